"""One training run: its terms, its optimiser, its batches. The defaults are LightRetriever's (arXiv 2505.12260, with KL)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from components.models.config import RetrieverConfig
from components.section import Section


class TermsConfig(Section):
    """The weight of each term of the loss (0 switches it off) and the temperatures."""

    symmetric_dense: float = Field(1.0, ge=0)
    """Contrastive loss of the full query, instruction + query through the LM, against the dense document."""
    asymmetric_dense: float = Field(1.0, ge=0)
    """Contrastive loss of the light query, which serving looks up."""
    sparse: float = Field(1.0, ge=0)
    """Contrastive loss of the query's token counts (or IDF) against the sparse document."""
    kl_dense: float = Field(1.0, ge=0)
    """KL of the light dense scores to the full query's, which are detached."""
    kl_sparse: float = Field(1.0, ge=0)
    flops: float = Field(1e-3, ge=0)
    """FLOPS regulariser of the sparse documents, ramped up quadratically."""
    flops_ramp_steps: int = Field(4000, ge=1)
    flops_columns: int | None = Field(None, ge=1)
    """Estimate FLOPS from this many random columns a step, without bias; None takes all."""
    dense_temperature: float = Field(0.02, gt=0)
    sparse_temperature: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _teacher(self) -> TermsConfig:
        if (self.kl_dense or self.kl_sparse) and not self.symmetric_dense:
            raise ValueError(
                "the KL terms learn from the symmetric scores: set symmetric_dense above 0, or kl_dense=kl_sparse=0"
            )
        if not (self.symmetric_dense or self.asymmetric_dense or self.sparse):
            raise ValueError("all contrastive terms are 0: nothing would be learnt")
        return self


class LoraConfig(Section):
    """Low-rank adapters on all linear layers but the LM head; merged before anything reads the model."""

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    dropout: float = Field(0.1, ge=0, lt=1)


class TrainConfig(Section):
    """Contrastive training."""

    retriever: RetrieverConfig = RetrieverConfig()
    terms: TermsConfig = TermsConfig()
    steps: int = Field(12_000, ge=0)
    """Optimiser steps; 0 trains nothing and only settles centre, IDF and lengths."""
    batch_size: int = Field(128, ge=1)
    """Queries a step over all workers; every other document of the batch is a negative."""
    negatives: int = Field(7, ge=0)
    """Mined negatives a query, besides those of the batch."""
    datasets: dict[str, float] = Field(default_factory=dict)
    """Mixing weight of each data set of the pairs; by default the number of its pairs. A batch is of one data set."""
    learning_rate: float = Field(2e-5, gt=0)
    warmup_steps: int = Field(100, ge=0)
    final_learning_rate: float = Field(0.1, ge=0, le=1)
    """Where the cosine ends, as a share of `learning_rate`."""
    weight_decay: float = Field(0.01, ge=0)
    max_gradient_norm: float = Field(1.0, gt=0)
    lora: LoraConfig | None = LoraConfig()
    """None trains all weights."""
    gradient_checkpointing: bool = True
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on GPUs that have it, float32 elsewhere."""
    document_max_tokens: int | None = Field(None, ge=3)
    """Cut training documents shorter than `text.document_max_tokens`, to save time."""
    center_documents: int = Field(128, ge=1)
    """Documents whose mean vector is the centre."""
    workers: int = Field(1, ge=1)
    use_gpu: bool | None = None
    """A GPU a worker; by default where the cluster has any."""
    cpus_per_worker: int | None = Field(None, ge=1)
    checkpoint_every: int = Field(100, ge=1)
    log_every: int = Field(10, ge=1)
    gradient_norms_every: int = Field(0, ge=0)
    """Measure the gradient norm of each term every so many steps; 0 never."""
    max_failures: int = Field(3, ge=0)
    """Times a training whose worker died is taken up again from its last checkpoint."""
    max_bad_steps: int = Field(3, ge=1)
    """Steps in a row with a loss that is not finite before training stops."""

    @model_validator(mode="after")
    def _divisible(self) -> TrainConfig:
        if self.batch_size % self.workers:
            raise ValueError(f"batch_size={self.batch_size} cannot be split evenly over workers={self.workers}")
        if self.batch_size * (1 + self.negatives) < 2:
            raise ValueError("batch_size=1 with negatives=0 leaves nothing to contrast with")
        return self
