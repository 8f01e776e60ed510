"""One record of a source to one clean row: ids cast to text, title and body joined by one rule, oddities counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

_DOUBLE_ENCODED = re.compile(r"Â[\s\u00a0-\u00bf]|Ã[\u0080-\u00bf]|â\u0080|â€")
_MARKUP = re.compile(r"<[a-zA-Z/][^>]*>|&[a-z]+;")
_NOTHING_ASKED = re.compile(r"^\W*$")

DOCUMENT_IDS = ("docid", "_id", "doc_id", "id")
QUERY_IDS = ("qid", "_id", "query_id", "id")
BODIES = ("text", "body", "contents", "abstract")


class RowError(ValueError):
    """A row that cannot be used; the message names file, row, field and remedy."""


class Document(NamedTuple):
    """A row of the corpus."""

    docid: str
    title: str
    text: str


def identifier(record: Mapping[str, Any], names: tuple[str, ...], where: str, counts: Counter[str]) -> str:
    """The record's id as text, whatever its type (numbers in some rows, strings in others: case T-067)."""
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            if isinstance(value, bool | float | list | dict):
                raise RowError(f"{where}: field {name!r} is {value!r}; an id is a string or a whole number")
            counts["ids_not_strings"] += 1
        if str(value).strip() == "":
            raise RowError(f"{where}: field {name!r} is empty; every row needs an id")
        return str(value)
    raise RowError(f"{where}: no id; one of the fields {', '.join(names)} is wanted, found {', '.join(record) or 'none'}")


def document(record: Mapping[str, Any], where: str, counts: Counter[str]) -> Document:
    """The corpus row of a record: `text` = title + " " + body, stripped, as BEIR does it (cases T-058, T-059).

    A missing or null title is no title; a record without any body field is refused, an empty body is counted.
    """
    docid = identifier(record, DOCUMENT_IDS, where, counts)
    title = _string(record, ("title",), where) or ""
    body = _string(record, BODIES, where)
    if body is None and not title:
        raise RowError(f"{where}: document {docid!r} has no text; one of the fields title, {', '.join(BODIES)} is wanted")
    title = title.strip()
    text = f"{title} {body or ''}".strip()
    counts["documents"] += 1
    counts["documents_empty"] += not text
    counts["documents_double_encoded"] += bool(_DOUBLE_ENCODED.search(text))
    return Document(docid, title, text)


def query(record: Mapping[str, Any], where: str, counts: Counter[str]) -> tuple[str, str]:
    """(qid, text) of a query record; markup and queries that ask nothing (`????`) are counted (case T-072)."""
    qid = identifier(record, QUERY_IDS, where, counts)
    text = _string(record, ("text", "query"), where)
    if text is None:
        raise RowError(f"{where}: query {qid!r} has no text; one of the fields text, query is wanted")
    counts["queries"] += 1
    counts["queries_empty"] += not text.strip()
    counts["queries_odd"] += bool(_MARKUP.search(text)) or (bool(text.strip()) and bool(_NOTHING_ASKED.match(text)))
    return qid, text.strip()


def body_without_title(title: str, text: str) -> str:
    """The body of a joined text: the leading title removed, and once more where the body repeats it (as Cranfield's does)."""
    rest = text
    for _ in range(2):
        if title and rest.casefold().startswith(title.casefold()):
            rest = rest[len(title) :].strip()
    return rest


def _string(record: Mapping[str, Any], names: tuple[str, ...], where: str) -> str | None:
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RowError(f"{where}: field {name!r} is {type(value).__name__}; text is wanted")
        return value
    return None
