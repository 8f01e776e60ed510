"""MLflow tracking that never stops a run: sqlite by default, any server by URI, a local spool when the server is away.

Only the driver logs. Every call returns: after the first failure the tracker warns once and writes what would have been
sent to `mlflow-spool.jsonl` in the run folder instead.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from components.config import Config
from components.storage import read_json, versions, write_json

log = logging.getLogger("almanac")

SPOOL = "mlflow-spool.jsonl"
IDENTITY = "mlflow.json"
_IMPATIENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""MLflow's own defaults wait for minutes on a dead server (case T-142)."""


def tracking_uri(config: Config) -> str:
    """The server to log to: `tracking.uri`, else MLFLOW_TRACKING_URI, else a sqlite file in the runs folder.

    Raises ValueError for a plain folder, which MLflow ≥ 3.13 refuses (case T-138).
    """
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return f"sqlite:///{config.root.parent / 'mlflow.db'}"
    if "://" not in uri or uri.startswith("file:"):
        raise ValueError(
            f"tracking.uri={uri!r}: MLflow no longer logs into plain folders. Use sqlite:///path/mlflow.db or a "
            f"server's URL; old runs move over with `mlflow migrate-filestore --source {uri} --target sqlite:///mlflow.db`."
        )
    return uri


class Tracker:
    """One MLflow run for one pipeline run; started again under the same run name it goes on with that MLflow run."""

    def __init__(self, root: Path, uri: str | None) -> None:
        self.root, self.uri = root, uri
        self.run_id: str | None = None
        self._client: Any = None
        self._lock = threading.RLock()

    @classmethod
    def open(cls, config: Config, root: Path, parent_run_id: str | None = None) -> Tracker:
        """The tracker of a run folder. `parent_run_id` nests it explicitly, wherever the parent lives (case T-141)."""
        if not config.tracking.enabled:
            return cls(root, None)
        tracker = cls(root, tracking_uri(config))
        tracker._safely("open", {}, lambda: tracker._start(config, parent_run_id))
        tracker.log_params(flatten(config.model_dump(mode="json")))
        return tracker

    def _start(self, config: Config, parent_run_id: str | None) -> None:
        for name, value in _IMPATIENT.items():
            os.environ.setdefault(name, value)
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        self._client = MlflowClient(self.uri)
        known = read_json(self.root / IDENTITY) if (self.root / IDENTITY).exists() else {}
        if known.get("uri") == self.uri:
            self.run_id = known["run_id"]
            self._client.update_run(self.run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(config.tracking.experiment)
        place = None if not str(self.uri).startswith("sqlite") else (self.root.parent / "mlflow-artifacts").as_uri()
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(
            config.tracking.experiment, artifact_location=place
        )  # fmt: skip
        tags = {f"version.{name}": value for name, value in versions().items()}
        if parent_run_id:
            tags["mlflow.parentRunId"] = parent_run_id
        self.run_id = self._client.create_run(experiment_id, tags=tags, run_name=config.run_name).info.run_id
        write_json(self.root / IDENTITY, {"uri": self.uri, "run_id": self.run_id})

    def log_params(self, params: dict[str, str]) -> None:
        """Log parameters once; on a second start those that changed are tagged `changed.<name>` (case T-140)."""

        def send() -> None:
            from mlflow.entities import Param

            before = self._client.get_run(self.run_id).data.params
            fresh = [Param(name, value) for name, value in params.items() if name not in before]
            for start in range(0, len(fresh), 100):
                self._client.log_batch(self.run_id, params=fresh[start : start + 100])
            for name, value in params.items():
                if name in before and before[name] != value:
                    self._client.set_tag(self.run_id, f"changed.{name}", value)

        self._safely("params", params, send)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log finite numbers in one call; NaN and infinities are left out with a warning."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if len(finite) < len(metrics):
            log.warning("not logged, because not finite: %s", ", ".join(sorted(set(metrics) - set(finite))))
        stamp = int(time.time() * 1000)

        def send() -> None:
            from mlflow.entities import Metric

            rows = [Metric(name.replace("@", "_at_"), value, stamp, step or 0) for name, value in finite.items()]
            self._client.log_batch(self.run_id, metrics=rows)

        self._safely("metrics", {"step": step, "time": stamp, **finite}, send)

    def log_artifact(self, path: Path) -> None:
        """Copy a file to the run's artifacts."""
        self._safely("artifact", {"path": str(path)}, lambda: self._client.log_artifact(self.run_id, str(path)))

    def _safely(self, kind: str, payload: dict[str, Any], send: Callable[[], None]) -> None:
        if self.uri is None:
            return
        with self._lock:  # one sender at a time, so that threads that fail together warn once
            if self._client is not None or kind == "open":
                try:
                    send()
                except Exception as error:
                    self._client = None
                    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
                    log.warning(
                        "MLflow at %s does not take the run's records (%s): from here on they go to %s",
                        self.uri, reason, self.root / SPOOL,
                    )  # fmt: skip
                else:
                    return
            self.root.mkdir(parents=True, exist_ok=True)
            with (self.root / SPOOL).open("a", encoding="utf-8") as spool:
                spool.write(json.dumps({"kind": kind, **payload}) + "\n")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "FINISHED" if kind is None else "FAILED"
        if self._client is not None:
            self._safely("status", {"status": status}, lambda: self._client.set_terminated(self.run_id, status))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted names and values as MLflow takes them (at most 500 characters)."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = str(value)[:500]
    return flat
