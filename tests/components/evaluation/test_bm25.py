"""The BM25 baseline against the formula, its ties, and its known value on Cranfield."""

from __future__ import annotations

import csv
import gzip
import json
from collections import defaultdict
from pathlib import Path

import bm25s
import pytest
import Stemmer
from hypothesis import given, settings
from hypothesis import strategies as st

from components.evaluation.bm25 import Bm25
from components.evaluation.metrics import NDCG_10, RECALL_100, evaluate_run
from tests.components.evaluation.reference import reference_bm25

CRANFIELD = Path(__file__).resolve().parents[4] / "shared" / "data" / "cranfield"
WORDS = ["quick", "fox", "fox's", "flows", "flowing", "wing", "the", "and", "lift", "", "Flow", "12"]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join), min_size=1, max_size=8)


def words_of(texts: list[str]) -> list[list[str]]:
    """The words by bm25s itself: what is checked here is the scores."""
    stemmer = Stemmer.Stemmer("english")
    return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join))
def test_scores_are_those_of_the_formula(texts: list[str], query: str) -> None:
    documents = words_of(texts)
    hits = Bm25.build((f"d{i}", text) for i, text in enumerate(texts)).search([query], 100)[0]
    scores = reference_bm25(documents, words_of([query])[0], 0.9, 0.4)
    wanted = {f"d{i}": score for i, score in enumerate(scores) if score > 0}
    assert dict(hits) == pytest.approx(wanted, rel=1e-5)
    assert [docid for docid, _ in hits] == [docid for docid, _ in sorted(hits, key=lambda hit: (-hit[1], hit[0]))]


def test_every_document_with_the_word_is_found() -> None:
    """Case T-108: five tiny documents, among them empty ones; both with the word score above 0."""
    corpus = [("1", "quick"), ("2", ""), ("3", "the"), ("4", "quick fox"), ("5", "lazy dog")]
    hits = Bm25.build(corpus).search(["quick", "dog", ""], 10)
    assert {docid for docid, _ in hits[0]} == {"1", "4"}
    assert [docid for docid, _ in hits[1]] == ["5"]
    assert hits[2] == []


def test_ties_go_by_docid_also_at_the_cut() -> None:
    corpus = [(docid, "wing") for docid in ("d10", "d9", "b", "a", "c")] + [("best", "wing wing")]
    index = Bm25.build(corpus)
    assert [docid for docid, _ in index.search(["wing"], 10)[0]] == ["best", "a", "b", "c", "d10", "d9"]
    assert [docid for docid, _ in index.search(["wing"], 3)[0]] == ["best", "a", "b"]


def test_a_corpus_without_words_finds_nothing() -> None:
    assert Bm25.build([("a", ""), ("b", "the")]).search(["wing", "the"], 5) == [[], []]
    assert Bm25.build([]).search(["wing"], 5) == [[]]
    assert Bm25.build([("a", "wing")]).search([], 5) == []


@pytest.mark.skipif(not CRANFIELD.exists(), reason=f"{CRANFIELD} is not there: the test collections are not shipped")
def test_cranfield_has_its_known_value() -> None:
    with gzip.open(CRANFIELD / "corpus.jsonl.gz", "rt", encoding="utf-8") as handle:
        rows = [json.loads(line) for line in handle]
    queries = [json.loads(line) for line in (CRANFIELD / "queries.jsonl").read_text().splitlines()]
    qrels: dict[str, dict[str, int]] = defaultdict(dict)
    with (CRANFIELD / "qrels" / "test.tsv").open() as handle:
        for row in csv.DictReader(handle, delimiter="\t"):
            qrels[row["query-id"]][row["corpus-id"]] = int(row["score"])
    index = Bm25.build((row["_id"], f"{row['title']} {row['text']}".strip()) for row in rows)
    hits = index.search([row["text"] for row in queries], 1000)
    found = evaluate_run({row["_id"]: h for row, h in zip(queries, hits, strict=True)}, qrels)
    assert found.means[NDCG_10] == pytest.approx(0.352, abs=0.001)
    assert found.means[RECALL_100] == pytest.approx(0.726, abs=0.001)
    assert len(found.qids) == 225
    assert found.missing == 0
