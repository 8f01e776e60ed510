"""TokenMemo gives the ids of the tokenizer on any text, whatever its split pattern, and stays within its memory."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from components.lookup.bpe import byte_characters
from components.lookup.split import CLASSIFIED, GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN, piece_end
from components.lookup.tokens import MEMOS_KEPT, TokenBatch, TokenMemo
from components.text import Text, TextConfig

SENTENCES = [
    "the lift of a wing in a slipstream depends on the angle of attack, isn't it? we'll see; they're 12345 of 678",
    "what is the pressure distribution over a cone at supersonic speed?!... hello hello  world\n\n  end",
    "two  spaces   three  4   5\n\n6\n\n \n x\t\ty  ...  !!  --  ''  '' pressure pressure distribution distribution",
    "Größe naïve café 中文 中文 日本語 한국어 привет мир γειά σου κόσμος 😀😀 عربى 42 ٤٢",
]
FRAGMENTS = [
    "'s", "'S", "'ſ", "'ll", "'Ll", "'RE", "''", "'", " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "0", "7", "12345",
    "a", "word", "The", "é", "e\u0301", "É", "İ", "i̇", "Σ", "ΑΣ", "ὈΔΥΣΣΕΎΣ", "ς", "ǅ", "K", "Å", "ſ", "ﬆ", "ß", "²",
    "½", "٣", "Ⅻ", "１", "中文", "日", "한국", "ｱ", "😀", "👨\u200d👩\u200d👧", "🏴\U000e0067\U000e007f",
    "\u200b", "\u200d", "\ufeff", "\x00", "\x0b", "\x0c", "\x1c", "\x1f", "\x7f", "\x85", "\xa0", "\u2028",
    "\u3000", "<|bos|>", "<|eos|>", "<|pad|>", "<|endoftext|>", "!", "...", "_", "-", "\u0378", "\ue000",
    "\U00030000", "\U000e0001", "\U0010ffff", "xyzzy", " slipstreams", "x" * 47, "x" * 49, "中" * 90, "y" * 300,
]  # fmt: skip


def train(split: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|pad|>", "<|bos|>", "<|eos|>"],
    )  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


def byte_level(regex: bool, prefix: bool = False) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def split_by(pattern: str, behavior: str = "isolated", invert: bool = False) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior, invert)
    return pre_tokenizers.Sequence([split, byte_level(False)])


def changed(tokenizer: Tokenizer, change: Callable[[dict], None]) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    change(state["model"])
    return Tokenizer.from_str(json.dumps(state))


def ignore_merges(model: dict) -> None:
    model["ignore_merges"] = True
    size = max(model["vocab"].values()) + 1
    model["vocab"] |= {"xyzzy": size, "Ġslipstreams": size + 1, "ä¸Ńæĸĩ": size + 2}  # 中文


def without_bytes(model: dict) -> None:
    """As SmolLM2: some bytes, here 0xF0 (of every emoji) and `!`, are not in the vocabulary."""
    for character in ("ð", "!"):
        del model["vocab"][character]
    model["merges"] = [pair for pair in model["merges"] if not {*"ð!"} & {*"".join(pair)}]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if not {*"ð!"} & {*token}}


def as_text(tokenizer: Tokenizer, **config: object) -> Text:
    return Text.from_tokenizer(tokenizer, TextConfig.model_validate(config), bos_id=1, eos_id=2, pad_id=0)


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)])
EXACT = {
    "gpt2": lambda: as_text(train(byte_level(True))),
    "gpt2-cased": lambda: as_text(train(byte_level(True)), lowercase=False),
    "gpt2-as-split": lambda: as_text(train(split_by(GPT2_PATTERN))),
    "smollm": lambda: as_text(changed(train(DIGITS), without_bytes)),
    "llama3": lambda: as_text(changed(train(split_by(LLAMA3_PATTERN)), ignore_merges)),
    "llama3-cased": lambda: as_text(train(split_by(LLAMA3_PATTERN, "removed", True)), lowercase=False),
    "qwen": lambda: as_text(train(split_by(QWEN_PATTERN), normalizers.NFC())),
    "qwen-cased": lambda: as_text(
        train(split_by(QWEN_PATTERN), normalizers.Sequence([normalizers.NFC()])), lowercase=False
    ),
}
FALLBACK = {
    "prefix-space": lambda: as_text(train(byte_level(True, prefix=True))),
    "other-pattern": lambda: as_text(train(split_by(r"\p{L}+|\p{N}+|[^\p{L}\p{N}]+"))),
    "nfkc": lambda: as_text(train(byte_level(True), normalizers.NFKC())),
    "metaspace": lambda: as_text(train(pre_tokenizers.Metaspace())),
}
TEXTS = {name: make() for name, make in (EXACT | FALLBACK).items()}
MEMOS = {name: TokenMemo(text) for name, text in TEXTS.items()}


def rows(ids: np.ndarray, offsets: np.ndarray) -> list[list[int]]:
    return [ids[offsets[i] : offsets[i + 1]].tolist() for i in range(len(offsets) - 1)]


def assert_equal(memo: TokenMemo, text: Text, queries: Sequence[str]) -> TokenBatch:
    batch = memo(queries)
    assert rows(batch.dense_ids, batch.dense_offsets) == text.queries(queries)
    assert rows(batch.sparse_ids, batch.sparse_offsets) == text.sparse_queries(queries)
    assert (batch.dense_ids.dtype, batch.dense_offsets.dtype) == (np.int32, np.int64)
    assert (batch.sparse_ids.dtype, batch.sparse_offsets.dtype) == (np.int32, np.int64)
    return batch


any_text = st.one_of(st.text(), st.text(st.characters(max_codepoint=0x24F, exclude_categories=["Cs"])))
any_fragments = st.lists(st.one_of(st.sampled_from(FRAGMENTS), any_text)).map("".join)
queries_of = st.lists(st.one_of(any_text, any_fragments), max_size=6)


@pytest.mark.parametrize("name", [*EXACT, *FALLBACK])
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(queries=queries_of)
def test_ids_equal_the_tokenizers_on_any_text(name: str, queries: list[str]) -> None:
    memo = MEMOS[name]
    assert memo.exact == (name in EXACT)
    assert_equal(memo, TEXTS[name], queries)
    assert_equal(memo, TEXTS[name], queries)  # from the memo, and with the new characters known


@pytest.mark.parametrize("name", EXACT)
def test_every_pair_of_fragments(name: str) -> None:
    queries = [first + second for first in FRAGMENTS for second in FRAGMENTS]
    queries += [f"a{first}1 {first} {first}a" for first in FRAGMENTS]
    assert_equal(MEMOS[name], TEXTS[name], queries)
    assert_equal(MEMOS[name], TEXTS[name], queries)


def pieces(memo: TokenMemo, query: str) -> list[int]:
    """Where each piece of the normalised query ends, in bytes, as far as the kernel is certain."""
    content = np.frombuffer(query.encode(), np.uint8)
    ends, at = [], 0
    while at < len(content):
        rules = memo._rules
        at = piece_end(content, at, len(content), memo._classes.table, rules.llama, rules.number_run)
        if at < 0:
            break
        ends.append(at)
    return ends


@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None, max_examples=200)
@given(query=any_fragments)
def test_pieces_end_where_the_pre_tokenizer_ends_them(name: str, query: str) -> None:
    """Sharper than equal ids: a wrong boundary shows even where the vocabulary has no merge across it."""
    memo, tokenizer = MEMOS[name], TEXTS[name].tokenizer
    query = tokenizer.normalizer.normalize_str(query) if tokenizer.normalizer is not None else query
    memo._classes.learn(query)
    wanted = np.cumsum([len(piece) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(query)]).tolist()
    found = pieces(memo, query)
    assert found == wanted[: len(found)]
    assert len(found) == len(wanted) or "ſ" in query or max(map(ord, query)) >= CLASSIFIED


def check_code_points(name: str, points: range) -> None:
    queries = [f"a{c}1{c} {c}'{c}s{c}{c}" for c in map(chr, points) if not 0xD800 <= ord(c) < 0xE000]
    assert_equal(MEMOS[name], TEXTS[name], queries)
    assert_equal(MEMOS[name], TEXTS[name], queries)


@pytest.mark.parametrize("name", ["smollm", "llama3-cased", "qwen"])
def test_code_points_in_every_neighbourhood(name: str) -> None:
    check_code_points(name, range(0x3000))
    check_code_points(name, range(0x3000, 0x110000, 251))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm", "llama3", "qwen"])
def test_every_classified_code_point(name: str) -> None:
    for start in range(0, CLASSIFIED, 0x4000):
        check_code_points(name, range(start, start + 0x4000))


def test_characters_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXTS["gpt2"]
    memo = TokenMemo(text)
    assert_equal(memo, text, ["漢字 and", "kana かな"])
    monkeypatch.setattr(memo, "_by_tokenizer", lambda queries: pytest.fail(f"asked the tokenizer for {queries}"))
    assert_equal(memo, text, ["漢字 and more", "plain"])


@pytest.mark.parametrize("name", EXACT)
def test_only_hard_queries_go_to_the_tokenizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    memo = TokenMemo(TEXTS[name])
    original = memo._by_tokenizer
    monkeypatch.setattr(memo, "_by_tokenizer", lambda queries: asked.extend(queries) or original(queries))
    easy = ["what's lift?", "", "  two  spaces \n", "naïve café – “quoted”", "12,345 m/s", "'tis 'S", "α-helix"]
    hard = ["z" * 257, "flag \U000e0067"]
    easy = [query for query in easy if "!" not in query]
    assert_equal(memo, TEXTS[name], [easy[0], hard[0], *easy[1:], hard[1]])
    assert asked == hard


def test_truncation_is_that_of_text() -> None:
    tokenizers = [train(byte_level(True)), train(split_by(LLAMA3_PATTERN))]
    queries = ["", "one two three four", "'store of value and more", "x" * 300 + " end", "a" * 40 + " 中" * 30, " lead"]
    queries += [
        "pressure distribution over a cone",
        "distribution",
        "angle of attack",
        "ab漢",
        "1１１",
        "!︰",
        " \u1680a",
    ]
    for limit in (1, 2, 3, 4, 5, 6, 7, 64):
        for tokenizer in tokenizers:
            text = as_text(tokenizer, query_max_tokens=limit)
            assert_equal(TokenMemo(text), text, queries)


@pytest.mark.parametrize("capacity", [1, 2, 50])
def test_a_full_memo_is_emptied(capacity: int) -> None:
    text = TEXTS["gpt2"]
    memo = TokenMemo(text, capacity)
    words = [f"word{i:03d}x hello {'long' * (i % 11)}" for i in range(400)]
    assert_equal(memo, text, words)
    assert_equal(memo, text, words[::-1])
    ((pieces, _),) = memo._pool
    assert pieces.state[0] <= len(pieces.entries) // 2
    assert sum(part.nbytes for part in pieces) < 40_000
    memo.clear()
    assert_equal(memo, text, words[:3])


def test_threads_share_one_memo() -> None:
    text = TEXTS["smollm"]
    memo = TokenMemo(text, capacity=64)
    queries = [[f"thread {i} query {j} naïve 中文 {'ab' * (j % 30)}" for j in range(60)] for i in range(8)]
    wanted = [text.sparse_queries(some) for some in queries]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(30):
            batch = memo(queries[i])
            if rows(batch.sparse_ids, batch.sparse_offsets) != wanted[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(queries))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(memo._pool) <= MEMOS_KEPT


@pytest.mark.parametrize("name", ["gpt2", "metaspace"])
def test_blank_queries_are_marked(name: str) -> None:
    blank = ["", "   ", "\t\n", "\u200b", "\u200b \ufeff", "\x00", "\u3000", "\u2060\xad"]
    seen = [".", "a", " \u200bb", "\u200b中", "😀", "²"]
    for _ in range(2):
        assert MEMOS[name](blank + seen).blank.tolist() == [True] * len(blank) + [False] * len(seen)


@pytest.mark.parametrize("name", ["gpt2", "metaspace"])
def test_what_is_no_text_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=r"queries\[1\]: found int, wanted str"):
        MEMOS[name](["fine", 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"queries\[0\]: found NoneType"):
        MEMOS[name]([None, "é"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"write \[query\]"):
        MEMOS[name]("one string")
    with pytest.raises(ValueError, match=r"queries\[2\]: the character at 1 is half of a surrogate pair"):
        MEMOS[name](["fine", "é", "x\ud800"])
    with pytest.raises(ValueError, match="capacity is 0"):
        TokenMemo(TEXTS[name], 0)
    assert_equal(MEMOS[name], TEXTS[name], ["still", "works"])


def test_the_reason_for_a_fallback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TokenMemo(TEXTS["nfkc"])
        TokenMemo(TEXTS["other-pattern"])
        TokenMemo(as_text(Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, "c"))))
    assert [part in caplog.text for part in ("Lowercase + NFKC", "split pattern", "WordLevel")] == [True] * 3


def test_byte_characters_are_those_of_tokenizers() -> None:
    characters = byte_characters()
    assert sorted(characters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for byte in (0, 0x20, 0x41, 0x7F):
        ((piece, _),) = byte_level(False).pre_tokenize_str(chr(byte))
        assert piece == characters[byte]
    ((piece, _),) = byte_level(False).pre_tokenize_str("\xad")
    assert piece == characters[0xC2] + characters[0xAD]
