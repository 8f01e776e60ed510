"""Documents to vectors: one forward pass gives the dense vector and the sparse terms; no vector depends on its
batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from components.models.backbone import head_bias, head_weight, last_hidden, producible_mask
from components.models.config import RetrieverConfig
from components.models.lexical import LexicalPrior
from components.models.pooling import content_mask, dense_vectors, pad_batch, pool, positions_from_mask
from components.models.retriever import Retriever, load_retriever
from components.models.sparse_head import sparse_values
from components.text import Text


@dataclass(frozen=True)
class States:
    """The last hidden states of a batch and which positions they may be read at."""

    hidden: Tensor
    """[B, T, H]."""
    mask: Tensor
    """bool [B, T]: real tokens."""
    content: Tensor
    """bool [B, T]: real tokens other than bos, prompt and eos."""


class SparseRows(NamedTuple):
    """CSR rows: the terms of row i are `ids[indptr[i]:indptr[i+1]]`, ascending, with their weights > 0."""

    indptr: np.ndarray
    """int64 [B + 1]."""
    ids: np.ndarray
    """int32 [nnz]."""
    weights: np.ndarray
    """float32 [nnz]."""


class Encoded(NamedTuple):
    """A batch of documents: dense float32 [B, H] unit rows (zero without content), and sparse rows."""

    dense: np.ndarray
    sparse: SparseRows


def text_states(model: nn.Module, ids: Tensor, mask: Tensor, text: Text, prompt_length: int = 0) -> States:
    """Run the backbone over padded `[bos] … [eos]` ids [B, T]; either padding side gives the same states (T-001)."""
    hidden = last_hidden(model, ids, mask, positions_from_mask(mask))
    content = content_mask(mask, bos=text.config.bos, eos=text.config.eos, prompt_length=prompt_length)
    return States(hidden, mask, content)


def full_query_vectors(
    model: nn.Module, queries: Sequence[str], *, text: Text, config: RetrieverConfig, instruction: str = "",
    center: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fp32 unit rows [Q, H]: the symmetric query `q_full`, `[bos] instruction+query [eos]` through the document path.

    `instruction` is the rendered prompt. Mean pooling leaves its tokens out, except one that merged with the query's
    first word (spec trap 4).
    """
    device = next(model.parameters()).device
    ids, mask = pad_batch(text.full_queries(queries, instruction), text.pad_id, device)
    prompt_length = len(text.plain([instruction.rstrip()])[0]) if instruction.strip() else 0
    states = text_states(model, ids, mask, text, prompt_length)
    return dense_vectors(pool(states.hidden, states.mask, states.content, config.pooling), center)


class DocumentEncoder:
    """Encodes documents with a trained retriever. Safe to use from one thread at a time."""

    def __init__(self, retriever: Retriever, device: torch.device | str = "cpu") -> None:
        self.retriever, self.device = retriever, torch.device(device)
        self.text, self.config, self.extras = retriever.text, retriever.config, retriever.extras
        self.model = retriever.model.to(self.device).eval()  # type: ignore[arg-type]
        size = self.text.vocabulary_size
        self._head = head_weight(self.model, size)
        self._bias = head_bias(self.model, size)
        self._producible = producible_mask(self.text, self.device)
        lexical = self.config.lexical_weight > 0
        self._prior = LexicalPrior(self.text, self.config, self.extras.average_length) if lexical else None
        center = self.extras.center if self.config.center else None
        self._center = None if center is None else torch.from_numpy(center).to(self.device)

    @classmethod
    def load(
        cls, folder: Path, dtype: str = "auto", attention: str = "sdpa", device: torch.device | str = "cpu"
    ) -> DocumentEncoder:
        """The encoder of the retriever in `folder` (as `save_retriever` wrote it); nothing outside the folder is
        read."""
        return cls(load_retriever(folder, dtype, attention), device)

    def encode(self, texts: Sequence[str], batch_tokens: int = 4096) -> Encoded:
        """Vectors of `texts` in their order; see `encode_texts`."""
        return self.encode_texts(texts, batch_tokens)

    def encode_texts(self, texts: Sequence[str], batch_tokens: int = 4096) -> Encoded:
        """Vectors of `texts` in their order, batched by length under `batch_tokens` padded tokens (T-090)."""
        return self.encode_plain(self.text.plain(list(texts)), batch_tokens)

    def encode_plain(self, full: Sequence[Sequence[int]], batch_tokens: int = 4096) -> Encoded:
        """`encode_texts` of texts given as their plain, untruncated ids (`Text.plain`)."""
        ids = [self.text.wrap(tokens) for tokens in full]
        batches = token_batches([len(row) for row in ids], batch_tokens)
        parts = [self.encode_ids([ids[i] for i in batch], [full[i] for i in batch]) for batch in batches]
        return _in_order(parts, batches, len(full), self._head.shape[1])

    def pooled(self, texts: Sequence[str], batch_tokens: int = 4096) -> np.ndarray:
        """float32 [N, H]: raw dense vectors, neither centred nor normalised; their mean is `Extras.center`."""
        ids = self.text.documents(texts)
        vectors = np.zeros((len(ids), self._head.shape[1]), dtype=np.float32)
        with torch.inference_mode():
            for batch in token_batches([len(row) for row in ids], batch_tokens):
                states = self._states([ids[i] for i in batch])
                vectors[batch] = self._pool(states).cpu().numpy()
        return vectors

    def encode_ids(self, ids: Sequence[Sequence[int]], full_ids: Sequence[Sequence[int]] | None = None) -> Encoded:
        """Vectors of one batch of `[bos] … [eos]` ids (`Text.wrap`).

        `full_ids` are the plain ids of the untruncated documents, for the lexical prior; None takes them from `ids`.
        Results are fp32 whatever the model computes in (T-012). NaN states are a FloatingPointError that names the row.
        """
        self._check(ids)
        with torch.inference_mode():
            states = self._states(ids)
            dense = dense_vectors(self._pool(states), self._center).cpu().numpy()
            values = sparse_values(
                states.hidden, states.content, self._head, self.config, self._producible, bias=self._bias
            ).cpu().numpy()  # fmt: skip
        if self._prior is not None:
            self._prior.add_to(values, ids if full_ids is None else full_ids)
        bad = ~(np.isfinite(dense).all(axis=1) & np.isfinite(values).all(axis=1))
        if bad.any():
            raise FloatingPointError(
                f"row {int(bad.argmax())} of the batch: the model's output is NaN or infinite. Look at the training "
                f"loss, and encode with model.dtype=float32."
            )
        return Encoded(dense, sparse_rows(values, self.config.top_k_terms, self.config.min_weight))

    def _states(self, ids: Sequence[Sequence[int]]) -> States:
        batch, mask = pad_batch(ids, self.text.pad_id, self.device)
        return text_states(self.model, batch, mask, self.text)

    def _pool(self, states: States) -> Tensor:
        return pool(states.hidden, states.mask, states.content, self.config.pooling)

    def _check(self, ids: Sequence[Sequence[int]]) -> None:
        text = self.text
        for row, tokens in enumerate(ids):
            begins = not text.config.bos or list(tokens[:1]) == [text.bos_id]
            ends = not text.config.eos or list(tokens[-1:]) == [text.eos_id]
            if not (begins and ends):
                wanted = (text.bos_id if text.config.bos else None, text.eos_id if text.config.eos else None)
                raise ValueError(
                    f"row {row} of the batch: ids {list(tokens[:2])} … {list(tokens[-2:])} do not begin with bos "
                    f"{wanted[0]} and end with eos {wanted[1]}, as this model was trained. "
                    f"Make them with Text.documents or Text.wrap."
                )


def token_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row numbers in batches of similar length whose rows × longest row is at most `budget`; a longer row goes
    alone."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def sparse_rows(values: np.ndarray, top_k: int | None = None, min_weight: float = 0.0) -> SparseRows:
    """CSR of the positive entries of float32 [B, V] that are ≥ `min_weight`, the `top_k` largest a row (ties:
    smaller id)."""
    ids, weights, counts = [], [], []
    for row in values:
        terms = np.flatnonzero((row > 0) & (row >= min_weight))
        if top_k is not None and len(terms) > top_k:
            found = row[terms]
            limit = np.partition(found, -top_k)[-top_k]
            above, equal = found > limit, np.flatnonzero(found == limit)
            above[equal[: top_k - int(above.sum())]] = True
            terms = terms[above]
        ids.append(terms.astype(np.int32))
        weights.append(row[terms])
        counts.append(len(terms))
    return SparseRows(
        np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64),
        np.concatenate([*ids, np.zeros(0, np.int32)]), np.concatenate([*weights, np.zeros(0, np.float32)]),
    )  # fmt: skip


def _in_order(parts: list[Encoded], batches: list[list[int]], count: int, hidden_size: int) -> Encoded:
    dense = np.zeros((count, hidden_size), dtype=np.float32)
    rows: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, np.int32), np.zeros(0, np.float32))] * count
    for part, batch in zip(parts, batches, strict=True):
        dense[batch] = part.dense
        for place, row in enumerate(batch):
            span = slice(part.sparse.indptr[place], part.sparse.indptr[place + 1])
            rows[row] = (part.sparse.ids[span], part.sparse.weights[span])
    indptr = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in rows], dtype=np.int64)]).astype(np.int64)
    ids = np.concatenate([*(ids for ids, _ in rows), np.zeros(0, np.int32)])
    weights = np.concatenate([*(weights for _, weights in rows), np.zeros(0, np.float32)])
    return Encoded(dense, SparseRows(indptr, ids, weights))
