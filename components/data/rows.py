"""One record of a source to one clean row: ids cast to text, title and body joined by one rule, oddities counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

_DOUBLE_ENCODED = re.compile(r"Â[\s\u00a0-\u00bf]|Ã[\u0080-\u00bf]|â\u0080|â€")
_MARKUP = re.compile(r"<[a-zA-Z/!][^>]*>|&(?:[a-z]+|#[0-9]+);")
_NOTHING_ASKED = re.compile(r"[\W_]*")

DOCUMENT_IDS = ("docid", "_id", "doc_id", "id")
QUERY_IDS = ("qid", "_id", "query_id", "id")
BODIES = ("text", "body", "contents", "abstract")
QUERY_TEXTS = ("text", "query")
JUDGEMENTS = {
    "qid": ("qid", "query-id", "query_id"),
    "docid": ("docid", "corpus-id", "corpus_id", "doc_id"),
    "grade": ("grade", "score", "relevance"),
}


class DataError(ValueError):
    """The data cannot be used as it is; the message names the place and what to do."""


class NotThereError(DataError, FileNotFoundError):
    """A file or folder that is not there, or a pattern that matches nothing."""


class RowError(DataError):
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
            if not isinstance(value, int) or isinstance(value, bool):
                raise RowError(
                    f"{where}: field {name!r} is {value!r}; an id is a string or a whole number. Convert it."
                )
            counts["ids_not_strings"] += 1
            value = str(value)
        if not value.strip():
            raise RowError(f"{where}: field {name!r} is empty; every row needs an id")
        if not _encodable(value):
            raise RowError(f"{where}: field {name!r} is {value!r}, which is not valid Unicode. Give it another id.")
        counts["ids_with_spaces"] += bool(re.search(r"\s", value))
        return value
    raise RowError(
        f"{where}: no id; one of the fields {', '.join(names)} is wanted, found {', '.join(map(str, record)) or 'none'}"
    )


def document(record: Mapping[str, Any], where: str, counts: Counter[str]) -> Document:
    """The corpus row of a record: `text` = title + " " + body, stripped, as BEIR does it (cases T-058, T-059).

    A missing or null title is no title; a null or empty body is counted; a record without any such field is refused.
    """
    docid = identifier(record, DOCUMENT_IDS, where, counts)
    if not any(name in record for name in ("title", *BODIES)):
        raise RowError(
            f"{where}: document {docid!r} has no text; one of the fields title, {', '.join(BODIES)} is wanted, found "
            f"{', '.join(map(str, record))}"
        )
    title, body = (_string(record, names, where, counts) for names in (("title",), BODIES))
    text = f"{title} {body}".strip()
    counts["documents_double_encoded"] += bool(_DOUBLE_ENCODED.search(text))
    return Document(docid, title.strip(), text)


def query(record: Mapping[str, Any], where: str, counts: Counter[str]) -> tuple[str, str]:
    """(qid, text) of a query record; markup and queries that ask nothing (`????`) are counted (case T-072)."""
    qid = identifier(record, QUERY_IDS, where, counts)
    if not any(name in record for name in QUERY_TEXTS):
        raise RowError(f"{where}: query {qid!r} has no text; one of the fields {', '.join(QUERY_TEXTS)} is wanted")
    text = _string(record, QUERY_TEXTS, where, counts).strip()
    counts["queries_empty"] += not text
    counts["queries_odd"] += bool(text) and bool(_MARKUP.search(text) or _NOTHING_ASKED.fullmatch(text))
    counts["queries_double_encoded"] += bool(_DOUBLE_ENCODED.search(text))
    return qid, text


def judgement(record: Mapping[str, Any], where: str, counts: Counter[str]) -> tuple[str, str, int]:
    """(qid, docid, grade) of a judgement; the grade is a whole number, also when written as 1.0 or "1"."""
    qid, docid = (identifier(record, JUDGEMENTS[name], where, counts) for name in ("qid", "docid"))
    name = next((name for name in JUDGEMENTS["grade"] if record.get(name) is not None), None)
    if name is None:
        raise RowError(f"{where}: no grade; one of the fields {', '.join(JUDGEMENTS['grade'])} is wanted")
    try:
        value = float(record[name])
    except (TypeError, ValueError):
        value = float("nan")
    if not value.is_integer():
        raise RowError(f"{where}: field {name!r} is {record[name]!r}; a grade is a whole number")
    return qid, docid, int(value)


def body_without_title(title: str, text: str) -> str:
    """The body of a joined text: the leading title removed, and once more where the body repeats it (Cranfield)."""
    rest = text
    for _ in range(2):
        if title and rest[: len(title)].casefold() == title.casefold():
            rest = rest[len(title) :].strip()
    return rest


def _string(record: Mapping[str, Any], names: tuple[str, ...], where: str, counts: Counter[str]) -> str:
    """The first of the fields that is not null, "" where there is none; half surrogate pairs become U+FFFD."""
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RowError(f"{where}: field {name!r} is {type(value).__name__}; text is wanted. Convert it.")
        if not _encodable(value):
            counts["texts_not_unicode"] += 1
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return value
    return ""


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
