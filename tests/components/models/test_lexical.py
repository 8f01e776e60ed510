"""The lexical prior against BM25's term saturation written out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from components.models.config import RetrieverConfig
from components.models.lexical import LexicalPrior
from components.text import Text


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.0), (0.0, 0.5)])
def test_weights_are_saturated_counts_of_plain_tokens(tiny_text: Text, k1: float, b: float) -> None:
    prior = LexicalPrior(tiny_text, RetrieverConfig(lexical_weight=0.5, lexical_k1=k1, lexical_b=b), average_length=4.0)
    ids = [30, 40, 30, 30, 50, 40]
    terms, weights = prior.weights([1, *ids, 2])
    counts = Counter(ids)
    assert terms.tolist() == sorted(counts)
    wanted = [counts[t] * (k1 + 1) / (counts[t] + k1 * (1 - b + b * len(ids) / 4.0)) for t in sorted(counts)]
    assert weights.dtype == np.float32
    assert weights.tolist() == pytest.approx(wanted)
    values = np.ones((2, tiny_text.vocabulary_size), dtype=np.float32)
    prior.add_to(values, [ids, []])
    assert values[0, terms].tolist() == pytest.approx([1 + 0.5 * w for w in wanted])
    assert (values[1] == 1).all()
    assert (np.delete(values[0], terms) == 1).all()
