"""Stages are done once, redone when what they depend on changes, and never half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.config import Config, load_config
from components.storage import read_json
from workflows.stage import Stage, StageContext, StageError, run_lock, run_stage
from workflows.tracking import Tracker


class Pipeline:
    """Two stages that count how often they run."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.calls: list[str] = []
        self.first = Stage(name="data", sections=("seed",), inputs=(), run=self._run("data"))
        self.second = Stage(name="encode", sections=("encode",), inputs=("data",), run=self._run("encode"))

    def _run(self, name: str):  # type: ignore[no-untyped-def]
        def run(context: StageContext) -> dict[str, Any]:
            self.calls.append(name)
            (context.folder / "out.txt").write_text(context.config.run_name)
            return {"count": 1}

        return run

    def start(self, *overrides: str) -> Config:
        config = load_config(None, [f"runs={self.runs}", *overrides])
        tracker = Tracker(config.root, None)
        for stage in (self.first, self.second):
            run_stage(stage, config, tracker)
        return config


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(tmp_path)


def test_a_second_start_does_nothing(pipeline: Pipeline) -> None:
    pipeline.start()
    config = pipeline.start()
    assert pipeline.calls == ["data", "encode"]
    result = read_json(config.root / "encode" / "result.json")
    assert result["count"] == 1
    assert result["versions"]["commit"]


def test_a_changed_section_redoes_only_what_depends_on_it(pipeline: Pipeline) -> None:
    pipeline.start()
    pipeline.start("encode.batch_tokens=4000")
    assert pipeline.calls == ["data", "encode", "encode"]
    pipeline.start("encode.batch_tokens=4000", "seed=7")
    assert pipeline.calls == ["data", "encode", "encode", "data", "encode"]
    pipeline.start("encode.batch_tokens=4000", "seed=7", "index.texts=false")
    assert len(pipeline.calls) == 5


def test_a_failed_stage_leaves_nothing_that_looks_done(pipeline: Pipeline) -> None:
    def fail(context: StageContext) -> dict[str, Any]:
        (context.folder / "half.txt").write_text("half")
        raise RuntimeError("power cut")

    config = load_config(None, [f"runs={pipeline.runs}"])
    broken = Stage(name="data", sections=("seed",), inputs=(), run=fail)
    with pytest.raises(RuntimeError, match="power cut"):
        run_stage(broken, config, Tracker(config.root, None))
    assert not (config.root / "data").exists()
    partial = next(config.root.glob(".data.*.partial"))
    assert (partial / "half.txt").exists()  # kept, so that a stage may resume
    pipeline.start()
    assert (config.root / "data" / "half.txt").exists()


def test_a_stage_without_its_input_or_with_a_stale_one_says_what_to_run(pipeline: Pipeline) -> None:
    config = load_config(None, [f"runs={pipeline.runs}"])
    with pytest.raises(StageError, match="which is not there"):
        run_stage(pipeline.second, config, Tracker(config.root, None))
    pipeline.start()
    changed = load_config(None, [f"runs={pipeline.runs}", "seed=8"])
    with pytest.raises(StageError, match="another `seed` section"):
        run_stage(pipeline.second, changed, Tracker(changed.root, None))


def test_a_number_that_is_not_finite_is_never_written(pipeline: Pipeline) -> None:
    config = load_config(None, [f"runs={pipeline.runs}"])
    stage = Stage(name="data", sections=("seed",), inputs=(), run=lambda context: {"loss": float("nan")})
    with pytest.raises(ValueError, match="NaN"):
        run_stage(stage, config, Tracker(config.root, None))
    assert not (config.root / "data").exists()


def test_two_drivers_on_one_run_are_refused(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(StageError, match="another process"), run_lock(tmp_path):
        pass
