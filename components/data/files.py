"""Files wherever they lie: local or a URI (fsspec, else pyarrow.fs), globs, compressed or not; errors name it."""

from __future__ import annotations

import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from components.data.rows import DataError, NotThereError, RowError

Row = tuple[str, dict[str, Any]]
"""(where it stands, its fields)"""


def locate(place: str) -> tuple[Any, str]:
    """(fsspec file system, path in it) of a local path or URI; pyarrow's file systems where fsspec lacks a plug-in."""
    if "://" not in place:
        return LocalFileSystem(), str(Path(place).expanduser().absolute())
    try:
        return fsspec.core.url_to_fs(place)
    except (ImportError, ValueError, OSError) as error:
        try:
            filesystem, path = pyarrow.fs.FileSystem.from_uri(place)
        except (pa.ArrowInvalid, OSError):
            raise DataError(f"{place}: neither fsspec nor pyarrow opens such a URI ({_first_line(error)})") from error
        return ArrowFSWrapper(filesystem), path


def is_local(place: str) -> bool:
    """Whether the path or URI is on this machine's own file system."""
    return "://" not in place or place.startswith("file://")


def expand(pattern: str) -> list[str]:
    """Files that match a glob, sorted, absolute so that every process finds them; a plain path stands for itself.

    NotThereError: none there.
    """
    filesystem, path = locate(pattern)
    if any(sign in path for sign in "*?["):
        found = [name for name in sorted(filesystem.glob(path)) if filesystem.isfile(name)]
    else:
        found = [path] if filesystem.isfile(path) else []
    if not found:
        raise NotThereError(
            f"{pattern}: no such file, or the pattern matches none. Check the path (it was taken as {path})."
        )
    return [_full(filesystem, pattern, name) for name in found]


def either(folder: str, name: str) -> str | None:
    """The full path of `name` or `name`.gz in a folder; None where neither is there."""
    for candidate in (f"{folder.rstrip('/')}/{name}", f"{folder.rstrip('/')}/{name}.gz"):
        filesystem, path = locate(candidate)
        if filesystem.isfile(path):
            return _full(filesystem, candidate, path)
    return None


def listing(folder: str) -> list[str]:
    """Names of what lies in a folder, sorted; empty where there is no such folder."""
    filesystem, path = locate(folder)
    return sorted(Path(name).name for name in filesystem.ls(path, detail=False)) if filesystem.isdir(path) else []


@contextmanager
def open_binary(path: str) -> Iterator[BinaryIO]:
    """A file opened for reading as it is. NotThereError where it is not there."""
    filesystem, inner = locate(path)
    try:
        handle = filesystem.open(inner, "rb")
    except FileNotFoundError:
        raise NotThereError(f"{path}: no such file on this machine. Every node must see the same path.") from None
    with handle:
        yield handle


def lines(path: str) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of a UTF-8 text file, compressed or not.

    DataError: the archive is cut off or broken (case T-075), or the text is not UTF-8; each names file and line.
    """
    number = 0
    compression = fsspec.utils.infer_compression(path)
    try:
        with open_binary(path) as raw:
            handle = fsspec.compression.compr[compression](raw, mode="r") if compression else raw
            for line in io.TextIOWrapper(handle, encoding="utf-8-sig"):
                number += 1
                yield number, line
    except NotThereError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 after line {number} ({error.reason}). Convert it, for example with iconv."
        ) from error
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise DataError(f"{path}: broken or cut off after line {number} ({error}). Fetch it again.") from error


def json_rows(path: str) -> Iterator[Row]:
    """Objects of a JSON-lines file; the error of a broken line names file and line."""
    for number, line in lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise RowError(
                f"{where}: not valid JSON ({error.msg} at column {error.colno}). Mend or remove the line."
            ) from None
        if not isinstance(record, dict):
            raise RowError(f"{where}: an object is wanted, found {type(record).__name__}")
        yield where, record


def parquet_rows(path: str) -> Iterator[Row]:
    """Rows of a Parquet file, a batch at a time."""
    with open_binary(path) as handle:
        try:
            yield from _batch_rows(pq.ParquetFile(handle).iter_batches(batch_size=1000), path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{path}: not a whole Parquet file ({_first_line(error)}). Write or fetch it again."
            ) from error


def arrow_rows(path: str) -> Iterator[Row]:
    """Rows of an Arrow file (stream or file format), such as Hugging Face `datasets` saves to disk."""
    with open_binary(path) as handle:
        begin = handle.read(6)
        handle.seek(0)
        try:
            if begin == b"ARROW1":
                reader = pa.ipc.open_file(handle)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                batches = iter(pa.ipc.open_stream(handle))
            yield from _batch_rows(batches, path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{path}: not a whole Arrow file ({_first_line(error)}). Save the data set again."
            ) from error


def _batch_rows(batches: Iterator[pa.RecordBatch], path: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for begin in range(0, batch.num_rows, 1000):
            for record in batch.slice(begin, 1000).to_pylist():
                number += 1
                yield f"{path}, row {number}", record


def _full(filesystem: Any, given: str, path: str) -> str:
    """The path as `locate` takes it: local ones plain and absolute, others with the scheme they were given with."""
    if isinstance(filesystem, LocalFileSystem):
        return path
    scheme = given.partition("://")[0]
    return path if path.startswith(f"{scheme}://") else f"{scheme}://{path}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
