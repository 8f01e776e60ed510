"""Collections of ir_datasets: the vendored one without network, others fetched once (cases T-059, T-074, T-075)."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from components.data.ir_collections import CRANFIELD, cranfield, document_rows, fetch_once, query_rows
from components.data.rows import DataError, document, query

SHARED = Path(os.environ.get("ALMANAC_SHARED", Path(__file__).parents[4] / "shared" / "data"))


class Doc(NamedTuple):
    """A document with a body field of an unknown name, as some TREC collections have."""

    doc_id: str
    title: str
    passage: str

    def default_text(self) -> str:
        return f"{self.title} {self.passage}"


class Topic(NamedTuple):
    """A TREC topic."""

    query_id: str
    title: str
    narrative: str

    def default_text(self) -> str:
        return self.title


class Collection:
    """A stand-in that fetches its file on first use, slowly, and notes each fetch."""

    def __init__(self, home: Path, broken: bool = False) -> None:
        self.home, self.broken = home, broken

    def docs_iter(self) -> Any:
        if self.broken:
            raise ConnectionError("no route to host")
        if not (self.home / "docs").exists():
            time.sleep(0.2)
            with (self.home / "fetched.log").open("a") as log:
                log.write(f"{os.getpid()}\n")
            (self.home / "docs").write_text("whole")
        return iter([Doc("1", "T", "body")])

    def queries_iter(self) -> Any:
        return iter([Topic("q", "what is lift", "A long story.")])

    def has_queries(self) -> bool:
        return True

    def has_qrels(self) -> bool:
        return False


def _fetch(home: str) -> None:
    fetch_once(Collection(Path(home)), "some/set", Path(home))


def test_four_processes_with_an_empty_cache_fetch_once(tmp_path: Path) -> None:
    """T-074."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_fetch, args=(str(tmp_path),)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len((tmp_path / "fetched.log").read_text().splitlines()) == 1


def test_a_fetch_that_fails_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"ir_datasets:some/set: not to be had \(ConnectionError: no route.*IR_DATASETS_HOME"
    ):
        fetch_once(Collection(tmp_path, broken=True), "some/set", tmp_path)


def test_unknown_fields_give_the_default_text(tmp_path: Path) -> None:
    """T-059."""
    collection = Collection(tmp_path)
    (doc,) = [document(record, where, Counter()) for where, record in document_rows(collection, "some/set")]
    assert doc == ("1", "", "T body")
    (topic,) = [query(record, where, Counter()) for where, record in query_rows(collection, "some/set")]
    assert topic == ("q", "what is lift")


def test_a_vendored_archive_that_is_cut_off_or_gone_is_refused(tmp_path: Path) -> None:
    """T-075."""
    half = tmp_path / "cran.tar.gz"
    half.write_bytes(CRANFIELD.read_bytes()[:100_000])
    with pytest.raises(DataError, match=r"cran\.tar\.gz: 100000 bytes with SHA-256 .* cut off or changed"):
        list(cranfield(half).docs_iter())
    half.unlink()
    with pytest.raises(DataError, match=r"is missing\. Restore it"):
        list(cranfield(half).queries_iter())


def test_no_file_of_the_users_own_home_is_read_or_written(tmp_path: Path) -> None:
    """A half archive of the user's stays as it is and is no harm; sockets are closed, so nothing is downloaded."""
    own = tmp_path / "cranfield" / "cran.tar.gz"
    own.parent.mkdir()
    own.write_bytes(b"half a file")
    code = (
        "import socket\n"
        "def closed(*a, **k): raise OSError('no network')\n"
        "socket.socket.connect = closed\n"
        "from components.data.sources import corpus_pieces\n"
        "print(sum(1 for _ in corpus_pieces('ir_datasets:cranfield')[0].rows()))"
    )
    environment = os.environ | {"IR_DATASETS_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1400", done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [own]
    assert own.read_bytes() == b"half a file"


def test_the_archive_is_the_one_ir_datasets_expects(tmp_path: Path) -> None:
    """ir_datasets.load itself reads it from a home folder of the vendored layout, and gives the same documents."""
    shutil.copytree(CRANFIELD.parent, tmp_path / "cranfield")
    code = "import ir_datasets; print([d.doc_id + d.title for d in ir_datasets.load('cranfield').docs_iter()])"
    environment = os.environ | {"IR_DATASETS_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str([doc.doc_id + doc.title for doc in cranfield().docs_iter()]), done.stderr


@pytest.mark.skipif(
    not (SHARED / "cranfield").is_dir(), reason="the shared test collections are not beside the repository"
)
def test_documents_and_queries_equal_the_beir_copy() -> None:
    with gzip.open(SHARED / "cranfield" / "corpus.jsonl.gz", "rt", encoding="utf-8") as handle:
        beir = [document(json.loads(line), "beir", Counter()) for line in handle]
    ours = [document(record, where, Counter()) for where, record in document_rows(cranfield(), "cranfield")]
    assert ours == beir
    with (SHARED / "cranfield" / "queries.jsonl").open(encoding="utf-8") as handle:
        asked = [query(json.loads(line), "beir", Counter()) for line in handle]
    assert [query(record, where, Counter()) for where, record in query_rows(cranfield(), "cranfield")] == asked
