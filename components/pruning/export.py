"""Pruned models on disk: written so that they load again exactly, and never by accident as something else (T-113).

What stock transformers can express (whole layers, one width) is written as a plain stock folder. Anything else gets
`almanac_pruning` in config.json, from which the architecture is rebuilt before the weights are read, and two locks
against a stock loader, which would fill the missing parts at random: a `model_type` it does not know (`almanac_llama`),
and a weights file it does not look for (`model.almanac.safetensors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from components.models.backbone import check_loading, quiet_transformers
from components.pruning.architecture import PRUNING_KEY, Layout, apply_layout, family, layout_of, record_layout
from components.pruning.width import GatedDown
from components.storage import read_json, write_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PREFIX = "almanac_"
VARIANT = "almanac"
RESULT_FILE = "pruning.json"
_DTYPES: dict[str, Any] = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}


def save_pruned(model: PreTrainedModel, folder: Path, result: Mapping[str, Any] | None = None) -> None:
    """Write the model (adapter merged before) as config.json and safetensors; `result`, if given, as pruning.json.

    A model that was not pruned, or only in ways stock transformers can express, becomes a plain stock folder.
    """
    folder = Path(folder)
    layout = layout_of(model)
    if any(isinstance(module, GatedDown) for module in model.modules()):
        raise TypeError("the model carries gates: slice its widths or detach the gates before saving")
    _check_ties(model)
    record_layout(model)
    with quiet_transformers():
        model.save_pretrained(folder, variant=None if layout.stock else VARIANT)
    if not layout.stock:
        path = folder / "config.json"
        base = model.config.model_type
        names = [f"Almanac{type(model).__name__}"]
        write_json(path, read_json(path) | {"model_type": PREFIX + base, "architectures": names})
    if result is not None:
        write_json(folder / RESULT_FILE, dict(result))


def load_pruned(folder: Path, dtype: str = "auto", attention: str = "sdpa") -> PreTrainedModel:
    """The causal LM that `save_pruned` wrote into `folder` with `almanac_pruning` in its config, in eval mode.

    The layers are cut to their saved shapes on the meta device before any weight is read. Missing, unexpected or
    misshapen weights, and a layout that does not fit, are a ValueError that names them.
    """
    folder = Path(folder)
    config, layout = _read_config(folder)
    base = _causal_class(config)

    class Pruned(base):  # type: ignore[misc, valid-type]
        def __init__(self, config: PretrainedConfig, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            apply_layout(self, layout)

    Pruned.__name__ = base.__name__  # transformers picks the loss by the name of the class
    with quiet_transformers():
        try:
            loaded: Any = Pruned.from_pretrained(
                folder, config=config, variant=VARIANT, dtype=_DTYPES[dtype], attn_implementation=attention,
                use_safetensors=True, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        except OSError as error:
            raise ValueError(
                f"{folder}: no model.{VARIANT}.safetensors beside a config.json with {PRUNING_KEY}. The folder was not "
                f"written by save_pruned (save_pretrained does not do it), or not whole: prune or train again."
            ) from error
    model, info = loaded  # misshapen weights are not ignored: they are in the report, by name
    check_loading(folder, info)
    model.__class__ = base
    return model.eval()


def _read_config(folder: Path) -> tuple[PretrainedConfig, Layout]:
    from transformers import CONFIG_MAPPING

    path = folder / "config.json"
    state = read_json(path)
    if PRUNING_KEY not in state:
        raise ValueError(f"{path}: no {PRUNING_KEY}, so this is no pruned folder: load it with load_causal_lm")
    base = state[PRUNING_KEY].get("model_type")
    if state.get("model_type") != f"{PREFIX}{base}":
        raise ValueError(
            f"{path}: model_type is {state.get('model_type')!r} but {PRUNING_KEY} was written for {PREFIX}{base}: the "
            f"folder was edited, or written by save_pretrained, not save_pruned. Prune or train again."
        )
    family(base)
    layout = Layout.from_json(state[PRUNING_KEY], state["num_hidden_layers"], path)
    config = CONFIG_MAPPING[base].from_dict(state | {"model_type": base, "architectures": None})
    return config, layout


def _causal_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found


def _check_ties(model: PreTrainedModel) -> None:
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if head is None or not getattr(model.config, "tie_word_embeddings", False):
        return
    if head.weight is not embedding.weight and not torch.equal(head.weight, embedding.weight):
        raise ValueError(
            "config.tie_word_embeddings is true but the LM head differs from the embedding, and one of them would be "
            "lost: set tie_word_embeddings to false before saving"
        )
