"""Collections of `ir_datasets`: the one this repository carries, without any download; others are fetched once."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from components.data.files import Row
from components.data.rows import BODIES, QUERY_TEXTS, DataError

VENDORED = Path(__file__).resolve().parents[2] / "workflows" / "data" / "ir_datasets"
"""Archives kept in the repository, by the folder and name under which ir_datasets expects them."""
CRANFIELD = VENDORED / "cranfield" / "cran.tar.gz"
CRANFIELD_SHA256 = "8c48a8412e4a7e6e0dd5af99c959f8d75fdf88135602adc1a56aa22770652d64"


@dataclass(frozen=True)
class Member:
    """A file of a checked archive as ir_datasets' readers take it: read in memory, nothing is written anywhere."""

    archive: Path
    sha256: str
    name: str

    @contextmanager
    def stream(self) -> Iterator[io.BytesIO]:
        """The file's bytes. DataError: the archive is not the one it should be (case T-075)."""
        if not self.archive.is_file():
            raise DataError(
                f"{self.archive}: the archive that ships with this project is missing. Restore it with git."
            )
        content = self.archive.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise DataError(
                f"{self.archive}: {len(content)} bytes with SHA-256 {found[:12]}…, wanted {self.sha256[:12]}…: cut off "
                f"or changed. Restore it with git."
            )
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            member = archive.extractfile(self.name)
            assert member is not None
            yield io.BytesIO(member.read())


def cranfield(archive: Path = CRANFIELD) -> Any:
    """ir_datasets' Cranfield, read by its own classes from the archive in this repository: no home, no network."""
    from ir_datasets.datasets import cranfield as reader
    from ir_datasets.datasets.base import Dataset

    class Docs(reader.CranfieldDocs):
        def docs_iter(self) -> Iterator[Any]:
            """From the archive, whatever document store an ir_datasets home holds (it may be half built)."""
            return reader.CranfieldDocs.docs_iter.__wrapped__(self)

    docs, queries, qrels = (Member(archive, CRANFIELD_SHA256, n) for n in ("cran.all.1400", "cran.qry", "cranqrel"))
    return Dataset(Docs(docs), reader.CranfieldQueries(queries), reader.CranfieldQrels(qrels))


_CARRIED: dict[str, Callable[[], Any]] = {"cranfield": cranfield}
_HARD_WRAPPED = frozenset({"cranfield"})
"""Collections whose files break lines at a fixed column: a line break there is a space, not a part of the text."""


def load_ir_dataset(name: str) -> Any:
    """The collection `name`, carried here or fetched by ir_datasets to its home. DataError: unknown, not to be had."""
    import ir_datasets

    if name in _CARRIED:
        return _CARRIED[name]()
    try:
        collection = ir_datasets.load(name)
    except KeyError:
        raise DataError(f"ir_datasets:{name}: ir_datasets {ir_datasets.__version__} knows no such collection") from None
    if not collection.has_docs():
        raise DataError(f"ir_datasets:{name} has no documents; name one of its subsets")
    fetch_once(collection, name, Path(ir_datasets.util.home_path()))
    return collection


def fetch_once(collection: Any, name: str, home: Path) -> None:
    """Have what the collection needs fetched by one process a machine, the others waiting for it (case T-074).

    ir_datasets writes to a temporary name, checks the MD5 and renames, so a failed fetch leaves nothing (case T-075).
    """
    with FileLock(home / f"{name.replace('/', '_')}.almanac.lock"):
        try:
            next(iter(collection.docs_iter()), None)
            if has_judgements(collection):
                next(iter(collection.queries_iter()), None)
                next(iter(collection.qrels_iter()), None)
        except Exception as error:
            raise DataError(
                f"ir_datasets:{name}: not to be had ({type(error).__name__}: {str(error)[:200]}). Put its files below "
                f"{home} (see IR_DATASETS_HOME), or give the collection as beir:, jsonl: or parquet: files."
            ) from error


def has_judgements(collection: Any) -> bool:
    """Whether it has queries with judgements."""
    return collection.has_queries() and collection.has_qrels()


def document_rows(collection: Any, name: str) -> Iterator[Row]:
    """Its documents, streamed; one without a body field gives its default text."""
    return _rows(collection.docs_iter(), BODIES, f"ir_datasets:{name} document", name in _HARD_WRAPPED)


def query_rows(collection: Any, name: str) -> Iterator[Row]:
    """Its queries, streamed; one without a text field (TREC topics) gives its default text."""
    return _rows(collection.queries_iter(), QUERY_TEXTS, f"ir_datasets:{name} query", name in _HARD_WRAPPED)


def judgement_rows(collection: Any, name: str) -> Iterator[Row]:
    """Its judgements with the fields qid, docid, grade."""
    for number, row in enumerate(collection.qrels_iter(), 1):
        fields = {"qid": row.query_id, "docid": row.doc_id, "grade": row.relevance}
        yield f"ir_datasets:{name} judgement {number}", fields


def _rows(items: Iterator[Any], texts: tuple[str, ...], where: str, wrapped: bool) -> Iterator[Row]:
    for number, item in enumerate(items, 1):
        record = item._asdict()
        if not any(name in record for name in texts):
            record = {name: value for name, value in record.items() if name != "title"} | {"text": item.default_text()}
        if wrapped:
            record = {name: " ".join(value.split()) for name, value in record.items()}
        yield f"{where} {number}", record
