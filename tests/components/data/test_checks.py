"""Queries, judgements and repeats: what is refused, what is counted (cases T-062, T-064, T-066, T-077)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.data import checks
from components.data.config import DataConfig, PairSource
from components.data.pairs import file_pairs, is_dev, pair_table, title_body_pairs
from components.data.rows import Document, RowError
from components.data.schemas import CORPUS, PAIRS, check_schema
from components.data.sources import Piece
from components.data.writing import Marks, find_repeats, mark, repeated, rewrite_without_repeats, write_part


def judged(*rows: tuple[str, str, int]):  # type: ignore[no-untyped-def]
    return [(f"q.tsv, line {i}", {"qid": q, "docid": d, "grade": g}) for i, (q, d, g) in enumerate(rows, 1)]


def test_grades_below_zero_are_no_gain_and_a_map_is_followed() -> None:
    """T-066."""
    counts: Counter[str] = Counter()
    table = checks.qrel_table(judged(("q", "a", -1), ("q", "b", 0), ("q", "c", 2)), None, counts)
    assert table["grade"].to_pylist() == [0, 0, 2]
    assert counts["grades_negative"] == 1
    assert checks.qrel_table(judged(("q", "a", 1)), {1: 4}, Counter())["grade"].to_pylist() == [4]
    with pytest.raises(RowError, match=r"line 1: grade 5 is not in data\.grades"):
        checks.qrel_table(judged(("q", "a", 5)), {1: 4}, Counter())
    with pytest.raises(RowError, match="judged twice"):
        checks.qrel_table(judged(("q", "a", 1), ("q", "a", 2)), None, Counter())


def test_a_query_id_twice_is_refused() -> None:
    rows = [("f, line 1", {"_id": "q", "text": "a"}), ("f, line 2", {"_id": "q", "text": "b"})]
    with pytest.raises(RowError, match="line 2: query id 'q' occurs twice"):
        checks.query_table(rows, Counter())


def test_judgements_that_point_nowhere_are_kept_and_counted() -> None:
    """T-064."""
    counts: Counter[str] = Counter()
    queries = checks.query_table([("f", {"_id": "q", "text": "a"}), ("f", {"_id": "r", "text": "b"})], Counter())
    qrels = checks.qrel_table(judged(("q", "a", 1), ("q", "gone", 1), ("zz", "a", 1)), None, Counter())
    checks.cross_check(queries, qrels, np.array([mark("a")], np.uint64), counts)
    assert counts == {
        "queries_judged": 1,
        "queries_unjudged": 1,
        "judgements_without_query": 1,
        "judgements_without_document": 1,
    }
    assert qrels.num_rows == 3


def test_collections_that_do_not_belong_together_are_refused() -> None:
    queries = checks.query_table([("f", {"_id": "q", "text": "a"})], Counter())
    with pytest.raises(ValueError, match="different collections"):
        checks.cross_check(
            queries,
            checks.qrel_table(judged(("x", "a", 1)), None, Counter()),
            np.array([mark("a")], np.uint64),
            Counter(),
        )
    with pytest.raises(ValueError, match="no judged document"):
        checks.cross_check(
            queries,
            checks.qrel_table(judged(("q", "b", 1)), None, Counter()),
            np.array([mark("a")], np.uint64),
            Counter(),
        )


@pytest.fixture
def parts(tmp_path: Path) -> tuple[list[Path], np.ndarray]:
    lines = [
        ['{"_id":"1","text":"a"}', '{"_id":"2","text":"b"}'],
        ['{"_id":1,"text":"other"}', '{"_id":"3","text":"a"}'],
    ]
    paths, marks = [], []
    for number, rows in enumerate(lines):
        source = tmp_path / f"{number}.jsonl"
        source.write_text("\n".join(rows))
        paths.append(tmp_path / f"part-{number}.parquet")
        marks.append(write_part(Piece("jsonl", str(source)), paths[-1], 1))
    return paths, np.concatenate([m.docids for m in marks])


def test_an_id_that_occurs_twice_is_found_with_file_and_row(parts: tuple[list[Path], np.ndarray]) -> None:
    """T-062, T-067: "1" and 1 are the same id."""
    paths, marks = parts
    assert find_repeats(paths, repeated(marks)) == [("1", "part-1.parquet", 0)]


def test_only_the_first_is_kept_when_asked(parts: tuple[list[Path], np.ndarray]) -> None:
    paths, marks = parts
    assert rewrite_without_repeats(paths, repeated(marks), 1) == ["1"]
    tables = [pq.read_table(path) for path in paths]
    assert pa.concat_tables(tables)["text"].to_pylist() == ["a", "b", "a"]
    check_schema(tables[1].schema, CORPUS, paths[1])


def test_a_hash_collision_loses_nothing(parts: tuple[list[Path], np.ndarray]) -> None:
    paths, _ = parts
    pretended = np.array([mark("2"), mark("3")], np.uint64)
    assert find_repeats(paths, pretended) == []
    assert rewrite_without_repeats(paths, pretended, 1) == []


def test_equal_passages_under_two_ids_are_counted() -> None:
    """T-077."""
    texts = np.array([mark("a"), mark("b"), mark("a"), mark(""), mark("")], np.uint64)
    assert checks.repeated_texts(texts, np.array([1, 1, 1, 0, 0])) == 2


def test_marks_travel_as_bytes(parts: tuple[list[Path], np.ndarray], tmp_path: Path) -> None:
    marks = write_part(Piece("jsonl", str(tmp_path / "0.jsonl")), tmp_path / "x.parquet", 10)
    again = Marks.unpacked(marks.packed())
    assert again.counts == marks.counts
    np.testing.assert_array_equal(again.lengths, marks.lengths)


def test_a_schema_that_is_not_ours_is_named() -> None:
    with pytest.raises(ValueError, match=r"f\.parquet: field 'title' is missing"):
        check_schema(pa.schema([("docid", pa.string())]), CORPUS, "f.parquet")
    with pytest.raises(ValueError, match="is int64, wanted string"):
        check_schema(pa.schema([("docid", pa.int64())]), CORPUS, "f.parquet")


def test_title_pairs_and_held_out_queries() -> None:
    source = PairSource(name="t", kind="title_body", dev_fraction=0.3)
    documents = [Document(str(i), f"title {i}", f"title {i} body {i}") for i in range(300)] + [
        Document("x", "", "y"),
        Document("y", "z", "z"),
    ]
    table = pair_table(title_body_pairs(documents, source, seed=1), Counter())
    assert table.schema == PAIRS
    assert table.num_rows == 300
    assert table["positive"][7].as_py() == "body 7"
    share = table["split"].to_pylist().count("dev") / 300
    assert 0.2 < share < 0.4
    assert is_dev("q", 0.3, 1) == is_dev("q", 0.3, 1)
    assert not is_dev("q", 0.0, 1)


def test_pairs_from_files_are_checked() -> None:
    source = PairSource(name="t", kind="file", source="jsonl:x")
    good = [("f, line 1", {"query": "a", "positive": "b", "negatives": ["c"]})]
    assert pair_table(file_pairs(good, source, 0), Counter())["negatives"].to_pylist() == [["c"]]
    with pytest.raises(RowError, match="line 1: field 'query'"):
        list(file_pairs([("f, line 1", {"query": " ", "positive": "b"})], source, 0))
    uneven = {"query": "a", "positive": "b", "negatives": ["c"], "negative_docids": ["1", "2"]}
    with pytest.raises(RowError, match="they go together"):
        list(file_pairs([("f", uneven)], source, 0))


def test_a_bare_corpus_is_legal_and_half_of_a_collection_is_not() -> None:
    DataConfig(corpus="jsonl:x")
    with pytest.raises(ValueError, match="together"):
        DataConfig(corpus="jsonl:x", queries="jsonl:y")
