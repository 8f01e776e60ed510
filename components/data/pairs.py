"""Training pairs: from judgements, from documents (title → body), or from files; dev queries held out by a hash.

A query that is evaluated never becomes a training query, whatever the source: such pairs are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.data.config import PairSource
from components.data.files import Row
from components.data.rows import Document, RowError, body_without_title
from components.data.schemas import PAIRS
from components.data.writing import mark, write_rows, write_table

Pair = dict[str, Any]
_BUCKETS = 1 << 20


def is_dev(qid: str, fraction: float, seed: int) -> bool:
    """Whether a query is held out; the same for the same id and seed, in whatever order or process."""
    return mark(f"{seed}:{qid}") % _BUCKETS < fraction * _BUCKETS


def query_mark(text: str) -> int:
    """A hash of a query's words, whatever its case and spacing."""
    return mark(" ".join(text.casefold().split()))


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


def file_pairs(rows: Iterable[Row], source: PairSource, seed: int, prefix: str | None = None) -> Iterator[Pair]:
    """Pairs from records with `query`, `positive` and optionally qid, docid, `negatives` (texts) and `negative_docids`.

    A record without a qid gets `prefix` and its number for one. RowError: a field is missing, or of another type.
    """
    for number, (where, record) in enumerate(rows):
        for name in ("query", "positive"):
            if not isinstance(record.get(name), str) or not record[name].strip():
                raise RowError(f"{where}: field {name!r} is {record.get(name)!r}; text is wanted")
        negatives = record.get("negatives") or []
        if not isinstance(negatives, list) or not all(isinstance(text, str) for text in negatives):
            raise RowError(f"{where}: field 'negatives' is no list of texts")
        ids = record.get("negative_docids") or [f"{source.name}-{mark(text):016x}" for text in negatives]
        if len(ids) != len(negatives):
            raise RowError(f"{where}: {len(negatives)} negatives but {len(ids)} negative_docids; they go together")
        docid, qid = record.get("docid"), record.get("qid")
        made = pair(
            source, f"{prefix or source.name}-{number}" if qid is None else str(qid), record["query"],
            f"{source.name}-{mark(record['positive']):016x}" if docid is None else str(docid), record["positive"], seed,
        )  # fmt: skip
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


def write_pairs(
    pairs: Iterable[Pair], path: Path, source: PairSource, evaluated: Set[int], rows_per_group: int
) -> Counter[str]:
    """Stream up to `source.limit` pairs to `path` and count them as `pair_table` does; no file where there is none.

    `evaluated` are the `query_mark`s of the evaluated queries: their pairs are left out, and counted.
    """
    counts: Counter[str] = Counter()

    def allowed() -> Iterator[Pair]:
        for row in pairs:
            if query_mark(row["query"]) in evaluated:
                counts[f"pairs.{source.name}.evaluated"] += 1
            else:
                yield row

    rows = islice(allowed(), source.limit)
    if write_rows(rows, path, PAIRS, rows_per_group, lambda block: pair_table(block, counts)) == 0:
        path.unlink()
    return counts


def shorten(path: Path, source: PairSource, rows: int) -> Counter[str]:
    """Keep the first `rows` pairs of a file of the source (none: no file) and count them as `pair_table` does."""
    table = pq.read_table(path).slice(0, rows)
    path.unlink()
    if table.num_rows:
        write_table(table, path)
    return Counter(f"pairs.{source.name}.{split}" for split in table["split"].to_pylist())
