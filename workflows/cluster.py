"""Join the Ray cluster that RAY_ADDRESS names, or start one on this machine."""

from __future__ import annotations

import logging
import os

import ray

from components.config import ClusterConfig

log = logging.getLogger("almanac")


def connect(config: ClusterConfig) -> None:
    """Join the cluster at `RAY_ADDRESS` (`ray job submit` sets it), else start a local one. A second call does nothing.

    A cluster that merely runs on this machine is not joined: it may be anybody's. Token authentication stays as Ray has it (on).
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    # Spinning threads cost workers up to five times the time when others use the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.WARNING)
    else:
        ray.init(address="local", num_cpus=config.local_cpus, logging_level=logging.WARNING)
    quiet = ray.data.DataContext.get_current()
    quiet.enable_progress_bars = False
    quiet.print_on_execution_start = False
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # it warns that bars are off
    resources = ray.cluster_resources()
    log.info(
        "ray       %d node(s), %g CPUs, %g GPUs, %.1f GiB memory", len(ray.nodes()), resources.get("CPU", 0),
        resources.get("GPU", 0), resources.get("memory", 0) / 2**30,
    )  # fmt: skip


def require(cpus: float = 0, gpus: float = 0, what: str = "this stage") -> None:
    """Raise RuntimeError in an instant when the cluster can never give what `what` asks for (case T-088)."""
    have = ray.cluster_resources()
    for name, need in (("CPU", cpus), ("GPU", gpus)):
        if need > have.get(name, 0):
            raise RuntimeError(
                f"{what} needs {need:g} {name}s but the cluster has {have.get(name, 0):g}: lower its workers/actors or their "
                f"share in the config, or join a larger cluster (RAY_ADDRESS)"
            )
