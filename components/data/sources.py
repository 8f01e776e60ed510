"""Where collections come from: each source is streamed, row by row, with a name for every row.

`ir_datasets:<id>`, `beir:<folder>`, `jsonl:<glob>`, `parquet:<glob>`, `hf:<folder>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from components.data.config import split_source
from components.data.files import (
    Row,
    arrow_rows,
    either,
    expand,
    json_rows,
    lines,
    listing,
    open_binary,
    parquet_rows,
)
from components.data.ir_collections import document_rows, has_judgements, judgement_rows, load_ir_dataset
from components.data.ir_collections import query_rows as ir_query_rows
from components.data.rows import DataError, NotThereError, RowError

Judged = tuple[Iterator[Row], Iterator[Row]]
"""Rows of queries, rows of judgements."""
_HEADERS = ("score", "grade", "relevance", "rel", "label")
_READERS = {"jsonl": json_rows, "parquet": parquet_rows, "hf": arrow_rows}


@dataclass(frozen=True)
class Piece:
    """A part of a source that one task reads: a file, or a whole ir_datasets collection."""

    kind: str
    place: str

    def rows(self) -> Iterator[Row]:
        """Its rows, streamed."""
        if self.kind == "ir_datasets":
            return document_rows(load_ir_dataset(self.place), self.place)
        return _READERS[self.kind](self.place)


def corpus_pieces(source: str) -> list[Piece]:
    """The parts of a source's corpus (or of plain files), in order. NotThereError: nothing there."""
    kind, place = split_source(source)
    if kind == "ir_datasets":
        load_ir_dataset(place)
        return [Piece(kind, place)]
    if kind == "beir":
        path = either(place, "corpus.jsonl")
        if path is None:
            raise NotThereError(f"{place}: no corpus.jsonl or corpus.jsonl.gz, so this is no BEIR folder")
        return [Piece("jsonl", path)]
    if kind == "hf":
        return saved_pieces(place)
    return [Piece(kind, path) for path in expand(place)]


def saved_pieces(folder: str) -> list[Piece]:
    """The files of a data set that Hugging Face `datasets` saved to disk, in its order; or a folder's Parquet files."""
    folder, found = folder.rstrip("/"), listing(folder)
    if "dataset_dict.json" in found:
        splits = [name for name in found if name != "dataset_dict.json"]
        raise DataError(f"hf:{folder} holds the splits {', '.join(splits)}. Name one, such as hf:{folder}/{splits[0]}")
    if "state.json" in found:
        with open_binary(expand(f"{folder}/state.json")[0]) as handle:
            names = [entry["filename"] for entry in json.load(handle).get("_data_files", [])]
    else:
        names = [name for name in found if name.endswith(".arrow")]
    if names:
        return [Piece("hf", path) for name in names for path in expand(f"{folder}/{name}")]
    names = [name for name in found if name.endswith(".parquet")]
    if not names:
        raise NotThereError(f"hf:{folder}: no .arrow or .parquet file there, so this is no saved data set")
    return [Piece("parquet", path) for name in names for path in expand(f"{folder}/{name}")]


def query_rows(source: str, qrels: str | None, split: str) -> Judged | None:
    """(rows of queries, rows of judgements); None for a bare corpus.

    With `qrels` the source holds the queries; without, it is a whole collection, and a BEIR folder's `split` is taken.
    DataError: the folder has judgements, but not of this split.
    """
    if qrels is not None:
        return _queries(source), _judgements(qrels)
    kind, place = split_source(source)
    if kind == "ir_datasets":
        collection = load_ir_dataset(place)
        return (_queries(source), judgement_rows(collection, place)) if has_judgements(collection) else None
    if kind != "beir":
        return None
    path = either(place, f"qrels/{split}.tsv")
    if path is None:
        found = [name.removesuffix(".gz").removesuffix(".tsv") for name in listing(f"{place.rstrip('/')}/qrels")]
        if found or either(place, "queries.jsonl"):
            raise NotThereError(f"{place}: no judgements for split {split!r} (found: {', '.join(found) or 'none'})")
        return None
    return _queries(source), qrel_rows(path)


def qrel_rows(path: str) -> Iterator[Row]:
    """Judgements as qid, docid, grade: BEIR's three tab-separated columns with a header, or TREC's four."""
    for number, line in lines(path):
        where = f"{path}, line {number}"
        columns = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
        if not line.strip() or (number == 1 and columns[-1].strip().casefold() in _HEADERS):
            continue
        if len(columns) == 4:
            columns = [columns[0], columns[2], columns[3]]
        if len(columns) != 3:
            raise RowError(f"{where}: 3 columns (query, document, grade) or 4 (TREC) are wanted, found {len(columns)}")
        try:
            grade = int(columns[2])
        except ValueError:
            raise RowError(f"{where}: the grade {columns[2]!r} is not a whole number") from None
        yield where, {"qid": columns[0], "docid": columns[1], "grade": grade}


def _queries(source: str) -> Iterator[Row]:
    """Rows of the queries of a collection, or of files that hold queries."""
    kind, place = split_source(source)
    if kind == "ir_datasets":
        return ir_query_rows(load_ir_dataset(place), place)
    if kind == "beir":
        path = either(place, "queries.jsonl")
        if path is None:
            raise NotThereError(f"{place}: no queries.jsonl or queries.jsonl.gz beside its judgements")
        return json_rows(path)
    return (row for piece in corpus_pieces(source) for row in piece.rows())


def _judgements(place: str) -> Iterator[Row]:
    """Rows of JSON lines, Parquet or a saved data set, by kind or ending; of tab-separated files otherwise."""
    try:
        kind, _ = split_source(place)
    except ValueError:
        return (row for path in expand(place) for row in qrel_rows(path))
    if kind in ("ir_datasets", "beir"):
        raise DataError(f"qrels {place!r}: wanted files (tab-separated, jsonl:, parquet: or hf:)")
    return (row for piece in corpus_pieces(place) for row in piece.rows())
