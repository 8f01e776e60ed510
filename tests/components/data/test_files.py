"""Local files and URIs, compressed or not, whole or broken."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data import files
from components.data.files import arrow_rows, either, expand, json_rows, lines, listing, locate, parquet_rows
from components.data.rows import DataError, NotThereError, RowError, document
from components.data.sources import corpus_pieces, query_rows

RECORDS = [{"_id": "1", "text": "x"}, {"_id": "2", "text": "größe 中文 😀"}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def values(rows: Any) -> list[dict[str, Any]]:
    return [record for _, record in rows]


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_plain_and_compressed_files_read_alike(tmp_path: Path, suffix: str, compress: Any) -> None:
    path = tmp_path / f"c.jsonl{suffix}"
    path.write_bytes(compress(LINES))
    assert values(json_rows(str(path))) == RECORDS


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_no_content(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n"))
    assert values(json_rows(str(path))) == RECORDS
    assert [where for where, _ in json_rows(str(path))] == [f"{path}, line 1", f"{path}, line 3"]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    record = {"_id": "1", "text": "a\u2028b\u0085c\x0bd"}
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    assert values(json_rows(str(path))) == [record]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99])
def test_wherever_an_archive_is_cut_off_it_is_said(tmp_path: Path, share: float) -> None:
    """T-075: never a shorter corpus. (Of nothing at all, an empty file is left: that has no documents.)"""
    whole = gzip.compress(b"".join(b'{"_id": "%d", "text": "x"}\n' % i for i in range(5000)))
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(whole[: max(5, int(len(whole) * share))])
    with pytest.raises(DataError, match=r"c\.jsonl\.gz: broken or cut off after line \d+ .*Fetch it again"):
        list(json_rows(str(path)))


def test_a_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(LINES)
    with pytest.raises(DataError, match=r"c\.jsonl\.gz: broken or cut off"):
        list(lines(str(path)))


def test_wrong_encoding_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(LINES * 2000 + '{"_id": "3", "text": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"not UTF-8 after line \d+"):
        list(json_rows(str(path)))


def test_uris_of_any_file_system_are_globbed_and_read() -> None:
    filesystem = fsspec.filesystem("memory")
    try:
        for name in ("b", "a"):
            filesystem.pipe(f"/almanac-test/{name}.jsonl", LINES)
        filesystem.pipe("/almanac-test/beir/corpus.jsonl.gz", gzip.compress(LINES))
        assert expand("memory://almanac-test/*.jsonl") == [f"memory:///almanac-test/{n}.jsonl" for n in "ab"]
        pieces = corpus_pieces("jsonl:memory://almanac-test/*.jsonl")
        assert [values(piece.rows()) for piece in pieces] == [RECORDS, RECORDS]
        assert values(corpus_pieces("beir:memory://almanac-test/beir")[0].rows()) == RECORDS
        with pytest.raises(NotThereError, match="matches none"):
            expand("memory://almanac-test/*.parquet")
    finally:
        filesystem.rm("/almanac-test", recursive=True)


def test_pyarrow_opens_what_fsspec_has_no_plug_in_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    (tmp_path / "c.jsonl").write_bytes(LINES)
    monkeypatch.setattr(files.fsspec.core, "url_to_fs", missing)
    (path,) = expand(f"file://{tmp_path}/*.jsonl")
    assert values(json_rows(path)) == RECORDS
    with pytest.raises(DataError, match="nosuch://x: neither fsspec nor pyarrow opens"):
        locate("nosuch://x")


def test_relative_paths_become_absolute_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(LINES)
    monkeypatch.chdir(tmp_path)
    assert expand("*.jsonl") == expand("corpus.jsonl") == [str(tmp_path / "corpus.jsonl")]
    assert either(".", "corpus.jsonl") == str(tmp_path / "corpus.jsonl")
    assert either(".", "queries.jsonl") is None
    assert listing(".") == ["corpus.jsonl"]
    assert listing("nowhere") == []


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotThereError, match="no such file"):
        expand(str(tmp_path))
    with pytest.raises(NotThereError, match="Every node must see the same path"):
        list(json_rows(str(tmp_path / "gone.jsonl")))


def test_both_forms_of_arrow_files_read_alike(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    for name, open_writer in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, open_writer(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
        assert values(arrow_rows(str(tmp_path / name))) == RECORDS
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match="not a whole Arrow file"):
            list(arrow_rows(str(tmp_path / name)))


def test_a_saved_data_set_is_read_in_its_own_order(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    for number, name in enumerate(("z.arrow", "a.arrow")):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(number, 1))
    (tmp_path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "z.arrow"}, {"filename": "a.arrow"}]})
    )
    assert [values(piece.rows()) for piece in corpus_pieces(f"hf:{tmp_path}")] == [[RECORDS[0]], [RECORDS[1]]]


def test_a_saved_data_set_with_splits_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"holds the splits train\. Name one, such as hf:.*/train"):
        corpus_pieces(f"hf:{tmp_path}")
    with pytest.raises(NotThereError, match="no saved data set"):
        corpus_pieces(f"hf:{tmp_path}/train")
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "train" / "0.parquet")
    assert values(corpus_pieces(f"hf:{tmp_path}/train")[0].rows()) == RECORDS


def test_ids_of_any_integer_type_and_null_columns_read_alike(tmp_path: Path) -> None:
    """T-067: a column of nulls in one file, of strings in the next; numbers in one, strings in the next."""
    first = pa.table({"_id": pa.array([1, 2], pa.uint8()), "title": pa.nulls(2), "text": ["a", "b"]})
    second = pa.table({"_id": ["3"], "title": ["T"], "text": pa.array(["c"]).dictionary_encode()})
    counts: Counter[str] = Counter()
    rows = []
    for number, table in enumerate((first, second)):
        pq.write_table(table, tmp_path / f"{number}.parquet")
        rows += [document(record, where, counts) for where, record in parquet_rows(str(tmp_path / f"{number}.parquet"))]
    assert rows == [("1", "", "a"), ("2", "", "b"), ("3", "T", "T c")]
    assert counts["ids_not_strings"] == 2


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"_id": st.integers(0, 10**20) | st.text(min_size=1), "text": st.none() | st.text()},
            optional={"title": st.none() | st.text(), "metadata": st.dictionaries(st.text(), st.integers())},
        )
    )
)
def test_any_record_becomes_one_clean_row_or_a_named_error(records: list[dict[str, Any]]) -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/almanac-any.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
    for (where, found), record in zip(json_rows("memory:///almanac-any.jsonl"), records, strict=True):
        if not str(record["_id"]).strip():
            with pytest.raises(RowError, match=re.escape(where)):
                document(found, where, Counter())
            continue
        row = document(found, where, Counter())
        assert row.docid == str(record["_id"])
        assert row.text == f"{record.get('title') or ''} {record['text'] or ''}".strip()
        pa.array(row).cast(pa.large_string())


def test_half_characters_are_replaced_and_counted() -> None:
    counts: Counter[str] = Counter()
    record = json.loads(r'{"_id": "1", "text": "a\ud83d b \ud83d\ude00"}')
    assert document(record, "f, line 1", counts).text == "a\ufffd b 😀"
    assert counts["texts_not_unicode"] == 1
    with pytest.raises(RowError, match="not valid Unicode"):
        document(json.loads(r'{"_id": "\ud83d", "text": "a"}'), "f, line 1", counts)


def test_ids_with_white_space_are_counted() -> None:
    counts: Counter[str] = Counter()
    assert document({"_id": "a b", "text": "x"}, "f, line 1", counts).docid == "a b"
    assert counts["ids_with_spaces"] == 1


@pytest.mark.parametrize("name", ["q.jsonl", "q.parquet", "q.tsv", "q.txt.gz"])
def test_judgements_of_plain_files_in_any_form(tmp_path: Path, name: str) -> None:
    rows = [{"query-id": "q1", "corpus-id": "d1", "score": 2}, {"query-id": "q1", "corpus-id": "d2", "score": -1}]
    path = tmp_path / name
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".tsv"):
        path.write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t-1\n")
    else:
        path.write_bytes(gzip.compress(b"q1 0 d1 2\nq1 0 d2 -1\n"))
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "x"}\n')
    found = query_rows(f"jsonl:{tmp_path}/queries.jsonl", str(path), "test")
    assert found is not None
    assert [tuple(row.values()) for row in values(found[1])] == [("q1", "d1", 2), ("q1", "d2", -1)]


def test_a_beir_folder_without_the_split_says_which_it_has(tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_bytes(LINES)
    assert query_rows(f"beir:{tmp_path}", None, "test") is None
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "x"}\n')
    (tmp_path / "qrels" / "train.tsv.gz").write_bytes(gzip.compress(b"q1\td1\t1\n"))
    with pytest.raises(NotThereError, match=r"no judgements for split 'test' \(found: train\)"):
        query_rows(f"beir:{tmp_path}", None, "test")
    assert query_rows(f"beir:{tmp_path}", None, "train") is not None
