"""Tiny random models of every supported architecture, in fp32 with eager attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

HIDDEN, WIDTH, LAYERS, VOCABULARY = 32, 48, 4, 50
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
_GEMMA: dict[str, Any] = {**_COMMON, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama_bias": lambda: LlamaConfig(**_COMMON, mlp_bias=True, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=5),
    "qwen2": lambda: Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen2_sliding": lambda: Qwen2Config(**_COMMON, use_sliding_window=True, sliding_window=4, max_window_layers=2),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=8),
    "gemma": lambda: GemmaConfig(**_COMMON, head_dim=8),
    "gemma2": lambda: Gemma2Config(**_GEMMA),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA),
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A random causal LM of the named architecture; its norms are random too, so that forgetting one shows."""
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(params=list(CONFIGS))
def any_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of each supported architecture in turn."""
    return build(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    """A random Llama of 4 layers, hidden 32, MLP 48."""
    return build("llama")


@pytest.fixture
def ids() -> torch.Tensor:
    """int64 [5, 9]: random ids without special tokens."""
    return torch.randint(3, VOCABULARY, (5, 9), generator=torch.Generator().manual_seed(1))
