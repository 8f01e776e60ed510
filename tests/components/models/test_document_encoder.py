"""Documents: the vectors are the stated formulas, and no vector depends on padding, batch, side or attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from components.models.backbone import load_causal_lm
from components.models.config import RetrieverConfig
from components.models.document_encoder import (
    DocumentEncoder,
    Encoded,
    full_query_vectors,
    sparse_rows,
    text_states,
    token_batches,
)
from components.models.lexical import LexicalPrior
from components.models.pooling import pool
from components.models.retriever import Extras, Retriever, save_retriever
from components.text import Text, TextConfig, instruction_prompt

TEXTS = [
    "The lift of a wing",
    "",
    "heat transfer in the laminar boundary layer of a flat plate, and more of it: buckling of thin cylindrical shells",
    "wing",
    "Größe 中文 😀 " * 9,
]


@pytest.fixture
def make_encoder(tiny_model_folder: Path, tiny_text: Text) -> Callable[..., DocumentEncoder]:
    def make(dtype: str = "float32", attention: str = "sdpa", text: Text = tiny_text, **config: Any) -> DocumentEncoder:
        generator = np.random.default_rng(0)
        extras = Extras(
            token_scores=np.ones(text.vocabulary_size, np.float32),
            center=generator.normal(size=32).astype(np.float32),
            average_length=12.0,
        )
        model = load_causal_lm(tiny_model_folder, dtype, attention)
        return DocumentEncoder(Retriever(model, text, RetrieverConfig(**config), extras, "mark"))

    return make


def row(encoded: Encoded, number: int) -> np.ndarray:
    """float32 [V] of one sparse row."""
    values = np.zeros(400, np.float32)
    span = slice(encoded.sparse.indptr[number], encoded.sparse.indptr[number + 1])
    values[encoded.sparse.ids[span]] = encoded.sparse.weights[span]
    return values


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["eos", "mean"])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("activation", ["log1p_relu", "probability_root", "log_probability"])
def test_vectors_are_the_stated_formulas(
    make_encoder: Callable[..., DocumentEncoder], pooling: str, center: bool, activation: str
) -> None:
    encoder = make_encoder(pooling=pooling, center=center, sparse_activation=activation)
    found = encoder.encode_texts(TEXTS, batch_tokens=64)
    assert found.dense.dtype == found.sparse.weights.dtype == np.float32
    assert found.sparse.ids.dtype == np.int32
    size = encoder.text.vocabulary_size
    for number, ids in enumerate(encoder.text.documents(TEXTS)):
        if len(ids) == 2:
            assert not found.dense[number].any()
            assert not row(found, number).any()
            continue
        hidden = encoder.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        raw = hidden[-1] if pooling == "eos" else hidden[1:-1].mean(dim=0)
        raw = raw - torch.from_numpy(encoder.extras.center) if center else raw
        assert np.allclose(found.dense[number], normalize(raw, dim=0), atol=1e-5)
        logits = hidden[1:-1] @ encoder.model.lm_head.weight[:size].T
        values = {
            "log1p_relu": lambda z=logits: z.relu().log1p(),
            "probability_root": lambda z=logits: z.softmax(-1).sqrt(),
            "log_probability": lambda z=logits: (z.log_softmax(-1) + 8).relu() / 8,
        }[activation]().amax(dim=0)
        values[~torch.from_numpy(encoder.text.producible)] = 0
        assert np.allclose(row(found, number)[:size], values, atol=1e-5)


@pytest.mark.parametrize("pooling", ["eos", "mean"])
def test_a_vector_does_not_depend_on_its_batch_or_its_order(
    make_encoder: Callable[..., DocumentEncoder], pooling: str
) -> None:
    encoder = make_encoder(pooling=pooling, sparse_activation="log_probability", lexical_weight=0.5)
    alone = [encoder.encode([text]) for text in TEXTS]
    for budget in (8, 64, 4096):
        together = encoder.encode_texts(TEXTS, budget)
        for number, single in enumerate(alone):
            assert np.allclose(together.dense[number], single.dense[0], atol=1e-5)
            assert np.allclose(row(together, number), row(single, 0), atol=1e-5)
    backwards = encoder.encode_texts(TEXTS[::-1], 64)
    assert np.allclose(backwards.dense[::-1], together.dense, atol=1e-5)


def test_eager_and_sdpa_agree(make_encoder: Callable[..., DocumentEncoder]) -> None:
    """T-008."""
    sdpa, eager = (make_encoder(attention=name).encode(TEXTS) for name in ("sdpa", "eager"))
    assert np.allclose(sdpa.dense, eager.dense, atol=1e-4)
    assert np.allclose(row(sdpa, 2), row(eager, 2), atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pooling", ["eos", "mean"])
@torch.no_grad()
def test_left_and_right_padding_give_the_vector_of_the_text_alone(
    make_encoder: Callable[..., DocumentEncoder], attention: str, pooling: str
) -> None:
    """T-001, T-007, T-009: two texts of 2 and 5 content tokens; both sides; a batch of one; no NaN from padded rows."""
    encoder = make_encoder(attention=attention)
    rows = [[1, 30, 40, 2], [1, 50, 51, 52, 53, 54, 2]]
    states = []
    for side in ("left", "right"):
        batch, mask = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.bool)
        for number, ids in enumerate(rows):
            span = slice(7 - len(ids), 7) if side == "left" else slice(0, len(ids))
            batch[number, span], mask[number, span] = torch.tensor(ids), True
        found = text_states(encoder.model, batch, mask, encoder.text)
        assert torch.isfinite(found.hidden).all()
        states.append(pool(found.hidden, found.mask, found.content, pooling))
    alone = []
    for ids in rows:
        single = text_states(
            encoder.model, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), encoder.text
        )
        alone.append(pool(single.hidden, single.mask, single.content, pooling))
    for found in states:
        assert torch.allclose(found, torch.cat(alone), atol=1e-5)


def test_a_bfloat16_model_gives_float32_arrays(make_encoder: Callable[..., DocumentEncoder]) -> None:
    """T-012."""
    half, full = make_encoder("bfloat16").encode(TEXTS), make_encoder("float32").encode(TEXTS)
    assert half.dense.dtype == half.sparse.weights.dtype == np.float32
    assert np.allclose(half.dense, full.dense, atol=0.1)
    assert np.allclose(np.linalg.norm(half.dense[[0, 2, 3, 4]], axis=1), 1, atol=1e-6)


def replace_states(encoder: DocumentEncoder, token: int, state: torch.Tensor) -> None:
    """From now on the encoder's last state is `state` wherever the input is `token`."""
    base: Any = encoder.model.base_model
    plain = base.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.last_hidden_state[kwargs["input_ids"] == token] = state
        return output

    base.forward = forward


def test_a_loud_bos_does_not_make_all_documents_alike(make_encoder: Callable[..., DocumentEncoder]) -> None:
    """T-037: the state of bos points to one term so strongly that pooling it would decide every vector."""
    encoder = make_encoder(sparse_activation="log_probability", log_probability_shift=3.0)
    replace_states(encoder, 1, 100 * encoder.model.get_output_embeddings().weight[77].detach())  # type: ignore[index, operator, union-attr]
    found = encoder.encode(["wing", "heat transfer"])
    one, other = row(found, 0), row(found, 1)
    assert one[77] < 0.9
    assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) < 0.5


def test_ids_without_bos_or_eos_are_refused(make_encoder: Callable[..., DocumentEncoder]) -> None:
    encoder = make_encoder()
    for ids in ([30, 40, 2], [1, 30, 40], []):
        with pytest.raises(ValueError, match="row 1 of the batch"):
            encoder.encode_ids([[1, 30, 2], ids])


def test_nan_states_are_an_error_that_names_the_row(make_encoder: Callable[..., DocumentEncoder]) -> None:
    encoder = make_encoder()
    replace_states(encoder, 50, torch.full((32,), float("nan")))
    with pytest.raises(FloatingPointError, match="row 1 of the batch"):
        encoder.encode_ids([[1, 30, 2], [1, 50, 2]])


def test_the_lexical_prior_is_added_from_the_untruncated_document(
    make_encoder: Callable[..., DocumentEncoder], tiny_tokenizer: Any
) -> None:
    short = Text.from_tokenizer(tiny_tokenizer, TextConfig(document_max_tokens=6), bos_id=1, eos_id=2, pad_id=0)
    without, with_prior = make_encoder(text=short), make_encoder(text=short, lexical_weight=0.5)
    full = short.plain(TEXTS)
    prior = LexicalPrior(short, with_prior.config, 12.0)
    found, base = with_prior.encode(TEXTS), without.encode(TEXTS)
    for number, ids in enumerate(full):
        wanted = row(base, number)
        terms, weights = prior.weights(ids)
        wanted[terms] += 0.5 * weights
        assert np.allclose(row(found, number), wanted, atol=1e-5)
    assert set(full[2]) <= set(np.flatnonzero(row(found, 2)))


def test_top_k_and_min_weight_prune_rows_with_ties_to_the_smaller_id() -> None:
    values = np.array([[0, 0.5, 0.2, 0.5, 0.1, 0.5], [0, 0, 0, 0, 0, 0.1], [0] * 6], dtype=np.float32)
    everything = sparse_rows(values)
    assert everything.indptr.tolist() == [0, 5, 6, 6]
    assert everything.ids.tolist() == [1, 2, 3, 4, 5, 5]
    top = sparse_rows(values, top_k=2)
    assert top.indptr.tolist() == [0, 2, 3, 3]
    assert top.ids.tolist() == [1, 3, 5]
    assert sparse_rows(values, top_k=4).ids.tolist() == [1, 2, 3, 5, 5]
    assert sparse_rows(values, min_weight=0.2).ids.tolist() == [1, 2, 3, 5]
    nothing = sparse_rows(np.zeros((0, 6), np.float32))
    assert (nothing.indptr.tolist(), nothing.ids.dtype, nothing.weights.dtype) == ([0], np.int32, np.float32)


def test_batches_keep_to_the_token_budget_and_hold_every_row_once() -> None:
    lengths = [3, 100, 7, 7, 2, 50, 1]
    batches = token_batches(lengths, 52)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert batches[0] == [1]
    for batch in batches[1:]:
        assert max(lengths[i] for i in batch) * len(batch) <= 52
    assert token_batches([], 10) == []


def test_encoding_nothing_gives_empty_arrays(make_encoder: Callable[..., DocumentEncoder]) -> None:
    found = make_encoder().encode([])
    assert found.dense.shape == (0, 32)
    assert found.sparse.indptr.tolist() == [0]


def test_a_saved_folder_encodes_the_same(make_encoder: Callable[..., DocumentEncoder], tmp_path: Path) -> None:
    encoder = make_encoder(center=True, lexical_weight=0.3, top_k_terms=20, pooling="mean")
    save_retriever(tmp_path / "model", encoder.retriever.model, encoder.text, encoder.config, encoder.extras)
    again = DocumentEncoder.load(tmp_path / "model")
    assert again.config == encoder.config
    one, other = encoder.encode(TEXTS), again.encode(TEXTS)
    assert np.array_equal(one.dense, other.dense)
    assert all(np.array_equal(a, b) for a, b in zip(one.sparse, other.sparse, strict=True))


@torch.no_grad()
def test_raw_pooled_vectors_are_what_a_center_is_made_of(make_encoder: Callable[..., DocumentEncoder]) -> None:
    encoder = make_encoder(pooling="mean")
    raw = encoder.pooled(TEXTS, 64)
    assert not raw[1].any()
    assert np.allclose(
        raw[[0, 2]] / np.linalg.norm(raw[[0, 2]], axis=1, keepdims=True), encoder.encode(TEXTS).dense[[0, 2]], atol=1e-5
    )


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["eos", "mean"])
def test_the_full_query_goes_through_the_document_path(
    make_encoder: Callable[..., DocumentEncoder], pooling: str
) -> None:
    encoder = make_encoder(pooling=pooling)
    prompt = instruction_prompt("find the passage")
    queries = ["the lift of a wing", "heat"]
    found = full_query_vectors(encoder.model, queries, text=encoder.text, config=encoder.config, instruction=prompt)
    for vector, ids in zip(found, encoder.text.full_queries(queries, prompt), strict=True):
        hidden = encoder.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        before = 1 + len(encoder.text.plain([prompt.rstrip()])[0])
        raw = hidden[-1] if pooling == "eos" else hidden[before:-1].mean(dim=0)
        assert torch.allclose(vector, normalize(raw, dim=0), atol=1e-5)
    bare = full_query_vectors(encoder.model, ["wing"], text=encoder.text, config=encoder.config)
    assert np.allclose(bare, encoder.encode(["wing"]).dense, atol=1e-5)
