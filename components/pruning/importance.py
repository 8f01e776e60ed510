"""How much each sub-layer turns the residual stream: S = 1 - mean cosine before and after it (EffiR 4.1, spec 4.1).

Shape legend: B batch, T positions, H hidden, L layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from components.pruning.architecture import family_of, layers_of, model_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["mlp", "attention", "block"]
KINDS: tuple[Kind, ...] = ("mlp", "attention", "block")

Batch = tuple[Tensor, Tensor | None]
"""Token ids int [B, T] and a mask [B, T] that is zero at padding; no mask: no padding."""


@dataclass(frozen=True)
class Importance:
    """What each sub-layer does to the residual stream, float64 [L] a kind, over `tokens` tokens."""

    cosines: dict[Kind, np.ndarray]
    """Mean cosine of the stream before and after."""
    growth: dict[Kind, np.ndarray]
    """Largest factor by which a token's stream became longer. An MLP that writes the massive activation of an attention
    sink multiplies one token's norm a hundredfold, which the mean cosine does not show."""
    tokens: int

    def scores(self, kind: Kind) -> np.ndarray:
        """float64 [L]: S = 1 - mean cosine; higher means keep. A sub-layer dropped before has 0."""
        return 1.0 - self.cosines[kind]


@torch.inference_mode()
def score_sublayers(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    skip_first_token: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Importance:
    """The importance of every MLP, attention and block, from one forward pass over `batches`.

    Per token the cosine is taken in fp32 over the hidden dimension; sums are kept in fp64 and nothing else is stored,
    so the result does not depend on how rows are grouped into batches. Padding is left out. `progress(rows)` is called
    after each batch. Raises a ValueError for an unknown architecture, no tokens, or states that are not finite.
    """
    device = model_device(model)
    recorder = _Recorder(len(layers_of(model)), device)
    was_training = model.training
    model.eval()
    try:
        with recorder.attached(model):
            for ids, mask in batches:
                present = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.bool()
                counted = present & (present.cumsum(1) > 1) if skip_first_token else present
                recorder.present, recorder.counted = present.to(device), counted.to(device)
                model.base_model(
                    input_ids=ids.to(device), attention_mask=None if mask is None else mask.to(device), use_cache=False
                )
                recorder.tokens += int(counted.sum())
                if progress is not None:
                    progress(ids.shape[0])
    finally:
        model.train(was_training)
    return recorder.result()


class _Recorder:
    """Hooks on every layer that add up cosines while a batch passes through."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.sums = {kind: torch.zeros(layers, dtype=torch.float64, device=device) for kind in KINDS}
        self.growth = {kind: torch.zeros(layers, dtype=torch.float64, device=device) for kind in KINDS}
        self.counted = self.present = torch.ones(0, dtype=torch.bool)
        self.tokens = 0
        self._before: Tensor | None = None
        self._between: Tensor | None = None

    @contextlib.contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[None]:
        """Inside the block the model's layers report to this recorder."""
        family, handles = family_of(model), []
        for index, layer in enumerate(layers_of(model)):
            entry: nn.Module = getattr(layer, family.attention_norms[0])
            middle: nn.Module = getattr(layer, family.mlp_norms[0])
            handles.append(entry.register_forward_pre_hook(self._enter))
            handles.append(middle.register_forward_pre_hook(self._middle(index)))
            handles.append(layer.register_forward_hook(self._leave(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._before = inputs[0]

    def _middle(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._between = inputs[0]
            self._add("attention", index, self._before, self._between)

        return hook

    def _leave(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            after = output[0] if isinstance(output, tuple) else output
            self._add("mlp", index, self._between, after)
            self._add("block", index, self._before, after)

        return hook

    def _add(self, kind: Kind, index: int, before: Tensor | None, after: Tensor) -> None:
        assert before is not None
        before, after = before.float(), after.float()
        cosine_BT = nn.functional.cosine_similarity(before, after, dim=-1)
        self.sums[kind][index] += cosine_BT[self.counted].double().sum()
        if self.present.any():
            ratio_BT = after.norm(dim=-1) / before.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
            self.growth[kind][index] = torch.maximum(self.growth[kind][index], ratio_BT[self.present].max().double())

    def result(self) -> Importance:
        if not self.tokens:
            raise ValueError("importance needs at least one token that is not padding: the calibration text is empty")
        cosines = {kind: (total / self.tokens).cpu().numpy() for kind, total in self.sums.items()}
        for kind, values in cosines.items():
            broken = np.flatnonzero(~np.isfinite(values))
            if len(broken):
                raise ValueError(
                    f"the cosine around the {kind} of layer {broken[0]} is not finite: the model's states overflow in "
                    f"this number format. Set model.dtype=float32 or bfloat16, or check the weights."
                )
        return Importance(cosines, {kind: values.cpu().numpy() for kind, values in self.growth.items()}, self.tokens)
