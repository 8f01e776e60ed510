"""Pairs: streamed, limited, never of an evaluated query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from components.data.config import PairSource
from components.data.pairs import file_pairs, is_dev, qrel_pairs, query_mark, shorten, title_body_pairs, write_pairs
from components.data.rows import Document, RowError
from components.data.schemas import PAIRS, check_schema

TITLES = PairSource(name="t", kind="title_body", dev_fraction=0.2)


def documents(count: int) -> Iterator[Document]:
    return (Document(str(i), f"Title {i}", f"Title {i} body {i}") for i in range(count))


def test_pairs_are_written_in_row_groups_with_the_fixed_schema(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    counts = write_pairs(title_body_pairs(documents(25), TITLES, 1), path, TITLES, frozenset(), 10)
    table = pq.read_table(path)
    check_schema(table.schema, PAIRS, path)
    assert pq.read_metadata(path).num_row_groups == 3
    assert table["positive_docid"].to_pylist() == [str(i) for i in range(25)]
    splits = Counter(table["split"].to_pylist())
    assert counts == {"pairs.t.train": splits["train"], "pairs.t.dev": splits["dev"]}
    assert 0 < splits["dev"] < splits["train"]


def test_a_source_is_read_no_further_than_its_limit(tmp_path: Path) -> None:
    def endless() -> Iterator[Document]:
        number = 0
        while True:
            yield Document(str(number), f"T {number}", f"T {number} x")
            number += 1

    source = TITLES.model_copy(update={"limit": 7})
    write_pairs(title_body_pairs(endless(), source, 1), tmp_path / "p.parquet", source, frozenset(), 3)
    assert pq.read_metadata(tmp_path / "p.parquet").num_rows == 7


def test_a_query_that_is_evaluated_makes_no_pair(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    counts = write_pairs(title_body_pairs(documents(3), TITLES, 1), path, TITLES, {query_mark("  title\n1 ")}, 10)
    assert pq.read_table(path)["query"].to_pylist() == ["Title 0", "Title 2"]
    assert counts["pairs.t.evaluated"] == 1


def test_no_pairs_leave_no_file(tmp_path: Path) -> None:
    assert not write_pairs(iter([]), tmp_path / "p.parquet", TITLES, frozenset(), 10)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_shortened_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    write_pairs(title_body_pairs(documents(5), TITLES, 1), path, TITLES, frozenset(), 2)
    assert sum(shorten(path, TITLES, 3).values()) == 3
    assert pq.read_table(path)["positive_docid"].to_pylist() == ["0", "1", "2"]
    assert not shorten(path, TITLES, 0)
    assert not path.exists()


def test_judged_pairs_need_a_query_and_a_document_with_text() -> None:
    source = PairSource(name="q", kind="qrels", split="train")
    made = qrel_pairs(
        {"a": "x", "b": ""}, [("a", "1"), ("a", "gone"), ("b", "1"), ("z", "1")], {"1": "text"}, source, 0
    )
    assert [(row["qid"], row["positive"]) for row in made] == [("a", "text")]


def test_held_out_queries_depend_on_seed_and_id_only() -> None:
    held = [{i for i in range(2000) if is_dev(str(i), 0.1, seed)} for seed in (1, 1, 2)]
    assert held[0] == held[1] != held[2]
    assert all(140 < len(some) < 260 for some in held)
    assert held[0] <= {i for i in range(2000) if is_dev(str(i), 0.2, 1)}


def test_pairs_from_files_keep_ids_and_name_what_is_wrong() -> None:
    source = PairSource(name="f", kind="file", source="jsonl:x")
    rows = [
        ("f, line 1", {"qid": 0, "docid": 0, "query": "a", "positive": "b"}),
        ("f, line 2", {"query": "a", "positive": "b", "negatives": ["c", "d"], "negative_docids": [1, 2]}),
    ]
    first, second = file_pairs(rows, source, 0, "f-3")
    assert (first["qid"], first["positive_docid"]) == ("0", "0")
    assert (second["qid"], second["negative_docids"]) == ("f-3-1", ["1", "2"])
    with pytest.raises(RowError, match="line 1: field 'negatives' is no list of texts"):
        list(file_pairs([("f, line 1", {"query": "a", "positive": "b", "negatives": "c"})], source, 0))
