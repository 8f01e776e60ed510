"""Fixtures shared by all tests: a tiny random Llama, its tokenizer, and one Ray cluster for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from components.text import Text, TextConfig

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
os.environ.setdefault("RAY_DEDUP_LOGS", "1")

SENTENCES = [
    "the lift of a wing in a slipstream depends on the angle of attack",
    "heat transfer in the laminar boundary layer of a flat plate",
    "what is the pressure distribution over a cone at supersonic speed",
    "buckling of thin cylindrical shells under axial compression",
    "an experimental study of the flow past a body of revolution",
    "0123456789 the quick brown fox jumps over the lazy dog, isn't it? Größe 中文 😀",
]
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>"]


def make_tokenizer(vocabulary: int = 400) -> Tokenizer:
    """A byte-level BPE tokenizer (GPT-2's split) with pad 0, bos 1 and eos 2, trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of 400 tokens or fewer (see `make_tokenizer`)."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_text(tiny_tokenizer: Tokenizer) -> Text:
    """The `Text` of the tiny tokenizer, lower-casing, with bos and eos."""
    return Text.from_tokenizer(tiny_tokenizer, TextConfig(), bos_id=1, eos_id=2, pad_id=0)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    """A random Llama (4 layers, hidden 32, MLP 64, tied embeddings, 8 phantom vocabulary rows) with its tokenizer on disk."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny_tokenizer.get_vocab_size() + 8, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|eos|>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray cluster of 2 CPUs for every test that needs Ray; shut down at the end whatever happens."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()
