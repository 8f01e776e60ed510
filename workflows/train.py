"""Train the retriever: `python workflows/train.py --config F --run-name N train.steps=200`.

First one pass of Ray Data over the corpus settles document frequencies (IDF) and lengths; then Ray Train trains the terms that
the config switches on; rank 0 merges the adapter, settles the centre and writes `model/`.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import ray
import torch
from safetensors.numpy import load_file, save_file

from components.config import Config
from components.data.batches import PairBatch, PairBatches
from components.encoding import ShardPlan, plan_shards, read_rows
from components.lookup.idf import TokenStatistics, inverse_document_frequencies, token_statistics
from components.lookup.stems import stem_groups
from components.models.backbone import load_causal_lm
from components.models.document_encoder import DocumentEncoder
from components.models.retriever import Extras, Retriever, save_retriever
from components.models.trainee import Trainee
from components.objectives.config import TrainConfig
from components.storage import atomic_file, read_json, replace_folder
from components.text import Text
from workflows.stage import Stage, StageContext, main
from workflows.training import STEPS_LOG, Worker, train, training_shape, use_bfloat16

log = logging.getLogger("almanac")

STATISTICS, MODEL = "statistics.safetensors", "model"


def run(context: StageContext) -> dict[str, Any]:
    """Write `model/`; returns the last losses, tokens and pace."""
    config, folder = context.config.train, context.folder
    shape = training_shape(config)
    backbone, data = context.inputs["prune"] / MODEL, context.inputs["data"]
    statistics = folder / STATISTICS
    if not statistics.exists():
        _settle_statistics(data / "corpus", backbone, config, statistics)
    device = "GPU" if shape.gpu else "CPU"
    log.info(
        "train     %d steps × %d queries on %d × %s, %s, negatives per query: %d", config.steps, config.batch_size,
        shape.workers, device, _precision(config, shape.gpu), config.batch_size * (1 + config.negatives) - 1,
    )  # fmt: skip
    settings = _Settings(context.config, backbone, data, folder, statistics)
    if not (folder / MODEL).exists():
        train(lambda worker: RetrieverTask(settings, worker), config, folder, shape, context.config.seed, context.log)
    result = _summary(folder, config)
    for leftover in ("ray", "checkpoints"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    return result


@dataclass(frozen=True)
class _Settings:
    """What a worker is given; all of it is small."""

    config: Config
    backbone: Path
    data: Path
    folder: Path
    statistics: Path


class RetrieverTask:
    """Contrastive training of one retriever (see `workflows.training.Task`)."""

    def __init__(self, settings: _Settings, worker: Worker) -> None:
        self.settings, self.config, self.worker = settings, settings.config.train, worker
        config = self.config
        torch.manual_seed(settings.config.seed)
        self.text = Text.load(settings.backbone)
        half = use_bfloat16(config, worker.device) and config.lora is not None
        model = load_causal_lm(
            settings.backbone, "bfloat16" if half else "float32", settings.config.model.attention
        ).to(worker.device)  # type: ignore[arg-type]
        self.extras = self._extras()
        if config.retriever.center:
            self.extras = self._centred(model)
        if config.gradient_checkpointing and config.steps:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        self.module: Any = Trainee(
            with_lora(model, config) if config.steps else model, self.text, config.retriever, config.terms, self.extras,
            document_max_tokens=config.document_max_tokens, seed=settings.config.seed,
        )  # fmt: skip
        if config.steps:
            self.batches = PairBatches(
                settings.data / "pairs", batch_size=config.batch_size, negatives=config.negatives, steps=config.steps,
                seed=settings.config.seed, weights=config.datasets,
            )  # fmt: skip

    def batch(self, step: int) -> PairBatch:
        """The global batch of a step."""
        return self.batches.batch(step)

    def names(self, batch: PairBatch) -> list[str]:
        """Query ids."""
        return [f"{batch.dataset}/{qid}" for qid in batch.qids]

    def state(self) -> dict[str, Any]:
        """The centre used in training."""
        return {} if self.extras.center is None else {"center": torch.from_numpy(self.extras.center)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the centre."""
        if "center" in state:
            self.extras = Extras(
                self.extras.token_scores, state["center"].numpy(), self.extras.idf, self.extras.average_length
            )
            self.module.extras = self.extras

    def export(self) -> None:
        """Merge the adapter, settle the centre anew with the trained weights, write `model/` whole."""
        model: Any = self.module.model
        if self.config.gradient_checkpointing and self.config.steps:
            model.gradient_checkpointing_disable()
        if hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()
        model.eval()
        if self.config.retriever.center and self.config.steps:
            self.extras = self._centred(model)
        temporary = self.settings.folder / f".{MODEL}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        save_retriever(temporary, model, self.text, self.config.retriever, self.extras)
        replace_folder(temporary, self.settings.folder / MODEL)

    def _extras(self) -> Extras:
        found = load_file(self.settings.statistics)
        idf = found["idf"]
        weighted = self.config.retriever.query_weights == "idf"
        scores = idf if weighted else self.text.producible.astype(np.float32)
        return Extras(scores, None, idf if weighted else None, float(found["average_length"][0]))

    def _centred(self, model: Any) -> Extras:
        """The extras with the centre: the mean raw vector over a seeded sample of documents."""
        retriever = Retriever(
            model, self.text, self.config.retriever.model_copy(update={"center": False}), self.extras, ""
        )
        texts = sample_documents(self.settings.data / "corpus", self.config.center_documents, self.settings.config.seed)
        vectors = DocumentEncoder(retriever, self.worker.device).pooled(texts)
        filled = vectors[np.abs(vectors).sum(axis=1) > 0]
        center = filled.mean(axis=0) if len(filled) else np.zeros(vectors.shape[1], np.float32)
        return Extras(self.extras.token_scores, center.astype(np.float32), self.extras.idf, self.extras.average_length)


def with_lora(model: Any, config: TrainConfig) -> Any:
    """The model with adapters on all its linear layers (the LM head stays as it is), or whole and trainable."""
    if config.lora is None:
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    lora = config.lora
    return get_peft_model(
        model, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules="all-linear")
    )


def sample_documents(corpus: Path, count: int, seed: int) -> list[str]:
    """Texts of up to `count` documents, a seeded sample in corpus order; only their row groups are read."""
    files = sorted(corpus.glob("*.parquet"))
    total = sum(pq.ParquetFile(path).metadata.num_rows for path in files)
    rows = np.sort(np.random.default_rng([seed, 4]).choice(total, min(count, total), replace=False))
    size = 1000
    plans = plan_shards(files, size)
    texts: list[str] = []
    for number in np.unique(rows // size).tolist():
        table = read_rows(plans[number], ["text"])
        texts += table["text"].take(rows[rows // size == number] - number * size).to_pylist()
    return texts


def _settle_statistics(corpus: Path, backbone: Path, config: TrainConfig, target: Path) -> None:
    """Document frequencies and mean length over the whole corpus, summed by Ray Data from vocabulary-sized parts."""
    text = Text.load(backbone)
    stems = config.retriever.lexical_stems
    groups = stem_groups(text, stems) if stems else None
    plans = plan_shards(sorted(corpus.glob("*.parquet")), 20_000)

    def count(batch: Any) -> Any:
        found = [_counted(backbone, plan, groups) for plan in map(ShardPlan.loads, batch["plan"])]
        return {
            "frequencies": np.stack([part.frequencies for part in found]),
            "documents": [part.documents for part in found], "tokens": [part.tokens for part in found],
        }  # fmt: skip

    total = TokenStatistics(np.zeros(text.vocabulary_size, np.int64), 0, 0)
    for row in (
        ray.data.from_items([{"plan": plan.dumps()} for plan in plans]).map_batches(count, batch_size=1).iter_rows()
    ):
        total += TokenStatistics(row["frequencies"], int(row["documents"]), int(row["tokens"]))
    arrays = {
        "idf": inverse_document_frequencies(total, text.producible),
        "average_length": np.asarray([total.average_length], np.float32),
    }
    with atomic_file(target) as temporary:
        save_file(arrays, temporary)
    log.info("train     corpus: %d documents, %.1f tokens each", total.documents, total.average_length)


def _counted(backbone: Path, plan: Any, groups: np.ndarray | None) -> TokenStatistics:
    text = Text.load(backbone)
    return token_statistics(text.plain(read_rows(plan, ["text"])["text"].to_pylist()), text.producible, groups)


def _precision(config: TrainConfig, gpu: bool) -> str:
    if config.precision != "auto":
        return f"{config.precision} (as configured)"
    return "bfloat16 where the GPU has it" if gpu else "float32 (CPU)"


def _summary(folder: Path, config: TrainConfig) -> dict[str, Any]:
    path = folder / STEPS_LOG
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    retriever = read_json(folder / MODEL / "retriever.json")
    return {
        "steps": config.steps, "queries_seen": config.steps * config.batch_size, "model_fingerprint": retriever["fingerprint"],
        "last": {name: value for name, value in rows[-1].items() if np.isfinite(value)} if rows else {},
        "negatives_per_query": config.batch_size * (1 + config.negatives) - 1, "workers": config.workers,
    }  # fmt: skip


STAGE = Stage(name="train", sections=("train", "seed"), inputs=("data", "prune"), run=run)

if __name__ == "__main__":
    main(STAGE)
