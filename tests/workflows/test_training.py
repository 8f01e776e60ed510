"""Training: the same loss and gradient on one rank and two, resumed equals undisturbed, every adapter moves, faults are named."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn

from components.config import Config
from components.data.batches import PairBatches
from components.storage import sha256_file
from workflows import train as train_stage
from workflows.stage import StageContext
from workflows.tracking import Tracker
from workflows.training import Worker, learning_rate_share, run_loop, training_shape

ONE = Worker(0, 1, torch.device("cpu"), 1)
Make = Callable[..., Config]


def context_of(config: Config, name: str = "train") -> StageContext:
    folder = config.root / f".{name}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {stage: config.root / stage for stage in ("data", "prune", "train")}
    return StageContext(config, folder, inputs, "f", Tracker(config.root, None))


def task_of(config: Config, worker: Worker = ONE) -> train_stage.RetrieverTask:
    context = context_of(config)
    statistics = context.folder / train_stage.STATISTICS
    if not statistics.exists():
        from safetensors.numpy import save_file

        from components.lookup.idf import inverse_document_frequencies, token_statistics
        from components.text import Text

        text = Text.load(config.root / "prune" / "model")
        found = token_statistics(text.plain(["lift of a wing", "flow past a body"]), text.producible)
        save_file(
            {
                "idf": inverse_document_frequencies(found, text.producible),
                "average_length": np.array([found.average_length], np.float32),
            },
            statistics,
        )
    settings = train_stage._Settings(
        config, config.root / "prune" / "model", config.root / "data", context.folder, statistics
    )
    return train_stage.RetrieverTask(settings, worker)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def _rank(rank: int, config: Config, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    task = task_of(config, Worker(rank, 2, torch.device("cpu"), 1))
    wrapped = nn.parallel.DistributedDataParallel(task.module)
    terms = wrapped(task.batch(3), rank, 2, 3)
    (terms.total * 2).backward()
    if rank == 0:
        torch.save({"loss": terms.total.detach(), "gradients": gradients(task.module)}, f"{folder}/two.pt")
    dist.destroy_process_group()


def test_loss_and_gradient_are_the_same_on_one_rank_and_two(tiny_run: Make, tmp_path: Path) -> None:
    """T-018, T-019, T-041 (FLOPS too), spec invariant 12: with mined negatives, so the layout P N per query matters."""
    config = tiny_run(
        "ranks", "train.lora.dropout=0.0", "train.terms={flops: 0.1, flops_ramp_steps: 4, flops_columns: 50}"
    )
    task = task_of(config)
    terms = task.module(task.batch(3), 0, 1, 3)
    assert set(terms.weighted) == {"symmetric_dense", "asymmetric_dense", "sparse", "kl_dense", "kl_sparse", "flops"}
    terms.total.backward()
    port = 20_000 + os.getpid() % 20_000
    mp.spawn(_rank, args=(config, port, str(tmp_path)), nprocs=2)
    two = torch.load(tmp_path / "two.pt")
    torch.testing.assert_close(two["loss"], terms.total.detach(), rtol=1e-5, atol=1e-5)
    one = gradients(task.module)
    assert one.keys() == two["gradients"].keys()
    for name, value in one.items():
        torch.testing.assert_close(two["gradients"][name], value, rtol=1e-4, atol=1e-5)


def test_every_adapter_moves_with_gradient_checkpointing(tiny_run: Make) -> None:
    """T-013."""
    task = task_of(tiny_run("lora", "train.gradient_checkpointing=true"))
    task.module.train()
    task.module(task.batch(0), 0, 1, 0).total.backward()
    moved = {
        name: float(p.grad.norm())
        for name, p in task.module.named_parameters()
        if "lora_B" in name and p.grad is not None
    }
    assert len(moved) == 4 * 7
    assert min(moved.values()) > 0


class _Killed(Exception):
    pass


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_resumed_training_ends_in_the_same_bytes(tiny_run: Make, lora: bool) -> None:
    """T-031: optimiser state, data position and dropout come back; also past a damaged last checkpoint."""
    extra = [] if lora else ["train.lora=null"]
    whole, broken = (tiny_run(name, *extra) for name in ("whole", "broken"))
    task = task_of(whole)
    run_loop(task, whole.train, context_of(whole).folder, ONE, whole.seed)

    def until(config: Config, last: int) -> None:
        task = task_of(config)
        inner = task.batch
        seen = []

        def batch(step: int) -> Any:
            seen.append(step)
            if step == last:
                raise _Killed
            return inner(step)

        task.batch = batch  # type: ignore[method-assign]
        with pytest.raises(_Killed):
            run_loop(task, config.train, context_of(config).folder, ONE, config.seed)
        steps.append(seen)

    steps: list[list[int]] = []
    until(broken, 3)
    until(broken, 5)
    last = sorted((context_of(broken).folder / "checkpoints").glob("*.pt"))[-1]
    last.write_bytes(last.read_bytes()[:100])
    task = task_of(broken)
    run_loop(task, broken.train, context_of(broken).folder, ONE, broken.seed)
    assert steps == [[0, 1, 2, 3], [2, 3, 4, 5]]
    names = ("model.safetensors", "extras.safetensors")
    for name in names:
        paths = [context_of(config).folder / "model" / name for config in (whole, broken)]
        assert sha256_file(paths[0]) == sha256_file(paths[1])


def test_training_moves_the_loss_and_the_stage_kills_and_resumes_a_worker(tiny_run: Make, ray_cluster: None) -> None:
    """T-032: the worker is killed with SIGKILL in the middle; Ray starts another, which goes on from the checkpoint."""
    import threading

    undisturbed = tiny_run("calm", "train.steps=8", "train.lora.dropout=0.0")
    disturbed = tiny_run("storm", "train.steps=8", "train.lora.dropout=0.0")
    results = {}
    for config in (undisturbed, disturbed):
        context = context_of(config)
        killed: list[int] = []
        if config is disturbed:
            threading.Thread(target=_kill_a_worker, args=(context.folder, killed), daemon=True).start()
        results[config.run_name] = train_stage.run(context)
        if config is disturbed:
            assert killed, "the worker had ended before it could be killed"
    models = [
        load_file(config.root / ".train.partial" / "model" / "model.safetensors") for config in (undisturbed, disturbed)
    ]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=0, atol=0)
    lines = [
        json.loads(line) for line in (undisturbed.root / ".train.partial" / "steps.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert results["calm"]["negatives_per_query"] == 7


def _kill_a_worker(folder: Path, killed: list[int]) -> None:
    import psutil

    deadline = time.time() + 120
    while time.time() < deadline and not killed:
        if list((folder / "checkpoints").glob("step-*.pt")):
            for process in psutil.Process().children(recursive=True):  # other people's workers are none of ours
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "RayTrainWorker" in " ".join(process.cmdline()):
                        process.kill()
                        killed.append(process.pid)
                        return
        time.sleep(0.01)


def test_a_loss_that_is_not_finite_stops_with_the_ids_of_the_batch(tiny_run: Make) -> None:
    """T-028."""
    config = tiny_run("nan", "train.max_bad_steps=2")
    task = task_of(config)
    forward = task.module.forward

    def broken(*arguments: Any) -> Any:
        terms = forward(*arguments)
        terms.weighted["sparse"] = terms.weighted["sparse"] * float("nan")
        return terms

    task.module.forward = broken  # type: ignore[method-assign]
    before = {name: p.detach().clone() for name, p in task.module.named_parameters() if p.requires_grad}
    with pytest.raises(FloatingPointError, match=r"2 steps in a row .* [ab]/q\d+"):
        run_loop(task, config.train, context_of(config).folder, ONE, config.seed)
    for name, p in task.module.named_parameters():
        if name in before:
            torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0)


def test_more_workers_than_the_cluster_has_fail_at_once(tiny_run: Make, ray_cluster: None) -> None:
    """T-088."""
    config = tiny_run("many", "train.workers=4").train
    started = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"needs 4 CPUs but the cluster has 2"):
        training_shape(config)
    with pytest.raises(RuntimeError, match=r"needs 1 GPUs but the cluster has 0"):
        training_shape(tiny_run("gpu", "train.use_gpu=true").train)
    assert time.perf_counter() - started < 5


def test_batches_depend_on_seed_and_step_only_and_cover_each_epoch(tiny_run: Make) -> None:
    """T-033: a fixed number of steps, homogeneous in data set, each pair once an epoch."""
    folder = tiny_run("batches").root / "data" / "pairs"
    make = lambda: PairBatches(folder, batch_size=5, negatives=1, steps=24, seed=3)  # noqa: E731
    forward = [make().batch(step) for step in range(24)]
    again = make()
    for step in (23, 4, 11):
        assert again.batch(step).qids == forward[step].qids
        assert again.batch(step).documents == forward[step].documents
    for dataset in "ab":
        seen = [qid for batch in forward if batch.dataset == dataset for qid in batch.qids]
        assert len(set(seen[:30])) == min(30, len(seen))
    whole = forward[0]
    parts = [PairBatches(folder, batch_size=4, negatives=1, steps=2, seed=3).batch(0).part(rank, 2) for rank in (0, 1)]
    assert [len(part.documents) for part in parts] == [4, 4]
    assert len(whole.keys) == 10
    with pytest.raises(ValueError, match="has no negatives"):
        _without_negatives(folder)
    with pytest.raises(ValueError, match="names c, but the pairs are of a, b"):
        PairBatches(folder, batch_size=4, negatives=0, steps=2, seed=3, weights={"c": 1})


def _without_negatives(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(folder)
    rows = [row | {"negatives": [], "negative_docids": []} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), folder / "part-00000.parquet")
    PairBatches(folder, batch_size=4, negatives=1, steps=2, seed=3).batch(0)


def test_the_learning_rate_warms_up_and_ends_at_its_share(tiny_run: Make) -> None:
    config = tiny_run("rate").train.model_copy(update={"steps": 100, "warmup_steps": 10})
    shares = [learning_rate_share(step, config) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == pytest.approx(1.0)
    assert shares[-1] == pytest.approx(0.1, abs=0.01)
