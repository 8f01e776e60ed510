"""A trained retriever as one folder: weights, tokenizer, `text.json`, `retriever.json` and the small tensors beside
them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file, save

from components.models.backbone import check_vocabulary, load_causal_lm, save_causal_lm
from components.models.config import RetrieverConfig
from components.storage import fingerprint, read_json, sha256_file, write_atomic, write_json
from components.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT_VERSION = 1
RETRIEVER_FILE = "retriever.json"
EXTRAS_FILE = "extras.safetensors"


@dataclass(frozen=True)
class Extras:
    """What training or its corpus settled besides the weights. Arrays are float32."""

    token_scores: np.ndarray
    """[V]: sparse query weight of a token; set to 0 where plain text cannot produce it."""
    center: np.ndarray | None = None
    """[H]: the mean raw document vector, for `RetrieverConfig.center`."""
    idf: np.ndarray | None = None
    """[V]: weights of the dense query's token rows, for `query_weights: idf`."""
    average_length: float = 0.0
    """Mean tokens of an untruncated document, for the lexical prior."""


@dataclass(frozen=True)
class Retriever:
    """A loaded retriever."""

    model: PreTrainedModel
    text: Text
    config: RetrieverConfig
    extras: Extras
    fingerprint: str
    """Changes with the weights, the tokenizer or the settings."""

    @property
    def row_weights(self) -> np.ndarray | None:
        """float32 [V] or None: what each token's dense row is multiplied by (IDF, or nothing)."""
        return self.extras.idf if self.config.query_weights == "idf" else None


def save_retriever(folder: Path, model: PreTrainedModel, text: Text, config: RetrieverConfig, extras: Extras) -> str:
    """Write everything that `load_retriever` reads into `folder` and return its fingerprint. LoRA must be merged
    before."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_vocabulary(model, text)
    extras = _checked(extras, config, text, int(model.config.get_text_config().hidden_size), "save_retriever")
    save_causal_lm(model, folder)
    text.save(folder)
    arrays = {name: value for name, value in dataclasses.asdict(extras).items() if isinstance(value, np.ndarray)}
    write_atomic(folder / EXTRAS_FILE, save(arrays))
    files = {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.name != RETRIEVER_FILE}
    mark = fingerprint(files, config.model_dump(), extras.average_length)
    state = {
        "format_version": FORMAT_VERSION, "config": config.model_dump(), "average_length": extras.average_length,
        "files": files, "fingerprint": mark,
    }  # fmt: skip
    write_json(folder / RETRIEVER_FILE, state)
    return mark


def load_retriever(folder: Path, dtype: str = "auto", attention: str = "sdpa") -> Retriever:
    """The retriever in `folder`, with the model in eval mode on the CPU.

    A file too few or too many (say, a stray adapter that transformers would quietly apply), another tokenizer, or
    weights that do not fit are a ValueError that names them.
    """
    folder = Path(folder)
    if not (folder / RETRIEVER_FILE).is_file():
        raise FileNotFoundError(f"{folder}: no {RETRIEVER_FILE}, so this is no trained retriever. Run the train stage.")
    state = read_json(folder / RETRIEVER_FILE)
    if state["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{folder / RETRIEVER_FILE}: format version {state['format_version']}, not {FORMAT_VERSION}. Train again."
        )
    found, wanted = {path.name for path in folder.iterdir()}, {*state["files"], RETRIEVER_FILE}
    if found != wanted:
        raise ValueError(
            f"{folder}: missing files {sorted(wanted - found)}, files that do not belong {sorted(found - wanted)}. "
            f"Put the folder back as the train stage wrote it, or run that stage again."
        )
    config = RetrieverConfig(**state["config"])
    text = Text.load(folder)
    model = load_causal_lm(folder, dtype, attention)
    check_vocabulary(model, text, folder)
    extras = Extras(average_length=state["average_length"], **load_file(folder / EXTRAS_FILE))
    extras = _checked(extras, config, text, int(model.config.get_text_config().hidden_size), folder / EXTRAS_FILE)
    return Retriever(model, text, config, extras, state["fingerprint"])


def _checked(extras: Extras, config: RetrieverConfig, text: Text, hidden_size: int, source: object) -> Extras:
    shapes = {"token_scores": text.vocabulary_size, "center": hidden_size, "idf": text.vocabulary_size}
    arrays: dict[str, np.ndarray] = {}
    for name, size in shapes.items():
        value = getattr(extras, name)
        if value is None:
            continue
        value = np.ascontiguousarray(value, dtype=np.float32)
        if value.shape != (size,) or not np.isfinite(value).all():
            raise ValueError(f"{source}: {name} has shape {value.shape}, wanted ({size},) with finite numbers only")
        arrays[name] = value
    arrays["token_scores"] = arrays["token_scores"] * text.producible
    needs = {"center": config.center, "idf": config.query_weights == "idf"}
    for name, needed in needs.items():
        if needed and name not in arrays:
            raise ValueError(f"{source}: the retriever's settings need {name}, which is not there. Train again.")
    if config.lexical_weight > 0 and not extras.average_length > 0:
        raise ValueError(f"{source}: lexical_weight needs average_length > 0, found {extras.average_length}")
    return Extras(average_length=float(extras.average_length), **arrays)
