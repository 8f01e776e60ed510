"""The stretch of a document that shows best why it was found, and where the query's tokens stand in it. Pure functions.

Terms are tokens, so what is highlighted is what the sparse score counts: " lift" where " lift" is a token. Tokenising
whole documents would cost more than the search, so the stretch is chosen by plain string search and only it is
tokenised.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tokenizers import Tokenizer

LONGEST_READ = 20_000
"""Characters of a document that are looked at. Snippets of longer ones come from their beginning."""
OCCURRENCES = 50
"""Places of one term that are looked at."""
FAINT = 0.15
"""A term that gives less than this share of the strongest term's contribution is not highlighted ("the", "of")."""
LEAD = 60
"""Characters of context wanted in front of the first highlighted word of a snippet."""
_WORD = re.compile(r"\w[\w'’-]*|\S")
_SENTENCE_END = re.compile(r"[.!?]\s+")


class Found(NamedTuple):
    """A term in a text, from code point `start` to `end`."""

    start: int
    end: int
    surface: str


def strong_terms(contributions: Mapping[int, float]) -> set[int]:
    """The token ids worth highlighting: those above `FAINT` of the strongest."""
    strongest = max(contributions.values(), default=0.0)
    return {term for term, value in contributions.items() if value > 0 and value >= FAINT * strongest}


def words_of_tokens(tokenizer: Tokenizer, query: str) -> dict[int, str]:
    """For each token id of a query, the word in which it stands first."""
    words = list(_WORD.finditer(query))
    ends = [word.end() for word in words]
    encoding = tokenizer.encode(" " + query, add_special_tokens=False)
    found: dict[int, str] = {}
    for token_id, (_, end) in zip(encoding.ids, encoding.offsets, strict=True):
        place = bisect_left(ends, end - 1)
        if place < len(words):
            found.setdefault(token_id, words[place].group())
    return found


def without_title(text: str, title: str) -> str:
    """The text without the title in front, which is shown above it already."""
    while title and text[: len(title)].lower() == title.lower():
        text = text[len(title) :].lstrip()
    return text


def token_spans(tokenizer: Tokenizer, text: str, wanted: set[int]) -> list[tuple[int, int]]:
    """Where tokens of `wanted` stand in `text`, in order, without the space in front; pieces of a word are joined."""
    if not wanted or not text:
        return []
    encoding = tokenizer.encode(" " + text, add_special_tokens=False)
    spans: list[tuple[int, int]] = []
    for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if token_id not in wanted:
            continue
        start, end = max(start - 1, 0), end - 1
        while start < end and text[start].isspace():
            start += 1
        if start >= end:
            continue
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


def make_snippet(text: str, surfaces: Mapping[str, float], characters: int) -> str:
    """The stretch of about `characters` that holds the most weight of different terms; without any term, the beginning.

    surfaces: terms as they stand in a lower-cased text, with their weights. It begins at a sentence or a word, and "…"
    marks where text was left out.
    """
    start = _start(text, _best_place(text, surfaces, characters))
    end = min(len(text), start + characters)
    if end < len(text):
        space = text.rfind(" ", start + characters // 2, end)
        end = space if space > 0 else end
    return ("… " if start > 0 else "") + text[start:end].strip() + (" …" if end < len(text) else "")


def _occurrences(text: str, surfaces: Mapping[str, float]) -> Iterator[Found]:
    lowered = text[:LONGEST_READ].lower()
    for surface in surfaces:
        word = surface.strip()
        if not word:
            continue
        place = lowered.find(word)
        for _ in range(OCCURRENCES):
            if place < 0:
                break
            if surface[0] != " " or place == 0 or not lowered[place - 1].isalnum():
                yield Found(place, place + len(word), surface)
            place = lowered.find(word, place + len(word))


def _best_place(text: str, surfaces: Mapping[str, float], characters: int) -> int:
    """Start of the first term of the best stretch: most summed weight of different terms, the earliest among equals."""
    found = sorted(_occurrences(text, surfaces))
    best, best_weight = 0, 0.0
    for position, first in enumerate(found):
        inside: set[str] = set()
        for item in found[position:]:
            if item.end > first.start + characters - LEAD:
                break
            inside.add(item.surface)
        weight = sum(surfaces[surface] for surface in inside)
        if weight > best_weight * (1 + 1e-9):
            best, best_weight = first.start, weight
    return best


def _start(text: str, place: int) -> int:
    """Where a snippet that shows `place` begins: at its sentence if that is near, else at a word before it."""
    if place <= LEAD:
        return 0
    before = text[place - LEAD : place]
    ends = list(_SENTENCE_END.finditer(before))
    if ends:
        return place - LEAD + ends[-1].end()
    space = before.find(" ")
    return place - LEAD + space + 1 if space >= 0 else place
