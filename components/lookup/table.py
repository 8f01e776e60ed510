"""Builds the lookup table of a trained model: a row a token id, equal to what training computed for that token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from components.lookup.artefact import Storage
from components.models.config import RetrieverConfig
from components.section import Section
from components.text import Text, instruction_prompt

if TYPE_CHECKING:
    from torch import nn


class TabulateConfig(Section):
    """What the lookup table holds and how it is stored."""

    storage: Storage = "float16"
    instructions: dict[str, str] = Field(default_factory=dict)
    """Table name → task text, one table each; empty: one table `default` for the instruction the model was trained
    with."""
    batch: int = Field(512, ge=1)
    """Token ids a forward pass (packed form)."""


def build_table(
    model: nn.Module, text: Text, config: RetrieverConfig, instruction: str, *, weights: np.ndarray | None = None,
    ids: Sequence[int] | None = None, batch: int = 512, progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:  # fmt: skip
    """float32 [V, H], or one row for each of `ids`: the dense query vector of every token id, raw (LightRetriever 1.4).

    `instruction` is the task text. `weights` [V] (IDF) is folded into the rows. Ids that plain text cannot produce get
    zero rows. `progress(done, total)` is called after each forward pass of `batch` ids. The model should be in eval
    mode.
    """
    import torch

    from components.models.backbone import embedding_weight
    from components.models.query_encoders import token_rows

    asked = np.arange(text.vocabulary_size) if ids is None else np.asarray(ids, dtype=np.int64)
    places = np.flatnonzero(text.producible[asked])
    matrix = embedding_weight(model, text.vocabulary_size)
    table = np.zeros((len(asked), matrix.shape[1]), dtype=np.float32)
    prompt = text.prompt(instruction_prompt(instruction))
    scale = None if weights is None else torch.from_numpy(np.asarray(weights, dtype=np.float32)).to(matrix.device)
    step = batch if config.query_dense == "packed" else max(1, len(places))
    with torch.inference_mode():
        for start in range(0, len(places), step):
            some = places[start : start + step]
            tokens = torch.from_numpy(asked[some]).to(matrix.device)
            rows = token_rows(model, tokens, text=text, config=config, prompt=prompt, weights=scale)
            table[some] = rows.cpu().numpy()
            if progress is not None:
                progress(start + len(some), len(places))
    return table
