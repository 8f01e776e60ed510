"""bos and eos exactly once and after truncation, whatever the tokenizer says (T-003 … T-006); typed specials are
text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, processors

from components.models.tokenizer import text_for_model
from components.text import Text, TextConfig, instruction_prompt


def from_tokenizer(tokenizer: Tokenizer, config: TextConfig | None = None, pad_id: int | None = 0) -> Text:
    return Text.from_tokenizer(tokenizer, config or TextConfig(), bos_id=1, eos_id=2, pad_id=pad_id)


def copied(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.to_str())


def write(folder: Path, tokenizer: Tokenizer, **tokenizer_config: object) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_eos_comes_exactly_once_from_a_llama_tokenizer_that_adds_bos_only(
    tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """T-003: the post-processor adds bos, the config says add_eos_token, library versions disagree about the rest."""
    llama = copied(tiny_tokenizer)
    llama.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    folder = write(
        tmp_path / "llama", llama, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>", add_eos_token=True
    )
    text = text_for_model(folder, TextConfig())
    wanted = plain_ids(tiny_tokenizer, "the lift")
    assert text.documents(["The lift"]) == [[1, *wanted, 2]]
    assert text.prompt("the lift") == [1, *wanted]
    assert text.queries(["the lift"]) == [wanted]


def test_the_eos_is_the_configured_one_not_the_pad_that_the_tokenizer_appends(
    tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """T-004: a Qwen3-like tokenizer whose post-processor appends the pad id."""
    qwen = copied(tiny_tokenizer)
    qwen.post_processor = processors.TemplateProcessing(single="$A <|pad|>", special_tokens=[("<|pad|>", 0)])
    folder = write(tmp_path / "qwen", qwen, eos_token={"content": "<|eos|>"}, pad_token="<|pad|>", bos_token=None)
    with pytest.raises(ValueError, match=r"qwen.*text\.bos=false"):
        text_for_model(folder, TextConfig())
    text = text_for_model(folder, TextConfig(bos=False))
    assert (text.bos_id, text.eos_id, text.pad_id) == (None, 2, 0)
    assert text.documents(["the lift"]) == [[*plain_ids(tiny_tokenizer, "the lift"), 2]]
    assert text.prompt("the lift") == plain_ids(tiny_tokenizer, "the lift")
    text.save(folder)
    assert Text.load(folder).eos_id == 2


def test_without_names_the_ids_of_config_json_are_taken_and_an_unknown_name_is_refused(
    tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = write(tmp_path / "bare", tiny_tokenizer)
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 5]}))
    text = text_for_model(folder, TextConfig())
    assert (text.bos_id, text.eos_id, text.pad_id) == (1, 2, 2)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ValueError, match="eos_token"):
        text_for_model(folder, TextConfig())


def test_a_folder_of_ours_is_read_back_and_must_have_been_made_with_the_same_settings(
    tiny_text: Text, tmp_path: Path
) -> None:
    tiny_text.save(tmp_path)
    assert text_for_model(tmp_path, TextConfig()).fingerprint == tiny_text.fingerprint
    with pytest.raises(ValueError, match="made with text settings"):
        text_for_model(tmp_path, TextConfig(lowercase=False))


def test_truncation_keeps_the_eos(tiny_tokenizer: Tokenizer) -> None:
    """T-006: a text of more than 10 tokens at a limit of 10 is bos, 8 tokens and eos."""
    text = from_tokenizer(tiny_tokenizer, TextConfig(document_max_tokens=10))
    sentence = "buckling of thin cylindrical shells under axial compression, isn't it? 0123456789"
    ids = plain_ids(tiny_tokenizer, sentence)
    assert len(ids) > 20
    assert text.documents([sentence]) == [[1, *ids[:8], 2]]
    without_bos = from_tokenizer(tiny_tokenizer, TextConfig(document_max_tokens=10, bos=False))
    assert without_bos.documents([sentence]) == [[*ids[:9], 2]]


def test_queries_are_cut_without_special_tokens_and_the_instruction_is_never_cut(tiny_tokenizer: Tokenizer) -> None:
    text = from_tokenizer(tiny_tokenizer, TextConfig(query_max_tokens=3))
    sentence = "what is the pressure distribution over a cone"
    ids = plain_ids(tiny_tokenizer, sentence)
    assert text.queries([sentence]) == [ids[:3]]
    assert text.sparse_queries([sentence]) == [plain_ids(tiny_tokenizer, " " + sentence)[:3]]
    prompt = instruction_prompt("Find the passage")
    full = text.full_queries([sentence], prompt)[0]
    instruction = plain_ids(tiny_tokenizer, prompt.lower())
    assert full[0] == 1
    assert full[-1] == 2
    assert full[1 : len(instruction)] == instruction[:-1]
    assert len(full) == len(instruction) + 3 + 2


def test_the_sparse_query_has_a_leading_space_and_the_dense_one_has_not(tiny_text: Text) -> None:
    assert tiny_text.queries(["lift"]) == tiny_text.plain(["lift"])
    assert tiny_text.sparse_queries(["lift"]) == tiny_text.plain([" lift"])
    assert tiny_text.queries(["lift"]) != tiny_text.sparse_queries(["lift"])


@pytest.mark.parametrize("typed", ["<|eos|>", "a <|bos|> b", "<|pad|><|eos|>", "<|EOS|>"])
def test_a_special_token_typed_by_a_user_is_plain_text(tiny_text: Text, typed: str) -> None:
    for ids in (*tiny_text.queries([typed]), *tiny_text.sparse_queries([typed]), tiny_text.documents([typed])[0][1:-1]):
        assert len(ids) > 1
        assert not tiny_text.special_ids & set(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_no_text_produces_a_special_or_unknown_id(text: str) -> None:
    made = _made()
    for ids in (*made.queries([text]), *made.sparse_queries([text])):
        assert made.producible[ids].all()
    document = made.documents([text])[0]
    assert document[0] == 1
    assert document[-1] == 2
    assert document.count(1) == document.count(2) == 1


_MADE: list[Text] = []


def _made() -> Text:
    from tests.conftest import make_tokenizer

    if not _MADE:
        _MADE.append(from_tokenizer(make_tokenizer()))
    return _MADE[0]


def test_all_text_is_lower_cased_in_the_tokenizer_instructions_too(make_pair: Callable[[], tuple[Text, Text]]) -> None:
    lower, cased = make_pair()
    assert lower.prompt("Query: LIFT") == lower.prompt("query: lift")
    assert cased.prompt("Query: LIFT") != cased.prompt("query: lift")
    assert lower.fingerprint != cased.fingerprint


@pytest.fixture
def make_pair(tiny_tokenizer: Tokenizer) -> Callable[[], tuple[Text, Text]]:
    return lambda: (from_tokenizer(tiny_tokenizer), from_tokenizer(tiny_tokenizer, TextConfig(lowercase=False)))


def test_the_vocabulary_reaches_to_the_largest_id_of_added_tokens_and_only_plain_ids_are_producible(
    tiny_tokenizer: Tokenizer,
) -> None:
    extended = copied(tiny_tokenizer)
    extended.add_tokens([AddedToken("<|extra|>", special=True)])
    text = from_tokenizer(extended)
    size = tiny_tokenizer.get_vocab_size()
    assert text.vocabulary_size == size + 1
    assert text.producible.shape == (size + 1,)
    assert np.flatnonzero(~text.producible).tolist() == [0, 1, 2, size]


def test_saving_and_loading_keeps_every_id_and_notices_another_tokenizer(tiny_text: Text, tmp_path: Path) -> None:
    tiny_text.save(tmp_path)
    again = Text.load(tmp_path)
    sentence = "Größe 中文 😀 the LIFT <|eos|>"
    assert again.documents([sentence]) == tiny_text.documents([sentence])
    assert again.fingerprint == tiny_text.fingerprint
    assert (again.special_ids, again.vocabulary_size) == (tiny_text.special_ids, tiny_text.vocabulary_size)
    content = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(content.replace('"Lowercase"', '"NFC"'))
    with pytest.raises(ValueError, match="changed after training"):
        Text.load(tmp_path)


def test_a_tokenizer_without_eos_or_pad_is_refused_with_a_remedy(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"text\.eos=false"):
        Text.from_tokenizer(tiny_tokenizer, TextConfig(), bos_id=1, eos_id=None, pad_id=0)
    with pytest.raises(ValueError, match="neither a pad nor an eos"):
        Text.from_tokenizer(tiny_tokenizer, TextConfig(eos=False), bos_id=1, eos_id=None, pad_id=None)
