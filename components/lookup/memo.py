"""A memo of byte strings and their token ids for compiled code: an open-addressing table over two pools, never growing.

When it is full it is emptied; the common pieces are back within a few queries, which no bookkeeping of use could beat.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import secrets
from typing import NamedTuple

import numpy as np

from components.lookup.jit import kernel

LONGEST_MEMOISED = 48
"""Bytes. A longer piece is rarely seen twice."""
MIX = np.uint64(0x9E3779B97F4A7C15)
_PRIME = np.uint64(0x100000001B3)
HALF = np.uint64(32)


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


def table_size(count: int) -> int:
    """The power of two of slots that leaves half of them free."""
    return 1 << max(4, (2 * count - 1).bit_length())


def make_memo(capacity: int) -> Memo:
    """An empty memo for `capacity` pieces of up to 16 bytes and 4 ids on average (it is also full when a pool is)."""
    state = np.array([0, 0, 0, secrets.randbits(63)], dtype=np.int64)
    entries = np.zeros((table_size(capacity), 4), dtype=np.int64)
    pool = max(capacity, LONGEST_MEMOISED)
    return Memo(entries, np.zeros(16 * pool, dtype=np.uint8), np.zeros(4 * pool, dtype=np.int32), state)


@kernel
def piece_hash(text, start, stop, seed):
    """A positive int64 from the bytes `start` to `stop` (FNV-1a from a secret seed, folded)."""
    code = np.uint64(seed)
    for at in range(start, stop):
        code = (code ^ np.uint64(text[at])) * _PRIME
    code = (code ^ (code >> HALF)) * MIX
    return np.int64(code >> np.uint64(1)) | 1 << 40


@kernel
def find(memo, text, start, stop, code):
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
def remember(memo, text, start, stop, code, ids, at, count):
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
