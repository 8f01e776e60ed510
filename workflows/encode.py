"""Encode the corpus into dense and sparse vectors: `python workflows/encode.py --config F --run-name N`.

The corpus is cut into shards of fixed rows; Ray Data hands shard numbers, never documents, to a pool of encoder actors. An
actor reads its rows, encodes them and renames the finished file into place. So what crosses processes is small, nothing
depends on the order in which Ray finishes, and after a kill only the shards that are not on disk are encoded again: the
bytes are those of an undisturbed run.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from components.encoding import MANIFEST, EncodeConfig, ShardPlan, plan_shards, read_rows, shard_counts, write_shard
from components.storage import read_json, sha256_file, write_json
from components.text import Text
from workflows.cluster import require
from workflows.stage import RESULT, Stage, StageContext, main

log = logging.getLogger("almanac")


class ShardEncoder:
    """The Ray Data actor: holds one document encoder and turns shard plans into shard files."""

    def __init__(
        self, model: str, folder: str, batch_tokens: int, dtype: str, attention: str, threads: int, gpu: bool
    ) -> None:
        import torch

        from components.models.document_encoder import DocumentEncoder

        if not gpu:
            torch.set_num_threads(threads)  # Ray sets OMP_NUM_THREADS=1 in its workers (case T-087)
        self.encoder = DocumentEncoder.load(
            Path(model), dtype=dtype, attention=attention, device="cuda" if gpu else "cpu"
        )
        self.folder, self.batch_tokens = Path(folder), batch_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
        """Encode the plans in `batch`; one row a shard: its number and the seconds it took."""
        plans = [ShardPlan.loads(text) for text in batch["plan"]]
        seconds = [self._encode(plan) for plan in plans]
        return {"shard": np.asarray([plan.index for plan in plans]), "seconds": np.asarray(seconds)}

    def _encode(self, plan: ShardPlan) -> float:
        started = time.perf_counter()
        rows = read_rows(plan, ["docid", "text"])
        text = self.encoder.text
        full = text.plain(rows["text"].to_pylist())
        encoded = self.encoder.encode_plain(full, self.batch_tokens)
        write_shard(
            self.folder / plan.file, rows["docid"], encoded.dense, *encoded.sparse,
            vocabulary_size=text.vocabulary_size, tokens=sum(len(text.wrap(ids)) for ids in full),
        )  # fmt: skip
        return time.perf_counter() - started


def run(context: StageContext) -> dict[str, Any]:
    """Encode every shard that is not on disk yet, verify the counts and write the manifest."""
    config, folder = context.config.encode, context.folder
    plans = plan_shards(sorted((context.inputs["data"] / "corpus").glob("*.parquet")), config.rows_per_shard)
    missing = [plan for plan in plans if not (folder / plan.file).exists()]
    total = sum(plan.rows for plan in plans)
    if len(missing) < len(plans):
        log.info("encode    %d of %d shards are on disk already and are kept", len(plans) - len(missing), len(plans))
    started = time.perf_counter()
    if missing:
        _encode_missing(context, missing, total)
    seconds = time.perf_counter() - started
    return _finish(context, plans, seconds, sum(plan.rows for plan in missing))


def actor_shape(config: EncodeConfig) -> tuple[int, int, bool]:
    """Actors, CPUs of each and whether each has a GPU, from the config and the cluster; refuses what can never fit."""
    have = ray.cluster_resources()
    gpus, cpus = int(have.get("GPU", 0)), max(1, int(have.get("CPU", 1)))
    actors = config.actors or (
        gpus or max(1, len([node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]))
    )
    share = config.cpus_per_actor or max(1, cpus // actors)
    require(cpus=actors * share, gpus=actors if gpus else 0, what=f"encode with {actors} actors of {share} CPUs")
    return actors, share, gpus > 0


def _encode_missing(context: StageContext, missing: list[ShardPlan], total: int) -> None:
    config = context.config
    actors, cpus, gpu = actor_shape(config.encode)
    actors = min(actors, len(missing))
    log.info(
        "encode    %d documents, %d shards to do, %d actor(s) × %d CPUs%s",
        total,
        len(missing),
        actors,
        cpus,
        " + GPU" if gpu else "",
    )
    dataset = ray.data.from_items([{"plan": plan.dumps()} for plan in missing], override_num_blocks=len(missing)).map_batches(
        ShardEncoder,
        fn_constructor_args=(
            str(context.inputs["train"] / "model"), str(context.folder), config.encode.batch_tokens, config.model.dtype,
            config.model.attention, cpus, gpu,
        ),
        batch_size=1, compute=ray.data.ActorPoolStrategy(size=actors), num_cpus=cpus, num_gpus=1 if gpu else None,
    )  # fmt: skip
    rows = {plan.index: plan.rows for plan in missing}
    done, finished, started = total - sum(rows.values()), 0, time.perf_counter()
    for row in dataset.iter_rows():
        finished += rows[int(row["shard"])]
        done += rows[int(row["shard"])]
        rate = finished / (time.perf_counter() - started)
        left = (total - done) / rate
        log.info("encode    %d / %d documents, %.1f a second, %.0f s left", done, total, rate, left)
        context.log({"encode.documents": done, "encode.documents_per_second": rate}, step=done)


def _finish(context: StageContext, plans: list[ShardPlan], seconds: float, encoded: int) -> dict[str, Any]:
    shards, totals = [], {"rows": 0, "tokens": 0, "nonzeros": 0}
    for plan in plans:
        path = context.folder / plan.file
        counts = shard_counts(path)
        if counts["rows"] != plan.rows:
            raise ValueError(
                f"{path}: holds {counts['rows']} documents instead of {plan.rows}. Delete it and run encode again."
            )
        totals = {name: totals[name] + counts[name] for name in totals}
        shards.append({"file": plan.file, "sha256": sha256_file(path), **counts})
    wanted = read_json(context.inputs["data"] / RESULT)["documents"]
    if totals["rows"] != wanted:
        raise ValueError(f"encoded {totals['rows']} documents but ingest wrote {wanted}: run with a fresh run name")
    text = Text.load(context.inputs["train"] / "model")
    manifest = {
        "model_fingerprint": read_json(context.inputs["train"] / "model" / "retriever.json")["fingerprint"],
        "text_fingerprint": text.fingerprint,
        "vocabulary_size": text.vocabulary_size,
        "documents": totals["rows"],
        "shards": shards,
    }
    write_json(context.folder / MANIFEST, manifest)
    return {
        "documents": totals["rows"], "tokens": totals["tokens"], "shards": len(shards),
        "terms_per_document": round(totals["nonzeros"] / max(1, totals["rows"]), 2),
        "encoded_now": encoded, "encode_seconds": round(seconds, 3),
        "documents_per_second": round(encoded / seconds, 3) if encoded else 0.0,
        "bytes": sum((context.folder / plan.file).stat().st_size for plan in plans),
    }  # fmt: skip


STAGE = Stage(name="encode", sections=("encode", "model"), inputs=("data", "train"), run=run)

if __name__ == "__main__":
    main(STAGE)
