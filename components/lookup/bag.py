"""Compiled sums over table rows and counts of tokens: from flat token ids to unit dense vectors and sorted sparse ones.

Sums are float32 whatever the storage; float16 and int8 rows are decoded as they are added, never copied as a table.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from components.lookup.jit import kernel


def _bits_to_float(typing_context, bits):
    """The float32 whose IEEE bits are the uint32 `bits`."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


_float_from_bits: Any = intrinsic(_bits_to_float)
_HALF_EXPONENT = np.float32(2.0**112)
"""float16 bits moved into float32's fields read as 2**-112 times the value (exponent biases 15 and 127), exactly."""


@kernel
def _finish(out, query, count, normalize):
    """Turn the sum of rows in `out[query]` into the mean, or into the unit vector; a zero vector stays zero.

    Gives 1 back for a sum of no rows, else 0.
    """
    factor = np.float32(1) / np.float32(max(count, 1))
    if normalize:
        squares = 0.0
        for j in range(out.shape[1]):
            squares += np.float64(out[query, j]) * np.float64(out[query, j])
        factor = np.float32(1.0 / np.sqrt(squares)) if squares > 0.0 else np.float32(0)
    for j in range(out.shape[1]):
        out[query, j] *= factor
    return 1 if count == 0 else 0


@kernel
def bag_float32(rows, scales, ids, offsets, blank, normalize, out):
    """Fill `out` [Q, H] float32 with the mean or unit sum of `rows` float32 [V, H or more]; zeros where `blank`.

    Gives back how many queries are blank or have no ids.
    """
    without = 0
    for query in range(len(blank)):
        out[query, :] = 0
        if blank[query]:
            without += 1
            continue
        for i in range(offsets[query], offsets[query + 1]):
            token = ids[i]
            for j in range(out.shape[1]):
                out[query, j] += rows[token, j]
        without += _finish(out, query, offsets[query + 1] - offsets[query], normalize)
    return without


@kernel
def bag_float16(rows, scales, ids, offsets, blank, normalize, out):
    """As `bag_float32`, for rows that are the bits of finite float16 numbers as uint16."""
    without = 0
    for query in range(len(blank)):
        out[query, :] = 0
        if blank[query]:
            without += 1
            continue
        for i in range(offsets[query], offsets[query + 1]):
            token = ids[i]
            for j in range(out.shape[1]):
                bits = np.uint32(rows[token, j])
                moved = (bits & np.uint32(0x8000)) << np.uint32(16) | (bits & np.uint32(0x7FFF)) << np.uint32(13)
                out[query, j] += _float_from_bits(np.uint32(moved)) * _HALF_EXPONENT
        without += _finish(out, query, offsets[query + 1] - offsets[query], normalize)
    return without


@kernel
def bag_int8(rows, scales, ids, offsets, blank, normalize, out):
    """As `bag_float32`, for int8 rows that are multiplied by their `scales` float32 [V]."""
    without = 0
    for query in range(len(blank)):
        out[query, :] = 0
        if blank[query]:
            without += 1
            continue
        for i in range(offsets[query], offsets[query + 1]):
            token = ids[i]
            for j in range(out.shape[1]):
                out[query, j] += scales[token] * np.float32(rows[token, j])
        without += _finish(out, query, offsets[query + 1] - offsets[query], normalize)
    return without


BAGS: dict[str, Callable[..., int]] = {"float32": bag_float32, "float16": bag_float16, "int8": bag_int8}


@kernel
def _sort(values, start, stop):
    """Sort `values[start:stop]` in place (Shell's sort: queries are short)."""
    for gap in (301, 132, 57, 23, 10, 4, 1):
        for i in range(start + gap, stop):
            value = values[i]
            j = i
            while j >= start + gap and values[j - gap] > value:
                values[j] = values[j - gap]
                j -= gap
            values[j] = value


@kernel
def count_tokens(ids, offsets, blank, scores, indptr, indices, weights):
    """Fill the CSR rows of counts times `scores` float32 [V], columns ascending, without tokens that score 0.

    Blank queries have none. indptr: int64 [Q + 1]. indices: int32, weights: float32, with room for every id.
    """
    at = 0
    indptr[0] = 0
    for query in range(len(blank)):
        first, last = offsets[query], offsets[query + 1]
        if not blank[query]:
            for i in range(last - first):
                indices[at + i] = ids[first + i]
            stop = at + last - first
            _sort(indices, at, stop)
            i = at
            while i < stop:  # what is written never overtakes what is read
                token, count = indices[i], 0
                while i < stop and indices[i] == token:
                    count += 1
                    i += 1
                if scores[token] != 0:
                    indices[at] = token
                    weights[at] = np.float32(count) * scores[token]
                    at += 1
        indptr[query + 1] = at
