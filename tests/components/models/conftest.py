"""Fixtures of the model tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from components.text import Text


@pytest.fixture(scope="session")
def make_text(tiny_tokenizer: Tokenizer) -> Callable[..., Text]:
    """A function from a TextConfig to the Text of the tiny tokenizer."""
    return lambda config: Text.from_tokenizer(tiny_tokenizer, config, bos_id=1, eos_id=2, pad_id=0)
