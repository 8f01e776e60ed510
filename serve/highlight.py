"""The stretch of a document that shows best why it was found, and where the query's tokens stand in it.

Terms are tokens, so what is highlighted is what the sparse score counts: " lift" where " lift" is a token. Tokenising
the documents found would cost several times their search, so words are tokenised one by one and remembered: texts
repeat them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

from tokenizers import Tokenizer

LONGEST_READ = 20_000
"""Characters of a document that are looked at. Snippets of longer ones come from their beginning."""
WORDS_KEPT = 100_000
"""Words remembered, about 300 bytes each; then all are forgotten, and the common ones are soon back."""
LONGEST_KEPT = 40
"""Characters. Longer words are rarely seen twice."""
OCCURRENCES = 20
"""Places of one term that are looked at."""
FAINT = 0.15
"""A term that gives less than this share of the strongest term's contribution is not highlighted ("the", "of")."""
LEAD = 60
"""Characters of context wanted in front of the first highlighted word of a snippet."""
_WORD = re.compile(r"\S+")
_PIECE = re.compile(r"\w[\w'’-]*|\S")
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


def without_title(text: str, title: str) -> str:
    """The text without the title in front, which is shown above it already."""
    while title and text[: len(title)].lower() == title.lower():
        text = text[len(title) :].lstrip()
    return text


class Words:
    """Tokens of words, remembered. Threads may share it: the worst that happens is that a word is tokenised twice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[tuple[int, int, int], ...]] = {}

    def ids(self, text: str) -> set[int]:
        """The token ids of a text (at most `LONGEST_READ` characters of it), each word with a space in front."""
        return {token_id for word in text[:LONGEST_READ].split() for token_id, _, _ in self._tokens(word)}

    def spans(self, text: str, wanted: Set[int]) -> list[tuple[int, int]]:
        """Where tokens of `wanted` stand in `text`, in order, without the space in front; pieces of a word are one."""
        found: list[tuple[int, int]] = []
        for match in _WORD.finditer(text) if wanted else ():
            shift = match.start()
            for token_id, start, end in self._tokens(match.group()):
                if token_id not in wanted or start >= end:
                    continue
                if found and shift + start <= found[-1][1]:
                    found[-1] = (found[-1][0], max(shift + end, found[-1][1]))
                else:
                    found.append((shift + start, shift + end))
        return found

    def first_words(self, query: str) -> dict[int, str]:
        """For each token id of a query, the word, without punctuation around it, in which it stands first."""
        found: dict[int, str] = {}
        for word in query.split():
            for token_id, start, end in self._tokens(word):
                around = next((m.group() for m in _PIECE.finditer(word) if m.start() <= start and end <= m.end()), word)
                found.setdefault(token_id, around)
        return found

    def _tokens(self, word: str) -> tuple[tuple[int, int, int], ...]:
        """(token id, start, end) of each token of `" " + word`, places in the word."""
        known = self._known.get(word)
        if known is None:
            encoding = self._tokenizer.encode(" " + word, add_special_tokens=False)
            places = zip(encoding.ids, encoding.offsets, strict=True)
            known = tuple((token_id, max(start - 1, 0), end - 1) for token_id, (start, end) in places)
            if len(word) <= LONGEST_KEPT:
                if len(self._known) >= WORDS_KEPT:
                    self._known.clear()
                self._known[word] = known
        return known


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
        place, left = lowered.find(word), OCCURRENCES
        while place >= 0 and left:
            if surface[0] != " " or place == 0 or not lowered[place - 1].isalnum():
                yield Found(place, place + len(word), surface)
                left -= 1
            place = lowered.find(word, place + len(word))


def _best_place(text: str, surfaces: Mapping[str, float], characters: int) -> int:
    """Start of the first term of the best stretch: most summed weight of different terms, the earliest among equals."""
    found = sorted(_occurrences(text, surfaces))
    inside = dict.fromkeys(surfaces, 0)
    best, best_weight, weight, stop = 0, 0.0, 0.0, 0
    for position, first in enumerate(found):
        while stop < len(found) and (stop == position or found[stop].end <= first.start + characters - LEAD):
            surface = found[stop].surface
            weight += surfaces[surface] if inside[surface] == 0 else 0.0
            inside[surface] += 1
            stop += 1
        if weight > best_weight * (1 + 1e-6):
            best, best_weight = first.start, weight
        inside[first.surface] -= 1
        weight -= surfaces[first.surface] if inside[first.surface] == 0 else 0.0
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
