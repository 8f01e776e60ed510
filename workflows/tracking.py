"""MLflow tracking that never stops a run: sqlite by default, any server by URI, a local spool when the server is away.

Only the driver logs, and it does not wait: a thread sends what was logged, metrics gathered into batches. After the
first failure it warns once and writes what would have been sent to `mlflow-spool.jsonl` in the run folder instead.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from components.config import Config
from components.storage import read_json, write_json
from workflows.mlflow_server import alone, flatten, is_alive, metric_name, tracking_uri, version_tags

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
_GATHER = 0.5
"""Seconds that metrics are gathered before they are sent as one batch."""
_BATCH = 1000
"""Most metrics that MLflow takes in one call."""
_PATIENCE = 60.0
"""Seconds that closing, or handing over a file, waits for a slow server."""


@dataclass(frozen=True)
class _Record:
    """Something logged: what the thread sends, or a line of the spool."""

    kind: str
    payload: dict[str, Any]
    sent: threading.Event = field(default_factory=threading.Event)


_STOP = _Record("stop", {})


class Tracker:
    """One MLflow run for one pipeline run; started again under the same run name it goes on with that MLflow run."""

    def __init__(self, root: Path, uri: str | None) -> None:
        self.root, self.uri = root, uri
        self.run_id: str | None = None
        self._client: Any = None
        self._queue: queue.Queue[_Record] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._warned = False

    @classmethod
    def open(cls, config: Config, root: Path, parent_run_id: str | None = None) -> Tracker:
        """The tracker of a run folder. `parent_run_id` nests it explicitly, wherever the parent lives (case T-141)."""
        if not config.tracking.enabled:
            return cls(root, None)
        tracker = cls(root, tracking_uri(config))
        try:
            tracker._start(config, parent_run_id)
        except Exception as error:
            tracker._give_up(error)
            tracker._spool(_Record("open", {"run_name": config.run_name, "parent_run_id": parent_run_id}))
        tracker._thread = threading.Thread(target=tracker._work, name="mlflow", daemon=True)
        tracker._thread.start()
        tracker.log_params(flatten(config.model_dump(mode="json")))
        return tracker

    def log_params(self, params: dict[str, str]) -> None:
        """Log parameters once; on a second start those that changed are tagged `changed.<name>` (case T-140)."""
        self._put_and_wait("params", params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log finite numbers; NaN and infinities are left out with a warning. Returns at once."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if len(finite) < len(metrics):
            log.warning("not logged, because not finite: %s", ", ".join(sorted(set(metrics) - set(finite))))
        if finite:
            self._put(_Record("metrics", {"step": step, "time": int(time.time() * 1000), "values": finite}))

    def log_artifact(self, path: Path) -> None:
        """Copy a file to the run's artifacts. Waits for that (a minute at most): the caller may move the file then."""
        self._put_and_wait("artifact", {"path": str(path)})

    def _put(self, record: _Record) -> None:
        if self._thread is not None:
            self._queue.put(record)

    def _put_and_wait(self, kind: str, payload: dict[str, Any]) -> None:
        record = _Record(kind, payload)
        if self._thread is not None:
            self._queue.put(record)
            record.sent.wait(_PATIENCE)

    def _start(self, config: Config, parent_run_id: str | None) -> None:
        for name, value in _IMPATIENT.items():
            os.environ.setdefault(name, value)
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        with alone(str(self.uri)):
            client = MlflowClient(self.uri)
            self.run_id = self._known_run(client) or self._new_run(client, config, parent_run_id)
        self._client = client

    def _known_run(self, client: Any) -> str | None:
        """The MLflow run of an earlier start, running again; None where there is none, or none any more."""
        from mlflow.entities import RunTag

        known = read_json(self.root / IDENTITY) if (self.root / IDENTITY).exists() else {}
        if known.get("uri") != self.uri or not is_alive(client, known["run_id"]):
            return None
        client.update_run(known["run_id"], status="RUNNING")
        client.log_batch(known["run_id"], tags=[RunTag(name, value) for name, value in version_tags().items()])
        return known["run_id"]

    def _new_run(self, client: Any, config: Config, parent_run_id: str | None) -> str:
        tags = version_tags()
        if parent_run_id:
            tags["mlflow.parentRunId"] = parent_run_id
        experiment = client.get_experiment_by_name(config.tracking.experiment)
        place = (self.root.parent / "mlflow-artifacts").as_uri() if str(self.uri).startswith("sqlite") else None
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(
            config.tracking.experiment, artifact_location=place
        )  # fmt: skip
        run_id = client.create_run(experiment_id, tags=tags, run_name=config.run_name).info.run_id
        write_json(self.root / IDENTITY, {"uri": self.uri, "run_id": run_id})
        return str(run_id)

    def _work(self) -> None:
        """Send record after record until told to stop; neighbouring metrics go together."""
        following: _Record | None = None
        while (record := following or self._queue.get()) is not _STOP:
            following, batch = None, [record]
            if record.kind == "metrics":
                following = self._gather(batch)
            delivered = self._client is not None and self._delivered(batch)
            for done in batch:
                if not delivered:
                    self._spool(done)
                done.sent.set()

    def _gather(self, batch: list[_Record]) -> _Record | None:
        """Add the metrics logged within a moment to `batch`; gives back the record that ended it, if one did."""
        deadline, count = time.monotonic() + _GATHER, len(batch[0].payload["values"])
        while count < _BATCH:
            try:
                record = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if record.kind != "metrics":
                return record
            batch.append(record)
            count += len(record.payload["values"])
        return None

    def _delivered(self, batch: list[_Record]) -> bool:
        try:
            self._send(batch)
        except Exception as error:  # whatever it is, it must not stop the run
            self._give_up(error)
            return False
        return True

    def _send(self, batch: list[_Record]) -> None:
        kind, payload = batch[0].kind, batch[0].payload
        if kind == "metrics":
            self._send_metrics(batch)
        elif kind == "params":
            self._send_params(payload)
        elif kind == "status":
            self._client.set_terminated(self.run_id, payload["status"])
        elif Path(payload["path"]).is_file():
            self._client.log_artifact(self.run_id, payload["path"])
        else:
            log.warning("not copied to MLflow, because it is not there: %s", payload["path"])

    def _send_metrics(self, batch: list[_Record]) -> None:
        from mlflow.entities import Metric

        rows = [
            Metric(metric_name(name), value, record.payload["time"], record.payload["step"] or 0)
            for record in batch
            for name, value in record.payload["values"].items()
        ]
        for start in range(0, len(rows), _BATCH):
            self._client.log_batch(self.run_id, metrics=rows[start : start + _BATCH])

    def _send_params(self, params: dict[str, str]) -> None:
        from mlflow.entities import Param

        before = self._client.get_run(self.run_id).data.params
        fresh = [Param(name, value) for name, value in params.items() if name not in before]
        for start in range(0, len(fresh), 100):
            self._client.log_batch(self.run_id, params=fresh[start : start + 100])
        changed = {name: value for name, value in params.items() if before.get(name, value) != value}
        for name, value in changed.items():
            self._client.set_tag(self.run_id, f"changed.{name}", value)
        if changed:
            log.info("MLflow keeps the parameters of the first start; tagged as changed: %s", ", ".join(changed))

    def _give_up(self, error: Exception) -> None:
        """Warn, once, that from here on everything goes to the spool."""
        self._client = None
        if self._warned:
            return
        self._warned = True
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        log.warning(
            "MLflow at %s does not take the run's records (%s): from here on they go to %s",
            self.uri, reason, self.root / SPOOL,
        )  # fmt: skip

    def _spool(self, record: _Record) -> None:
        if record.kind == "status":
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with (self.root / SPOOL).open("a", encoding="utf-8") as spool:
                spool.write(json.dumps({"kind": record.kind, **record.payload}) + "\n")
        except OSError as error:
            log.warning("lost for MLflow, because the spool cannot be written (%s): %s", error, record.payload)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is left and mark the MLflow run finished or failed; a server that dawdles is left to the spool."""
        if self._thread is None:
            return
        self._put(_Record("status", {"status": "FINISHED" if kind is None else "FAILED"}))
        self._put(_STOP)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._give_up(TimeoutError(f"it has not taken them for {_PATIENCE:.0f} s"))
            while not self._queue.empty():
                if (record := self._queue.get()) is not _STOP:
                    self._spool(record)
            self._put(_STOP)
