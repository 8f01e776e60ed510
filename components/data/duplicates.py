"""Documents with the same text under two ids: found by their marks, compared as text, credited where asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.data.schemas import QRELS
from components.data.writing import Marks, repeated


def same_texts(parts: list[Path], marks: Marks) -> list[list[str]]:
    """Groups of docids whose texts, not empty, are equal, in corpus order; only suspects' row groups are read."""
    filled = marks.lengths > 0
    suspects = np.flatnonzero(filled & np.isin(marks.texts, repeated(marks.texts[filled])))
    groups: dict[str, list[str]] = {}
    for docid, text in _rows_at(parts, suspects):
        groups.setdefault(text, []).append(docid)
    return [docids for docids in groups.values() if len(docids) > 1]


def credit(qrels: pa.Table, groups: list[list[str]], counts: Counter[str]) -> pa.Table:
    """The judgements, plus one for each twin of a relevant document that is not judged itself (case T-077)."""
    twins = {docid: group for group in groups for docid in group}
    rows = qrels.to_pylist()
    judged = {(row["qid"], row["docid"]) for row in rows}
    added = []
    for row in rows:
        for twin in twins.get(row["docid"], ()) if row["grade"] >= 1 else ():
            if (row["qid"], twin) not in judged:
                judged.add((row["qid"], twin))
                added.append(row | {"docid": twin})
    counts["judgements_credited"] = len(added)
    return pa.concat_tables([qrels, pa.Table.from_pylist(added, schema=QRELS)])


def _rows_at(parts: list[Path], positions: np.ndarray) -> Iterator[tuple[str, str]]:
    """(docid, text) of the rows at sorted corpus positions."""
    begin = 0
    for path in parts:
        with pq.ParquetFile(path) as reader:
            for group in range(reader.num_row_groups):
                count = reader.metadata.row_group(group).num_rows
                here = positions[np.searchsorted(positions, begin) : np.searchsorted(positions, begin + count)]
                if len(here):
                    table = reader.read_row_group(group, columns=["docid", "text"]).take(pa.array(here - begin))
                    yield from zip(table["docid"].to_pylist(), table["text"].to_pylist(), strict=True)
                begin += count
