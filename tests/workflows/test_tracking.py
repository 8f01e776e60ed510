"""Tracking on sqlite, resumed runs, refused folders, and servers that are away."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from components.config import Config, load_config
from workflows import tracking
from workflows.tracking import SPOOL, Tracker, flatten, metric_name, tracking_uri


@pytest.fixture(autouse=True)
def _no_server_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder; its database is made once, because that takes seconds."""
    return tmp_path_factory.mktemp("runs")


def config_of(runs: Path, name: str, *overrides: str) -> Config:
    return load_config(None, [f"runs={runs}", f"run_name={name}", *overrides])


def read_back(config: Config, tracker: Tracker) -> Run:
    assert tracker.run_id is not None
    return MlflowClient(tracking_uri(config)).get_run(tracker.run_id)


def test_a_run_holds_parameters_metrics_versions_and_files(runs: Path, tmp_path: Path) -> None:
    config = config_of(runs, "whole")
    (tmp_path / "report.html").write_text("<p>hello")
    with Tracker.open(config, config.root) as tracker:
        tracker.log_metrics({"hybrid.nDCG@10": 0.5}, step=3)
        tracker.log_metrics({"hybrid.nDCG@10": 0.6}, step=4)
        tracker.log_artifact(tmp_path / "report.html")
        assert read_back(config, tracker).info.status == "RUNNING"
    run = read_back(config, tracker)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "whole"
    assert run.data.params == flatten(config.model_dump(mode="json"))
    history = MlflowClient(tracking_uri(config)).get_metric_history(run.info.run_id, "hybrid.nDCG_at_10")
    assert [(point.step, point.value) for point in history] == [(3, 0.5), (4, 0.6)]
    assert run.data.tags["version.mlflow"]
    assert (runs / "mlflow.db").exists()
    assert [path.name for path in (runs / "mlflow-artifacts").rglob("*") if path.is_file()] == ["report.html"]
    assert not (config.root / SPOOL).exists()


def test_a_run_that_raises_is_marked_failed(runs: Path) -> None:
    config = config_of(runs, "failed")
    with pytest.raises(RuntimeError, match="power cut"), Tracker.open(config, config.root) as tracker:
        raise RuntimeError("power cut")
    assert read_back(config, tracker).info.status == "FAILED"


def test_a_resumed_run_goes_on_and_its_changes_are_tagged(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case T-140: MLflow refuses to change a parameter; a second start must not fail on it."""
    config = config_of(runs, "resumed", "seed=1")
    with Tracker.open(config, config.root) as first:
        first.log_metrics({"loss": 2.0}, step=1)
    changed = config_of(runs, "resumed", "seed=2")
    with Tracker.open(changed, changed.root) as second:
        second.log_metrics({"loss": 1.0}, step=2)
    assert second.run_id == first.run_id
    run = read_back(changed, second)
    assert run.data.params["seed"] == "1"
    assert {name: value for name, value in run.data.tags.items() if name.startswith("changed.")} == {
        "changed.seed": "2"
    }
    assert run.data.metrics["loss"] == 1.0
    assert not (changed.root / SPOOL).exists()
    assert "does not take" not in caplog.text


def test_numbers_that_are_not_finite_are_left_out(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(runs, "nan")
    with caplog.at_level(logging.WARNING, "almanac"), Tracker.open(config, config.root) as tracker:
        tracker.log_metrics({"good": 1.0, "bad": float("nan"), "worse": float("inf")})
    assert read_back(config, tracker).data.metrics == {"good": 1.0}
    assert "not logged, because not finite: bad, worse" in caplog.text


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "file:///tmp/mlruns", "/tmp/mlruns"])
def test_plain_folders_are_refused_with_the_way_out(tmp_path: Path, uri: str) -> None:
    """Case T-138."""
    config = config_of(tmp_path, "folder", f"tracking.uri={uri}")
    with pytest.raises(ValueError, match="mlflow migrate-filestore --source"):
        Tracker.open(config, config.root)


def test_the_address_is_from_the_config_else_the_environment_else_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, "any")
    assert tracking_uri(config) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert tracking_uri(config) == "http://tracking:5000"
    assert tracking_uri(config_of(tmp_path, "any", "tracking.uri=http://other:1")) == "http://other:1"


def test_a_dead_server_neither_stops_nor_stalls_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case T-142: MLflow's own defaults retry for minutes."""
    with socket.socket() as probe:  # a port that was free a moment ago: nobody listens there
        probe.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"
    config = config_of(tmp_path, "dead", f"tracking.uri={uri}")
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "almanac"), Tracker.open(config, config.root) as tracker:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda step: tracker.log_metrics({"loss": 1.0}, step), range(20)))
        tracker.log_artifact(tmp_path / "gone.html")
    assert time.monotonic() - started < 15
    records = [json.loads(line) for line in (config.root / SPOOL).read_text().splitlines()]
    assert [record["kind"] for record in records] == ["open", "params", *["metrics"] * 20, "artifact"]
    assert sorted(record["step"] for record in records if record["kind"] == "metrics") == list(range(20))
    assert records[1]["seed"] == "42"
    assert caplog.text.count("does not take the run's records") == 1


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case T-142, the other half: the connection stands, but nothing comes back."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = config_of(tmp_path, "mute", f"tracking.uri=http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with Tracker.open(config, config.root) as tracker:
            tracker.log_metrics({"loss": 1.0})
        assert time.monotonic() - started < 10
    assert len((config.root / SPOOL).read_text().splitlines()) == 3


def test_a_server_that_goes_away_between_two_calls(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(runs, "away")

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("connection refused")

    with caplog.at_level(logging.WARNING, "almanac"), Tracker.open(config, config.root) as tracker:
        tracker._client.log_batch = refuse
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda step: tracker.log_metrics({"loss": 1.0}, step), range(8)))
    assert len((config.root / SPOOL).read_text().splitlines()) == 8
    assert caplog.text.count("connection refused") == 1


def test_a_child_is_nested_by_the_id_it_is_given(runs: Path) -> None:
    """Case T-141: no reliance on an active run in the process."""
    config = config_of(runs, "parent")
    child_config = config_of(runs, "child")
    with Tracker.open(config, config.root) as parent:
        Tracker.open(child_config, child_config.root, parent_run_id=parent.run_id).__exit__(None, None, None)
        child = Tracker.open(child_config, child_config.root)
    assert read_back(child_config, child).data.tags["mlflow.parentRunId"] == parent.run_id
    assert child.run_id != parent.run_id


def test_four_threads_log_side_by_side(runs: Path) -> None:
    config = config_of(runs, "threads")
    with Tracker.open(config, config.root) as tracker, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda step: tracker.log_metrics({f"m{step % 4}": float(step)}, step), range(24)))
    client = MlflowClient(tracking_uri(config))
    assert tracker.run_id is not None
    found = {point.step for i in range(4) for point in client.get_metric_history(tracker.run_id, f"m{i}")}
    assert found == set(range(24))
    assert not (config.root / SPOOL).exists()


def test_switched_off_nothing_is_written(tmp_path: Path) -> None:
    config = config_of(tmp_path, "silent", "tracking.enabled=false")
    with Tracker.open(config, config.root) as tracker:
        tracker.log_metrics({"loss": 1.0})
        tracker.log_artifact(tmp_path / "gone.html")
    assert list(tmp_path.iterdir()) == []


def test_flat_names_and_values_that_mlflow_takes() -> None:
    found = flatten({"a": {"b": 1, "empty": {}}, "long": "x" * 900})
    assert found == {"a.b": "1", "a.empty": "{}", "long": "x" * 500}


def test_neighbouring_metrics_go_in_one_call_and_nobody_waits(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(runs, "batched")
    tracker = Tracker.open(config, config.root)
    sent: list[int] = []
    original = tracker._client.log_batch

    def slow(run_id: str, metrics: list[object]) -> None:
        time.sleep(0.3)
        sent.append(len(metrics))
        original(run_id, metrics=metrics)

    monkeypatch.setattr(tracker._client, "log_batch", slow)
    started = time.monotonic()
    for step in range(40):
        tracker.log_metrics({"loss": 1.0, "rate": 0.1}, step)
    assert time.monotonic() - started < 0.3
    tracker.__exit__(None, None, None)
    assert sum(sent) == 80
    assert len(sent) < 5
    history = MlflowClient(tracking_uri(config)).get_metric_history(str(tracker.run_id), "loss")
    assert sorted(point.step for point in history) == list(range(40))


def test_a_file_is_copied_before_its_folder_moves_on(runs: Path, tmp_path: Path) -> None:
    config = config_of(runs, "moved")
    (tmp_path / "report.html").write_text("whole")
    with Tracker.open(config, config.root) as tracker:
        tracker.log_artifact(tmp_path / "report.html")
        (tmp_path / "report.html").unlink()
    found = [path.read_text() for path in (runs / "mlflow-artifacts" / str(tracker.run_id)).rglob("report.html")]
    assert found == ["whole"]


def test_one_wrong_call_does_not_cost_the_others(runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(runs, "wrong")
    with caplog.at_level(logging.WARNING, "almanac"), Tracker.open(config, config.root) as tracker:
        tracker.log_artifact(tmp_path / "nowhere.html")
        tracker.log_metrics({"loss (train), % of 1": 0.5, "time": 3.0, "step": 4.0})
        tracker.log_metrics({})
    assert read_back(config, tracker).data.metrics == {"loss _train__ _ of 1": 0.5, "time": 3.0, "step": 4.0}
    assert "because it is not there" in caplog.text
    assert not (config.root / SPOOL).exists()


def test_a_run_that_was_deleted_is_followed_by_a_new_one(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(runs, "deleted")
    with Tracker.open(config, config.root) as first:
        pass
    MlflowClient(tracking_uri(config)).delete_run(str(first.run_id))
    with caplog.at_level(logging.WARNING, "almanac"), Tracker.open(config, config.root) as second:
        second.log_metrics({"loss": 1.0})
    assert second.run_id != first.run_id
    assert read_back(config, second).data.metrics == {"loss": 1.0}
    assert "a new one is started" in caplog.text
    assert not (config.root / SPOOL).exists()


def test_closing_does_not_wait_for_ever(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case T-142: a server that takes a call and never ends it; what it did not take is in the spool."""
    config = config_of(runs, "stuck")
    tracker = Tracker.open(config, config.root)
    release = threading.Event()
    monkeypatch.setattr(tracker._client, "log_batch", lambda *_, **__: release.wait(30))
    monkeypatch.setattr(tracking, "_PATIENCE", 0.5)
    tracker.log_metrics({"loss": 1.0}, 1)
    time.sleep(tracking._GATHER + 0.3)
    tracker.log_metrics({"loss": 2.0}, 2)
    started = time.monotonic()
    tracker.__exit__(None, None, None)
    assert time.monotonic() - started < 5
    release.set()
    steps = [json.loads(line)["step"] for line in (config.root / SPOOL).read_text().splitlines()]
    assert steps == [2]


@pytest.mark.slow
def test_processes_that_start_at_once_share_a_fresh_sqlite_file(tmp_path: Path) -> None:
    """Case T-144: without a lock all of them lose: each makes the tables."""
    code = (
        "import sys; from components.config import load_config; from workflows.tracking import Tracker\n"
        "config = load_config(None, ['runs=' + sys.argv[1], 'run_name=' + sys.argv[2]])\n"
        "with Tracker.open(config, config.root) as tracker: tracker.log_metrics({'loss': 1.0})\n"
        "assert tracker.run_id is not None"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"r{i}"]) for i in range(3)]
    assert [process.wait(180) for process in started] == [0, 0, 0]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("almanac").experiment_id])  # type: ignore[union-attr]
    assert sorted(str(run.info.run_name) for run in found) == ["r0", "r1", "r2"]
    assert not list(tmp_path.rglob(SPOOL))


def test_metric_names_are_those_mlflow_takes() -> None:
    """Case T-125: the name that the README gives is the one that is sent."""
    assert metric_name("hybrid.nDCG@10") == "hybrid.nDCG_at_10"
    assert metric_name("größe/ü:1") == "gr__e/_:1"
