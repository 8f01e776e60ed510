"""Training pairs: from judgements, from documents (title → body), or from files; dev queries held out by a hash of their id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from components.data.config import PairSource
from components.data.rows import Document, RowError, body_without_title
from components.data.schemas import PAIRS
from components.data.sources import Row
from components.data.writing import mark

Pair = dict[str, Any]
_BUCKETS = 1 << 20


def is_dev(qid: str, fraction: float, seed: int) -> bool:
    """Whether a query is held out; the same for the same id and seed, in whatever order or process."""
    return mark(f"{seed}:{qid}") % _BUCKETS < fraction * _BUCKETS


def title_body_pairs(documents: Iterable[Document], source: PairSource, seed: int) -> Iterator[Pair]:
    """Title → body with the title taken out of it; documents that lack either are left out."""
    for docid, title, text in documents:
        body = body_without_title(title, text)
        if title and body:
            yield pair(source, f"title-{docid}", title, docid, body, seed)


def qrel_pairs(
    queries: dict[str, str], positives: Iterable[tuple[str, str]], texts: dict[str, str], source: PairSource, seed: int
) -> Iterator[Pair]:  # fmt: skip
    """A pair for every (qid, docid) judged relevant whose query and document exist and have text."""
    for qid, docid in positives:
        if queries.get(qid) and texts.get(docid):
            yield pair(source, qid, queries[qid], docid, texts[docid], seed)


def file_pairs(rows: Iterable[Row], source: PairSource, seed: int) -> Iterator[Pair]:
    """Pairs from records with `query`, `positive` and optionally qid, docid, `negatives` (texts) and `negative_docids`."""
    for number, (where, record) in enumerate(rows):
        for name in ("query", "positive"):
            if not isinstance(record.get(name), str) or not record[name].strip():
                raise RowError(f"{where}: field {name!r} is {record.get(name)!r}; text is wanted")
        negatives = record.get("negatives") or []
        ids = record.get("negative_docids") or [f"{source.name}-{mark(text):016x}" for text in negatives]
        if len(ids) != len(negatives):
            raise RowError(f"{where}: {len(negatives)} negatives but {len(ids)} negative_docids; they go together")
        docid = str(record.get("docid") or f"{source.name}-{mark(record['positive']):016x}")
        made = pair(source, str(record.get("qid") or f"{source.name}-{number}"), record["query"], docid, record["positive"], seed)
        yield made | {"negatives": list(negatives), "negative_docids": [str(i) for i in ids]}


def pair(source: PairSource, qid: str, query: str, docid: str, text: str, seed: int) -> Pair:
    """One row of the pairs table, without negatives."""
    split = "dev" if is_dev(qid, source.dev_fraction, seed) else "train"
    return {"dataset": source.name, "qid": qid, "query": query, "positive_docid": docid, "positive": text,
            "negative_docids": [], "negatives": [], "split": split}  # fmt: skip


def pair_table(pairs: Iterable[Pair], counts: Counter[str]) -> pa.Table:
    """The pairs with the fixed schema, counted by data set and split."""
    rows = list(pairs)
    for row in rows:
        counts[f"pairs.{row['dataset']}.{row['split']}"] += 1
    return pa.Table.from_pylist(rows, schema=PAIRS)
