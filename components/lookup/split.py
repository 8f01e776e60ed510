"""Where a pre-token ends: the split patterns of GPT-2 and of Llama 3 / Qwen, compiled, over UTF-8 bytes.

Both patterns ask only four things of a character: is it `\\s`, `\\p{L}`, `\\p{N}` or none of them. `CharacterClasses`
asks the regular-expression engine inside `tokenizers` itself, so no difference between Unicode versions can creep in;
what it has not been asked about yet is UNKNOWN and left to the tokenizer. Neither pattern looks behind, so the piece
that begins at a byte depends on the text from there on only, which `bpe.tokenise` relies on.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import numpy as np
from tokenizers import Regex, pre_tokenizers

from components.lookup.jit import kernel

END, SPACE, LETTER, NUMBER, OTHER, DIGIT, UNKNOWN = range(7)
"""Classes of characters. DIGIT is for tokenizers that cut every digit off before they split (`Digits` in front)."""
CLASS_BITS, INVISIBLE = 7, 8
"""An entry of the table is a class, plus INVISIBLE for a character that shows nothing (see `is_invisible`)."""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

BLOCK = 256
CLASSIFIED = 0x40000
"""Code points from here on (private use, tags) are never classified."""
ALWAYS = (0x0000, 0x0100, 0x0200, 0x0300, 0x0400, 0x2000, 0x2100, 0x3000)
"""Blocks classified at once: Latin, Greek, Cyrillic, punctuation. Others follow when a text first brings them."""


def is_invisible(character: str) -> bool:
    """Whether it is white space, a control or a zero-width character: text of these alone is no query (case T-052)."""
    return character.isspace() or unicodedata.category(character) in {"Cc", "Cf"}


class CharacterClasses:
    """`table`: uint8 [CLASSIFIED], the class of every code point that was asked about, UNKNOWN elsewhere."""

    def __init__(self, isolate_digits: bool) -> None:
        self._isolate_digits = isolate_digits
        self._removers = [
            (kind, pre_tokenizers.Split(Regex(pattern), "removed"))
            for kind, pattern in ((SPACE, r"\s+"), (LETTER, r"\p{L}+"), (NUMBER, r"\p{N}+"))
        ]
        self._digits = pre_tokenizers.Digits(individual_digits=False)
        self.table = np.full(CLASSIFIED, UNKNOWN, dtype=np.uint8)
        for start in ALWAYS:
            self._learn_block(start)

    def learn(self, characters: Iterable[str]) -> None:
        """Classify the blocks of these characters. Safe beside running kernels: an entry goes from UNKNOWN to final."""
        for start in {ord(character) // BLOCK * BLOCK for character in characters}:
            if start < CLASSIFIED and self.table[start] == UNKNOWN and not 0xD800 <= start < 0xE000:
                self._learn_block(start)

    def _learn_block(self, start: int) -> None:
        block = "".join(map(chr, range(start, start + BLOCK)))
        found = np.full(BLOCK, OTHER, dtype=np.uint8)
        for kind, remover in self._removers:
            matched = np.ones(BLOCK, dtype=bool)
            for _, (first, last) in remover.pre_tokenize_str(block):
                matched[first:last] = False
            found[matched] = kind
        if self._isolate_digits:
            # Runs of digits and of others alternate, and the letter put in front makes the first run one of others.
            for _, (first, last) in self._digits.pre_tokenize_str("x" + block)[1::2]:
                found[first - 1 : last - 1] = DIGIT
        found |= np.where([is_invisible(character) for character in block], INVISIBLE, 0).astype(np.uint8)
        self.table[start : start + BLOCK] = found


@kernel
def look(text, at, classes):
    """(entry of the class table, bytes) of the character that begins at byte `at`."""
    lead = np.int64(text[at])
    if lead < 0x80:
        return np.int64(classes[lead]), 1
    second = np.int64(text[at + 1]) & 0x3F
    if lead < 0xE0:
        return np.int64(classes[(lead & 0x1F) << 6 | second]), 2
    third = np.int64(text[at + 2]) & 0x3F
    if lead < 0xF0:
        return np.int64(classes[(lead & 0x0F) << 12 | second << 6 | third]), 3
    point = (lead & 0x07) << 18 | second << 12 | third << 6 | (np.int64(text[at + 3]) & 0x3F)
    return (np.int64(classes[point]) if point < CLASSIFIED else UNKNOWN), 4


@kernel
def peek(text, at, end, classes):
    """(class, bytes) of the character that begins at byte `at`; (END, 0) at the end."""
    if at >= end:
        return END, 0
    entry, width = look(text, at, classes)
    return entry & CLASS_BITS, width


@kernel
def shows_nothing(text, at, end, classes):
    """Whether no visible character lies between the bytes `at` and `end`."""
    while at < end:
        entry, width = look(text, at, classes)
        if entry & INVISIBLE == 0:
            return False
        at += width
    return True


@kernel
def run_end(text, at, end, classes, kind):
    """Where the run of characters of class `kind` from `at` ends, or -1 if an UNKNOWN character stops it."""
    while True:
        found, width = peek(text, at, end, classes)
        if found != kind:
            return at if found != UNKNOWN else -1
        at += width


@kernel
def contraction_end(text, at, end, any_case):
    """Where `'s 't 'm 'd 're 've 'll` at the apostrophe `at` ends; `at` if there is none; -1 to ask the tokenizer."""
    if at + 1 >= end:
        return at
    first = text[at + 1]
    second = text[at + 2] if at + 2 < end else 0
    if any_case:
        if first == 0xC5 and second == 0xBF:  # U+017F, the long s: some engines fold it to s
            return -1
        first = first | 0x20 if 0x41 <= first <= 0x5A else first
        second = second | 0x20 if 0x41 <= second <= 0x5A else second
    if first == 0x73 or first == 0x74 or first == 0x6D or first == 0x64:  # s t m d
        return at + 2
    if (first == 0x72 or first == 0x76) and second == 0x65:  # re ve
        return at + 3
    if first == 0x6C and second == 0x6C:  # ll
        return at + 3
    return at


@kernel
def space_end(text, at, end, classes, newline_rule):
    """End of a piece of white space: `\\s*[\\r\\n]+` (Llama 3), else `\\s+(?!\\S)`, else `\\s+`; -1 as in `run_end`."""
    last, newline = at, -1
    stop = at
    while True:
        kind, width = peek(text, stop, end, classes)
        if kind != SPACE:
            break
        last = stop
        if text[stop] == 0x0A or text[stop] == 0x0D:
            newline = stop + 1
        stop += width
    if kind == UNKNOWN:
        return -1
    if newline_rule and newline >= 0:
        return newline
    if kind in (END, DIGIT) or last == at:  # a digit that is cut off beforehand is the end of its part
        return stop
    return last


@kernel
def piece_end(text, at, end, classes, llama, number_run):
    """The byte where the pre-token that begins at `at` ends, or -1 if only the tokenizer can say.

    `llama` chooses LLAMA3_PATTERN, in which `number_run` is the longest `\\p{N}` piece, over GPT2_PATTERN.
    """
    kind, width = peek(text, at, end, classes)
    if kind == UNKNOWN:
        return -1
    after = at + width
    if kind == DIGIT:
        return after
    lead = text[at]
    if lead == 0x27:
        stop = contraction_end(text, at, end, llama)
        if stop != at:
            return stop
    if kind == LETTER or (kind == NUMBER and not llama):
        return run_end(text, after, end, classes, kind)
    if kind == NUMBER:
        for _ in range(number_run - 1):
            following, width = peek(text, after, end, classes)
            if following != NUMBER:
                return after if following != UNKNOWN else -1
            after += width
        return after
    following, _ = peek(text, after, end, classes)
    if following == UNKNOWN:
        return -1
    if llama:
        if following == LETTER and lead != 0x0A and lead != 0x0D:
            return run_end(text, after, end, classes, LETTER)
        if kind == OTHER or (lead == 0x20 and following == OTHER):
            stop = run_end(text, after, end, classes, OTHER)
            while 0 <= stop < end and (text[stop] == 0x0A or text[stop] == 0x0D):
                stop += 1
            return stop
    elif kind == OTHER:
        return run_end(text, after, end, classes, OTHER)
    elif lead == 0x20 and following in (LETTER, NUMBER, OTHER):
        return run_end(text, after, end, classes, following)
    return space_end(text, at, end, classes, llama)
