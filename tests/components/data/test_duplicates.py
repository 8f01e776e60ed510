"""Equal passages under two ids: found, compared as text, credited where asked for (case T-077)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.checks import repeated_texts
from components.data.duplicates import credit, same_texts
from components.data.schemas import QRELS
from components.data.sources import Piece
from components.data.writing import Marks, find_repeats, repeated, rewrite_without_repeats, slices, write_part


def write(folder: Path, *parts: list[tuple[str, str]]) -> tuple[list[Path], list[Marks]]:
    paths, marks = [], []
    for number, rows in enumerate(parts):
        source = folder / f"{number}.jsonl"
        source.write_text("".join(json.dumps({"_id": docid, "text": text}) + "\n" for docid, text in rows))
        paths.append(folder / f"part-{number}.parquet")
        marks.append(write_part(Piece("jsonl", str(source)), paths[-1], 2))
    return paths, marks


def test_twins_are_found_across_parts_and_row_groups(tmp_path: Path) -> None:
    parts, marks = write(
        tmp_path, [("1", "a"), ("2", "b"), ("3", "c"), ("4", "")], [], [("5", "a"), ("6", ""), ("7", "c")]
    )
    joined = Marks.joined(marks)
    assert same_texts(parts, joined) == [["1", "5"], ["3", "7"]]
    assert repeated_texts(joined.texts, joined.lengths) == 4


def test_a_collision_of_hashes_makes_no_twins(tmp_path: Path) -> None:
    parts, (marks,) = write(tmp_path, [("1", "a"), ("2", "b")])
    pretended = Marks(marks.docids, np.array([7, 7], np.uint64), marks.lengths)
    assert same_texts(parts, pretended) == []


def test_twins_of_relevant_documents_are_credited_once() -> None:
    rows = [("q", "1", 2), ("q", "3", 0), ("r", "5", 1), ("r", "1", 0)]
    qrels = pa.Table.from_pylist([dict(zip(QRELS.names, row, strict=True)) for row in rows], schema=QRELS)
    counts: Counter[str] = Counter()
    found = credit(qrels, [["1", "5", "9"], ["3", "7"]], counts).to_pylist()
    added = [tuple(row.values()) for row in found[len(rows) :]]
    assert added == [("q", "5", 2), ("q", "9", 2), ("r", "9", 1)]
    assert counts["judgements_credited"] == 3
    assert credit(qrels, [], counts).equals(qrels)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), max_size=7), min_size=1, max_size=4))
def test_dropping_repeats_is_keeping_the_first_of_each(
    tmp_path_factory: pytest.TempPathFactory, ids: list[list[int]]
) -> None:
    """T-062, whatever the parts and row groups: docids, texts and marks stay together, in order."""
    folder = tmp_path_factory.mktemp("parts")
    parts, marks = write(
        folder, *[[(str(i), f"{i} in {p}, {n}") for n, i in enumerate(p_ids)] for p, p_ids in enumerate(ids)]
    )
    joined = Marks.joined(marks)
    suspects = repeated(joined.docids)
    repeats = find_repeats(parts, suspects)
    begins = np.cumsum([0, *map(len, ids)])
    left = joined.without([int(begins[int(name[5])]) + row for _, name, row in repeats])
    assert rewrite_without_repeats(parts, suspects, 2) == [docid for docid, _, _ in repeats]
    found = [row for piece in slices(parts, groups=1) for row in piece.documents()]
    first: dict[str, str] = {}
    for p, p_ids in enumerate(ids):
        for n, i in enumerate(p_ids):
            first.setdefault(str(i), f"{i} in {p}, {n}")
    assert [(row.docid, row.text) for row in found] == list(first.items())
    assert left.lengths.tolist() == [len(text) for text in first.values()]
    assert len(set(left.docids.tolist())) == len(first)
