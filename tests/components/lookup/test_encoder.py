"""The query encoder against a slow reference that anyone can check, and its behaviour at the edges."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from tokenizers import Tokenizer, models, pre_tokenizers

from components.lookup import QueryBatch, QueryEncoder, save_table
from components.lookup.bag import _sort
from components.lookup.encoder import EMPTY, INVISIBLE, NO_TOKENS
from components.text import Text, TextConfig

HIDDEN = 40
STORAGES = ["float32", "float16", "int8"]
QUERIES = [
    "what is lift", "Heat transfer in a flat plate", "the the the wing", "Größe 中文 😀", "0123 12", "it's 'quoted'",
    "a", " b", "<|bos|> <|eos|>", "flow " * 300, "z" * 400,
]  # fmt: skip


def rows_and_scores(text: Text) -> tuple[dict[str, np.ndarray], np.ndarray]:
    generator = np.random.default_rng(7)
    rows = {name: generator.normal(size=(text.vocabulary_size, HIDDEN)).astype(np.float32) for name in ("web", "facts")}
    scores = generator.gamma(1.0, size=text.vocabulary_size).astype(np.float32)
    scores[::5] = 0
    return rows, np.where(text.producible, scores, 0).astype(np.float32)


@pytest.fixture(scope="module")
def text(tiny_tokenizer: Tokenizer) -> Text:
    return Text.from_tokenizer(tiny_tokenizer, TextConfig(), bos_id=1, eos_id=2, pad_id=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, text: Text) -> dict[str, Path]:
    rows, scores = rows_and_scores(text)
    made = {}
    for storage in STORAGES:
        made[storage] = tmp_path_factory.mktemp(storage)
        save_table(
            made[storage], rows, scores, text, instructions={"web": "", "facts": "Find facts"}, storage=storage,
            model_fingerprint="abc",
        )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def encoders(folders: dict[str, Path]) -> dict[str, QueryEncoder]:
    return {storage: QueryEncoder.load(folder) for storage, folder in folders.items()}


def reference_dense(
    text: Text, table: np.ndarray, query: str, dimensions: int = HIDDEN, unit: bool = True
) -> np.ndarray:
    total = np.zeros(dimensions)
    (ids,) = text.queries([query])
    for token in ids:
        total += table[token, :dimensions].astype(np.float64)
    return total / np.linalg.norm(total) if unit else total / len(ids)


def reference_sparse(text: Text, scores: np.ndarray, query: str) -> list[tuple[int, float]]:
    counts = Counter(text.sparse_queries([query])[0])
    return [(token, counts[token] * float(scores[token])) for token in sorted(counts) if scores[token] != 0]


def sparse_row(batch: QueryBatch, i: int) -> list[tuple[int, float]]:
    part = slice(batch.indptr[i], batch.indptr[i + 1])
    return list(zip(batch.indices[part].tolist(), batch.weights[part].tolist(), strict=True))


def assert_parity(
    encoder: QueryEncoder, text: Text, queries: list[str], storage: str, instruction: str = "web"
) -> None:
    tables, scores = rows_and_scores(text)
    batch = encoder.encode(queries, instruction)
    assert (batch.dense.shape, batch.dense.dtype) == ((len(queries), HIDDEN), np.float32)
    for i, query in enumerate(queries):
        if batch.empty[i] is not None:
            assert not batch.dense[i].any()
            assert sparse_row(batch, i) == []
            continue
        wanted = reference_dense(text, tables[instruction], query)
        if storage == "int8":
            assert batch.dense[i] @ wanted > 0.999
        else:
            np.testing.assert_allclose(batch.dense[i], wanted, atol=5e-6 if storage == "float32" else 1e-3)
        found, sparse = sparse_row(batch, i), reference_sparse(text, scores, query)
        assert [token for token, _ in found] == [token for token, _ in sparse]
        np.testing.assert_allclose([weight for _, weight in found], [weight for _, weight in sparse], rtol=1e-6)


@pytest.mark.parametrize("instruction", ["web", "facts"])
@pytest.mark.parametrize("storage", STORAGES)
def test_parity_with_a_plain_reference(
    encoders: dict[str, QueryEncoder], text: Text, storage: str, instruction: str
) -> None:
    assert_parity(encoders[storage], text, QUERIES, storage, instruction)


@settings(deadline=None, max_examples=100)
@given(queries=st.lists(st.text(), max_size=5))
def test_parity_on_any_text(encoders: dict[str, QueryEncoder], text: Text, queries: list[str]) -> None:
    for storage in STORAGES:
        assert_parity(encoders[storage], text, queries, storage)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_query_is_encoded_alike_alone_and_in_a_batch(encoders: dict[str, QueryEncoder], storage: str) -> None:
    encoder = encoders[storage]
    batch = encoder.encode(QUERIES)
    assert np.array_equal(encoder.encode_dense(QUERIES), batch.dense)
    for i, query in enumerate(QUERIES):
        alone = encoder.encode([query])
        assert np.array_equal(alone.dense[0], batch.dense[i])
        assert sparse_row(alone, 0) == sparse_row(batch, i)


def test_order_and_doubling_change_nothing_and_the_instruction_does(encoders: dict[str, QueryEncoder]) -> None:
    encoder = encoders["float32"]
    dense = encoder.encode_dense([" wing lift", " lift wing", " wing lift wing lift"])
    np.testing.assert_allclose(dense[1:], dense[[0, 0]], atol=1e-6)
    once, twice = encoder.encode(["wing lift"]), encoder.encode(["wing lift wing lift"])
    assert np.array_equal(once.indices, twice.indices)
    np.testing.assert_allclose(twice.weights, 2 * once.weights)
    assert not np.allclose(encoder.encode_dense(["wing"], "web"), encoder.encode_dense(["wing"], "facts"), atol=0.1)


def test_sparse_matrix_and_length(encoders: dict[str, QueryEncoder], text: Text) -> None:
    batch = encoders["float32"].encode(QUERIES)
    assert isinstance(batch.sparse, csr_matrix)
    assert batch.sparse is batch.sparse
    assert batch.sparse.shape == (len(batch), text.vocabulary_size) == (len(QUERIES), text.vocabulary_size)
    assert batch.sparse.has_canonical_format
    assert batch.sparse.dtype == np.float32
    assert dict(sparse_row(batch, 0)) == {
        int(j): float(batch.sparse[0, j]) for j in batch.sparse[0].indices
    }  # columns as in the raw arrays
    assert (batch.indptr.dtype, batch.indices.dtype, batch.weights.dtype) == (np.int64, np.int32, np.float32)


@pytest.mark.parametrize("storage", STORAGES)
def test_queries_that_show_nothing_are_zero_and_say_why(encoders: dict[str, QueryEncoder], storage: str) -> None:
    batch = encoders[storage].encode(["", "   ", "\u200b", "lift", "\n\t\x00"])
    assert batch.empty == [EMPTY, INVISIBLE, INVISIBLE, None, INVISIBLE]
    assert np.isfinite(batch.dense).all()
    assert np.abs(batch.dense[[0, 1, 2, 4]]).max() == 0
    assert np.linalg.norm(batch.dense[3]) == pytest.approx(1, abs=1e-6)
    assert np.diff(batch.indptr)[[0, 1, 2, 4]].tolist() == [0, 0, 0, 0]


def test_no_queries(encoders: dict[str, QueryEncoder]) -> None:
    batch = encoders["float32"].encode([])
    assert (batch.dense.shape, batch.indptr.tolist(), batch.empty, batch.sparse.shape[0]) == ((0, HIDDEN), [0], [], 0)


def test_a_query_without_tokens_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "e": 2}, []))  # drops every other character
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text = Text.from_tokenizer(tokenizer, TextConfig(bos=False), bos_id=None, eos_id=2, pad_id=None)
    rows = np.array([[3, 4], [-3, -4], [0, 0]], dtype=np.float32)
    save_table(
        tmp_path, {"x": rows}, np.ones(3), text, instructions={"x": ""}, storage="float32", model_fingerprint="f"
    )
    batch = QueryEncoder.load(tmp_path).encode(["zzz", "a", "ab"])
    assert batch.empty == [NO_TOKENS, None, None]
    np.testing.assert_allclose(batch.dense, [[0, 0], [0.6, 0.8], [0, 0]], atol=1e-7)  # the rows of "ab" cancel
    assert batch.sparse.toarray().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("storage", STORAGES)
def test_matryoshka_cuts_before_it_normalises(folders: dict[str, Path], text: Text, storage: str) -> None:
    tables, _ = rows_and_scores(text)
    dense = QueryEncoder.load(folders[storage], dimensions=16).encode_dense(QUERIES)
    assert dense.shape == (len(QUERIES), 16)
    for vector, query in zip(dense, QUERIES, strict=True):
        assert vector @ reference_dense(text, tables["web"], query, 16) > 0.999
    for wrong in (0, HIDDEN + 1):
        with pytest.raises(ValueError, match=f"dimensions is {wrong}; the table has 1 to {HIDDEN}"):
            QueryEncoder.load(folders[storage], dimensions=wrong)


def test_normalize_is_stored_and_an_override_wins_and_is_logged(
    tmp_path: Path, text: Text, caplog: pytest.LogCaptureFixture
) -> None:
    tables, scores = rows_and_scores(text)
    save_table(
        tmp_path, {"web": tables["web"]}, scores, text, instructions={"web": ""}, storage="float32", normalize=False,
        model_fingerprint="abc",
    )  # fmt: skip
    query = "what is lift"
    with caplog.at_level(logging.INFO):
        plain = QueryEncoder.load(tmp_path).encode_dense([query])[0]
    assert "normalize" not in caplog.text
    np.testing.assert_allclose(plain, reference_dense(text, tables["web"], query, unit=False), atol=1e-6)
    with caplog.at_level(logging.INFO):
        unit = QueryEncoder.load(tmp_path, normalize=True).encode_dense([query])[0]
    assert "normalize=True overrides the table's own setting, False" in caplog.text
    np.testing.assert_allclose(unit, reference_dense(text, tables["web"], query), atol=1e-6)


def test_errors_name_what_was_wrong(encoders: dict[str, QueryEncoder]) -> None:
    encoder = encoders["float32"]
    with pytest.raises(TypeError, match=r"queries\[1\]: found bytes, wanted str"):
        encoder.encode(["a", b"b"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="found one string"):
        encoder.encode("lift")
    with pytest.raises(ValueError, match=r"instruction: found 'nope', wanted one of \['facts', 'web'\]"):
        encoder.encode(["a"], "nope")


def test_threads_share_one_encoder(encoders: dict[str, QueryEncoder]) -> None:
    encoder = encoders["int8"]
    wanted = encoder.encode(QUERIES)
    same: list[bool] = []

    def work() -> None:
        for _ in range(50):
            batch = encoder.encode(QUERIES)
            same.append(np.array_equal(batch.dense, wanted.dense) and np.array_equal(batch.weights, wanted.weights))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 300


@settings(deadline=None)
@given(values=st.lists(st.integers(0, 50), max_size=600), start=st.integers(0, 3))
def test_sort(values: list[int], start: int) -> None:
    array = np.array([*[99] * start, *values, -1], dtype=np.int32)
    _sort(array, start, start + len(values))
    assert array.tolist() == [*[99] * start, *sorted(values), -1]
