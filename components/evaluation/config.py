"""What is measured at the end of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.indexing.fusion import FusionConfig
from components.section import Section


class EvaluateConfig(Section):
    """Measures, baseline and how the two result lists are joined."""

    depth: int = Field(1000, ge=10)
    """Documents a query that are scored and written to the run files."""
    fusion: FusionConfig = FusionConfig()
    fusion_weights: Literal["fixed", "dev"] = "fixed"
    """Take the weights of `fusion`, or choose the dense share on the held-out dev pairs (never on evaluated queries)."""
    dev_queries: int = Field(500, ge=1)
    """Most dev queries used for that."""
    bm25: bool = True
    """Measure BM25 beside it. It keeps the whole corpus's postings in memory: switch it off above some ten million documents."""
    bm25_k1: float = Field(0.9, ge=0)
    bm25_b: float = Field(0.4, ge=0, le=1)
    drop_self_hits: bool = False
    """Drop the document whose id is the query's, after fusion: for ArguAna and Quora, whose queries are in the corpus."""
    significance_samples: int = Field(10_000, ge=100)
    timing_rounds: int = Field(5, ge=1)
    """Rounds of encoding all queries; the median is reported."""
