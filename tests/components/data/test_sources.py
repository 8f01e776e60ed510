"""Files in every supported form, whole or broken."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.data.rows import RowError
from components.data.sources import Piece, corpus_pieces, json_rows, load_ir_dataset, qrel_rows, query_rows

SHARED = Path(os.environ.get("ALMANAC_SHARED", Path(__file__).parents[4] / "shared" / "data"))


def rows(source: str) -> list[dict]:  # type: ignore[type-arg]
    return [record for piece in corpus_pieces(source) for _, record in piece.rows()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(records=st.lists(st.fixed_dictionaries({"_id": st.text(min_size=1), "text": st.text()}), max_size=20))
def test_json_lines_come_back_as_they_were_written(tmp_path: Path, records: list[dict]) -> None:  # type: ignore[type-arg]
    path = tmp_path / "x.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as handle:
        handle.writelines(json.dumps(record) + "\n" for record in records)
    assert [record for _, record in json_rows(str(path))] == records


def test_globs_parquet_and_hugging_face_folders(tmp_path: Path) -> None:
    table = pa.table({"docid": ["a", "b"], "text": ["x", "y"]})
    pq.write_table(table, tmp_path / "1.parquet")
    pq.write_table(table.slice(1), tmp_path / "2.parquet")
    assert [row["docid"] for row in rows(f"parquet:{tmp_path}/*.parquet")] == ["a", "b", "b"]
    with pa.OSFile(str(tmp_path / "data-00000.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert [row["docid"] for row in rows(f"hf:{tmp_path}")] == ["a", "b"]
    assert [row["docid"] for row in rows(f"parquet:file://{tmp_path}/1.parquet")] == ["a", "b"]


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="matches none"):
        corpus_pieces(f"jsonl:{tmp_path}/*.jsonl")
    with pytest.raises(FileNotFoundError, match="no BEIR folder"):
        corpus_pieces(f"beir:{tmp_path}")
    with pytest.raises(ValueError, match="wanted <kind>:<place>"):
        corpus_pieces("csv:x")
    with pytest.raises(ValueError, match="knows no such collection"):
        corpus_pieces("ir_datasets:no-such-set")[0].rows()


def test_broken_lines_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"_id": "1", "text": "x"}\n{"_id": \n')
    with pytest.raises(RowError, match=r"c\.jsonl, line 2: not valid JSON"):
        list(json_rows(str(path)))
    path.write_text("[1]\n")
    with pytest.raises(RowError, match="an object is wanted, found list"):
        list(json_rows(str(path)))
    path.write_bytes(b'{"_id": "1", "text": "\xff"}\n')
    with pytest.raises(ValueError, match="not UTF-8"):
        list(json_rows(str(path)))


def test_a_cut_off_archive_is_named(tmp_path: Path) -> None:
    """T-075."""
    whole = gzip.compress(b'{"_id": "1", "text": "x"}\n' * 1000)
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz: broken or cut off"):
        list(json_rows(str(path)))
    (tmp_path / "p.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match="not a whole Parquet file"):
        list(Piece("parquet", str(tmp_path / "p.parquet")).rows())


def test_judgements_in_both_forms(tmp_path: Path) -> None:
    beir, trec = tmp_path / "beir.tsv", tmp_path / "trec.txt"
    beir.write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\n")
    trec.write_text("q1 0 d1 2\nq2 0 d2 -1\n")
    assert [row for _, row in qrel_rows(str(beir))] == [{"qid": "q1", "docid": "d1", "grade": 2}]
    assert [row["grade"] for _, row in qrel_rows(str(trec))] == [2, -1]
    trec.write_text("q1 0 d1 high\n")
    with pytest.raises(RowError, match=r"trec\.txt, line 1: the grade 'high'"):
        list(qrel_rows(str(trec)))
    trec.write_text("q1 d1\n")
    with pytest.raises(RowError, match="found 2"):
        list(qrel_rows(str(trec)))


def test_cranfield_comes_without_network_from_the_archive_in_the_repository() -> None:
    """The vendored archive passes ir_datasets' own checksum; grades are the raw codes."""
    documents = list(load_ir_dataset("cranfield").docs_iter())
    assert len(documents) == 1400
    assert [doc.doc_id for doc in documents if not doc.text.strip()] == ["471", "995"]
    found = query_rows("ir_datasets:cranfield", None, "test")
    assert found is not None
    assert len(list(found[0])) == 225
    grades = [row["grade"] for _, row in found[1]]
    assert len(grades) == 1837
    assert set(grades) == {-1, 1, 2, 3, 4}


def test_four_processes_fill_an_empty_cache_together(tmp_path: Path) -> None:
    """T-074: one copy, made under a lock, whole for everyone."""
    code = (
        "from components.data.sources import load_ir_dataset as l; print(sum(1 for _ in l('cranfield').queries_iter()))"
    )
    environment = os.environ | {"IR_DATASETS_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == ["225"] * 4


@pytest.mark.skipif(
    not (SHARED / "cranfield").is_dir(), reason="the shared test collections are not beside the repository"
)
def test_cranfield_equals_the_beir_copy_after_the_grade_map() -> None:
    beir = query_rows(f"beir:{SHARED / 'cranfield'}", None, "test")
    ours = query_rows("ir_datasets:cranfield", None, "test")
    assert beir is not None
    assert ours is not None
    grades = {1: 4, 2: 3, 3: 2, 4: 1, -1: 0}
    wanted = {(r["qid"], r["docid"]): max(0, r["grade"]) for _, r in beir[1]}
    found = {(r["qid"], r["docid"]): grades[r["grade"]] for _, r in ours[1]}
    assert found == wanted


@pytest.mark.skipif(
    not (SHARED / "zh_drcd").is_dir(), reason="the shared test collections are not beside the repository"
)
def test_a_chinese_collection_reads() -> None:
    assert len(rows(f"beir:{SHARED / 'zh_drcd'}")) == 2000
