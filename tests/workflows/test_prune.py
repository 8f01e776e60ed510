"""The prune stage on a tiny model under Ray: what it writes, what it reports (T-118), and that it does not drift."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from components.config import Config
from components.models.backbone import load_causal_lm
from components.pruning.architecture import layout_of, parameter_count
from components.storage import read_json, write_json
from components.text import Text
from workflows.prune import STAGE, task_shape
from workflows.stage import run_stage
from workflows.tracking import Tracker

WORDS = [
    "the",
    "lift",
    "of",
    "a",
    "wing",
    "in",
    "a",
    "slipstream",
    "depends",
    "on",
    "the",
    "angle",
    "of",
    "attack",
    "and",
    "the",
    "heat",
    "of",
    "the",
    "boundary",
    "layer",
]
SMALL = {"samples": 4, "tokens": 32, "batch_size": 2}


def make_config(root: Path, model: Path, **prune: Any) -> Config:
    """A config whose data folder is already there, with 60 short documents."""
    corpus = root / "runs" / "tiny" / "data" / "corpus"
    if not corpus.exists():
        corpus.mkdir(parents=True)
        generator = np.random.default_rng(0)
        texts = [" ".join(generator.choice(WORDS, 20)) for _ in range(60)]
        table = pa.table({"docid": [str(i) for i in range(60)], "text": pa.array(texts, pa.large_string())})
        pq.write_table(table, corpus / "part-00000.parquet")
        write_json(
            corpus.parent / "result.json", {"fingerprint": "data", "sections": {}, "inputs": {}, "documents": 60}
        )
    return Config.model_validate(
        {
            "run_name": "tiny", "runs": str(root / "runs"), "data": {"source": "beir:nowhere"},
            "model": {"source": str(model)}, "prune": {"calibration": SMALL, **prune}, "tracking": {"enabled": False},
        }
    )  # fmt: skip


def run(config: Config) -> dict[str, Any]:
    return run_stage(STAGE, config, Tracker(config.root, None))


@pytest.mark.usefixtures("ray_cluster")
def test_stage_writes_a_pruned_model_and_says_how(
    tiny_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, tiny_model_folder, drop_mlps=2, width_fraction=0.25)
    with caplog.at_level(logging.INFO, logger="almanac"):
        result = run(config)
    folder = config.root / "prune"
    full, model = load_causal_lm(tiny_model_folder), load_causal_lm(folder / "model")
    assert len(layout_of(model).dropped_mlps) == 2
    assert sorted(result["dropped"]["mlp"]) == list(layout_of(model).dropped_mlps)
    assert result["order_of_pruning"]["mlp"][:2] == result["dropped"]["mlp"]
    assert result["intermediate_sizes"] == list(layout_of(model).widths)
    assert result["neurons_removed"] == 32
    assert result["parameters_before"] == parameter_count(full)
    assert (
        result["parameters_after"] == parameter_count(model) == parameter_count(full) - (2 * 64 + 32) * 3 * 32 - 2 * 32
    )
    assert result["bytes_after"] < result["bytes_before"]
    calibration = result["calibration"]
    assert (calibration["seed"], calibration["tokens"], calibration["source"]) == (42, 128, "corpus")
    assert len(calibration["sha256"]) == 64
    assert result["tokens_per_second_before"] > 0
    assert result["speedup"] > 0
    json.dumps(result, allow_nan=False)
    text = Text.load(folder / "model")
    assert text.documents(["lift"])[0][-1] == text.eos_id
    rows = pq.read_table(folder / "importance.parquet").to_pylist()
    assert list(rows[0]) == ["layer", "kind", "score", "cosine", "growth", "dropped", "tokens"]
    assert len(rows) == 12
    mlps = sorted((row for row in rows if row["kind"] == "mlp"), key=lambda row: row["score"])
    assert [row["layer"] for row in mlps if row["dropped"]] == result["dropped"]["mlp"]
    assert [row["layer"] for row in mlps[:2]] == result["dropped"]["mlp"]
    assert all(row["score"] == pytest.approx(1 - row["cosine"]) and row["tokens"] == 128 for row in rows)
    assert (folder / "importance.png").stat().st_size > 1000
    assert read_json(folder / "model" / "pruning.json")["order_of_pruning"] == result["order_of_pruning"]
    said = " | ".join(record.message for record in caplog.records)
    for part in (
        "drop 2 MLPs and 25% of the neurons by importance",
        "128 tokens",
        "4 of 4 rows",
        "dropped 2 mlps",
        "tokens/s",
    ):
        assert part in said, part


@pytest.mark.usefixtures("ray_cluster")
def test_same_settings_give_the_same_result_and_a_second_start_skips(tiny_model_folder: Path, tmp_path: Path) -> None:
    """T-118."""
    keys: dict[str, Any] = {"drop_mlps": 2, "speed_rounds": 0}
    one = run(make_config(tmp_path / "a", tiny_model_folder, **keys))
    other = make_config(tmp_path / "b", tiny_model_folder, **keys)
    two = run(other)
    for key in ("calibration", "order_of_pruning", "dropped", "parameters_after"):
        assert one[key] == two[key]
    assert "speedup" not in two
    written = (other.root / "prune" / "result.json").stat().st_mtime_ns
    assert run(other) == two
    assert (other.root / "prune" / "result.json").stat().st_mtime_ns == written
    weights = [tmp_path / name / "runs/tiny/prune/model/model.almanac.safetensors" for name in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("keys", [{}, {"drop_mlps": 2, "enabled": False}])
def test_nothing_to_drop_copies_the_model_as_a_stock_folder(
    tiny_model_folder: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    config = make_config(tmp_path, tiny_model_folder, **keys)
    result = run(config)
    assert result["pruned"] is False
    assert result["parameters_before"] == result["parameters_after"]
    folder = config.root / "prune" / "model"
    assert (folder / "model.safetensors").is_file()
    assert (folder / "text.json").is_file()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        full, copy = load_causal_lm(tiny_model_folder)(ids).logits, load_causal_lm(folder)(ids).logits
    torch.testing.assert_close(copy, full, rtol=0, atol=0)


@pytest.mark.usefixtures("ray_cluster")
def test_too_many_mlps_are_refused_with_the_numbers(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, tiny_model_folder, drop_mlps=9)
    with pytest.raises(ValueError, match=r"prune.drop_mlps=9 but the model has 4 of them"):
        run(config)
    assert not (config.root / "prune").exists()


@pytest.mark.usefixtures("ray_cluster")
def test_task_takes_the_cpus_of_a_node() -> None:
    assert task_shape() == (2, False)


def test_fingerprint_follows_the_model_and_the_calibration_text(tiny_model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "general.txt"
    text.write_text("one\n")
    config = make_config(tmp_path, tiny_model_folder, drop_mlps=1, calibration={**SMALL, "source": str(text)})
    before = STAGE.external(config)
    assert STAGE.external(config) == before
    assert any("model.safetensors" in entry[0] for entry in before)
    text.write_text("one\ntwo\n")
    assert STAGE.external(config) != before
