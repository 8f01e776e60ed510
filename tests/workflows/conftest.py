"""A tiny run folder up to the training stage: corpus, pairs, and a pruned (here: whole) tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.config import Config, load_config
from components.data.schemas import CORPUS, PAIRS
from components.models.backbone import load_causal_lm, save_causal_lm
from components.models.tokenizer import text_for_model
from components.storage import write_json
from components.text import TextConfig

WORDS = [
    "lift",
    "wing",
    "flow",
    "shell",
    "heat",
    "plate",
    "cone",
    "body",
    "layer",
    "speed",
    "angle",
    "stress",
    "load",
    "drag",
    "shock",
    "wave",
]


def write_tiny_inputs(root: Path, model: Path, documents: int = 60) -> None:
    """`data/` and `prune/` as the real stages leave them (without fingerprints)."""
    text = text_for_model(model, TextConfig(document_max_tokens=32))
    (root / "data" / "corpus").mkdir(parents=True)
    (root / "data" / "pairs").mkdir()
    docids = [f"d{i:03d}" for i in range(documents)]
    titles = [f"{WORDS[i % 16]} {WORDS[(i * 7 + 3) % 16]}" for i in range(documents)]
    texts = [
        f"{title} " + " ".join(WORDS[(i * k + k) % 16] for k in range(1, 3 + i % 9)) for i, title in enumerate(titles)
    ]
    texts[5] = ""
    pq.write_table(
        pa.table([docids, titles, texts], schema=CORPUS),
        root / "data" / "corpus" / "part-00000.parquet",
        row_group_size=16,
    )
    rows = [
        {"dataset": "ab"[i % 2], "qid": f"q{i}", "query": titles[i], "positive_docid": docids[i], "positive": texts[i] or "x",
         "negative_docids": [docids[(i + 9) % documents]], "negatives": [texts[(i + 9) % documents] or "y"], "split": "train"}
        for i in range(documents)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=PAIRS), root / "data" / "pairs" / "part-00000.parquet")
    write_json(root / "data" / "result.json", {"documents": documents, "fingerprint": "data"})
    folder = root / "prune" / "model"
    folder.mkdir(parents=True)
    save_causal_lm(load_causal_lm(model), folder)
    text.save(folder)
    write_json(root / "prune" / "result.json", {"fingerprint": "prune"})


TINY = [
    "text.document_max_tokens=32", "train.steps=6", "train.batch_size=4", "train.negatives=1", "train.warmup_steps=2",
    "train.learning_rate=0.01", "train.checkpoint_every=2", "train.log_every=1", "train.center_documents=8",
    "train.document_max_tokens=null", "train.lora={rank: 4, alpha: 8, dropout: 0.1}", "train.cpus_per_worker=1", "encode.rows_per_shard=16",
    "encode.batch_tokens=128", "tracking.enabled=false", "train.terms={}", "train.gradient_norms_every=0",
    "train.retriever={pooling: mean, center: true, query_dense: packed, sparse_activation: log_probability, lexical_weight: 1.0, query_weights: idf}",
]  # fmt: skip


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_model_folder: Path) -> Callable[..., Config]:
    """Makes `data/` and `prune/` of a run and gives back its config; overrides come last."""

    def make(name: str = "tiny", *overrides: str) -> Config:
        config = load_config(None, [f"runs={tmp_path}", f"run_name={name}", *TINY, *overrides])
        if not (config.root / "data").exists():
            write_tiny_inputs(config.root, tiny_model_folder)
        return config

    return make
