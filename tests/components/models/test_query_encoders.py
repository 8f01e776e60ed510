"""Packed and distinct forms equal separate forward passes of `[bos] instruction t eos` (spec invariants 1 and 3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from components.models.attention import additive_mask, pack_tokens, packed_visible
from components.models.backbone import last_hidden, load_causal_lm
from components.models.config import RetrieverConfig
from components.models.query_encoders import (
    bag_vectors,
    packed_queries,
    packed_rows,
    query_vectors,
    token_bags,
    token_rows,
)
from components.text import Text, TextConfig, instruction_prompt

QUERIES = [[30, 40, 30, 50], [60], [], [40, 41, 42, 43, 44, 45, 46], [50, 50]]
PACKED = RetrieverConfig()


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, tiny_model_folder: Path) -> torch.nn.Module:
    return load_causal_lm(tiny_model_folder, "float32", request.param)


def separate(model: torch.nn.Module, prompt: list[int], token: int, eos: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, token, *eos]])
    return model(ids, output_hidden_states=True).hidden_states[-1][0, -1]


def test_visible_is_the_published_mask() -> None:
    prompt, blocks, width = 3, 2, 2
    length = prompt + blocks * width
    for q in range(length):
        for k in range(length):
            same = q >= prompt and k >= prompt and (q - prompt) // width == (k - prompt) // width and k <= q
            wanted = (q < prompt and k <= q) or (q >= prompt and k < prompt) or same
            assert packed_visible(prompt, blocks, width)[q, k] == wanted


def test_packing_restarts_positions_and_gives_padding_only_itself() -> None:
    packed = pack_tokens([[7, 8], [9]], [1, 5], eos_id=2, pad_id=0, dtype=torch.float32)
    assert packed.ids.tolist() == [[1, 5, 7, 2, 8, 2], [1, 5, 9, 2, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 2, 3]] * 2
    assert packed.pooled.tolist() == [[3, 5]] * 2
    assert packed.valid.tolist() == [[True, True], [True, False]]
    assert (packed.mask[1, 0, 4] == 0).nonzero()[:, 0].tolist() == [4]
    assert not (packed.mask[1, 0, :4, 4:] == 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mask_is_finite_after_autocast_narrows_it(dtype: torch.dtype) -> None:
    mask = additive_mask(torch.zeros(1, 2, 2, dtype=torch.bool), dtype)
    assert torch.isfinite(mask).all()
    assert dtype == torch.float16 or torch.isfinite(mask.to(torch.bfloat16)).all()


@pytest.mark.parametrize("instruction", ["", instruction_prompt("find the passage")])
@pytest.mark.parametrize("config", [TextConfig(), TextConfig(bos=False), TextConfig(eos=False)])
@torch.no_grad()
def test_both_forms_equal_separate_passes(
    model: torch.nn.Module, make_text: Callable[..., Text], instruction: str, config: TextConfig
) -> None:
    text = make_text(config)
    prompt, eos = text.prompt(instruction), [2] if config.eos else []
    wanted = {token: separate(model, prompt, token, eos) for query in QUERIES for token in query}
    found = packed_queries(model, QUERIES, prompt, text)
    assert found.ids == [token for query in QUERIES for token in query]
    for row, token in zip(found.rows, found.ids, strict=True):
        assert torch.allclose(row, wanted[token], atol=1e-5)
    ids = torch.tensor(sorted(wanted))
    for blocks, sequences in ((128, 8), (3, 2), (1, 1), (4, 8)):
        rows = packed_rows(model, ids, prompt, text, blocks=blocks, sequences=sequences)
        assert torch.allclose(rows, torch.stack([wanted[i] for i in ids.tolist()]), atol=1e-5)
    for form in ("distinct", "sequence"):
        config_of_form = RetrieverConfig(packed_form=form)
        vectors = query_vectors(model, QUERIES, text=text, config=config_of_form, prompt=prompt)
        for vector, query in zip(vectors, QUERIES, strict=True):
            if query:
                mean = torch.stack([wanted[token] for token in query]).mean(dim=0)
                assert torch.allclose(vector, normalize(mean, dim=0), atol=1e-5)
            else:
                assert vector.abs().sum() == 0


def test_both_forms_have_the_gradient_of_separate_passes(tiny_model_folder: Path, tiny_text: Text) -> None:
    model = load_causal_lm(tiny_model_folder, "float32", "sdpa")
    queries, prompt = [[30, 40, 30], [50]], tiny_text.prompt("query:")
    target = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))

    def gradient(vectors: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        (vectors * target).sum().backward()
        return model.model.layers[1].self_attn.k_proj.weight.grad.clone()

    means = [torch.stack([separate(model, prompt, token, [2]) for token in query]).mean(dim=0) for query in queries]
    wanted = gradient(normalize(torch.stack(means), dim=1))
    for form in ("distinct", "sequence"):
        found = gradient(
            query_vectors(model, queries, text=tiny_text, config=RetrieverConfig(packed_form=form), prompt=prompt)
        )
        assert torch.allclose(found, wanted, atol=1e-4)
    checkpointed = packed_rows(model, torch.tensor([30, 40, 50]), prompt, tiny_text, blocks=1, sequences=1)
    assert torch.allclose(gradient(bag_vectors(checkpointed, token_bags(queries))), wanted, atol=1e-4)


@torch.no_grad()
def test_order_and_doubling_change_nothing_and_the_instruction_does(model: torch.nn.Module, tiny_text: Text) -> None:
    query = [30, 40, 50, 30]

    def vector(ids: list[int], instruction: str) -> torch.Tensor:
        return query_vectors(model, [ids], text=tiny_text, config=PACKED, prompt=tiny_text.prompt(instruction))[0]

    assert torch.allclose(vector(query, "find:"), vector(query[::-1], "find:"), atol=1e-6)
    assert torch.allclose(vector(query, "find:"), vector(query * 2, "find:"), atol=1e-6)
    assert not torch.allclose(vector(query, "find:"), vector(query, "answer:"), atol=1e-2)


@torch.no_grad()
def test_head_and_embedding_rows_are_the_stated_formulas(model: torch.nn.Module, tiny_text: Text) -> None:
    ids, size = torch.tensor([30, 31]), tiny_text.vocabulary_size
    producible = torch.from_numpy(tiny_text.producible)
    idf = torch.rand(size)
    head, embedding = model.lm_head.weight[:size], model.model.embed_tokens.weight[:size]
    rows = token_rows(model, ids, text=tiny_text, config=RetrieverConfig(query_dense="head"), weights=idf)
    assert torch.allclose(rows, (head[ids] - head[producible].mean(dim=0)) * idf[ids][:, None], atol=1e-6)
    rows = token_rows(model, ids, text=tiny_text, config=RetrieverConfig(query_dense="embedding"))
    assert torch.equal(rows, embedding[ids])
    rows = token_rows(model, ids, text=tiny_text, config=RetrieverConfig(query_dense="embedding", center=True))
    assert torch.allclose(rows, embedding[ids] - embedding[producible].mean(dim=0), atol=1e-6)


@torch.no_grad()
def test_weights_scale_rows_in_every_form(model: torch.nn.Module, tiny_text: Text) -> None:
    idf = torch.rand(tiny_text.vocabulary_size) + 0.5
    prompt = tiny_text.prompt("")
    wanted = torch.stack([separate(model, prompt, t, [2]) * idf[t] for t in QUERIES[0]]).sum(dim=0)
    for form in ("distinct", "sequence"):
        config = RetrieverConfig(packed_form=form, query_weights="idf")
        found = query_vectors(model, QUERIES[:1], text=tiny_text, config=config, prompt=prompt, weights=idf)[0]
        assert torch.allclose(found, normalize(wanted, dim=0), atol=1e-5)


def test_a_batch_of_queries_stays_indices_and_never_becomes_a_matrix_of_the_vocabulary() -> None:
    bags = token_bags([[149_999, 7, 7], [], [7]])
    assert bags.ids.tolist() == [7, 149_999]
    assert bags.index.tolist() == [1, 0, 0, 0]
    assert bags.query.tolist() == [0, 0, 0, 2]
    assert bags.counts.tolist() == [3, 0, 1]


@torch.no_grad()
def test_an_empty_batch_has_empty_rows(model: torch.nn.Module, tiny_text: Text) -> None:
    assert packed_rows(model, torch.tensor([], dtype=torch.int64), [1], tiny_text).shape == (0, 32)
    assert query_vectors(model, [[]], text=tiny_text, config=PACKED, prompt=[1]).abs().sum() == 0


@torch.no_grad()
def test_last_hidden_skips_the_head_and_equals_the_full_model(model: torch.nn.Module) -> None:
    ids = torch.tensor([[1, 30, 40, 2]])
    wanted = model(ids, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(last_hidden(model, ids, torch.ones_like(ids)), wanted, atol=1e-6)
