"""Token statistics add up over parts of a corpus, and the IDF is Geng et al.'s."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.lookup.idf import TokenStatistics, inverse_document_frequencies, token_statistics

V = 12
PRODUCIBLE = np.array([False] * 3 + [True] * 9)
CORPUS = st.lists(st.lists(st.integers(0, V - 1), max_size=8), max_size=8)


@given(CORPUS, CORPUS)
def test_counts_equal_the_definition_and_add_up(one: list[list[int]], other: list[list[int]]) -> None:
    plain = [{i for i in ids if i >= 3} for ids in one]
    found = token_statistics(one, PRODUCIBLE)
    assert found.frequencies.tolist() == [sum(i in ids for ids in plain) for i in range(V)]
    assert found.documents == sum(bool(ids) for ids in plain)
    assert found.tokens == sum(i >= 3 for ids in one for i in ids)
    both, summed = token_statistics(one + other, PRODUCIBLE), found + token_statistics(other, PRODUCIBLE)
    assert np.array_equal(both.frequencies, summed.frequencies)
    assert (both.documents, both.tokens) == (summed.documents, summed.tokens)


@given(CORPUS)
def test_idf_is_the_published_formula_and_zero_for_specials(corpus: list[list[int]]) -> None:
    statistics = token_statistics(corpus, PRODUCIBLE)
    idf = inverse_document_frequencies(statistics, PRODUCIBLE)
    assert idf.dtype == np.float32
    for token, df in enumerate(statistics.frequencies.tolist()):
        wanted = math.log(1 + (statistics.documents - df + 0.5) / (df + 0.5)) if token >= 3 else 0.0
        assert idf[token] == pytest.approx(wanted, rel=1e-6)
    assert (idf[3:] > 0).all()


def test_an_empty_corpus_has_no_average_length() -> None:
    assert token_statistics([[], [1]], PRODUCIBLE).average_length == 0.0
    assert TokenStatistics(np.zeros(V, np.int64), 4, 10).average_length == 2.5


def test_members_of_a_group_share_their_document_frequency() -> None:
    groups = np.arange(V)
    groups[7] = 4
    found = token_statistics([[4, 7, 7], [7], [5]], PRODUCIBLE, groups)
    assert found.frequencies[[4, 5, 7]].tolist() == [2, 1, 2]
    assert found.tokens == 5
