"""Byte-level BPE, compiled: pieces of UTF-8 bytes to token ids, with a memo in front of the merging.

A piece is merged as `tokenizers` does it: of all neighbouring pairs that have a merge, the one of the lowest rank, the
leftmost among equals, until none is left. The memo keeps what was found, which is exact because byte-level BPE never
merges across pieces.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from components.lookup.jit import kernel
from components.lookup.memo import HALF, LONGEST_MEMOISED, MIX, Memo, find, piece_hash, remember, table_size
from components.lookup.split import piece_end, shows_nothing

LONGEST_MERGED = 256
"""Bytes. Merging takes quadratic time, so a longer piece is left to `tokenizers`, which uses a heap."""
_NO_MERGE = np.int64(0x7FFFFFFFFFFFFFFF)


class Merges(NamedTuple):
    """What a byte-level BPE vocabulary says: an open-addressing table of pairs, and the id of each byte."""

    pairs: np.ndarray
    """int64 [size, 2]: left id << 32 | right id (-1 where free), rank << 32 | id of the merged token."""
    bytes: np.ndarray
    """int32 [256]: the id of a single byte, -1 where the vocabulary has none."""


class Scratch(NamedTuple):
    """Room for the piece that is being merged."""

    symbols: np.ndarray
    """int32 [LONGEST_MERGED]"""
    steps: np.ndarray
    """int64 [LONGEST_MERGED]: rank << 32 | id of merging a symbol with the next one."""


class Tools(NamedTuple):
    """All that is needed to turn a piece into ids."""

    classes: np.ndarray
    """Table of CharacterClasses."""
    llama: bool
    """See `piece_end`, as for `number_run`."""
    number_run: int
    merges: Merges
    whole_tokens: Memo
    """The vocabulary where `ignore_merges` is set, else empty."""
    memo: Memo
    scratch: Scratch


def byte_characters() -> list[str]:
    """The printable character that stands for each of the 256 bytes in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_merges(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str] | str]) -> Merges:
    """The compiled form of `vocab` and `merges` of a tokenizer.json (pairs; in older files strings with a space)."""
    split = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    left = np.array([vocabulary[pair[0]] for pair in split], dtype=np.int64)
    right = np.array([vocabulary[pair[1]] for pair in split], dtype=np.int64)
    merged = np.array([vocabulary[pair[0] + pair[1]] for pair in split], dtype=np.int64)
    ranks = np.arange(len(split), dtype=np.int64)
    pairs = np.full((table_size(len(split)), 2), -1, dtype=np.int64)
    _fill_pairs(pairs, left << 32 | right, ranks << 32 | merged)
    single = np.array([vocabulary.get(character, -1) for character in byte_characters()], dtype=np.int32)
    return Merges(pairs, single)


def make_whole_tokens(vocabulary: Mapping[str, int]) -> Memo:
    """A memo of the whole vocabulary, for tokenizers that look a piece up before they merge it (`ignore_merges`)."""
    numbers = {character: byte for byte, character in enumerate(byte_characters())}
    known = [
        (token, i) for token, i in vocabulary.items() if token and all(character in numbers for character in token)
    ]
    pieces = [bytes(numbers[character] for character in token) for token, _ in known]
    ends = np.cumsum([0, *map(len, pieces)])
    text = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    memo = Memo(
        np.zeros((table_size(len(known)), 4), dtype=np.int64), np.zeros(max(1, len(text)), dtype=np.uint8),
        np.zeros(max(1, len(known)), dtype=np.int32), np.array([0, 0, 0, 1], dtype=np.int64),
    )  # fmt: skip
    _fill_memo(memo, text, ends, np.array([i for _, i in known], dtype=np.int32))
    return memo


def make_scratch() -> Scratch:
    """Room for one caller of `tokenise` at a time."""
    return Scratch(np.zeros(LONGEST_MERGED, dtype=np.int32), np.zeros(LONGEST_MERGED, dtype=np.int64))


@kernel
def _pair_slot(pairs, pair):
    mask = len(pairs) - 1
    slot = np.int64(np.uint64(pair) * MIX >> HALF) & mask
    while pairs[slot, 0] != pair and pairs[slot, 0] != -1:
        slot = (slot + 1) & mask
    return slot


@kernel
def _fill_pairs(pairs, keys, values):
    for i in range(len(keys)):
        slot = _pair_slot(pairs, keys[i])
        pairs[slot, 0] = keys[i]
        pairs[slot, 1] = values[i]


@kernel
def _fill_memo(memo, text, ends, ids):
    for i in range(len(ids)):
        code = piece_hash(text, ends[i], ends[i + 1], memo.state[3])
        remember(memo, text, ends[i], ends[i + 1], code, ids, i, 1)


@kernel
def _step(merges, left, right):
    pair = np.int64(left) << 32 | np.int64(right)
    slot = _pair_slot(merges.pairs, pair)
    return merges.pairs[slot, 1] if merges.pairs[slot, 0] == pair else _NO_MERGE


@kernel
def merge(text, start, stop, merges, scratch):
    """How many ids the piece has; they lie in `scratch.symbols`. -1 where the vocabulary lacks one of its bytes."""
    symbols, steps = scratch.symbols, scratch.steps
    count = stop - start
    for i in range(count):
        symbols[i] = merges.bytes[text[start + i]]
        if symbols[i] < 0:
            return -1
    for i in range(count - 1):
        steps[i] = _step(merges, symbols[i], symbols[i + 1])
    while count > 1:
        best = 0
        for i in range(1, count - 1):
            if steps[i] < steps[best]:
                best = i
        if steps[best] == _NO_MERGE:
            break
        symbols[best] = steps[best] & 0xFFFFFFFF
        count -= 1
        for i in range(best + 1, count):
            symbols[i] = symbols[i + 1]
            steps[i] = steps[i + 1]
        if best > 0:
            steps[best - 1] = _step(merges, symbols[best - 1], symbols[best])
        if best < count - 1:
            steps[best] = _step(merges, symbols[best], symbols[best + 1])
    return count


@kernel
def emit(text, start, stop, tools, ids, at):
    """Write the ids of one piece to `ids` from `at` on and say where they end; -1 if the tokenizer must be asked."""
    memo, whole_tokens = tools.memo, tools.whole_tokens
    length = stop - start
    if length > LONGEST_MERGED:
        return -1
    code = np.int64(0)
    if length <= LONGEST_MEMOISED:
        code = piece_hash(text, start, stop, memo.state[3])
        slot = find(memo, text, start, stop, code)
        if slot >= 0:
            begin = memo.entries[slot, 3]
            count = memo.entries[slot, 2] & 0xFFFFFFFF
            for i in range(count):
                ids[at + i] = memo.ids[begin + i]
            return at + count
    count = 0
    if whole_tokens.state[0] > 0:
        slot = find(whole_tokens, text, start, stop, piece_hash(text, start, stop, whole_tokens.state[3]))
        if slot >= 0:
            ids[at] = whole_tokens.ids[whole_tokens.entries[slot, 3]]
            count = 1
    if count == 0:
        count = merge(text, start, stop, tools.merges, tools.scratch)
        if count < 0:
            return -1
        for i in range(count):
            ids[at + i] = tools.scratch.symbols[i]
    if length <= LONGEST_MEMOISED:
        remember(memo, text, start, stop, code, ids, at, count)
    return at + count


@kernel
def advance(text, start, end, tools, ids, at):
    """(end of the piece that begins at `start`, end of its ids in `ids`); (-1, at) if the tokenizer must be asked."""
    stop = piece_end(text, start, end, tools.classes, tools.llama, tools.number_run)
    if stop < 0:
        return -1, at
    after = emit(text, start, stop, tools, ids, at)
    return (stop, after) if after >= 0 else (-1, at)


@kernel
def tokenise(
    text, lengths, limit, classes, llama, number_run, pairs, single_bytes, whole_entries, whole_text, whole_ids,
    whole_state, memo_entries, memo_text, memo_ids, memo_state, symbols, steps,
    dense, dense_offsets, sparse, sparse_offsets, blank,
):  # fmt: skip
    """The number of queries left to the tokenizer; writes the ids of each other query and of `" " + query`.

    text: uint8, normalised UTF-8 with one space before every query. lengths: int64 [Q], the bytes of each query; set to
    -1 where the query is left out. limit: most ids a query. llama, number_run: see `piece_end`. Then the fields of a
    Merges, of the Memo of whole tokens, of the Memo and of a Scratch (numba takes tuples apart slowly, arrays fast).
    dense, sparse: int32 with room for len(text) ids. dense_offsets, sparse_offsets: int64 [Q + 1].
    blank: bool [Q], whether the query shows nothing.

    From a byte where both splits have a boundary they go on alike (see split.py). That is nearly always the end of the
    first piece, so every later piece is looked up once for both.
    """
    tools = Tools(
        classes, llama, number_run, Merges(pairs, single_bytes),
        Memo(whole_entries, whole_text, whole_ids, whole_state),
        Memo(memo_entries, memo_text, memo_ids, memo_state), Scratch(symbols, steps),
    )  # fmt: skip
    left_out = 0
    dense_at = sparse_at = end = 0
    dense_offsets[0] = sparse_offsets[0] = 0
    for query in range(len(lengths)):
        dense_first, sparse_first = dense_at, sparse_at
        start = end + 1
        end = start + lengths[query]
        blank[query] = shows_nothing(text, start, end, classes)
        at, behind, stop = start, start - 1, 0
        while at != behind and stop >= 0:
            if behind < at:
                stop, sparse_at = advance(text, behind, end, tools, sparse, sparse_at)
                behind = stop
            else:
                stop, dense_at = advance(text, at, end, tools, dense, dense_at)
                at = stop
        common = dense_at
        room = limit + max(dense_first, common - (sparse_at - sparse_first))
        while stop >= 0 and at < end and dense_at < room:
            stop, dense_at = advance(text, at, end, tools, dense, dense_at)
            at = stop
        if stop < 0:
            dense_at, sparse_at = dense_first, sparse_first
            lengths[query] = -1
            left_out += 1
        else:
            for i in range(common, dense_at):
                sparse[sparse_at] = dense[i]
                sparse_at += 1
            dense_at = min(dense_at, dense_first + limit)
            sparse_at = min(sparse_at, sparse_first + limit)
        dense_offsets[query + 1] = dense_at
        sparse_offsets[query + 1] = sparse_at
    return left_out
