"""What a `data` section may say: sources by kind or ending, and never training on what is evaluated."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from components.data.config import DataConfig, PairSource, split_source


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("ir_datasets:beir/scifact/test", ("ir_datasets", "beir/scifact/test")),
        ("beir:/data/scifact", ("beir", "/data/scifact")),
        ("jsonl:s3://bucket/*.jsonl.gz", ("jsonl", "s3://bucket/*.jsonl.gz")),
        ("s3://bucket/*.jsonl.gz", ("jsonl", "s3://bucket/*.jsonl.gz")),
        ("docs/*.parquet", ("parquet", "docs/*.parquet")),
    ],
)
def test_a_source_is_a_kind_and_a_place(source: str, wanted: tuple[str, str]) -> None:
    assert split_source(source) == wanted


@pytest.mark.parametrize("source", ["csv:x", "beir:", "docs.xml", ""])
def test_any_other_source_is_refused_with_what_is_wanted(source: str) -> None:
    with pytest.raises(ValueError, match="wanted <kind>:<place>"):
        split_source(source)


def test_a_corpus_may_be_several_sources() -> None:
    config = DataConfig(corpus=["jsonl:a", "parquet:b"])
    assert config.corpora == ["jsonl:a", "parquet:b"]
    assert config.label == "jsonl:a, parquet:b"
    assert DataConfig(source="beir:x").label == "beir:x"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either `source`"),
        ({"corpus": []}, "give either `source`"),
        ({"source": "beir:x", "corpus": "jsonl:x"}, "give either `source`"),
        ({"source": "beir:x", "queries": "jsonl:q", "qrels": "q.tsv"}, "go with `corpus`"),
        ({"corpus": "jsonl:x", "qrels": "q.tsv"}, "come together"),
        ({"corpus": "csv:x"}, "wanted <kind>:<place>"),
    ],
)
def test_half_a_collection_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "pair", "message"),
    [
        ({"source": "beir:x"}, {"split": "test"}, "worthless"),
        ({"source": "beir:x"}, {"source": "beir:x", "split": "test"}, "worthless"),
        ({"source": "beir:x"}, {}, "needs a `split`"),
        ({"source": "ir_datasets:cranfield"}, {"split": "train"}, "worthless"),
        ({"source": "ir_datasets:cranfield"}, {"source": "ir_datasets:cranfield"}, "worthless"),
        ({"corpus": "jsonl:x", "queries": "jsonl:q", "qrels": "q.tsv"}, {"qrels": "q.tsv"}, "worthless"),
        ({"corpus": "jsonl:x"}, {"split": "train"}, "needs `qrels`"),
        ({"corpus": "jsonl:x"}, {"qrels": "q.tsv"}, "needs `queries`"),
    ],
)
def test_judgements_that_are_evaluated_never_make_training_pairs(
    settings: dict[str, Any], pair: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**settings, pairs=[{"name": "p", "kind": "qrels", **pair}])


def test_other_judgements_may() -> None:
    DataConfig(source="beir:x", pairs=[PairSource(name="p", kind="qrels", split="train")])
    DataConfig(source="beir:x", pairs=[PairSource(name="p", kind="qrels", source="beir:y", split="test")])
    files = {"corpus": "jsonl:x", "queries": "jsonl:q", "qrels": "test.tsv"}
    DataConfig(**files, pairs=[PairSource(name="p", kind="qrels", qrels="train.tsv")])


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ({"kind": "file"}, "needs `source`"),
        ({"kind": "file", "source": "beir:x"}, "needs `source`"),
        ({"kind": "title_body", "split": "train"}, "go with kind `qrels` only"),
        ({"kind": "title_body", "source": "csv:x"}, "wanted <kind>:<place>"),
    ],
)
def test_a_pair_source_says_only_what_its_kind_reads(pair: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PairSource(name="p", **pair)


def test_pair_sources_have_names_of_their_own() -> None:
    with pytest.raises(ValidationError, match="a name of its own"):
        DataConfig(corpus="jsonl:x", pairs=[PairSource(name="p", kind="title_body")] * 2)
