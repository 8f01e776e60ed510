"""The ingest stage on Ray: fixed schemas, source order, the same bytes twice, refusals that name what to mend."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from components.config import load_config
from components.data.schemas import CORPUS, PAIRS, QRELS, QUERIES, check_schema
from components.storage import read_json
from workflows.ingest import run, source_state
from workflows.stage import StageContext, StageError
from workflows.tracking import Tracker

SHARED = Path(os.environ.get("ALMANAC_SHARED", Path(__file__).parents[3] / "shared" / "data"))
Ingest = Callable[..., tuple[dict[str, Any], Path]]
pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def ingest(tmp_path: Path) -> Ingest:
    """Runs the stage on a `data` section into a new folder; gives back its counts and the folder."""

    def start(data: dict[str, Any], folder: str = "out") -> tuple[dict[str, Any], Path]:
        config = load_config(None, [f"data={json.dumps(data)}", f"runs={tmp_path}", "tracking.enabled=false"])
        target = tmp_path / folder
        target.mkdir(exist_ok=True)
        with Tracker.open(config, tmp_path) as tracker:
            return run(StageContext(config, target, {}, "x", tracker)), target

    return start


def lines(path: Path, records: list[Any]) -> Path:
    content = "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """12 documents (one empty, two alike), 4 queries, test and train judgements, one of them pointing nowhere."""
    folder = tmp_path / "beir"
    records: list[dict[str, Any]] = [{"_id": f"d{i}", "title": f"Title {i}", "text": f"body {i}"} for i in range(9)]
    records += [{"_id": 9, "text": ""}, {"_id": "d10", "title": None, "text": "alike"}, {"_id": "d11", "text": "alike"}]
    lines(folder / "corpus.jsonl.gz", records)
    lines(
        folder / "queries.jsonl",
        [{"_id": f"q{i}", "text": text} for i, text in enumerate(["one", "two", "????", "One"])],
    )
    test = ["query-id\tcorpus-id\tscore", "q0\td1\t2", "q0\tgone\t1", "q1\td2\t-1", "q1\td10\t1"]
    lines(folder / "qrels" / "test.tsv", test)
    lines(folder / "qrels" / "train.tsv", ["query-id\tcorpus-id\tscore", "q2\td3\t1", "q3\td4\t1", "q2\td5\t0"])
    return folder


def texts(folder: Path) -> dict[str, str]:
    table = pq.read_table(folder / "corpus")
    return dict(zip(table["docid"].to_pylist(), table["text"].to_pylist(), strict=True))


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_whole_collection(ingest: Ingest, beir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T-058, T-061, T-064, T-066, T-067, T-072, T-077 in one run; train pairs leave the evaluated queries out."""
    pairs = [{"name": "train", "kind": "qrels", "split": "train"}, {"name": "titles", "kind": "title_body"}]
    with caplog.at_level("INFO", "almanac"):
        result, folder = ingest({"source": f"beir:{beir}", "pairs": pairs})
    expected = [("corpus", CORPUS), ("queries.parquet", QUERIES), ("qrels.parquet", QRELS), ("pairs", PAIRS)]
    for name, schema in expected:
        check_schema(pq.read_table(folder / name).schema, schema, name)
    found = texts(folder)
    assert list(found) == [*(f"d{i}" for i in range(9)), "9", "d10", "d11"]
    assert (found["d3"], found["9"], found["d10"]) == ("Title 3 body 3", "", "alike")
    assert [row["grade"] for row in pq.read_table(folder / "qrels.parquet").to_pylist()] == [2, 1, 0, 1]
    counts = result["counts"]
    wanted = {
        "documents": 12, "documents_empty": 1, "documents_repeated_text": 2, "ids_not_strings": 1, "queries": 4,
        "queries_odd": 1, "queries_unjudged": 2, "judgements": 4, "judgements_without_document": 1,
        "grades_negative": 1, "pairs.train.train": 1, "pairs.train.evaluated": 1, "documents_double_encoded": 0,
    }  # fmt: skip
    assert {name: counts[name] for name in wanted} == wanted
    assert counts["pairs.titles.train"] + counts["pairs.titles.dev"] == 9
    assert read_json(folder / "checks.json")["counts"] == counts
    made = pq.read_table(folder / "pairs").to_pylist()
    assert [(row["query"], row["positive"]) for row in made if row["dataset"] == "train"] == [
        ("????", "Title 3 body 3")
    ]
    assert {row["positive"] for row in made if row["dataset"] == "titles"} == {f"body {i}" for i in range(9)}
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any("1 judgements of documents not in the corpus" in message for message in warned)


def test_the_same_input_gives_the_same_bytes_whatever_was_there(ingest: Ingest, tmp_path: Path) -> None:
    """Eight files read side by side, in glob order; what a killed run left behind is cleared (T-078, T-079)."""
    for number in range(8):
        records = [
            {"_id": f"{number}-{i}", "title": f"t{i}", "text": "x" * (number * 50 + i)} for i in range(30 - number)
        ]
        lines(tmp_path / "docs" / f"{number}.jsonl", records)
    data = {
        "corpus": f"jsonl:{tmp_path}/docs/*.jsonl",
        "rows_per_group": 7,
        "pairs": [{"name": "t", "kind": "title_body"}],
    }
    _, first = ingest(data)
    left = tmp_path / "again" / "corpus" / "part-00099.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    _, second = ingest(data, "again")
    assert digests(first) == digests(second)
    assert list(texts(first)) == [f"{number}-{i}" for number in range(8) for i in range(30 - number)]
    limited = data | {"pairs": [{"name": "t", "kind": "title_body", "limit": 40}]}
    _, third = ingest(limited, "limited")
    whole, some = (pq.read_table(folder / "pairs")["qid"].to_pylist() for folder in (first, third))
    assert some == whole[:40]


def test_a_bare_corpus_of_several_sources_is_enough(ingest: Ingest, tmp_path: Path) -> None:
    one, two = (
        lines(tmp_path / "a.jsonl", [{"_id": "1", "text": "x"}]),
        lines(tmp_path / "b.jsonl.gz", [{"id": 2, "text": "中文"}]),
    )
    result, folder = ingest({"corpus": [str(one), f"jsonl:{two}"]})
    assert result["documents"] == 2
    assert texts(folder) == {"1": "x", "2": "中文"}
    assert sorted(path.name for path in folder.iterdir()) == ["checks.json", "corpus", "pairs"]
    assert pq.read_table(folder / "pairs").num_rows == 0


def test_plain_files_with_queries_and_judgements(ingest: Ingest, beir: Path) -> None:
    data = {
        "corpus": f"jsonl:{beir}/corpus.jsonl.gz", "queries": f"jsonl:{beir}/queries.jsonl",
        "qrels": f"{beir}/qrels/test.tsv", "credit_duplicates": True,
        "pairs": [{"name": "train", "kind": "qrels", "qrels": f"{beir}/qrels/train.tsv"}],
    }  # fmt: skip
    result, folder = ingest(data)
    assert result["counts"]["judgements_credited"] == 1
    assert ("q1", "d11", 1) in [tuple(row.values()) for row in pq.read_table(folder / "qrels.parquet").to_pylist()]
    assert pq.read_table(folder / "pairs")["positive_docid"].to_pylist() == ["d3"]


def test_pairs_of_other_collections_and_files(ingest: Ingest, beir: Path, tmp_path: Path) -> None:
    bare = lines(tmp_path / "docs.jsonl", [{"_id": "x", "text": "y"}])
    lines(tmp_path / "pairs.jsonl", [{"query": "a", "positive": "b", "negatives": ["c"]}])
    pairs = [
        {
            "name": "other",
            "kind": "qrels",
            "source": f"beir:{beir}",
            "split": "test",
            "grades": {"2": 1, "1": 0, "-1": 0},
        },
        {"name": "own", "kind": "file", "source": f"jsonl:{tmp_path}/pairs.jsonl"},
    ]
    _, folder = ingest({"corpus": str(bare), "pairs": pairs})
    made = {row["dataset"]: row for row in pq.read_table(folder / "pairs").to_pylist()}
    assert (made["other"]["query"], made["other"]["positive"]) == ("one", "Title 1 body 1")
    assert made["own"]["negatives"] == ["c"]


def test_an_id_that_occurs_twice_stops_the_run_or_keeps_the_first(ingest: Ingest, tmp_path: Path) -> None:
    """T-062, T-086."""
    lines(tmp_path / "docs" / "a.jsonl", [{"_id": "1", "text": "first"}, {"_id": "2", "text": "x"}])
    lines(
        tmp_path / "docs" / "b.jsonl",
        [{"_id": "3", "text": "y"}, {"_id": 1, "text": "second"}, {"_id": "4", "text": "z"}],
    )
    data = {"corpus": f"jsonl:{tmp_path}/docs/*.jsonl"}
    with pytest.raises(
        StageError, match=r"1 documents have an id.*'1' again in .*b\.jsonl, document 2.*duplicates=first"
    ):
        ingest(data)
    result, folder = ingest(data | {"duplicates": "first"})
    assert texts(folder) == {"1": "first", "2": "x", "3": "y", "4": "z"}
    assert (result["documents"], result["counts"]["documents_dropped"]) == (4, 1)


def test_doubly_encoded_text_is_left_as_it_is_and_counted(ingest: Ingest, tmp_path: Path) -> None:
    """T-071."""
    records = [{"_id": "1", "text": "continuousÂ\u00a0iv"}, {"_id": "2", "text": "une Âme à Ângers"}]
    result, folder = ingest({"corpus": str(lines(tmp_path / "docs.jsonl", records))})
    assert list(texts(folder).values()) == [record["text"] for record in records]
    assert result["counts"]["documents_double_encoded"] == 1


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"_id": "1", "text": "x"}, '{"_id": '], r"docs\.jsonl, line 2: not valid JSON"),
        ([{"_id": "1", "text": "x"}, {"text": "y"}], r"docs\.jsonl, line 2: no id; one of the fields docid, _id"),
        ([{"_id": "1", "txt": "x"}], r"docs\.jsonl, line 1: document '1' has no text.*found _id, txt"),
        ([{"_id": "1", "text": ["x"]}], r"docs\.jsonl, line 1: field 'text' is list"),
        ([], "there is not one document"),
    ],
)
def test_a_bad_row_in_a_worker_is_one_plain_message(
    ingest: Ingest, tmp_path: Path, records: list[Any], message: str
) -> None:
    with pytest.raises(StageError, match=message) as error:
        ingest({"corpus": str(lines(tmp_path / "docs.jsonl", records))})
    assert "Traceback" not in str(error.value)


def test_what_is_not_there_is_one_plain_message(ingest: Ingest, beir: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="matches none"):
        ingest({"corpus": f"jsonl:{tmp_path}/none/*.jsonl"})
    with pytest.raises(StageError, match=r"no judgements for split 'tset' \(found: test, train\)"):
        ingest({"source": f"beir:{beir}", "split": "tset"})
    with pytest.raises(StageError, match=r"pairs 'd': .*no judgements for split 'dev'"):
        ingest({"source": f"beir:{beir}", "pairs": [{"name": "d", "kind": "qrels", "split": "dev"}]})
    untitled = str(lines(tmp_path / "u.jsonl", [{"_id": "1", "text": "x"}]))
    with pytest.raises(StageError, match="pairs 't': its source gives no pair"):
        ingest({"corpus": untitled, "pairs": [{"name": "t", "kind": "title_body"}]})


def test_a_changed_source_file_changes_the_state(beir: Path) -> None:
    config = load_config(None, [f"data={json.dumps({'source': f'beir:{beir}'})}"])
    before = source_state(config)
    assert len(before[f"beir:{beir}"]) == 4
    (beir / "queries.jsonl").write_text('{"_id": "q0", "text": "else"}\n')
    assert source_state(config) != before
    assert source_state(load_config(None, ["data.source=ir_datasets:cranfield"])) == {}


def test_the_demo_collection(ingest: Ingest) -> None:
    """Cranfield with the archive's readme as the grade map: sizes, empty documents, gains."""
    grades = {"1": 4, "2": 3, "3": 2, "4": 1, "-1": 0}
    result, folder = ingest(
        {"source": "ir_datasets:cranfield", "grades": grades, "pairs": [{"name": "t", "kind": "title_body"}]}
    )
    found = texts(folder)
    assert len(found) == 1400
    assert [docid for docid, text in found.items() if not text] == ["471", "995"]
    assert not any("\n" in text for text in found.values())
    assert set(pq.read_table(folder / "qrels.parquet")["grade"].to_pylist()) == {0, 1, 2, 3, 4}
    counts = result["counts"]
    assert (counts["queries"], counts["judgements"], counts["documents_empty"]) == (225, 1837, 2)
    assert counts["judgements_without_document"] == counts["judgements_without_query"] == 0


@pytest.mark.skipif(
    not (SHARED / "cranfield").is_dir(), reason="the shared test collections are not beside the repository"
)
def test_the_demo_collection_equals_its_beir_copy(ingest: Ingest) -> None:
    grades = {"1": 4, "2": 3, "3": 2, "4": 1, "-1": 0}
    _, ours = ingest({"source": "ir_datasets:cranfield", "grades": grades})
    _, beir = ingest({"source": f"beir:{SHARED}/cranfield"}, "beir")
    assert texts(ours) == texts(beir)
    assert pq.read_table(ours / "queries.parquet").equals(pq.read_table(beir / "queries.parquet"))
    found, wanted = (sorted(pq.read_table(folder / "qrels.parquet").to_pylist(), key=str) for folder in (ours, beir))
    assert found == wanted


@pytest.mark.skipif(
    not (SHARED / "zh_drcd").is_dir(), reason="the shared test collections are not beside the repository"
)
def test_a_chinese_collection(ingest: Ingest) -> None:
    result, folder = ingest(
        {"source": f"beir:{SHARED}/zh_drcd", "pairs": [{"name": "dev", "kind": "qrels", "split": "dev"}]}
    )
    counts = result["counts"]
    assert (counts["documents"], counts["queries_judged"], counts["judgements_without_document"]) == (2000, 3492, 0)
    assert counts["documents_double_encoded"] == counts["queries_odd"] == 0
    assert texts(folder)["test-0"].startswith("梵文 要探討")
    assert counts["pairs.dev.train"] > 3000
