"""Byte-level BPE, compiled: pieces of UTF-8 bytes to token ids, with a memo in front of the merging.

A piece is merged as `tokenizers` does it: of all neighbouring pairs that have a merge, the one of the lowest rank, the
leftmost among equals, until none is left. The memo keeps what was found. It is exact because byte-level BPE never merges
across pieces, and bounded: when it is full it is emptied, and the common pieces are back within a few queries.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from components.lookup.jit import kernel
from components.lookup.split import piece_end, shows_nothing

LONGEST_MEMOISED = 48
"""Bytes. A longer piece is rarely seen twice."""
LONGEST_MERGED = 256
"""Bytes. Merging takes quadratic time, so a longer piece is left to `tokenizers`, which uses a heap."""
_NO_MERGE = np.int64(0x7FFFFFFFFFFFFFFF)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_PRIME = np.uint64(0x100000001B3)
_HALF = np.uint64(32)


class Merges(NamedTuple):
    """What a byte-level BPE vocabulary says: an open-addressing table of pairs, and the id of each byte."""

    pairs: np.ndarray
    """int64 [size, 2]: left id << 32 | right id (-1 where free), rank << 32 | id of the merged token."""
    bytes: np.ndarray
    """int32 [256]: the id of a single byte, -1 where the vocabulary has none."""


class Memo(NamedTuple):
    """Pieces and their ids: an open-addressing table of entries over two pools."""

    entries: np.ndarray
    """int64 [2 * capacity or more, 4]: hash (0 = free), start in `text`, bytes << 32 | ids, start in `ids`."""
    text: np.ndarray
    """uint8: the bytes of the pieces, one after the other."""
    ids: np.ndarray
    """int32: their token ids."""
    state: np.ndarray
    """int64 [4]: entries, bytes and ids in use; the seed of the hash, so that nobody can aim collisions at it."""


class Scratch(NamedTuple):
    """Room for the piece that is being merged."""

    symbols: np.ndarray
    """int32 [LONGEST_MERGED]"""
    steps: np.ndarray
    """int64 [LONGEST_MERGED]: rank << 32 | id of merging a symbol with the next one."""


def _table_size(count: int) -> int:
    return 1 << max(4, (2 * count - 1).bit_length())


def byte_characters() -> list[str]:
    """The printable character that stands for each of the 256 bytes in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_merges(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str] | str]) -> Merges:
    """The compiled form of the `vocab` and `merges` of a tokenizer.json (pairs, or strings with a space in older files)."""
    split = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    left = np.array([vocabulary[pair[0]] for pair in split], dtype=np.int64)
    right = np.array([vocabulary[pair[1]] for pair in split], dtype=np.int64)
    merged = np.array([vocabulary[pair[0] + pair[1]] for pair in split], dtype=np.int64)
    ranks = np.arange(len(split), dtype=np.int64)
    pairs = np.full((_table_size(len(split)), 2), -1, dtype=np.int64)
    _fill_pairs(pairs, left << 32 | right, ranks << 32 | merged)
    single = np.array([vocabulary.get(character, -1) for character in byte_characters()], dtype=np.int32)
    return Merges(pairs, single)


def make_memo(capacity: int) -> Memo:
    """An empty memo for `capacity` pieces of up to 16 bytes and 4 ids on average (it is also full when a pool is)."""
    state = np.array([0, 0, 0, secrets.randbits(63)], dtype=np.int64)
    entries = np.zeros((_table_size(capacity), 4), dtype=np.int64)
    pool = max(capacity, LONGEST_MEMOISED)
    return Memo(entries, np.zeros(16 * pool, dtype=np.uint8), np.zeros(4 * pool, dtype=np.int32), state)


def make_whole_tokens(vocabulary: Mapping[str, int]) -> Memo:
    """A memo of the whole vocabulary, for tokenizers that look a piece up before they merge it (`ignore_merges`)."""
    numbers = {character: byte for byte, character in enumerate(byte_characters())}
    known = [(token, i) for token, i in vocabulary.items() if token and all(character in numbers for character in token)]
    pieces = [bytes(numbers[character] for character in token) for token, _ in known]
    ends = np.cumsum([0, *map(len, pieces)])
    text = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    memo = Memo(
        np.zeros((_table_size(len(known)), 4), dtype=np.int64), np.zeros(max(1, len(text)), dtype=np.uint8),
        np.zeros(max(1, len(known)), dtype=np.int32), np.array([0, 0, 0, 1], dtype=np.int64),
    )  # fmt: skip
    _fill_memo(memo, text, ends, np.array([i for _, i in known], dtype=np.int32))
    return memo


def make_scratch() -> Scratch:
    """Room for one caller of `tokenise` at a time."""
    return Scratch(np.zeros(LONGEST_MERGED, dtype=np.int32), np.zeros(LONGEST_MERGED, dtype=np.int64))


@kernel
def _pair_slot(pairs, pair):  # type: ignore[no-untyped-def]
    mask = len(pairs) - 1
    slot = np.int64(np.uint64(pair) * _MIX >> _HALF) & mask
    while pairs[slot, 0] != pair and pairs[slot, 0] != -1:
        slot = (slot + 1) & mask
    return slot


@kernel
def _fill_pairs(pairs, keys, values):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        slot = _pair_slot(pairs, keys[i])
        pairs[slot, 0] = keys[i]
        pairs[slot, 1] = values[i]


@kernel
def _fill_memo(memo, text, ends, ids):  # type: ignore[no-untyped-def]
    for i in range(len(ids)):
        code = piece_hash(text, ends[i], ends[i + 1], memo.state[3])
        remember(memo, text, ends[i], ends[i + 1], code, ids, i, 1)


@kernel
def piece_hash(text, start, stop, seed):  # type: ignore[no-untyped-def]
    """A positive int64 from the bytes `start` to `stop` (FNV-1a from a secret seed, folded)."""
    code = np.uint64(seed)
    for at in range(start, stop):
        code = (code ^ np.uint64(text[at])) * _PRIME
    code = (code ^ (code >> _HALF)) * _MIX
    return np.int64(code >> np.uint64(1)) | 1 << 40


@kernel
def find(memo, text, start, stop, code):  # type: ignore[no-untyped-def]
    """The slot of a piece in the memo, or -1."""
    entries = memo.entries
    mask = len(entries) - 1
    length = stop - start
    slot = code & mask
    while entries[slot, 0] != 0:
        if entries[slot, 0] == code and entries[slot, 2] >> 32 == length:
            begin = entries[slot, 1]
            same = 0
            while same < length and memo.text[begin + same] == text[start + same]:
                same += 1
            if same == length:
                return slot
        slot = (slot + 1) & mask
    return -1


@kernel
def remember(memo, text, start, stop, code, ids, at, count):  # type: ignore[no-untyped-def]
    """Put a piece and its ids `ids[at : at + count]` into the memo, emptying it first if they do not fit."""
    entries, state = memo.entries, memo.state
    length = stop - start
    if 2 * state[0] >= len(entries) or state[1] + length > len(memo.text) or state[2] + count > len(memo.ids):
        entries[:, 0] = 0
        state[:3] = 0
    mask = len(entries) - 1
    slot = code & mask
    while entries[slot, 0] != 0:
        slot = (slot + 1) & mask
    entries[slot, 0] = code
    entries[slot, 1] = state[1]
    entries[slot, 2] = length << 32 | count
    entries[slot, 3] = state[2]
    for i in range(length):
        memo.text[state[1] + i] = text[start + i]
    for i in range(count):
        memo.ids[state[2] + i] = ids[at + i]
    state[0] += 1
    state[1] += length
    state[2] += count


@kernel
def _step(merges, left, right):  # type: ignore[no-untyped-def]
    pair = np.int64(left) << 32 | np.int64(right)
    slot = _pair_slot(merges.pairs, pair)
    return merges.pairs[slot, 1] if merges.pairs[slot, 0] == pair else _NO_MERGE


@kernel
def merge(text, start, stop, merges, scratch):  # type: ignore[no-untyped-def]
    """How many ids the piece has; they are left in `scratch.symbols`. -1 where the vocabulary lacks one of its bytes."""
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
            if steps[i] >> 32 < steps[best] >> 32:
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
def emit(text, start, stop, merges, whole_tokens, memo, scratch, ids, at):  # type: ignore[no-untyped-def]
    """Write the ids of one piece to `ids` from `at` on and say where they end; -1 if the tokenizer must be asked."""
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
    if len(whole_tokens.text) > 1:
        slot = find(whole_tokens, text, start, stop, piece_hash(text, start, stop, whole_tokens.state[3]))
        if slot >= 0:
            ids[at] = whole_tokens.ids[whole_tokens.entries[slot, 3]]
            count = 1
    if count == 0:
        count = merge(text, start, stop, merges, scratch)
        if count < 0:
            return -1
        for i in range(count):
            ids[at + i] = scratch.symbols[i]
    if length <= LONGEST_MEMOISED:
        remember(memo, text, start, stop, code, ids, at, count)
    return at + count


@kernel
def advance(text, start, end, classes, rules, merges, whole_tokens, memo, scratch, ids, at):  # type: ignore[no-untyped-def]
    """(end of the piece that begins at `start`, end of its ids in `ids`); (-1, at) if the tokenizer must be asked."""
    stop = piece_end(text, start, end, classes, rules[0], rules[1])
    if stop < 0:
        return -1, at
    after = emit(text, start, stop, merges, whole_tokens, memo, scratch, ids, at)
    return (stop, after) if after >= 0 else (-1, at)


@kernel
def tokenise(  # type: ignore[no-untyped-def]  # fmt: skip
    text, lengths, limit, classes, rules, merges, whole_tokens, memo, scratch,
    dense, dense_offsets, sparse, sparse_offsets, blank,
):
    """The number of queries left to the tokenizer; writes the ids of each other query and of `" " + query`.

    text: uint8, normalised UTF-8 with one space before every query. lengths: int64 [Q], the bytes of each query; set to
    -1 where the query is left out. limit: most ids a query. rules: (llama, number_run) of `piece_end`.
    dense, sparse: int32 with room for len(text) ids. dense_offsets, sparse_offsets: int64 [Q + 1].
    blank: bool [Q], whether the query shows nothing.

    From a byte where both splits have a boundary they go on alike (see split.py). That is nearly always the end of the
    first piece, so every later piece is looked up once for both.
    """
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
                stop, sparse_at = advance(
                    text, behind, end, classes, rules, merges, whole_tokens, memo, scratch, sparse, sparse_at
                )
                behind = stop
            else:
                stop, dense_at = advance(text, at, end, classes, rules, merges, whole_tokens, memo, scratch, dense, dense_at)
                at = stop
        common = dense_at
        room = limit + max(dense_first, common - (sparse_at - sparse_first))
        while 0 <= stop and at < end and dense_at < room:
            stop, dense_at = advance(text, at, end, classes, rules, merges, whole_tokens, memo, scratch, dense, dense_at)
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
