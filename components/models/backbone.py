"""Loads a causal LM from a folder, refusing anything that does not fit, and gives plain access to its states and
matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from components.storage import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from components.text import Text

PRUNING_KEY = "almanac_pruning"
"""Key of config.json that marks a folder written by `components.pruning.export`."""

_DTYPES: dict[str, Any] = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}


def load_causal_lm(folder: Path, dtype: str = "auto", attention: str = "sdpa") -> PreTrainedModel:
    """The causal LM in `folder` (stock or pruned by us), in eval mode, with the KV cache off.

    dtype is auto|float32|bfloat16, attention sdpa|eager. Missing, unexpected or misshapen weights are a ValueError that
    names them: a head filled with random numbers must never pass for a model (T-035). No code from the folder is run.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}: no config.json, so this is no model folder. Give one that `resolve_model` returned."
        )
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if PRUNING_KEY in read_json(folder / "config.json"):
        from components.pruning.export import load_pruned

        model = load_pruned(folder, dtype=dtype, attention=attention)
    else:
        model = _load_stock(folder, _DTYPES[dtype], attention)
    model.config.use_cache = False
    return model.eval()


def _load_stock(folder: Path, dtype: Any, attention: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder}: holds a LoRA adapter, not a whole model. Merge the adapter into its base model first."
        )
    with quiet_transformers():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=attention, trust_remote_code=False, local_files_only=True,
                use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
        except RuntimeError as error:
            raise ValueError(f"{folder}: the weights do not fit config.json: {error}") from error
    model, info = loaded
    check_loading(folder, info)
    return model


def save_causal_lm(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json and safetensors so that `load_causal_lm` gives the same model back. LoRA must be merged
    before."""
    if unwrapped(model) is not model:
        raise TypeError(
            f"a {type(model).__name__} wraps the model: merge the adapter (merge_and_unload) and unwrap it first"
        )
    if getattr(model.config, PRUNING_KEY, None) is not None:
        from components.pruning.export import save_pruned

        save_pruned(model, folder)
    else:
        model.save_pretrained(folder)


def check_loading(source: Path, info: dict[str, Any]) -> None:
    """Raise a ValueError that names missing, unexpected or misshapen weights; `info` is transformers' loading
    report."""
    faults = [
        f"{kind}: {', '.join(sorted(map(str, info[key]))[:5])}{' …' if len(info[key]) > 5 else ''} ({len(info[key])})"
        for kind, key in (
            ("missing", "missing_keys"),
            ("unexpected", "unexpected_keys"),
            ("misshapen", "mismatched_keys"),
        )
        if info.get(key)
    ]
    if faults:
        raise ValueError(
            f"{source}: its weights are not those of the causal LM in its config.json ({'; '.join(faults)}). "
            f"Give the folder of a causal LM with its head; nothing is filled in at random."
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside the block transformers shows no progress bars (a weight bar a second long is noise in a log)."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT or DDP wrapper (LoRA layers stay in it), or the model itself."""
    inner: Any = model
    while True:
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        else:
            return inner


def last_hidden(model: nn.Module, ids: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """[B, T, H]: states after the final norm, without running the LM head; `mask` is [B, T], or 4-D and additive."""
    decoder = unwrapped(model).base_model
    mask = mask if mask.dim() == 4 else mask.to(torch.int64)
    return decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state


def head_weight(model: nn.Module, vocabulary_size: int) -> Tensor:
    """[V, H]: the LM head without the phantom rows behind the tokenizer's last id (T-046)."""
    return _rows(unwrapped(model).get_output_embeddings(), vocabulary_size)


def head_bias(model: nn.Module, vocabulary_size: int) -> Tensor | None:
    """[V] or None: the bias of the LM head."""
    bias = getattr(unwrapped(model).get_output_embeddings(), "bias", None)
    return None if bias is None else bias[:vocabulary_size]


def embedding_weight(model: nn.Module, vocabulary_size: int) -> Tensor:
    """[V, H]: the input embedding without phantom rows."""
    return _rows(unwrapped(model).get_input_embeddings(), vocabulary_size)


def producible_mask(text: Text, device: torch.device | str = "cpu") -> Tensor:
    """bool [V] on `device`: the ids that plain text can produce (`Text.producible`)."""
    return torch.from_numpy(text.producible).to(device)


def check_vocabulary(model: nn.Module, text: Text, source: object = "model") -> None:
    """Raise a ValueError when the tokenizer has ids for which the model has no embedding row (T-046)."""
    rows = embedding_weight(model, text.vocabulary_size).shape[0]
    if text.vocabulary_size > rows:
        raise ValueError(
            f"{source}: the tokenizer's largest id is {text.vocabulary_size - 1} but the model has {rows} embedding "
            f"rows. The tokenizer belongs to another model, or tokens were added to it without resizing the embedding."
        )


def _rows(layer: Any, vocabulary_size: int) -> Tensor:
    weight = layer.weight
    return weight if weight.shape[0] == vocabulary_size else weight[:vocabulary_size]
