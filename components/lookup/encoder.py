"""The query encoder that serves: text → unit dense vector and sparse vector by table lookup, without torch.

LightRetriever's query side (spec 1.4, 1.6): dense = normalise(sum of the table rows of the query's tokens), sparse =
occurrences of the tokens of `" " + query` × their scores. What the model knew was written into the table beforehand.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from components.lookup.artefact import Manifest, load_table
from components.lookup.bag import BAGS, count_tokens
from components.lookup.tokens import TokenBatch, TokenMemo
from components.text import Text

logger = logging.getLogger(__name__)

EMPTY = "the query is empty"
INVISIBLE = "the query holds only white space or invisible characters"
NO_TOKENS = "the tokenizer finds no token in the query"


@dataclass(eq=False)
class QueryBatch:
    """Q encoded queries. Sparse row i has the columns `indices[indptr[i] : indptr[i + 1]]`, ascending."""

    dense: np.ndarray
    """float32 [Q, H], unit rows (or means where the table says so); zeros for a query with a reason in `empty`."""
    indptr: np.ndarray
    """int64 [Q + 1]"""
    indices: np.ndarray
    """int32 [nnz]"""
    weights: np.ndarray
    """float32 [nnz], > 0"""
    empty: list[str | None]
    """Why a query can find nothing, None for all others."""
    vocabulary_size: int

    def __len__(self) -> int:
        return len(self.empty)

    @cached_property
    def sparse(self) -> csr_matrix:
        """scipy [Q, V] float32 over the same arrays. Built when asked for: that takes longer than encoding a query."""
        return csr_matrix((self.weights, self.indices, self.indptr), shape=(len(self), self.vocabulary_size))


class QueryEncoder:
    """A loaded lookup artefact. Threads may share it; the GIL is released while kernels run."""

    def __init__(
        self, manifest: Manifest, tensors: dict[str, np.ndarray], text: Text, *, dimensions: int | None = None,
        normalize: bool | None = None, capacity: int = 65_536,
    ) -> None:  # fmt: skip
        if dimensions is not None and not 1 <= dimensions <= manifest.hidden_size:
            raise ValueError(f"QueryEncoder: dimensions is {dimensions}; the table has 1 to {manifest.hidden_size}")
        if normalize is not None and normalize != manifest.normalize:
            logger.warning(
                "QueryEncoder: normalize=%s overrides the table's own setting, %s", normalize, manifest.normalize
            )
        self.manifest = manifest
        self.text = text
        self.dimensions = dimensions or manifest.hidden_size
        self.normalize = manifest.normalize if normalize is None else normalize
        self.vocabulary_size = manifest.vocabulary_size
        self.tokens = TokenMemo(text, capacity)
        self.token_scores = tensors["token_scores"]
        self._bag = BAGS[manifest.storage]
        self._tables = {name: _kernel_table(tensors, name) for name in manifest.instructions}

    @classmethod
    def load(
        cls, folder: Path, *, dimensions: int | None = None, normalize: bool | None = None, verify: bool = True,
        capacity: int = 65_536,
    ) -> QueryEncoder:  # fmt: skip
        """The encoder of a tabulate folder, its kernels compiled.

        dimensions: keep only the first ones (Matryoshka) before normalising. normalize: overrides the table's setting,
        which is logged. verify: compare the table's checksum. capacity: pre-tokens memoised. Errors: see `load_table`.
        """
        encoder = cls(*load_table(folder, verify), dimensions=dimensions, normalize=normalize, capacity=capacity)
        encoder.encode(["warm up"])
        return encoder

    def encode(self, queries: Sequence[str], instruction: str | None = None) -> QueryBatch:
        """Dense and sparse vectors of the queries. instruction: a name in the manifest; the default one if None.

        TypeError: a query is not a string. ValueError: no such instruction, or a query is not valid Unicode.
        """
        tokens = self.tokens(queries)
        indptr = np.empty(len(tokens.blank) + 1, np.int64)
        room = int(tokens.sparse_offsets[-1])
        indices, weights = np.empty(room, np.int32), np.empty(room, np.float32)
        count_tokens(
            tokens.sparse_ids, tokens.sparse_offsets, tokens.blank, self.token_scores, indptr, indices, weights
        )
        count = int(indptr[-1])
        dense, without = self._dense(tokens, instruction)
        reasons: list[str | None] = _reasons(tokens, queries) if without else [None] * len(queries)
        return QueryBatch(dense, indptr, indices[:count], weights[:count], reasons, self.vocabulary_size)

    def encode_dense(self, queries: Sequence[str], instruction: str | None = None) -> np.ndarray:
        """Only the dense vectors of `encode`, float32 [Q, H]."""
        return self._dense(self.tokens(queries), instruction)[0]

    def _dense(self, tokens: TokenBatch, instruction: str | None) -> tuple[np.ndarray, int]:
        """(dense vectors, number of queries that are blank or without tokens)."""
        name = self.manifest.default_instruction if instruction is None else instruction
        try:
            rows, scales = self._tables[name]
        except KeyError:
            raise ValueError(f"instruction: found {name!r}, wanted one of {sorted(self._tables)}") from None
        dense = np.empty((len(tokens.blank), self.dimensions), np.float32)
        without = self._bag(rows, scales, tokens.dense_ids, tokens.dense_offsets, tokens.blank, self.normalize, dense)
        return dense, without


def _kernel_table(tensors: dict[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(rows, scales) in the types that the kernels take; scales are unused unless rows are int8."""
    rows = tensors[f"rows.{name}"]
    scales = tensors.get(f"scales.{name}", tensors["token_scores"])
    return (rows.view(np.uint16) if rows.dtype == np.float16 else rows), scales


def _reasons(tokens: TokenBatch, queries: Sequence[str]) -> list[str | None]:
    reasons: list[str | None] = [None] * len(queries)
    for i in np.flatnonzero(tokens.blank | (np.diff(tokens.dense_offsets) == 0)).tolist():
        reasons[i] = EMPTY if not queries[i] else INVISIBLE if tokens.blank[i] else NO_TOKENS
    return reasons
