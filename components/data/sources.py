"""Where collections come from: each source is streamed, row by row, with a name for every row.

`ir_datasets:<id>`, `beir:<folder>`, `jsonl:<glob>`, `parquet:<glob>`, `hf:<folder>`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from components.data.rows import RowError
from components.storage import atomic_file

Row = tuple[str, dict[str, Any]]
"""(where it stands, its fields)"""

VENDORED = Path(__file__).resolve().parents[2] / "workflows" / "data" / "ir_datasets"
"""Archives kept in the repository, by the folder and name under which ir_datasets expects them."""
KINDS = ("ir_datasets", "beir", "jsonl", "parquet", "hf")


@dataclass(frozen=True)
class Piece:
    """A part of a source that one task reads: a file, or a whole ir_datasets collection."""

    kind: str
    place: str

    def rows(self) -> Iterator[Row]:
        """Its rows, streamed."""
        if self.kind == "ir_datasets":
            return _ir_rows(load_ir_dataset(self.place).docs_iter(), f"ir_datasets:{self.place} documents")
        return {"jsonl": json_rows, "parquet": parquet_rows, "hf": arrow_rows}[self.kind](self.place)


def split_source(source: str) -> tuple[str, str]:
    """(kind, place) of a source text; refuses an unknown kind."""
    kind, _, place = source.partition(":")
    if kind not in KINDS or not place:
        raise ValueError(f"source {source!r}: wanted <kind>:<place> with kind one of {', '.join(KINDS)}")
    return kind, place


def corpus_pieces(source: str) -> list[Piece]:
    """The parts of a source's corpus, in order. FileNotFoundError: nothing there, or a glob that matches nothing."""
    kind, place = split_source(source)
    if kind == "ir_datasets":
        return [Piece(kind, place)]
    if kind == "beir":
        return [Piece("jsonl", beir_file(place, "corpus.jsonl"))]
    pattern = f"{place.rstrip('/')}/*.arrow" if kind == "hf" else place
    return [Piece(kind, path) for path in expand(pattern)]


def query_rows(source: str, qrels: str | None, split: str) -> tuple[Iterator[Row], Iterator[Row]] | None:
    """(rows of queries, rows of judgements with the fields qid, docid, grade) of a source; None for a bare corpus."""
    kind, place = split_source(source)
    if kind == "ir_datasets":
        dataset = load_ir_dataset(place)
        if not (dataset.has_queries() and dataset.has_qrels()):
            return None
        where = f"ir_datasets:{place}"
        judged = (
            (f"{where} judgement {i}", {"qid": row.query_id, "docid": row.doc_id, "grade": row.relevance})
            for i, row in enumerate(dataset.qrels_iter())
        )
        return _ir_rows(dataset.queries_iter(), f"{where} queries"), judged
    if kind == "beir":
        judgements = beir_file(place, f"qrels/{split}.tsv", required=False)
        if not judgements:
            return None
        return json_rows(beir_file(place, "queries.jsonl")), qrel_rows(judgements)
    if qrels is None:
        return None
    pieces = [row for piece in corpus_pieces(source) for row in piece.rows()]
    return iter(pieces), (row for path in expand(split_source(qrels)[1] if ":" in qrels else qrels) for row in qrel_rows(path))


def expand(pattern: str) -> list[str]:
    """Files that match a glob, sorted; a plain path stands for itself."""
    filesystem, path = fsspec.core.url_to_fs(os.path.expanduser(pattern))
    found = sorted(filesystem.glob(path)) if any(mark in path for mark in "*?[") else [path] if filesystem.exists(path) else []
    if not found:
        raise FileNotFoundError(f"{pattern}: no such file, or the pattern matches none")
    return [name if filesystem.protocol[0] == "file" else f"{filesystem.protocol[0]}://{name}" for name in found]


def beir_file(folder: str, name: str, required: bool = True) -> str:
    """The path of a file of a BEIR folder, plain or gzipped; "" where it is not required and not there."""
    for candidate in (f"{folder.rstrip('/')}/{name}", f"{folder.rstrip('/')}/{name}.gz"):
        filesystem, path = fsspec.core.url_to_fs(os.path.expanduser(candidate))
        if filesystem.exists(path):
            return candidate
    if required:
        raise FileNotFoundError(f"{folder}: no {name} or {name}.gz, so this is no BEIR folder")
    return ""


@contextmanager
def open_text(path: str) -> Iterator[TextIO]:
    """A text file, local or remote, gzipped or not; a truncated or broken archive names the file (case T-075)."""
    try:
        with fsspec.open(os.path.expanduser(path), "rt", encoding="utf-8", compression="infer") as handle:
            yield handle
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: broken or cut off ({error}). Fetch it again.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}. Convert it, for example with iconv.") from error


def json_rows(path: str) -> Iterator[Row]:
    """Objects of a JSON-lines file; the error of a broken line names file and line."""
    with open_text(path) as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise RowError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from error
            if not isinstance(record, dict):
                raise RowError(f"{where}: an object is wanted, found {type(record).__name__}")
            yield where, record


def parquet_rows(path: str) -> Iterator[Row]:
    """Rows of a Parquet file, a batch at a time."""
    with fsspec.open(os.path.expanduser(path), "rb") as handle:
        try:
            reader = pq.ParquetFile(handle)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path}: not a whole Parquet file ({error})") from error
        yield from _batches(reader.iter_batches(batch_size=1000), path)


def arrow_rows(path: str) -> Iterator[Row]:
    """Rows of an Arrow file that Hugging Face `datasets` saved to disk."""
    with fsspec.open(os.path.expanduser(path), "rb") as handle:
        yield from _batches(iter(pa.ipc.open_stream(io.BufferedReader(handle))), path)


def _batches(batches: Iterator[pa.RecordBatch], path: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", record


def qrel_rows(path: str) -> Iterator[Row]:
    """Judgements as qid, docid, grade: BEIR's three tab-separated columns with a header, or TREC's four; or Parquet."""
    if path.endswith(".parquet"):
        yield from parquet_rows(path)
        return
    with open_text(path) as handle:
        for number, columns in enumerate(csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
            where = f"{path}, line {number}"
            if len(columns) == 1:
                columns = columns[0].split()
            if not columns or (number == 1 and columns[0] in ("query-id", "qid", "query_id")):
                continue
            if len(columns) == 4:
                columns = [columns[0], columns[2], columns[3]]
            if len(columns) != 3:
                raise RowError(f"{where}: 3 columns (query, document, grade) or 4 (TREC) are wanted, found {len(columns)}")
            try:
                yield where, {"qid": columns[0], "docid": columns[1], "grade": int(columns[2])}
            except ValueError:
                raise RowError(f"{where}: the grade {columns[2]!r} is not a whole number") from None


def load_ir_dataset(name: str) -> Any:
    """A collection of ir_datasets; an archive that this repository carries is first put into its cache, checked and whole."""
    import ir_datasets

    home = Path(ir_datasets.util.home_path())
    for archive in sorted((VENDORED / name.split("/")[0]).glob("*.gz")):
        _seed_cache(archive, home / archive.parent.name / archive.name)
    try:
        return ir_datasets.load(name)
    except KeyError:
        raise ValueError(f"ir_datasets:{name}: ir_datasets {ir_datasets.__version__} knows no such collection") from None


def _seed_cache(archive: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    wanted = hashlib.sha256(archive.read_bytes()).hexdigest()
    with FileLock(target.with_name(target.name + ".lock")):
        if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == wanted:
            return
        with atomic_file(target) as temporary:
            shutil.copyfile(archive, temporary)


def _ir_rows(items: Iterator[Any], where: str) -> Iterator[Row]:
    for number, item in enumerate(items, 1):
        yield f"{where}, row {number}", item._asdict()
