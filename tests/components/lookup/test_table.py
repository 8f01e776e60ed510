"""The table is the model: rows, bags and the serving encoder equal what training computes (spec invariants 2, 3;
T-056)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.lookup import QueryEncoder, save_table
from components.lookup.table import TabulateConfig, build_table
from components.models.backbone import load_causal_lm
from components.models.config import RetrieverConfig
from components.models.query_encoders import packed_queries, query_vectors
from components.text import Text, instruction_prompt

TASK = "find the passage"
FORMS = [{}, {"packed_form": "sequence"}, {"query_dense": "head"}, {"query_dense": "embedding", "center": True}]


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> Any:
    return load_causal_lm(tiny_model_folder, "float32")


@pytest.fixture(scope="module")
def queries() -> list[str]:
    """100 random queries of words, capitals, digits and odd characters."""
    generator = np.random.default_rng(1)
    words = ["lift", "Wing", "boundary", "LAYER", "heat", "isn't", "42", "中文", "😀", "x", "slipstream", "<|eos|>"]
    return [" ".join(generator.choice(words, generator.integers(1, 9))) for _ in range(100)]


@torch.no_grad()
def test_each_row_is_the_packed_eos_vector_of_its_token(model: Any, tiny_text: Text) -> None:
    table = build_table(model, tiny_text, RetrieverConfig(), TASK, batch=150)
    assert table.shape == (tiny_text.vocabulary_size, 32)
    assert table.dtype == np.float32
    ids = np.flatnonzero(tiny_text.producible)
    prompt = tiny_text.prompt(instruction_prompt(TASK))
    rows = packed_queries(model, [ids.tolist()], prompt, tiny_text).rows
    assert np.allclose(table[ids], rows.numpy(), atol=1e-5)
    assert not table[~tiny_text.producible].any()


@torch.no_grad()
def test_a_row_is_a_pass_of_its_own(model: Any, tiny_text: Text) -> None:
    ids = [30, 31, 200]
    table = build_table(model, tiny_text, RetrieverConfig(), TASK, ids=ids)
    for row, token in zip(table, ids, strict=True):
        sequence = [*tiny_text.prompt(instruction_prompt(TASK)), token, 2]
        hidden = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states[-1]
        assert np.allclose(row, hidden[0, -1], atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("idf", [False, True])
@torch.no_grad()
def test_the_served_query_is_the_trained_query(
    model: Any, tiny_text: Text, queries: list[str], form: dict[str, Any], idf: bool, tmp_path: Path
) -> None:
    """T-056: the prompt is in the rows and never in the sum; same for the IDF weights."""
    config = RetrieverConfig(query_weights="idf" if idf else "count", **form)
    weights = np.random.default_rng(2).uniform(0.5, 9, tiny_text.vocabulary_size).astype(np.float32) if idf else None
    table = build_table(model, tiny_text, config, "query: ", weights=weights)
    save_table(
        tmp_path, {"default": table}, np.ones(tiny_text.vocabulary_size), tiny_text,
        instructions={"default": "query: "}, storage="float32", model_fingerprint="mark",
    )  # fmt: skip
    served = QueryEncoder.load(tmp_path).encode(queries).dense
    trained = query_vectors(
        model, tiny_text.queries(queries), text=tiny_text, config=config,
        prompt=tiny_text.prompt(instruction_prompt("query: ")),
        weights=None if weights is None else torch.from_numpy(weights),
    )  # fmt: skip
    assert np.allclose(served, trained.numpy(), atol=1e-5)


@torch.no_grad()
def test_ranges_of_ids_and_any_batch_size_make_the_same_table(model: Any, tiny_text: Text) -> None:
    size = tiny_text.vocabulary_size
    for form in ({}, {"query_dense": "head"}):
        config = RetrieverConfig(**form)
        whole = build_table(model, tiny_text, config, TASK)
        ranges = [range(start, min(start + 150, size)) for start in range(0, size, 150)]
        parts = [build_table(model, tiny_text, config, TASK, ids=ids, batch=37) for ids in ranges]
        assert np.allclose(np.concatenate(parts), whole, atol=1e-5)


def test_progress_ends_at_the_number_of_rows(model: Any, tiny_text: Text) -> None:
    seen: list[tuple[int, int]] = []
    build_table(
        model, tiny_text, RetrieverConfig(), "", ids=range(100), batch=40, progress=lambda *now: seen.append(now)
    )
    assert seen == [(40, 97), (80, 97), (97, 97)]


@torch.no_grad()
def test_the_instruction_changes_packed_rows_only(model: Any, tiny_text: Text) -> None:
    for form, same in (("packed", False), ("head", True), ("embedding", True)):
        config = RetrieverConfig(query_dense=form)
        one, other = (build_table(model, tiny_text, config, task, ids=[30, 40]) for task in ("", TASK))
        assert np.allclose(one, other, atol=1e-3) == same


def test_defaults() -> None:
    config = TabulateConfig()
    assert (config.storage, config.instructions, config.batch) == ("float16", {}, 512)
