"""Snippets and highlights."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.text import Text, TextConfig
from serve import highlight
from serve.highlight import Words, make_snippet, strong_terms, without_title
from tests.conftest import SENTENCES, make_tokenizer

LONG = "one word after another goes here. " * 20 + "Then the lift of a wing is told. " + "and more words follow. " * 20


def test_snippet_shows_the_terms_and_marks_what_is_left_out() -> None:
    snippet = make_snippet(LONG, {" lift": 2.0, " wing": 1.0}, 120)
    assert snippet.startswith("… Then the lift of a wing")
    assert snippet.endswith(" …")
    assert len(snippet) <= 124


def test_snippet_without_terms_is_the_beginning() -> None:
    assert make_snippet(LONG, {}, 40).startswith("one word after another")
    assert make_snippet("short", {" lift": 1.0}, 40) == "short"
    assert make_snippet("", {" lift": 1.0}, 40) == ""


def test_a_term_that_begins_a_word_is_not_found_inside_one() -> None:
    text = "uplifting " * 40 + "a lift"
    assert make_snippet(text, {" lift": 1.0}, 100).endswith("a lift")


def test_spans_are_where_the_tokens_are_and_pieces_of_a_word_are_joined(tiny_text: Text) -> None:
    text = "The LIFT of a wing, and lift"
    wanted = set(tiny_text.plain([" lift"])[0])
    spans = Words(tiny_text.tokenizer).spans(text, wanted)
    assert [text[start:end].lower() for start, end in spans] == ["lift", "lift"]
    assert Words(tiny_text.tokenizer).spans(text, set()) == []


def test_title_is_taken_off_however_often_it_is_repeated() -> None:
    assert without_title("Lift lift of a wing", "lift") == "of a wing"
    assert without_title("no title", "") == "no title"


def test_faint_terms_are_not_strong() -> None:
    assert strong_terms({1: 2.0, 2: 0.1, 3: 0.0, 4: 1.0}) == {1, 4}
    assert strong_terms({}) == set()
    assert strong_terms({1: 0.0}) == set()


def test_every_token_of_a_query_belongs_to_a_word(tiny_text: Text) -> None:
    query = "slipstream, lift?"
    words = Words(tiny_text.tokenizer).first_words(query)
    assert set(words) == set(tiny_text.plain([" " + query])[0])
    assert set(words.values()) == {"slipstream", ",", "lift", "?"}


TEXT = Text.from_tokenizer(make_tokenizer(), TextConfig(), bos_id=1, eos_id=2, pad_id=0)
WORDS = Words(TEXT.tokenizer)


def test_words_one_by_one_have_the_tokens_of_the_whole_text() -> None:
    for text in (*SENTENCES, *SENTENCES):
        assert WORDS.ids(text) == set(TEXT.plain([" " + text])[0])


def test_forgetting_words_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highlight, "WORDS_KEPT", 2)
    words = Words(TEXT.tokenizer)
    for sentence in SENTENCES:
        assert words.ids(sentence) == WORDS.ids(sentence)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=200), st.text(max_size=20), st.integers(1, 80))
def test_any_text_gives_spans_inside_it(text: str, query: str, characters: int) -> None:
    wanted = set(TEXT.plain([" " + query])[0])
    surfaces = {TEXT.tokenizer.decode([term]): 1.0 for term in wanted}
    snippet = make_snippet(text, surfaces, characters)
    spans = WORDS.spans(snippet, wanted)
    assert all(0 <= start < end <= len(snippet) for start, end in spans)
    assert all(a[1] < b[0] for a, b in pairwise(spans))
    WORDS.first_words(query)
