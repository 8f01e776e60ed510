"""The retriever as it is trained: one LM for documents and queries, and the terms of the loss for a batch.

Letters in shapes: Q queries, G documents a query, D = Q·G, H hidden size, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from components.data.batches import PairBatch
from components.models.backbone import head_bias, head_weight, producible_mask
from components.models.config import RetrieverConfig
from components.models.document_encoder import full_query_vectors, text_states
from components.models.lexical import LexicalPrior
from components.models.pooling import dense_vectors, pad_batch, pool
from components.models.query_encoders import query_vectors
from components.models.retriever import Extras
from components.models.sparse_head import sparse_values
from components.objectives.config import TermsConfig
from components.objectives.contrastive import contrastive_loss, equal_document_mask, gather_with_gradient, scores_QD
from components.objectives.distillation import kl_to_teacher
from components.objectives.sparsity import flops_estimate, ramp
from components.text import Text, instruction_prompt


@dataclass
class LossTerms:
    """Weighted terms whose sum is the loss, and numbers to look at."""

    weighted: dict[str, Tensor]
    shown: dict[str, float]

    @property
    def total(self) -> Tensor:
        """[]: the loss."""
        return torch.stack(list(self.weighted.values())).sum()


class Trainee(nn.Module):
    """Computes the loss terms of a batch over all ranks; the gradient reaches this rank's texts."""

    def __init__(
        self, model: nn.Module, text: Text, config: RetrieverConfig, terms: TermsConfig, extras: Extras, *,
        document_max_tokens: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.text, self.config, self.terms, self.extras = model, text, config, terms, extras
        self._limit = min(document_max_tokens or text.config.document_max_tokens, text.config.document_max_tokens)
        self._seed = seed
        self._prior = LexicalPrior(text, config, extras.average_length) if config.lexical_weight > 0 else None
        self._instruction = instruction_prompt(config.instruction)

    def forward(self, whole: PairBatch, rank: int, world: int, step: int) -> LossTerms:
        """The terms for the global batch `whole`, of which this rank encodes its own part."""
        device = next(self.model.parameters()).device
        batch, terms = whole.part(rank, world), self.terms
        group = len(whole.documents) // len(whole.queries)
        full = self.text.plain(batch.documents)
        states = self._document_states(full, device)
        center = None
        if self.config.center and self.extras.center is not None:
            center = torch.from_numpy(self.extras.center).to(device)
        dense = gather_with_gradient(
            dense_vectors(pool(states.hidden, states.mask, states.content, self.config.pooling), center)
        )
        masked = equal_document_mask(torch.from_numpy(whole.keys).to(device), group)
        found = LossTerms({}, {})
        teacher = None
        if terms.symmetric_dense:
            queries = full_query_vectors(
                self.model,
                batch.queries,
                text=self.text,
                config=self.config,
                instruction=self._instruction,
                center=center,
            )
            teacher = scores_QD(gather_with_gradient(queries), dense, terms.dense_temperature)
            found.weighted["symmetric_dense"] = terms.symmetric_dense * contrastive_loss(teacher, group, masked)
        if terms.asymmetric_dense or terms.kl_dense:
            light = scores_QD(gather_with_gradient(self._light_queries(batch, device)), dense, terms.dense_temperature)
            if terms.asymmetric_dense:
                found.weighted["asymmetric_dense"] = terms.asymmetric_dense * contrastive_loss(light, group, masked)
            if terms.kl_dense and teacher is not None:
                found.weighted["kl_dense"] = terms.kl_dense * kl_to_teacher(light, teacher, masked)
        if terms.sparse or terms.kl_sparse or terms.flops:
            self._sparse_terms(found, whole, full, states, teacher, masked, step, device)
        return found

    def _document_states(self, full: list[list[int]], device: torch.device):  # type: ignore[no-untyped-def]
        ids = [self.text.wrap(tokens, self._limit) for tokens in full]
        return text_states(self.model, *pad_batch(ids, self.text.pad_id, device), self.text)

    def _light_queries(self, batch: PairBatch, device: torch.device) -> Tensor:
        weights = None
        if self.config.query_weights == "idf" and self.extras.idf is not None:
            weights = torch.from_numpy(self.extras.idf).to(device)
        return query_vectors(
            self.model, self.text.queries(batch.queries), text=self.text, config=self.config,
            prompt=self.text.prompt(self._instruction), weights=weights,
        )  # fmt: skip

    def _sparse_terms(self, found, whole, full, states, teacher, masked, step, device) -> None:  # type: ignore[no-untyped-def]
        """Only the columns of the batch's query tokens enter the scores; FLOPS takes its own sample of columns."""
        terms, size = self.terms, self.text.vocabulary_size
        token_lists = self.text.sparse_queries(whole.queries)
        columns = np.unique(np.asarray([token for tokens in token_lists for token in tokens], dtype=np.int64))
        sample = np.arange(size)
        if terms.flops_columns is not None and terms.flops_columns < size:
            sample = np.sort(
                np.random.default_rng([self._seed, 3, step]).choice(size, terms.flops_columns, replace=False)
            )
        asked = torch.from_numpy(np.concatenate([columns, sample])).to(device)
        values = sparse_values(
            states.hidden, states.content, head_weight(self.model, size), self.config,
            producible_mask(self.text, device), bias=head_bias(self.model, size), columns=asked,
        )  # fmt: skip
        values = gather_with_gradient(values)
        scored, regularised = values[:, : len(columns)], values[:, len(columns) :]
        active = float((regularised.detach() > 0).float().mean()) * size
        found.shown["active_terms"] = active
        if self._prior is not None:
            scored = scored + gather_with_gradient(torch.from_numpy(self._prior_at(full, columns)).to(device))
        queries = torch.from_numpy(self._query_matrix(token_lists, columns)).to(device)
        scores = scores_QD(queries, scored, terms.sparse_temperature)
        group = len(whole.documents) // len(whole.queries)
        if terms.sparse:
            found.weighted["sparse"] = terms.sparse * contrastive_loss(scores, group, masked)
        if terms.kl_sparse and teacher is not None:
            found.weighted["kl_sparse"] = terms.kl_sparse * kl_to_teacher(scores, teacher, masked)
        if terms.flops:
            weight = terms.flops * ramp(step, terms.flops_ramp_steps)
            estimate = flops_estimate(regularised, size)
            found.weighted["flops"] = weight * estimate
            found.shown["flops"] = float(estimate.detach())

    def _prior_at(self, full: list[list[int]], columns: np.ndarray) -> np.ndarray:
        """float32 [D, C]: weighted lexical prior of this rank's documents at `columns` (sorted)."""
        assert self._prior is not None
        matrix = np.zeros((len(full), len(columns)), np.float32)
        for row, ids in zip(matrix, full, strict=True):
            terms, weights = self._prior.weights(ids)
            _, there, where = np.intersect1d(terms, columns, assume_unique=True, return_indices=True)
            row[where] = self.config.lexical_weight * weights[there]
        return matrix

    def _query_matrix(self, token_lists: list[list[int]], columns: np.ndarray) -> np.ndarray:
        """float32 [Q, C]: counts × token scores; C is the batch's distinct query tokens, never V (case T-045)."""
        matrix = np.zeros((len(token_lists), len(columns)), np.float32)
        for row, tokens in zip(matrix, token_lists, strict=True):
            np.add.at(row, np.searchsorted(columns, np.asarray(tokens, np.int64)), 1.0)
        return matrix * self.extras.token_scores[columns]
