"""The fixed Parquet schemas of a run's `data` folder, and the check that a file has one of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa


def _required(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


CORPUS = _required(("docid", pa.string()), ("title", pa.large_string()), ("text", pa.large_string()))
"""`text` is what is encoded: title, a space and the body (BEIR's rule), stripped. `title` is for display."""
QUERIES = _required(("qid", pa.string()), ("text", pa.large_string()))
QRELS = _required(("qid", pa.string()), ("docid", pa.string()), ("grade", pa.int32()))
PAIRS = _required(
    ("dataset", pa.string()), ("qid", pa.string()), ("query", pa.large_string()),
    ("positive_docid", pa.string()), ("positive", pa.large_string()),
    ("negative_docids", pa.list_(pa.string())), ("negatives", pa.list_(pa.large_string())), ("split", pa.string()),
)  # fmt: skip


def check_schema(found: pa.Schema, wanted: pa.Schema, path: Path | str) -> None:
    """Raise ValueError naming the file and the first field that is missing or of another type."""
    for field in wanted:
        position = found.get_field_index(field.name)
        if position < 0:
            names = ", ".join(found.names)
            raise ValueError(f"{path}: field {field.name!r} is missing (found: {names}). Run ingest again.")
        if found.field(position).type != field.type:
            raise ValueError(
                f"{path}: field {field.name!r} is {found.field(position).type}, wanted {field.type}. Run ingest again."
            )
