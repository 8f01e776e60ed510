"""Build the lookup table of the trained model: `python workflows/tabulate.py --config F --run-name N`.

Builder actors (one a GPU, or one with a node's CPUs) hold the model and are handed ranges of token ids; the driver puts
the rows together and writes the artefact that `components.lookup.QueryEncoder` reads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.util import ActorPool

from components.lookup import save_table
from components.text import Text
from workflows.cluster import require
from workflows.stage import Stage, StageContext, main

if TYPE_CHECKING:
    from components.models.config import RetrieverConfig
    from components.models.retriever import Extras

log = logging.getLogger("almanac")

RANGE = 2048
"""Token ids handed to a builder at a time in the packed form."""
_LOG_SECONDS = 5.0


class TableBuilder:
    """The Ray actor: holds the trained model and computes table rows."""

    def __init__(self, model: str, dtype: str, attention: str, threads: int, gpu: bool) -> None:
        import torch

        from components.models.retriever import load_retriever

        if not gpu:
            torch.set_num_threads(threads)  # Ray sets OMP_NUM_THREADS=1 in its workers (case T-087)
        self.retriever = load_retriever(Path(model), dtype, attention)
        self.model: Any = self.retriever.model.to("cuda" if gpu else "cpu")  # type: ignore[arg-type]

    def describe(self) -> tuple[RetrieverConfig, Extras, str]:
        """The retriever's settings, its extras and its fingerprint."""
        return self.retriever.config, self.retriever.extras, self.retriever.fingerprint

    def rows(self, task: str, start: int, stop: int, batch: int) -> np.ndarray:
        """float32 [stop − start, H]: rows of the token ids in the range, for the instruction with this task text."""
        from components.lookup.table import build_table

        found = self.retriever
        return build_table(
            self.model, found.text, found.config, task, weights=found.row_weights, ids=range(start, stop), batch=batch
        )


def run(context: StageContext) -> dict[str, Any]:
    """Build one table an instruction and write `table.safetensors`, the tokenizer and `lookup.json`."""
    started = time.perf_counter()
    config, folder = context.config.tabulate, context.inputs["train"] / "model"
    text = Text.load(folder)
    builders = _start(context, folder)
    try:
        retriever, extras, mark = ray.get(builders[0].describe.remote())
        tasks = dict(config.instructions) or {"default": retriever.instruction}
        step = RANGE if retriever.query_dense == "packed" else text.vocabulary_size
        log.info(
            "tabulate  %d table(s) of %d rows, %s token vectors, %d builder(s)",
            len(tasks), text.vocabulary_size, retriever.query_dense, len(builders),
        )  # fmt: skip
        rows = {
            name: _table(builders, name, task, text.vocabulary_size, step, config.batch) for name, task in tasks.items()
        }
    finally:
        for builder in builders:
            ray.kill(builder)
    manifest = save_table(
        context.folder,
        rows,
        extras.token_scores,
        text,
        instructions=tasks,
        storage=config.storage,
        model_fingerprint=mark,
    )
    seconds = time.perf_counter() - started
    size = sum(path.stat().st_size for path in context.folder.iterdir())
    context.log({"tabulate.bytes": size, "tabulate.build_seconds": seconds})
    return {
        "tables": len(tasks), "rows": manifest.vocabulary_size, "hidden_size": manifest.hidden_size,
        "storage": manifest.storage, "bytes": size, "scored_tokens": int((extras.token_scores > 0).sum()),
        "model_fingerprint": mark, "build_seconds": round(seconds, 3),
    }  # fmt: skip


def builder_shape() -> tuple[int, int, bool]:
    """Builders, CPUs of each, and whether each has a GPU: one a GPU, else one with all CPUs of the largest node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    cpus = 1 if gpus else max(1, int(max(node.get("CPU", 1) for node in nodes)))
    require(cpus=max(1, gpus) * cpus, gpus=gpus, what="tabulate")
    return max(1, gpus), cpus, gpus > 0


def _start(context: StageContext, folder: Path) -> list[Any]:
    count, cpus, gpu = builder_shape()
    actor = ray.remote(num_cpus=cpus, num_gpus=1 if gpu else 0)(TableBuilder)
    model = context.config.model
    return [actor.remote(str(folder), model.dtype, model.attention, cpus, gpu) for _ in range(count)]


def _table(builders: list[Any], name: str, task: str, size: int, step: int, batch: int) -> np.ndarray:
    """float32 [V, H]: the rows of every token id for one instruction, logged as they come."""
    ranges = [(start, min(start + step, size)) for start in range(0, size, step)]
    pool, began, said = ActorPool(builders), time.perf_counter(), time.perf_counter()
    parts: Iterator[np.ndarray] = pool.map(lambda actor, span: actor.rows.remote(task, *span, batch), ranges)
    table: np.ndarray | None = None
    for (start, stop), part in zip(ranges, parts, strict=True):
        if table is None:
            table = np.zeros((size, part.shape[1]), dtype=np.float32)
        table[start:stop] = part
        now = time.perf_counter()
        if stop == size or now - said > _LOG_SECONDS:
            said = now
            left = (now - began) / stop * (size - stop)
            log.info("tabulate  %s: %d / %d rows, %.0f s left", name, stop, size, left)
    assert table is not None  # a vocabulary is never empty
    return table


STAGE = Stage(name="tabulate", sections=("tabulate", "model"), inputs=("train",), run=run)

if __name__ == "__main__":
    main(STAGE)
