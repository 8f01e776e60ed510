"""Everything about the data that would make a result wrong (an error) or is only odd (a warning), counted before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from components.data.rows import RowError, identifier, query
from components.data.schemas import QRELS, QUERIES
from components.data.sources import Row
from components.data.writing import mark, repeated

WARNED = {
    "documents_empty": "documents without any text (kept: they can be found by no query)",
    "documents_double_encoded": "documents that look doubly encoded, such as “Â ” (left as they are)",
    "documents_repeated_text": "documents whose text stands under another id too (a hit on either counts only if judged)",
    "documents_dropped": "documents dropped because their id had occurred before",
    "ids_not_strings": "ids that were numbers (now text)",
    "queries_empty": "queries without text",
    "queries_odd": "queries with markup, or of nothing but punctuation",
    "queries_unjudged": "queries without judgements (not evaluated)",
    "judgements_without_query": "judgements of queries that do not exist (ignored)",
    "judgements_without_document": "judgements of documents that are not in the corpus (kept in the denominators, as trec_eval does)",
    "grades_negative": "grades below zero (gain 0)",
}


def query_table(rows: Iterable[Row], counts: Counter[str]) -> pa.Table:
    """The queries with the fixed schema. RowError: the same qid twice."""
    seen: dict[str, str] = {}
    for where, record in rows:
        qid, text = query(record, where, counts)
        if qid in seen:
            raise RowError(f"{where}: query id {qid!r} occurs twice; its results could not be told apart. Remove one.")
        seen[qid] = text
    return pa.table([pa.array(seen.keys(), pa.string()), pa.array(seen.values(), pa.large_string())], schema=QUERIES)


def qrel_table(rows: Iterable[Row], grades: dict[int, int] | None, counts: Counter[str]) -> pa.Table:
    """The judgements with gains: mapped by `grades`, never below zero (case T-066).

    RowError: a grade that the map lacks, or a pair that is judged twice with different grades.
    """
    found: dict[tuple[str, str], int] = {}
    for where, record in rows:
        qid, docid = (identifier(record, (name,), where, counts) for name in ("qid", "docid"))
        grade = record.get("grade")
        if not isinstance(grade, int):
            raise RowError(f"{where}: the grade {grade!r} is not a whole number")
        if grades is not None:
            if grade not in grades:
                raise RowError(f"{where}: grade {grade} is not in data.grades ({grades}). Add it to the map.")
            grade = grades[grade]
        counts["grades_negative"] += grade < 0
        grade = max(0, grade)
        if found.setdefault((qid, docid), grade) != grade:
            raise RowError(f"{where}: {qid!r} → {docid!r} is judged twice, with {found[qid, docid]} and {grade}. Keep one.")
    counts["judgements"] = len(found)
    qids, docids = ([key[i] for key in found] for i in (0, 1))
    columns = [pa.array(qids, pa.string()), pa.array(docids, pa.string()), pa.array(found.values(), pa.int32())]
    return pa.table(columns, schema=QRELS)


def cross_check(queries: pa.Table, qrels: pa.Table, docid_marks: np.ndarray, counts: Counter[str]) -> None:
    """Count queries without judgements and judgements that point nowhere. ValueError: no query is judged at all."""
    qids = set(queries["qid"].to_pylist())
    judged = set(qrels["qid"].to_pylist())
    counts["queries_judged"] = len(qids & judged)
    counts["queries_unjudged"] = len(qids - judged)
    counts["judgements_without_query"] = sum(qid not in qids for qid in qrels["qid"].to_pylist())
    known = np.isin(np.asarray([mark(docid) for docid in qrels["docid"].to_pylist()], np.uint64), docid_marks)
    counts["judgements_without_document"] = int((~known).sum())
    if not qids & judged:
        raise ValueError(
            f"no query has a judgement ({len(qids)} queries, {len(judged)} judged ids, for example {sorted(qids)[:3]} and "
            f"{sorted(judged)[:3]}): queries and judgements are of different collections"
        )
    if not known.any():
        raise ValueError("no judged document is in the corpus: corpus and judgements are of different collections")


def length_summary(lengths: np.ndarray) -> dict[str, int]:
    """Characters of the documents at some percentiles."""
    if len(lengths) == 0:
        return {}
    return {f"p{p}": int(np.percentile(lengths, p)) for p in (0, 10, 50, 90, 99, 100)}


def repeated_texts(texts: np.ndarray, lengths: np.ndarray) -> int:
    """Documents whose non-empty text stands under another id as well (case T-077)."""
    filled = texts[lengths > 0]
    return int(np.isin(filled, repeated(filled)).sum())


def summary(counts: dict[str, Any]) -> Iterator[str]:
    """Lines that show the counts, warnings last."""
    for name in ("documents", "queries", "queries_judged", "judgements"):
        if name in counts:
            yield f"{counts[name]:>9,} {name.replace('_', ' ')}"
    for name, meaning in WARNED.items():
        if counts.get(name):
            yield f"{counts[name]:>9,} ! {meaning}"
