"""What would make a result wrong (an error) or is only odd (counted, a warning), found before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from components.data.files import Row
from components.data.rows import DataError, RowError, judgement, query
from components.data.schemas import QRELS, QUERIES
from components.data.writing import mark, repeated

WARNED = {
    "documents_empty": "documents without any text (kept: they can be found by no query)",
    "documents_double_encoded": "documents that look doubly encoded, such as “Â ” (left as they are)",
    "documents_repeated_text": "documents whose text stands under another id too (see data.credit_duplicates)",
    "documents_dropped": "documents dropped because their id had occurred before (data.duplicates=first)",
    "texts_not_unicode": "texts with half characters (replaced by U+FFFD)",
    "ids_not_strings": "ids that were numbers (now text)",
    "ids_with_spaces": "ids with white space in them (a TREC run file cannot hold these)",
    "queries_empty": "queries without text",
    "queries_odd": "queries with markup, or of nothing but punctuation",
    "queries_double_encoded": "queries that look doubly encoded (left as they are)",
    "queries_repeated": "queries that came twice, word for word (the first kept)",
    "queries_unjudged": "queries without judgements (not evaluated)",
    "queries_without_relevant": "judged queries without any relevant document (they count as 0)",
    "judgements_repeated": "judgements that came twice, alike (one kept)",
    "judgements_without_query": "judgements of queries that do not exist (ignored)",
    "judgements_without_document": "judgements of documents not in the corpus (kept in denominators, as by trec_eval)",
    "judgements_credited": "judgements added for documents with the text of a relevant one",
    "grades_negative": "grades below zero (gain 0)",
}
_SIZES = ("documents", "queries", "queries_judged", "judgements")


def query_table(rows: Iterable[Row], counts: Counter[str]) -> pa.Table:
    """The queries with the fixed schema. RowError: the same qid with two texts."""
    seen: dict[str, str] = {}
    for where, record in rows:
        qid, text = query(record, where, counts)
        counts["queries_repeated"] += qid in seen
        if seen.setdefault(qid, text) != text:
            raise RowError(f"{where}: query id {qid!r} occurs twice, with two texts. Give each query an id of its own.")
    counts["queries"] = len(seen)
    return pa.table([pa.array(seen.keys(), pa.string()), pa.array(seen.values(), pa.large_string())], schema=QUERIES)


def qrel_table(rows: Iterable[Row], grades: Mapping[int, int] | None, counts: Counter[str]) -> pa.Table:
    """The judgements with gains: mapped by `grades`, never below zero (case T-066).

    RowError: a grade that the map lacks, or a pair that is judged twice with different grades.
    """
    found: dict[tuple[str, str], int] = {}
    for where, record in rows:
        qid, docid, grade = judgement(record, where, counts)
        if grades is not None:
            if grade not in grades:
                raise RowError(f"{where}: grade {grade} is not in data.grades, or the pairs' grades: {dict(grades)}")
            grade = grades[grade]
        counts["grades_negative"] += grade < 0
        grade = max(0, grade)
        counts["judgements_repeated"] += (qid, docid) in found
        if found.setdefault((qid, docid), grade) != grade:
            before = found[qid, docid]
            raise RowError(f"{where}: {qid!r} → {docid!r} is judged twice, with {before} and {grade}. Keep one.")
    counts["judgements"] = len(found)
    qids, docids = ([key[i] for key in found] for i in (0, 1))
    columns = [pa.array(qids, pa.string()), pa.array(docids, pa.string()), pa.array(found.values(), pa.int32())]
    return pa.table(columns, schema=QRELS)


def cross_check(queries: pa.Table, qrels: pa.Table, docid_marks: np.ndarray, counts: Counter[str]) -> None:
    """Count queries without judgements and judgements that point nowhere (case T-064).

    DataError: no query is judged, no judged document is in the corpus, or no judgement is relevant: nothing to measure.
    """
    qids, judged = set(queries["qid"].to_pylist()), set(qrels["qid"].to_pylist())
    rows = list(zip(*(qrels[name].to_pylist() for name in QRELS.names), strict=True))
    counts["queries_judged"] = len(qids & judged)
    counts["queries_unjudged"] = len(qids - judged)
    counts["judgements_without_query"] = sum(qid not in qids for qid, _, _ in rows)
    known = np.isin(np.asarray([mark(docid) for _, docid, _ in rows], np.uint64), docid_marks)
    counts["judgements_without_document"] = int((~known).sum())
    hopeless = len((qids & judged) - {qid for qid, _, grade in rows if grade >= 1})
    if hopeless:
        counts["queries_without_relevant"] = hopeless
    if not qids & judged:
        raise DataError(
            f"no query has a judgement ({len(qids)} queries such as {sorted(qids)[:3]}, {len(judged)} judged ids such "
            f"as {sorted(judged)[:3]}): queries and judgements are of different collections"
        )
    if not known.any():
        raise DataError(
            f"no judged document (such as {sorted({docid for _, docid, _ in rows})[:3]}) is in the corpus: corpus and "
            f"judgements are of different collections"
        )
    if hopeless == counts["queries_judged"]:
        raise DataError("no judgement has a gain of 1 or more, so every measure would be 0: look at data.grades")


def length_summary(lengths: np.ndarray) -> dict[str, int]:
    """Characters at some percentiles; empty for none."""
    if len(lengths) == 0:
        return {}
    return {f"p{p}": int(np.percentile(lengths, p)) for p in (0, 10, 50, 90, 99, 100)}


def repeated_texts(texts: np.ndarray, lengths: np.ndarray) -> int:
    """Documents whose non-empty text stands under another id as well (case T-077)."""
    filled = texts[lengths > 0]
    return int(np.isin(filled, repeated(filled)).sum())


def text_lengths(table: pa.Table) -> np.ndarray:
    """Characters of each text of a small table."""
    return np.asarray([len(text) for text in table["text"].to_pylist()], np.int32)


def sizes(counts: Mapping[str, int], characters: Mapping[str, int]) -> Iterator[str]:
    """The lines of a small table: what there is, and how long the documents are."""
    for name in _SIZES:
        if name in counts:
            yield f"{counts[name]:>11,} {name.replace('_', ' ')}"
    if characters:
        middle, most = characters["p50"], characters["p100"]
        yield f"{middle:>11,} characters in the median document ({characters['p99']:,} at 99 %, {most:,} at most)"


def warnings(counts: Mapping[str, Any]) -> Iterator[str]:
    """A line for each oddity that was counted."""
    for name, meaning in WARNED.items():
        if counts.get(name):
            yield f"{counts[name]:>11,} {meaning}"
