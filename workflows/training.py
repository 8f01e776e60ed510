"""The training engine: Ray Train workers, DDP, one loop that any task runs in, checkpoints that end in the same weights.

A task (`Task`) says what is trained, what the loss of a step is, and what is written at the end. The loop owns the optimiser,
the schedule, clipping, checkpoints and the log. The state of a step follows from the seed and the step number alone, so a
killed training, resumed from its last checkpoint, ends bit for bit where an undisturbed one ends.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
from torch import nn

from components.objectives.config import TrainConfig
from components.storage import atomic_file
from workflows.cluster import require

log = logging.getLogger("almanac")

STEPS_LOG, CHECKPOINTS = "steps.jsonl", "checkpoints"
KEPT = 2
"""Checkpoints that stay on disk: the last, and one before it should the last be damaged."""


class Task(Protocol):
    """What the loop needs of a training task; built in every worker."""

    module: Any
    """A torch module that returns the loss terms when called with (batch, rank, world, step)."""

    def batch(self, step: int) -> Any:
        """The global batch of a step."""

    def names(self, batch: Any) -> list[str]:
        """Ids of the batch's examples, for error messages."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides trained weights and optimiser."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""

    def export(self) -> None:
        """Write the trained model; called by rank 0 only, after the last step."""


@dataclass(frozen=True)
class Worker:
    """Where a worker stands."""

    rank: int
    world: int
    device: torch.device
    threads: int


@dataclass(frozen=True)
class Shape:
    """How many workers train, with what."""

    workers: int
    cpus: int
    gpu: bool


def training_shape(config: TrainConfig) -> Shape:
    """Workers and their CPUs and GPUs; raises in an instant when the cluster can never give them (case T-088)."""
    have = ray.cluster_resources()
    gpu = bool(have.get("GPU")) if config.use_gpu is None else config.use_gpu
    cpus = config.cpus_per_worker or max(1, int(have.get("CPU", 1)) // config.workers)
    require(
        cpus=cpus * config.workers,
        gpus=config.workers if gpu else 0,
        what=f"training with {config.workers} workers of {cpus} CPUs",
    )
    return Shape(config.workers, cpus, gpu)


def train(
    build: Callable[[Worker], Task], config: TrainConfig, folder: Path, shape: Shape, seed: int,
    record: Callable[[dict[str, float], int], None],
) -> None:  # fmt: skip
    """Train with Ray Train and return when the task has exported. `record` gets the numbers of each logged step, on the driver."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def loop() -> None:
        context = ray.train.get_context()
        device = torch.device("cuda", torch.cuda.current_device()) if shape.gpu else torch.device("cpu")
        if not shape.gpu:
            torch.set_num_threads(shape.cpus)
        worker = Worker(context.get_world_rank(), context.get_world_size(), device, shape.cpus)
        run_loop(build(worker), config, folder, worker, seed)
        ray.train.report({"done": 1})

    reader = _LogReader(folder / STEPS_LOG, config.steps, record)
    trainer = TorchTrainer(
        loop,
        torch_config=TorchConfig(backend="nccl" if shape.gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=shape.workers, use_gpu=shape.gpu,
            resources_per_worker={"CPU": shape.cpus} | ({"GPU": 1} if shape.gpu else {}),
        ),
        run_config=RunConfig(
            name=f"train-{int(time.time() * 1000)}", storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=config.max_failures),
        ),
    )  # fmt: skip
    with reader:
        trainer.fit()


def run_loop(task: Task, config: TrainConfig, folder: Path, worker: Worker, seed: int) -> None:
    """The loop of one worker: from the last checkpoint, if there is one, to the last step and the export."""
    module = task.module
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimiser = torch.optim.AdamW(parameters.values(), lr=config.learning_rate, weight_decay=config.weight_decay)
    step = _resume(task, parameters, optimiser, folder / CHECKPOINTS)
    wrapped: nn.Module = module
    if worker.world > 1 and config.steps:
        wrapped = nn.parallel.DistributedDataParallel(
            module,
            device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
            find_unused_parameters=config.lora is None,
        )
    module.train()
    bad = 0
    window = time.perf_counter()
    while step < config.steps:
        torch.manual_seed(hash((seed, step, worker.rank)) % (1 << 31))
        for group in optimiser.param_groups:
            group["lr"] = config.learning_rate * learning_rate_share(step, config)
        batch = task.batch(step)
        with torch.autocast(worker.device.type, torch.bfloat16, enabled=use_bfloat16(config, worker.device)):
            terms = wrapped(batch, worker.rank, worker.world, step)
        norms = _gradient_norms(terms, parameters, config, step)
        loss = terms.total
        optimiser.zero_grad(set_to_none=True)
        (loss * worker.world).backward()
        norm = float(nn.utils.clip_grad_norm_(parameters.values(), config.max_gradient_norm))
        if math.isfinite(float(loss.detach())) and math.isfinite(norm):
            optimiser.step()
            bad = 0
        else:
            bad += 1
            log.warning("step %d: loss or gradient is not finite, the step is left out", step)
            if bad >= config.max_bad_steps:
                raise FloatingPointError(
                    f"{bad} steps in a row (the last is {step}) with a loss that is not finite; its batch: "
                    f"{', '.join(task.names(batch)[:20])}. Lower train.learning_rate, or train in bfloat16 rather than float16."
                )
        step += 1
        if worker.rank == 0 and (step % config.log_every == 0 or step in (1, config.steps)):
            now = time.perf_counter()
            shown = {
                "loss": float(loss.detach()),
                "gradient_norm": norm,
                "learning_rate": optimiser.param_groups[0]["lr"],
            }
            shown |= {name: float(value.detach()) for name, value in terms.weighted.items()} | terms.shown | norms
            _append(folder / STEPS_LOG, {"step": step, "seconds": now - window, **shown})
            window = now
        if worker.rank == 0 and (step % config.checkpoint_every == 0 and step < config.steps):
            _save(task, parameters, optimiser, step, folder / CHECKPOINTS)
    if worker.rank == 0:
        module.eval()
        task.export()


def learning_rate_share(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine from 1 to `final_learning_rate`; the first step of a warm-up is 1 / warmup_steps."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.final_learning_rate + (1 - config.final_learning_rate) * 0.5 * (1 + math.cos(math.pi * progress))


def use_bfloat16(config: TrainConfig, device: torch.device) -> bool:
    """Whether to compute in bfloat16: as configured; by default on a GPU that has it, never on a CPU."""
    if config.precision != "auto":
        return config.precision == "bfloat16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def _gradient_norms(
    terms: Any, parameters: dict[str, nn.Parameter], config: TrainConfig, step: int
) -> dict[str, float]:
    every = config.gradient_norms_every
    if not every or step % every:
        return {}
    norms = {}
    for name, value in terms.weighted.items():
        if value.requires_grad:
            found = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
            norms[f"norm.{name}"] = math.sqrt(sum(float(g.float().pow(2).sum()) for g in found if g is not None))
    return norms


def _save(
    task: Task, parameters: dict[str, nn.Parameter], optimiser: torch.optim.Optimizer, step: int, folder: Path
) -> None:
    state = {
        "step": step, "parameters": {name: p.detach().cpu() for name, p in parameters.items()},
        "optimiser": optimiser.state_dict(), "task": task.state(),
    }  # fmt: skip
    with atomic_file(folder / f"step-{step:08d}.pt") as temporary:
        torch.save(state, temporary)
    for old in sorted(folder.glob("step-*.pt"))[:-KEPT]:
        old.unlink()


def _resume(task: Task, parameters: dict[str, nn.Parameter], optimiser: torch.optim.Optimizer, folder: Path) -> int:
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            log.warning("%s cannot be read (%s): trying the one before", path, error)
            continue
        if set(state["parameters"]) != set(parameters):
            raise ValueError(
                f"{path}: a checkpoint of other trainable weights than this config trains. Delete {folder} to start over."
            )
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(state["parameters"][name])
        optimiser.load_state_dict(state["optimiser"])
        task.restore(state["task"])
        log.warning("resumed from step %d", state["step"])
        return int(state["step"])
    return 0


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(row) + "\n")


class _LogReader:
    """Follows the steps that rank 0 writes: one line a logged step on the driver's terminal, and the numbers to MLflow."""

    def __init__(self, path: Path, steps: int, record: Callable[[dict[str, float], int], None]) -> None:
        self._path, self._steps, self._record = path, steps, record
        self._place = path.stat().st_size if path.exists() else 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._last: tuple[int, float] | None = None

    def __enter__(self) -> _LogReader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _follow(self) -> None:
        while not self._stop.wait(1.0):
            self._read()
        self._read()

    def _read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open(encoding="utf-8") as handle:
            handle.seek(self._place)
            for line in handle:
                if not line.endswith("\n"):
                    break
                self._place += len(line.encode())
                self._show(json.loads(line))

    def _show(self, row: dict[str, float]) -> None:
        step, seconds = int(row.pop("step")), row.pop("seconds")
        before = self._last[0] if self._last else 0
        self._last = (step, seconds)
        each = seconds / max(1, step - before)
        terms = " ".join(
            f"{name} {value:.4g}" for name, value in row.items() if name not in ("learning_rate", "gradient_norm")
        )
        log.info(
            "train     step %d / %d  %s  |g| %.3g  %.1f s a step, %.0f s left",
            step,
            self._steps,
            terms,
            row["gradient_norm"],
            each,
            each * (self._steps - step),
        )
        self._record({f"train.{name}": value for name, value in row.items()} | {"train.seconds_a_step": each}, step)
