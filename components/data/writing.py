"""Writes one part of a corpus as Parquet, a row group at a time, and keeps eight-byte marks of every row for checks."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.data.rows import Document, document
from components.data.schemas import CORPUS, check_schema
from components.data.sources import Piece
from components.storage import atomic_file


@dataclass
class Marks:
    """What the checks need to know of every row, in row order: 20 bytes a document, whatever its length."""

    docids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """uint64 [N]: `mark` of each docid."""
    texts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """uint64 [N]: `mark` of each text."""
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [N]: characters of each text."""
    counts: Counter[str] = field(default_factory=Counter)
    """Oddities met while reading."""

    def packed(self) -> dict[str, Any]:
        """As one row of bytes, to travel between processes."""
        arrays = {"docids": self.docids, "texts": self.texts, "lengths": self.lengths}
        return {name: array.tobytes() for name, array in arrays.items()} | {"counts": json.dumps(self.counts)}

    @classmethod
    def unpacked(cls, row: dict[str, Any]) -> Marks:
        """What `packed` packed."""
        docids, texts = (np.frombuffer(row[name], np.uint64) for name in ("docids", "texts"))
        return cls(docids, texts, np.frombuffer(row["lengths"], np.int32), Counter(json.loads(row["counts"])))

    @classmethod
    def joined(cls, marks: list[Marks]) -> Marks:
        """Those of several parts, one after another."""
        docids, texts = np.concatenate([m.docids for m in marks]), np.concatenate([m.texts for m in marks])
        counts = sum((m.counts for m in marks), Counter[str]())
        return cls(docids, texts, np.concatenate([m.lengths for m in marks]), counts)

    def without(self, positions: list[int]) -> Marks:
        """Those of all rows but these."""
        kept = np.ones(len(self.docids), bool)
        kept[positions] = False
        return Marks(self.docids[kept], self.texts[kept], self.lengths[kept], self.counts)


@dataclass(frozen=True)
class Slice:
    """Some row groups of a corpus part: what one task reads in a second pass, however large the part is."""

    path: Path
    groups: range

    def documents(self) -> Iterator[Document]:
        """Its rows, a row group in memory at a time."""
        with pq.ParquetFile(self.path) as reader:
            check_schema(reader.schema_arrow, CORPUS, self.path)
            for group in self.groups:
                columns = reader.read_row_group(group, columns=CORPUS.names)
                yield from map(Document, *(columns[name].to_pylist() for name in CORPUS.names))


def slices(parts: Iterable[Path], groups: int = 200) -> list[Slice]:
    """The parts cut into slices of at most `groups` row groups, in corpus order."""
    found = []
    for path in parts:
        count = pq.read_metadata(path).num_row_groups
        found += [Slice(path, range(begin, min(begin + groups, count))) for begin in range(0, count, groups)]
    return found


def mark(text: str) -> int:
    """A 64-bit hash that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def documents_of(piece: Piece, counts: Counter[str]) -> Iterator[Document]:
    """The clean rows of a piece, streamed."""
    for where, record in piece.rows():
        yield document(record, where, counts)


def write_part(piece: Piece, path: Path, rows_per_group: int) -> Marks:
    """Write a piece to `path` and return the marks of its rows, in row order. At most one row group is in memory."""
    counts: Counter[str] = Counter()
    docids, texts, lengths = array("Q"), array("Q"), array("i")

    def table(rows: list[Document]) -> pa.Table:
        docids.extend(mark(row.docid) for row in rows)
        texts.extend(mark(row.text) for row in rows)
        lengths.extend(len(row.text) for row in rows)
        columns = zip(*rows, strict=True)
        return pa.table([pa.array(c, f.type) for c, f in zip(columns, CORPUS, strict=True)], schema=CORPUS)

    write_rows(documents_of(piece, counts), path, CORPUS, rows_per_group, table)
    return Marks(np.asarray(docids, np.uint64), np.asarray(texts, np.uint64), np.asarray(lengths, np.int32), counts)


def write_rows(
    rows: Iterable[Any], path: Path, schema: pa.Schema, rows_per_group: int, table: Callable[[list[Any]], pa.Table]
) -> int:
    """Stream rows to a Parquet file, a row group at a time; `table` makes one of some rows. Returns how many."""
    total, rows = 0, iter(rows)
    with atomic_file(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        while block := list(islice(rows, rows_per_group)):
            writer.write_table(table(block), row_group_size=rows_per_group)
            total += len(block)
    return total


def write_table(table: pa.Table, path: Path) -> None:
    """Write a small table, whole or not at all."""
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def repeated(values: np.ndarray) -> np.ndarray:
    """The values that occur more than once, sorted, each once."""
    ordered = np.sort(values)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def find_repeats(parts: list[Path], suspects: np.ndarray) -> list[tuple[str, str, int]]:
    """(docid, file, row) of every later occurrence of a docid, confirmed as text, in corpus order.

    `suspects` are the marks that occur twice; only they are compared as text, so a hash collision loses nothing.
    """
    seen: set[str] = set()
    found: list[tuple[str, str, int]] = []
    wanted = set(suspects.tolist())
    for path in parts if wanted else ():
        row = 0
        for batch in pq.ParquetFile(path).iter_batches(columns=["docid"]):
            for docid in batch["docid"].to_pylist():
                if mark(docid) in wanted:
                    if docid in seen:
                        found.append((docid, path.name, row))
                    seen.add(docid)
                row += 1
    return found


def rewrite_without_repeats(parts: list[Path], suspects: np.ndarray, rows_per_group: int) -> list[str]:
    """Drop each docid's later occurrences from the parts that have any; returns a docid for each dropped row."""
    repeats = find_repeats(parts, suspects)
    for path in parts:
        gone = np.asarray([row for _, file, row in repeats if file == path.name])
        if len(gone):
            _rewrite(path, gone, rows_per_group)
    return [docid for docid, _, _ in repeats]


def _rewrite(path: Path, gone: np.ndarray, rows_per_group: int) -> None:
    begin = 0
    with (
        pq.ParquetFile(path) as reader,
        atomic_file(path) as temporary,
        pq.ParquetWriter(temporary, CORPUS, compression="zstd") as writer,
    ):
        for group in range(reader.num_row_groups):
            table = reader.read_row_group(group)
            kept = ~np.isin(np.arange(begin, begin + table.num_rows), gone)
            begin += table.num_rows
            if kept.any():
                writer.write_table(table.filter(pa.array(kept)), row_group_size=rows_per_group)
