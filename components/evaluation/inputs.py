"""What an evaluation reads of a run's `data` folder: judged queries, the corpus as a stream, held-out dev pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

Qrels = dict[str, dict[str, int]]
"""qid → docid → grade"""


@dataclass(frozen=True)
class Judged:
    """Queries in a fixed order with their judgements."""

    qids: list[str]
    texts: list[str]
    qrels: Qrels
    without_text: int = 0
    """Judged ids that have no query text; they cannot be run and do not count."""


def read_judged(data: Path) -> Judged:
    """The judged queries of a data folder, in the order of its file; none where it has no queries."""
    if not (data / "queries.parquet").exists() or not (data / "qrels.parquet").exists():
        return Judged([], [], {})
    table, judgements = pq.read_table(data / "queries.parquet"), pq.read_table(data / "qrels.parquet")
    qrels: Qrels = {}
    for qid, docid, grade in zip(*(judgements[name].to_pylist() for name in ("qid", "docid", "grade")), strict=True):
        qrels.setdefault(qid, {})[docid] = grade
    table = table.filter(pc.is_in(table["qid"], value_set=pa.array(list(qrels), pa.string())))
    qids, texts = table["qid"].to_pylist(), table["text"].to_pylist()
    return Judged(qids, texts, {qid: qrels[qid] for qid in qids}, len(qrels) - len(qids))


def read_dev_pairs(data: Path, datasets: Sequence[str], limit: int) -> Judged:
    """The dev queries of these data sets, at most `limit` spread evenly; a pair's document is all that is relevant."""
    dev = (pc.field("split") == "dev") & pc.field("dataset").isin(pa.array(datasets, pa.string()))
    texts: dict[str, str] = {}
    qrels: Qrels = {}
    for path in sorted((data / "pairs").glob("*.parquet")):
        rows = pq.read_table(path, columns=["dataset", "qid", "query", "positive_docid"], filters=dev)
        for row in rows.to_pylist():
            qid = f"{row['dataset']} {row['qid']}"
            texts[qid] = row["query"]
            qrels.setdefault(qid, {})[row["positive_docid"]] = 1
    qids = list(texts)
    if len(qids) > limit:
        qids = [qids[i] for i in np.linspace(0, len(qids) - 1, limit).round().astype(int).tolist()]
    return Judged(qids, [texts[qid] for qid in qids], {qid: qrels[qid] for qid in qids})


def corpus_texts(data: Path) -> Iterator[tuple[str, str]]:
    """(docid, text) of every document, read a batch at a time."""
    for batch in _batches(data, ["docid", "text"]):
        yield from zip(batch["docid"].to_pylist(), batch["text"].to_pylist(), strict=True)


def sample_titles(data: Path, count: int = 1000) -> list[str]:
    """Titles (or beginnings of texts) of the first documents, to time query encoding where there are no queries."""
    for batch in _batches(data, ["title", "text"], count):
        rows = zip(batch["title"].to_pylist(), batch["text"].to_pylist(), strict=True)
        return [title or text[:80] for title, text in rows]
    return ["query"]


def _batches(data: Path, columns: list[str], rows: int = 8192) -> Iterator[pa.RecordBatch]:
    for path in sorted((data / "corpus").glob("*.parquet")):
        yield from pq.ParquetFile(path).iter_batches(rows, columns=columns)
