"""Writes one part of a corpus as Parquet, a row group at a time, and keeps eight-byte marks of every row for the checks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.data.rows import Document, document
from components.data.schemas import CORPUS
from components.data.sources import Piece
from components.storage import atomic_file


@dataclass
class Marks:
    """What the checks need to know of every row: 20 bytes a document, whatever its length."""

    docids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    texts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    counts: Counter[str] = field(default_factory=Counter)

    def packed(self) -> dict[str, Any]:
        """As one row of bytes, to travel between processes."""
        arrays = {"docids": self.docids, "texts": self.texts, "lengths": self.lengths}
        return {name: array.tobytes() for name, array in arrays.items()} | {"counts": json.dumps(self.counts)}

    @classmethod
    def unpacked(cls, row: dict[str, Any]) -> Marks:
        """What `packed` packed."""
        docids, texts = (np.frombuffer(row[name], np.uint64) for name in ("docids", "texts"))
        return cls(docids, texts, np.frombuffer(row["lengths"], np.int32), Counter(json.loads(row["counts"])))


def mark(text: str) -> int:
    """A 64-bit hash that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def documents_of(piece: Piece, counts: Counter[str]) -> Iterator[Document]:
    """The clean rows of a piece, streamed."""
    for where, record in piece.rows():
        yield document(record, where, counts)


def write_part(piece: Piece, path: Path, rows_per_group: int) -> Marks:
    """Write a piece to `path` and return the marks of its rows, in row order. At most one row group is in memory."""
    marks = Marks()
    docids: list[int] = []
    texts: list[int] = []
    lengths: list[int] = []
    rows = documents_of(piece, marks.counts)
    with atomic_file(path) as temporary, pq.ParquetWriter(temporary, CORPUS, compression="zstd") as writer:
        while block := list(islice(rows, rows_per_group)):
            columns = [[row[i] for row in block] for i in range(3)]
            writer.write_table(
                pa.table([pa.array(c, f.type) for c, f in zip(columns, CORPUS, strict=True)], schema=CORPUS),
                row_group_size=rows_per_group,
            )
            docids.extend(mark(row.docid) for row in block)
            texts.extend(mark(row.text) for row in block)
            lengths.extend(len(row.text) for row in block)
    marks.docids, marks.texts = np.asarray(docids, np.uint64), np.asarray(texts, np.uint64)
    marks.lengths = np.asarray(lengths, np.int32)
    return marks


def repeated(values: np.ndarray) -> np.ndarray:
    """The values that occur more than once, sorted."""
    ordered = np.sort(values)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def rewrite_without_repeats(parts: list[Path], suspects: np.ndarray, rows_per_group: int) -> list[str]:
    """Drop each docid's later occurrences from the parts; returns the docids dropped, one a dropped row.

    `suspects` are the marks that occur twice; only they are compared as text, so a hash collision loses nothing.
    """
    seen: set[str] = set()
    dropped: list[str] = []
    wanted = set(suspects.tolist())
    for path in parts:
        reader = pq.ParquetFile(path)
        with atomic_file(path) as temporary, pq.ParquetWriter(temporary, CORPUS, compression="zstd") as writer:
            for group in range(reader.num_row_groups):
                table = reader.read_row_group(group)
                keep = []
                for docid in table["docid"].to_pylist():
                    double = mark(docid) in wanted and docid in seen
                    if mark(docid) in wanted:
                        seen.add(docid)
                    if double:
                        dropped.append(docid)
                    keep.append(not double)
                writer.write_table(table.filter(pa.array(keep)), row_group_size=rows_per_group)
    return dropped


def find_repeats(parts: list[Path], suspects: np.ndarray) -> list[tuple[str, str, int]]:
    """(docid, file, row) of every later occurrence of a docid, confirmed as text."""
    seen: set[str] = set()
    found: list[tuple[str, str, int]] = []
    wanted = set(suspects.tolist())
    for path in parts:
        row = 0
        for batch in pq.ParquetFile(path).iter_batches(columns=["docid"]):
            for docid in batch["docid"].to_pylist():
                if mark(docid) in wanted:
                    if docid in seen:
                        found.append((docid, path.name, row))
                    seen.add(docid)
                row += 1
    return found
