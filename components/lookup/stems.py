"""Which tokens are forms of one word: groups by Snowball stem, for the lexical prior and its IDF.

Only tokens that are a whole word with a space before it (" wings") are grouped; pieces of words stay alone. With groups, a
document with "wings" also answers " wing", as it does in a stemmed BM25; the query side is untouched.
"""

from __future__ import annotations

import re

import numpy as np

from components.text import Text

_WORD = re.compile(r" [^\W\d_]{3,}")


def stem_groups(text: Text, language: str) -> np.ndarray:
    """int32 [V]: for each token the smallest id of its group, itself where it has none.

    `language` is a Snowball stemmer's name, for example english; ValueError lists them for an unknown one.
    """
    import Stemmer

    if language not in Stemmer.algorithms():
        raise ValueError(
            f"lexical_stems={language!r}: no such Snowball stemmer; there are {', '.join(Stemmer.algorithms())}"
        )
    stemmer = Stemmer.Stemmer(language)
    groups = np.arange(text.vocabulary_size, dtype=np.int32)
    first: dict[str, int] = {}
    for token in np.flatnonzero(text.producible).tolist():
        surface = text.tokenizer.decode([token], skip_special_tokens=False)
        if _WORD.fullmatch(surface):
            groups[token] = first.setdefault(stemmer.stemWord(surface[1:].lower()), token)
    return groups


def group_members(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indptr int64 [V + 1], members int32 [V]): the tokens of the group whose smallest id is g are members[indptr[g]:indptr[g+1]]."""
    members = np.argsort(groups, kind="stable").astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(groups, minlength=len(groups)))]).astype(np.int64)
    return indptr, members
