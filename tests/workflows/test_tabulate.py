"""The tabulate stage under Ray: it writes what serving reads, one table an instruction, and skips when nothing
changed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.config import Config
from components.lookup import QueryEncoder
from components.lookup.table import build_table
from components.models.backbone import load_causal_lm
from components.models.config import RetrieverConfig
from components.models.retriever import Extras, save_retriever
from components.storage import write_json
from components.text import Text
from workflows import tabulate
from workflows.stage import run_stage
from workflows.tracking import Tracker


def trained(root: Path, model_folder: Path, text: Text, retriever: RetrieverConfig, **settings: Any) -> Config:
    """A config whose train folder is already there."""
    folder = root / "runs" / "tiny" / "train"
    idf = np.linspace(1, 5, text.vocabulary_size, dtype=np.float32)
    save_retriever(folder / "model", load_causal_lm(model_folder), text, retriever, Extras(token_scores=idf, idf=idf))
    write_json(folder / "result.json", {"fingerprint": "train", "sections": {}, "inputs": {}})
    return Config.model_validate(
        {
            "run_name": "tiny", "runs": str(root / "runs"), "data": {"source": "beir:nowhere"},
            "model": {"source": str(model_folder)}, "tabulate": settings, "tracking": {"enabled": False},
        }
    )  # fmt: skip


def run(config: Config) -> dict[str, Any]:
    return run_stage(tabulate.STAGE, config, Tracker(config.root, None))


@pytest.mark.usefixtures("ray_cluster")
def test_packed_tables_for_two_instructions(
    tiny_model_folder: Path, tiny_text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(tabulate, "RANGE", 150)
    retriever = RetrieverConfig(query_weights="idf", instruction="unused here")
    tasks = {"web": "find the passage", "plain": ""}
    config = trained(tmp_path, tiny_model_folder, tiny_text, retriever, instructions=tasks, storage="float32", batch=64)
    with caplog.at_level(logging.INFO, logger="almanac"):
        result = run(config)
    assert (result["tables"], result["rows"], result["storage"]) == (2, tiny_text.vocabulary_size, "float32")
    assert result["scored_tokens"] == int(tiny_text.producible.sum())
    assert f"web: {tiny_text.vocabulary_size} / {tiny_text.vocabulary_size} rows" in caplog.text
    encoder = QueryEncoder.load(config.root / "tabulate")
    assert encoder.manifest.instructions == tasks
    assert encoder.manifest.default_instruction == "web"
    idf = np.linspace(1, 5, tiny_text.vocabulary_size, dtype=np.float32)
    model = load_causal_lm(tiny_model_folder)
    for name, task in tasks.items():
        table = build_table(model, tiny_text, retriever, task, weights=idf)
        wanted = table[tiny_text.queries(["what is lift"])[0]].sum(axis=0)
        found = encoder.encode(["what is lift"], name)
        assert np.allclose(found.dense[0], wanted / np.linalg.norm(wanted), atol=1e-5)
    assert found.weights.tolist() == pytest.approx(idf[found.indices].tolist())
    with caplog.at_level(logging.INFO, logger="almanac"):
        assert run(config)["fingerprint"] == result["fingerprint"]
    assert "already done" in caplog.text


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_the_default_table_is_for_the_instruction_of_training(
    tiny_model_folder: Path, tiny_text: Text, tmp_path: Path, storage: str
) -> None:
    retriever = RetrieverConfig(query_dense="head", instruction="answer the question")
    config = trained(tmp_path, tiny_model_folder, tiny_text, retriever, storage=storage)
    result = run(config)
    assert result["bytes"] == sum(
        path.stat().st_size for path in (config.root / "tabulate").iterdir() if path.name != "result.json"
    )
    encoder = QueryEncoder.load(config.root / "tabulate")
    assert encoder.manifest.instructions == {"default": "answer the question"}
    wanted = build_table(load_causal_lm(tiny_model_folder), tiny_text, retriever, "")
    wanted = wanted[tiny_text.queries(["lift"])[0]].sum(axis=0)
    assert np.allclose(encoder.encode(["lift"]).dense[0], wanted / np.linalg.norm(wanted), atol=2e-2)
