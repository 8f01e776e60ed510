"""What is measured at the end of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from components.evaluation.metrics import METRICS, MetricName
from components.indexing.fusion import FusionConfig
from components.section import Section


class EvaluateConfig(Section):
    """Measures, baseline and how the two result lists are joined."""

    depth: int = Field(1000, ge=100)
    """Documents a query that are scored and written to the run files."""
    metrics: tuple[MetricName, ...] = ("nDCG@10", "MRR@10", "R@20", "R@50", "R@100")
    """Measures, each compared with BM25's; nDCG@10, MRR@10 and R@100 are always among them."""
    fusion: FusionConfig = FusionConfig()
    fusion_weights: Literal["fixed", "dev"] = "fixed"
    """The weights of `fusion`, or the dense share that is best on held-out dev pairs (never on evaluated queries)."""
    dev_queries: int = Field(500, ge=1)
    """Most dev queries used for that."""
    bm25: bool = True
    """Measure BM25 beside it. All its postings lie in memory: switch it off above some ten million documents."""
    bm25_k1: float = Field(0.9, ge=0)
    bm25_b: float = Field(0.4, ge=0, le=1)
    drop_self_hits: bool = False
    """Drop the document whose id is the query's, after fusion: for ArguAna and Quora, whose queries are documents."""
    significance_samples: int = Field(10_000, ge=100)
    """Permutations of the paired test and resamples of the intervals."""
    timing_rounds: int = Field(5, ge=1)
    """Rounds of encoding all queries; the median is reported."""

    @model_validator(mode="after")
    def _deep_enough(self) -> EvaluateConfig:
        if missing := [name for name in METRICS if name not in self.metrics]:
            raise ValueError(f"metrics lacks {', '.join(missing)}, which every result reports: add it")
        deepest = max(int(name.rpartition("@")[2]) for name in self.metrics)
        if deepest > self.depth:
            raise ValueError(f"depth={self.depth} is less than a measure needs ({deepest}): raise it")
        return self
