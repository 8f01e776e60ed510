"""Prune the pretrained LM by EffiR: `python workflows/prune.py --config F --run-name N prune.drop_mlps=8`.

One Ray task, on a GPU where there is one and else on a whole node's CPUs, scores every sub-layer on calibration text,
drops, writes `model/`, loads it back, and compares it with the model in memory and, in speed, with the full one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from components.config import Config
from components.models.sources import ModelConfig, resolve_model
from components.pruning.config import PruneConfig
from components.storage import read_json
from components.text import TextConfig
from workflows.cluster import require
from workflows.stage import Stage, StageContext, main

if TYPE_CHECKING:
    from components.pruning.calibration import Calibration
    from components.pruning.pruner import PruneResult

log = logging.getLogger("almanac")

MODEL, IMPORTANCE, PLOT = "model", "importance.parquet", "importance.png"
_SPEED_TOKENS = 512
_PATIENT = {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""Threads that wait for each other sleep: spinning ones, on CPUs that others use too, made a forward pass 5 times slower."""
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Job:
    """What the Ray task is given; all of it is small."""

    source: Path
    corpus: Path
    folder: Path
    model: ModelConfig
    text: TextConfig
    prune: PruneConfig
    threads: int
    gpu: bool


def run(context: StageContext) -> dict[str, Any]:
    """Write `model/` and, where something is pruned, `importance.parquet` and `importance.png`."""
    config = context.config
    source = resolve_model(config.model.source, Path(config.model.cache).expanduser().resolve())
    cpus, gpu = task_shape()
    what = f"{cpus} CPUs" + (" and a GPU" if gpu else "")
    if config.prune.active:
        config.prune.check_layers(read_json(source / "config.json")["num_hidden_layers"])
        log.info("prune     %s on %s", _plan(config.prune), what)
    else:
        log.info("prune     nothing to drop: the model is copied as it is")
    job = Job(
        source, context.inputs["data"] / "corpus", context.folder, config.model, config.text, config.prune, cpus, gpu
    )
    task = ray.remote(num_cpus=cpus, num_gpus=1 if gpu else 0, num_returns="streaming", runtime_env=_PATIENT)(
        prune_task
    )
    messages: Any = task.remote(job)
    result: dict[str, Any] = {}
    for reference in messages:
        item = ray.get(reference)
        if isinstance(item, str):
            log.info("prune     %s", item)
        else:
            result = item
    context.log({f"prune.{key}": float(value) for key, value in result.items() if isinstance(value, int | float)})
    return result


def task_shape() -> tuple[int, bool]:
    """CPUs of the task and whether it takes a GPU: all CPUs of the largest node, or a node's share of one GPU."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    with_gpu = [node for node in nodes if node.get("GPU", 0) >= 1]
    best = max(with_gpu or nodes, key=lambda node: node.get("CPU", 0))
    cpus = max(1, int(best.get("CPU", 1) / (best["GPU"] if with_gpu else 1)))
    require(cpus=cpus, gpus=1 if with_gpu else 0, what="prune")
    return cpus, bool(with_gpu)


def prune_task(job: Job) -> Iterator[str | dict[str, Any]]:
    """Progress in words, one at a time, and at last the numbers for result.json."""
    from components.models.backbone import check_vocabulary, load_causal_lm, save_causal_lm
    from components.models.tokenizer import text_for_model
    from components.pruning.architecture import parameter_count

    _set_threads(job)
    started = time.perf_counter()
    text = text_for_model(job.source, job.text)
    model = load_causal_lm(job.source, job.model.dtype, job.model.attention)
    check_vocabulary(model, text, job.source)
    seconds = time.perf_counter() - started
    yield f"loaded {job.source.name}: {parameter_count(model) / 1e6:.1f} M parameters in {seconds:.1f} s"
    folder = job.folder / MODEL
    if not job.prune.active:
        save_causal_lm(model, folder)
        text.save(folder)
        count = parameter_count(model)
        yield {
            "pruned": False, "parameters_before": count, "parameters_after": count,
            "bytes_before": _bytes(job.source), "bytes_after": _bytes(folder), "parameters_kept": 1.0,
        }  # fmt: skip
        return
    yield from _prune(job, model, text)


def _prune(job: Job, model: Any, text: Any) -> Iterator[str | dict[str, Any]]:
    from components.models.backbone import load_causal_lm
    from components.pruning.architecture import parameter_count
    from components.pruning.calibration import pack, read_texts
    from components.pruning.export import save_pruned
    from components.pruning.plot import plot_importance
    from components.pruning.pruner import prune_model

    wanted, folder = job.prune.calibration, job.folder / MODEL
    device: Any = "cuda" if job.gpu else "cpu"
    model.to(device)
    place = job.corpus if wanted.source == "corpus" else Path(wanted.source).expanduser()
    calibration = pack(read_texts(place), text, samples=wanted.samples, tokens=wanted.tokens, seed=wanted.seed)
    yield f"calibration: {calibration.ids.size} tokens of {calibration.texts} texts, sha256 {calibration.sha256[:12]}"
    before, started = parameter_count(model), time.perf_counter()

    def work(say: Callable[[str], None]) -> PruneResult:
        _set_threads(job)
        return prune_model(model, job.prune, calibration.ids, progress=say)

    result = yield from _while_running(work)
    seconds = time.perf_counter() - started
    numbers = _numbers(job, result, calibration)
    save_pruned(model, folder, numbers)
    text.save(folder)
    write_importance(result, job.folder / IMPORTANCE)
    plot_importance(result, job.folder / PLOT, f"{job.source.name}: {_plan(job.prune)}")
    loaded = load_causal_lm(folder, job.model.dtype, job.model.attention).to(device)
    difference = _difference(model, loaded, calibration.ids[:2])
    if parameter_count(loaded) != parameter_count(model) or not difference <= _TOLERANCE:
        raise ValueError(
            f"{folder}: loads as another model than the one pruned in memory ({parameter_count(loaded)} parameters "
            f"instead of {parameter_count(model)}, relative difference of the states {difference:.2g}). This is a bug; "
            f"with prune.enabled=false the run goes on with the full model."
        )
    after = parameter_count(loaded)
    yield f"{before / 1e6:.1f} M → {after / 1e6:.1f} M parameters; the saved folder loads as the same model"
    speed: dict[str, float] = {}
    if job.prune.speed_rounds:
        model = load_causal_lm(job.source, job.model.dtype, job.model.attention).to(device)
        speed = _speed(model, loaded, calibration.ids, job.prune.speed_rounds)
        yield (
            f"speed: {speed['tokens_per_second_before']:.0f} → {speed['tokens_per_second_after']:.0f} tokens/s "
            f"({speed['speedup']:.2f} times)"
        )
    yield {
        **numbers, **speed, "parameters_before": before, "parameters_after": after,
        "parameters_kept": round(after / before, 4), "bytes_before": _bytes(job.source), "bytes_after": _bytes(folder),
        "prune_seconds": round(seconds, 3),
    }  # fmt: skip


def _while_running(work: Callable[[Callable[[str], None]], PruneResult]) -> Generator[str, None, PruneResult]:
    """Run `work(say)` in a thread, yield what it says when it says it, and return its result."""
    said: SimpleQueue[str | None] = SimpleQueue()
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(work, said.put)
        future.add_done_callback(lambda _: said.put(None))
        while (message := said.get()) is not None:
            yield message
    return future.result()


def _set_threads(job: Job) -> None:
    """Give torch the task's CPUs, in the calling thread: Ray sets OMP_NUM_THREADS=1 in its workers (case T-087)."""
    import torch

    if not job.gpu:
        torch.set_num_threads(job.threads)


def _numbers(job: Job, result: PruneResult, calibration: Calibration) -> dict[str, Any]:
    wanted = job.prune.calibration
    return {
        "pruned": True,
        "method": job.prune.method,
        "dropped": result.dropped,
        "order_of_pruning": result.order,
        "protected": result.protected,
        "kept_layers": result.kept_layers,
        "intermediate_sizes": result.widths,
        "neurons_removed": result.neurons_removed,
        "calibration": {
            "source": wanted.source, "seed": wanted.seed, "sha256": calibration.sha256, "texts": calibration.texts,
            "tokens": int(calibration.ids.size), "samples": len(calibration.ids),
        },
    }  # fmt: skip


def _speed(full: Any, pruned: Any, ids: np.ndarray, rounds: int) -> dict[str, float]:
    import torch

    from components.pruning.speed import tokens_per_second

    rows = max(1, min(len(ids), _SPEED_TOKENS // ids.shape[1]))
    rates = tokens_per_second({"before": full, "after": pruned}, torch.as_tensor(ids[:rows], dtype=torch.int64), rounds)
    numbers = {f"tokens_per_second_{name}": round(rate, 1) for name, rate in rates.items()}
    return numbers | {"speedup": round(rates["after"] / rates["before"], 3)}


def _difference(one: Any, other: Any, ids: np.ndarray) -> float:
    """The largest difference of last hidden states over their largest value."""
    import torch

    with torch.inference_mode():
        rows = torch.as_tensor(ids, dtype=torch.int64, device=one.device)
        left, right = (
            model.base_model(input_ids=rows, use_cache=False).last_hidden_state.float() for model in (one, other)
        )
    return float((left - right).abs().max() / left.abs().max().clamp_min(1e-12))


def write_importance(result: PruneResult, path: Path) -> None:
    """Write one row a layer and kind: layer, kind, score (of the method), cosine, growth, dropped, tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from components.storage import atomic_file

    rows = [
        {
            "layer": layer, "kind": kind, "score": float(result.scores[kind][layer]), "cosine": float(cosine),
            "growth": float(result.importance.growth[kind][layer]),
            "dropped": layer in result.dropped[kind], "tokens": result.importance.tokens,
        }
        for kind, cosines in result.importance.cosines.items()
        for layer, cosine in enumerate(cosines)
    ]  # fmt: skip
    schema = pa.schema(
        [
            ("layer", pa.int32()), ("kind", pa.string()), ("score", pa.float64()), ("cosine", pa.float64()),
            ("growth", pa.float64()),
            ("dropped", pa.bool_()), ("tokens", pa.int64()),
        ]
    )  # fmt: skip
    with atomic_file(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)


def _plan(config: PruneConfig) -> str:
    parts = [
        f"{number} {name}{'s' if number > 1 else ''}"
        for number, name in (
            (config.drop_blocks, "block"),
            (config.drop_mlps, "MLP"),
            (config.drop_attentions, "attention"),
        )
        if number
    ]
    if config.width_fraction:
        parts.append(f"{config.width_fraction:.0%} of the neurons")
    return f"drop {' and '.join(parts)} by {config.method}"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def outside(config: Config) -> Any:
    """Name, size and time of the files outside the run folder that the result depends on."""
    places = [config.model.source] if not config.model.source.startswith("dist:") else []
    if config.prune.active and config.prune.calibration.source != "corpus":
        places.append(config.prune.calibration.source)
    found = []
    for place in places:
        path = Path(place).expanduser()
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        found += [[str(file), file.stat().st_size, os.stat(file).st_mtime_ns] for file in files if file.is_file()]
    return found


STAGE = Stage(name="prune", sections=("model", "text", "prune"), inputs=("data",), run=run, external=outside)

if __name__ == "__main__":
    main(STAGE)
