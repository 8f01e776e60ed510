"""A stage: a function from a config section and earlier folders to one folder, done once and never half.

A stage works in `runs/<name>/.<stage>.<fingerprint>.partial`, which is renamed to `runs/<name>/<stage>` when whole. The
fingerprint hashes the stage's config sections and the fingerprints of its inputs: the same one is skipped on the next run,
another is done again. A partial folder outlives a kill, so a stage that can resume finds its own earlier work in it.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from components.config import Config
from components.storage import (
    FORMAT_VERSION,
    fingerprint,
    read_json,
    replace_folder,
    versions,
    write_atomic,
    write_json,
)
from workflows.tracking import Tracker

log = logging.getLogger("almanac")
RESULT = "result.json"


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline and what it depends on."""

    name: str
    sections: tuple[str, ...]
    """Top-level keys of the config that its result depends on."""
    inputs: tuple[str, ...]
    """Names of the stages whose folders it reads."""
    run: Callable[[StageContext], dict[str, Any]]
    external: Callable[[Config], Any] = field(default=lambda config: None)
    """Whatever outside the run folder the result depends on (sizes and times of source files), as a JSON value."""


@dataclass(frozen=True)
class StageContext:
    """What a stage is given: the whole config, the folder to fill, the folders to read."""

    config: Config
    folder: Path
    inputs: dict[str, Path]
    fingerprint: str
    tracker: Tracker

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Send numbers to the experiment tracker. Never raises."""
        self.tracker.log_metrics(metrics, step)


class StageError(RuntimeError):
    """A stage cannot start; the message says why and what to do."""


@contextmanager
def run_lock(root: Path) -> Iterator[None]:
    """Hold the run folder for this process; a second driver on the same run is refused at once."""
    root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StageError(
            f"{root}: another process is working on this run. Wait for it, or use another --run-name."
        ) from None
    try:
        yield
    finally:
        lock.release()


def run_stage(stage: Stage, config: Config, tracker: Tracker) -> dict[str, Any]:
    """Bring `runs/<name>/<stage>` up to date and return its result; skips (and says so) what is already done."""
    root = config.root
    inputs = {name: root / name for name in stage.inputs}
    expected = stage_fingerprint(stage, config)
    final = root / stage.name
    done = finished_result(final)
    if done is not None and done["fingerprint"] == expected:
        log.info("%-9s already done (%s), skipped", stage.name, expected)
        return done
    log.info("%-9s starts%s", stage.name, "" if done is None else " again: its config or its input changed")
    partial = root / f".{stage.name}.{expected}.partial"
    for stale in root.glob(f".{stage.name}.*"):
        if stale != partial:
            shutil.rmtree(stale)
    partial.mkdir(parents=True, exist_ok=True)
    started = time.time()
    metrics = stage.run(StageContext(config, partial, inputs, expected, tracker))
    result = {
        "stage": stage.name,
        "fingerprint": expected,
        "format_version": FORMAT_VERSION,
        "sections": _sections(stage, config),
        "external": stage.external(config),
        "inputs": {name: read_json(folder / RESULT)["fingerprint"] for name, folder in inputs.items()},
        "seconds": round(time.time() - started, 3),
        "versions": versions(),
        **metrics,
    }
    write_json(partial / RESULT, result)
    replace_folder(partial, final)
    tracker.log_metrics({f"{stage.name}.seconds": result["seconds"]})
    log.info("%-9s done in %.1f s → %s", stage.name, result["seconds"], final)
    return result


def finished_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished stage folder; None where there is none."""
    return read_json(folder / RESULT) if (folder / RESULT).exists() else None


def stage_fingerprint(stage: Stage, config: Config) -> str:
    """The fingerprint that the stage's folder must carry, given the config and the input folders as they are.

    Raises StageError when an input is missing, or was made with other settings than this config has.
    """
    found = {name: _check_input(stage.name, name, config) for name in stage.inputs}
    return fingerprint(stage.name, _sections(stage, config), found, stage.external(config))


def _sections(stage: Stage, config: Config) -> dict[str, Any]:
    dumped = config.model_dump(mode="json")
    return {name: dumped[name] for name in stage.sections}


def _check_input(needed_by: str, name: str, config: Config) -> str:
    folder = config.root / name
    result = finished_result(folder)
    remedy = f"run `python workflows/full_pipeline.py` (or that stage alone) with the same config and --run-name {config.run_name} first"
    if result is None:
        raise StageError(f"{needed_by} needs {folder}, which is not there: {remedy}")
    dumped = config.model_dump(mode="json")
    for section, value in result["sections"].items():
        if dumped.get(section) != value:
            raise StageError(
                f"{needed_by} needs {folder}, but that was made with another `{section}` section: {remedy}"
            )
    for inner, made_from in result["inputs"].items():
        if _check_input(name, inner, config) != made_from:
            raise StageError(f"{needed_by} needs {folder}, but `{inner}` was made again since: {remedy}")
    return result["fingerprint"]


def save_config(config: Config) -> Path:
    """Write the whole resolved config to `runs/<name>/config.yaml` and return its path."""
    path = config.root / "config.yaml"
    write_atomic(path, config.to_yaml().encode())
    return path


def main(stage: Stage, arguments: list[str] | None = None) -> None:
    """Run one stage from the command line: `python workflows/X.py --config F --run-name N key.path=value …`."""
    from workflows.cli import run_from_command_line

    run_from_command_line([stage], arguments)
