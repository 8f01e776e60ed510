"""Where MLflow's records go, which of them are there, and what it takes as a name or a value."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from components.config import Config, ConfigError
from components.storage import versions

log = logging.getLogger("almanac")

_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
_WAIT = 120.0
"""Seconds to wait for another process that makes the tables of the same sqlite file."""


def tracking_uri(config: Config) -> str:
    """The server to log to: `tracking.uri`, else MLFLOW_TRACKING_URI, else a sqlite file in the runs folder.

    Raises ConfigError for a plain folder, which MLflow ≥ 3.13 refuses (case T-138).
    """
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return f"sqlite:///{config.root.parent / 'mlflow.db'}"
    if uri != "databricks" and ("://" not in uri or uri.startswith("file:")):
        raise ConfigError(
            f"tracking.uri={uri!r}: MLflow no longer logs into plain folders. Use sqlite:///path/mlflow.db or a "
            f"server's URL; old runs move over with `mlflow migrate-filestore --source {uri} --target sqlite:///mlflow.db`."
        )
    return uri


def metric_name(name: str) -> str:
    """The name under which MLflow shows a metric: nDCG@10 is nDCG_at_10, other signs it refuses are underscores."""
    return _FORBIDDEN.sub("_", name.replace("@", "_at_"))


def version_tags() -> dict[str, str]:
    """Tags that say with which libraries and which commit a run was made."""
    return {f"version.{name}": value for name, value in versions().items()}


def is_alive(client: Any, run_id: str) -> bool:
    """Whether the run is on the server still: a database may have been emptied, a run deleted."""
    from mlflow.exceptions import MlflowException

    try:
        alive = client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        alive = False
    if not alive:
        log.warning("MLflow run %s is not there any more: a new one is started", run_id)
    return bool(alive)


@contextlib.contextmanager
def alone(uri: str) -> Iterator[None]:
    """Hold a sqlite file while its tables are made: two processes that make them at once spoil it (case T-144)."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    database = Path(uri.removeprefix("sqlite:///").partition("?")[0])
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock", timeout=_WAIT):
        yield


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted names and values as MLflow takes them (at most 500 characters)."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = str(value)[:500]
    return flat
