"""Query text to token ids without `tokenizers` in the way: equal ids, an order of magnitude faster.

Tokenisation is the query encoder (in LightRetriever's timing it takes 0.82 of 0.86 s). `TokenMemo` reads the
tokenizer's own description. If that is byte-level BPE behind a split pattern that `split.py` knows, queries are split,
looked up and merged by the kernels of `bpe.py`; any query about which they are not certain, and every query of any
other tokenizer, goes to `tokenizers`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from components.lookup.bpe import make_merges, make_scratch, make_whole_tokens, tokenise
from components.lookup.memo import Memo, make_memo
from components.lookup.split import GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN, CharacterClasses, is_invisible
from components.text import Text

logger = logging.getLogger(__name__)

MEMOS_KEPT = 8
"""Memos kept for as many threads that encode at the same moment; each holds about 80 bytes a piece of its capacity."""


@dataclass(slots=True)
class TokenBatch:
    """Token ids of Q queries, flat: query i has `ids[offsets[i] : offsets[i + 1]]`; later ones are undefined."""

    dense_ids: np.ndarray
    """int32: ids of the query alone (Text.queries)."""
    dense_offsets: np.ndarray
    """int64 [Q + 1]"""
    sparse_ids: np.ndarray
    """int32: ids of `" " + query` (Text.sparse_queries)."""
    sparse_offsets: np.ndarray
    """int64 [Q + 1]"""
    blank: np.ndarray
    """bool [Q]: the query holds nothing that can be seen, though it may have tokens (case T-052)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the kernels need to know of a tokenizer that they can replace."""

    llama: bool
    number_run: int
    isolate_digits: bool
    lowercase: bool
    ignore_merges: bool


def find_rules(state: dict[str, Any]) -> Rules | str:
    """The rules of a tokenizer.json, or the reason why its pieces cannot be looked up."""
    model = state["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        return f"its model is {model['type']} and not plain byte-level BPE"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its BPE model marks word parts with a prefix or a suffix"
    if state.get("added_tokens") or state.get("truncation") or state.get("padding"):
        return "it has added tokens, truncation or padding"
    normalizers = [step["type"] for step in _steps(state.get("normalizer"), "normalizers")]
    if not {*normalizers} <= {"Lowercase", "NFC"}:
        return f"its normaliser is {' + '.join(normalizers)}"
    split = _split_rule(_steps(state.get("pre_tokenizer"), "pretokenizers"))
    if split is None:
        return "its split pattern is none of GPT-2's, Llama 3's and Qwen's"
    llama, number_run, isolate_digits = split
    return Rules(llama, number_run, isolate_digits, "Lowercase" in normalizers, bool(model.get("ignore_merges")))


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer in order; sequences may be nested."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[key] for step in _steps(inner, key)]


def _split_rule(steps: list[dict[str, Any]]) -> tuple[bool, int, bool] | None:
    """(llama, number_run, isolate_digits) of a known chain of pre-tokenizers."""
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    before = steps[:-1]
    if steps[-1].get("use_regex", True):
        if not before:
            return False, 0, False
        if len(before) == 1 and before[0]["type"] == "Digits" and before[0].get("individual_digits"):
            return False, 0, True
        return None
    if len(before) != 1 or before[0]["type"] != "Split":
        return None
    if (before[0]["behavior"], before[0]["invert"]) not in {("Isolated", False), ("Removed", True)}:
        return None
    known = {GPT2_PATTERN: (False, 0, False), LLAMA3_PATTERN: (True, 3, False), QWEN_PATTERN: (True, 1, False)}
    return known.get(before[0]["pattern"].get("Regex"))


class TokenMemo:
    """Turns queries into a `TokenBatch`; every id is the one that `Text` would give.

    Threads may share it: each call takes a memo out of a pool and puts it back, so no two calls write to the same one.
    """

    def __init__(self, text: Text, capacity: int = 65_536) -> None:
        """capacity: how many pre-tokens a memo holds before it is emptied."""
        if capacity < 1:
            raise ValueError(f"TokenMemo: capacity is {capacity}; it must be at least 1")
        self._text = text
        self._tokenizer = text.tokenizer
        self._normalizer = text.tokenizer.normalizer
        self._limit = text.config.query_max_tokens
        self._capacity = capacity
        self._pool: list[tuple[Memo, Any]] = []
        state = json.loads(text.tokenizer.to_str())
        rules = find_rules(state)
        self._exact = isinstance(rules, Rules)
        if isinstance(rules, str):
            logger.warning(
                "queries are tokenised by `tokenizers`, about 5 times slower than with the memo, because %s", rules
            )
            return
        self._rules = rules
        self._classes = CharacterClasses(rules.isolate_digits)
        self._merges = make_merges(state["model"]["vocab"], state["model"]["merges"])
        self._whole_tokens = make_whole_tokens(state["model"]["vocab"] if rules.ignore_merges else {})

    @property
    def exact(self) -> bool:
        """Whether the tokenizer is one whose pieces can be looked up; otherwise `tokenizers` does all the work."""
        return self._exact

    def clear(self) -> None:
        """Forget every piece."""
        self._pool.clear()

    def __call__(self, queries: Sequence[str]) -> TokenBatch:
        """Ids of each query alone and with a space in front, each at most `query_max_tokens` long.

        TypeError: a query is not a string. ValueError: a query holds half a surrogate pair.
        """
        if isinstance(queries, str):
            raise TypeError("queries: found one string, wanted a list of strings; write [query]")
        if not self._exact:
            return self._by_tokenizer(_checked(queries))
        try:
            joined = " " + " ".join(queries)
            if joined.isascii():
                encoded = joined.encode()
                lengths = np.fromiter(map(len, queries), np.int64, len(queries))
            else:
                parts = [self._utf8(query) for query in queries]
                encoded = b" " + b" ".join(parts)
                lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        except (TypeError, UnicodeEncodeError):
            _checked(queries)
            raise
        if self._rules.lowercase:
            encoded = encoded.lower()
        try:
            memo, scratch = self._pool.pop()
        except IndexError:
            memo, scratch = make_memo(self._capacity), make_scratch()
        text = np.frombuffer(encoded, np.uint8)
        dense, sparse = np.empty(len(text), np.int32), np.empty(len(text), np.int32)
        dense_offsets, sparse_offsets = np.empty(len(lengths) + 1, np.int64), np.empty(len(lengths) + 1, np.int64)
        blank = np.empty(len(lengths), np.bool_)
        left_out = tokenise(
            text, lengths, self._limit, self._classes.table, self._rules.llama, self._rules.number_run, *self._merges,
            *self._whole_tokens, *memo, *scratch, dense, dense_offsets, sparse, sparse_offsets, blank,
        )  # fmt: skip
        if len(self._pool) < MEMOS_KEPT:
            self._pool.append((memo, scratch))
        batch = TokenBatch(dense, dense_offsets, sparse, sparse_offsets, blank)
        return self._fill(batch, queries, np.flatnonzero(lengths < 0)) if left_out else batch

    def _utf8(self, query: str) -> bytes:
        if not query.isascii() and self._normalizer is not None:
            query = self._normalizer.normalize_str(query)
        return query.encode()

    def _fill(self, batch: TokenBatch, queries: Sequence[str], left_out: np.ndarray) -> TokenBatch:
        """`batch` with the ids of the queries `left_out`, taken from the tokenizer; their characters are learned."""
        asked = [queries[i] for i in left_out.tolist()]
        self._classes.learn(set().union(*map(self._utf8_characters, asked)))
        answers = self._by_tokenizer(asked)
        batch.blank[left_out] = answers.blank
        return TokenBatch(
            *_splice(batch.dense_ids, batch.dense_offsets, left_out, answers.dense_ids, answers.dense_offsets),
            *_splice(batch.sparse_ids, batch.sparse_offsets, left_out, answers.sparse_ids, answers.sparse_offsets),
            batch.blank,
        )

    def _utf8_characters(self, query: str) -> set[str]:
        return set(self._utf8(query).decode())

    def _by_tokenizer(self, queries: Sequence[str]) -> TokenBatch:
        dense_ids, dense_offsets = _flatten(self._text.queries(queries))
        sparse_ids, sparse_offsets = _flatten(self._text.sparse_queries(queries))
        blank = np.fromiter((all(map(is_invisible, query)) for query in queries), np.bool_, len(queries))
        return TokenBatch(dense_ids, dense_offsets, sparse_ids, sparse_offsets, blank)


def _flatten(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.fromiter(chain.from_iterable(rows), np.int32, int(offsets[-1])), offsets


def _splice(
    ids: np.ndarray, offsets: np.ndarray, empty: np.ndarray, added: np.ndarray, added_offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, offsets) in which the rows `empty` of the first have become the rows of the second, in order."""
    lengths = np.diff(offsets)
    lengths[empty] = np.diff(added_offsets)
    filled = np.insert(ids[: offsets[-1]], offsets[empty].repeat(lengths[empty]), added)
    return filled, np.concatenate([[0], np.cumsum(lengths)])


def _checked(queries: Sequence[str]) -> Sequence[str]:
    for i, query in enumerate(queries):
        if not isinstance(query, str):
            raise TypeError(f"queries[{i}]: found {type(query).__name__}, wanted str")
        try:
            query.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"queries[{i}]: the character at {error.start} is half of a surrogate pair ({query[error.start]!a}), "
                "which is no text; repair the source or send it through .encode('utf-8', 'replace')"
            ) from error
    return queries
