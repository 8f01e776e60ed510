"""One record to one row: ids, titles, oddities (cases T-058, T-059, T-067, T-071, T-072)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.rows import RowError, body_without_title, document, query


def read(record: dict, counts: Counter | None = None):  # type: ignore[type-arg, no-untyped-def]
    return document(record, "f.jsonl, line 3", counts if counts is not None else Counter())


def test_a_missing_or_null_title_is_no_title_and_no_leading_space() -> None:
    """T-058."""
    assert read({"_id": "1", "text": "x"}) == ("1", "", "x")
    assert read({"_id": "1", "title": None, "text": "x"}) == ("1", "", "x")


def test_title_and_text_are_joined_by_one_rule() -> None:
    """T-059: also where a collection calls its text otherwise."""
    assert read({"doc_id": "1", "title": "T", "abstract": "body"}).text == "T body"
    assert read({"docid": "1", "title": "T", "text": ""}).text == "T"


def test_ids_of_mixed_types_become_text() -> None:
    """T-067."""
    counts: Counter[str] = Counter()
    assert [read({"_id": i, "text": "x"}, counts).docid for i in (1, "2", 3)] == ["1", "2", "3"]
    assert counts["ids_not_strings"] == 2


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "no id"),
        ({"_id": "", "text": "x"}, "is empty"),
        ({"_id": 1.5, "text": "x"}, "whole number"),
        ({"_id": ["a"], "text": "x"}, "whole number"),
        ({"_id": "1"}, "has no text"),
        ({"_id": "1", "text": 5}, "text is wanted"),
    ],
)
def test_a_row_that_cannot_be_used_names_file_and_field(record: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(RowError, match=message) as error:
        read(record)
    assert "f.jsonl, line 3" in str(error.value)


def test_double_encoded_text_is_left_as_it_is_and_counted() -> None:
    """T-071."""
    counts: Counter[str] = Counter()
    assert read({"_id": "1", "text": "continuousÂ\u00a0iv"}, counts).text == "continuousÂ\u00a0iv"
    read({"_id": "2", "text": "Ânes et Âges"}, counts)
    assert counts["documents_double_encoded"] == 1


@pytest.mark.parametrize(
    ("text", "odd"), [("???????", 1), ("<b>x</b> y", 1), ("a &amp; b", 1), ("what is lift?", 0), ("3 < 4", 0)]
)
def test_odd_queries_are_counted(text: str, odd: int) -> None:
    """T-072."""
    counts: Counter[str] = Counter()
    query({"_id": "q", "text": text}, "f", counts)
    assert counts["queries_odd"] == odd


def test_the_title_is_taken_out_of_the_body_once_or_twice() -> None:
    assert body_without_title("A Wing", "A Wing a wing in flow") == "in flow"
    assert body_without_title("", "text") == "text"
    assert body_without_title("Same", "Same") == ""


@given(st.text(), st.text(min_size=1))
def test_joined_text_never_begins_or_ends_with_white_space(title: str, text: str) -> None:
    joined = read({"_id": "1", "title": title, "text": text}).text
    assert joined == joined.strip()
