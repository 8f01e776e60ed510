"""The index stage under Ray: everything indexed once under its own id, and whatever does not fit together refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.sparse import csr_matrix, random_array

from components.config import Config, load_config
from components.data.schemas import CORPUS
from components.encoding import shard_counts, write_shard
from components.indexing import HybridIndex, Shard
from components.lookup import QueryBatch, QueryEncoder, save_table
from components.storage import read_json, sha256_file, write_json
from components.text import Text
from workflows import index
from workflows.stage import StageContext
from workflows.tracking import Tracker

HIDDEN, DOCUMENTS, ROWS = 8, 50, 12
WITHOUT_TERMS, WITHOUT_VECTOR = 7, 30
Make = Callable[..., Config]

pytestmark = pytest.mark.usefixtures("ray_cluster")


def encode_manifest(config: Config, text: Text, **changes: Any) -> None:
    folder = config.root / "encode"
    shards = [
        {"file": path.name, "sha256": sha256_file(path), **shard_counts(path)}
        for path in sorted(folder.glob("shard-*.parquet"))
    ]
    manifest = {
        "model_fingerprint": "model", "text_fingerprint": text.fingerprint, "vocabulary_size": text.vocabulary_size,
        "documents": sum(shard["rows"] for shard in shards), "shards": shards,
    }  # fmt: skip
    write_json(folder / "manifest.json", manifest | changes)


@pytest.fixture
def encoded(tmp_path: Path, tiny_text: Text) -> Make:
    """Makes `data/`, `encode/` and `tabulate/` of a run; the corpus is in another order than the encoded rows."""

    def make(*overrides: str) -> Config:
        config = load_config(None, [f"runs={tmp_path}", "run_name=tiny", "tracking.enabled=false", *overrides])
        if (config.root / "data").exists():
            return config
        rng = np.random.default_rng(0)
        docids = [f"d{i:02d}" for i in rng.permutation(DOCUMENTS)]
        (config.root / "data" / "corpus").mkdir(parents=True)
        for part, ids in enumerate((sorted(docids)[30:], sorted(docids)[:30])):
            table = pa.table([ids, [f"title {d}" for d in ids], [f"text {d}" for d in ids]], schema=CORPUS)
            pq.write_table(table, config.root / "data" / "corpus" / f"part-{part:05d}.parquet")
        dense = rng.normal(size=(DOCUMENTS, HIDDEN)).astype(np.float32)
        dense[WITHOUT_VECTOR] = 0
        dense /= np.maximum(np.linalg.norm(dense, axis=1, keepdims=True), 1e-9)
        sparse = csr_matrix(random_array((DOCUMENTS, tiny_text.vocabulary_size), density=0.05, rng=rng)).astype(
            np.float32
        )
        sparse.data[sparse.indptr[WITHOUT_TERMS] : sparse.indptr[WITHOUT_TERMS + 1]] = 0
        for number, start in enumerate(range(0, DOCUMENTS, ROWS)):
            rows, names = sparse[start : start + ROWS], pa.chunked_array([docids[start : start + ROWS]])
            write_shard(
                config.root / "encode" / f"shard-{number:05d}.parquet", names,
                dense[start : start + ROWS], rows.indptr, rows.indices, rows.data,
                vocabulary_size=tiny_text.vocabulary_size, tokens=1,
            )  # fmt: skip
        encode_manifest(config, tiny_text)
        table = rng.normal(size=(tiny_text.vocabulary_size, HIDDEN)).astype(np.float32)
        save_table(
            config.root / "tabulate", {"default": table}, tiny_text.producible.astype(np.float32), tiny_text,
            instructions={"default": ""}, storage="float32", model_fingerprint="model",
        )  # fmt: skip
        return config

    return make


def build(config: Config, name: str = "index") -> tuple[dict[str, Any], Path]:
    folder = config.root / name
    folder.mkdir(exist_ok=True)
    inputs = {stage: config.root / stage for stage in index.STAGE.inputs}
    return index.run(StageContext(config, folder, inputs, "f", Tracker(config.root, None))), folder


def queries(config: Config) -> QueryBatch:
    return QueryEncoder.load(config.root / "tabulate").encode(
        ["the lift of a wing", "heat transfer", "a cone at speed"]
    )


def test_documents_keep_their_own_vectors_and_texts(encoded: Make) -> None:
    """T-050, T-061, T-095: by id, although corpus, encoded rows and docids are all in different orders."""
    config = encoded()
    result, folder = build(config)
    assert (result["documents"], result["shards"], result["without_terms"], result["without_vector"]) == (50, 1, 1, 1)
    assert result["dense_recall_at_10"] == 1.0
    found = HybridIndex.open(folder)
    rows = pq.read_table(sorted((config.root / "encode").glob("*.parquet"))).to_pylist()
    assert result["nonzeros"] == sum(len(row["sparse_ids"]) for row in rows)
    assert found.documents([row["docid"] for row in rows]) == {
        row["docid"]: (f"title {row['docid']}", f"text {row['docid']}") for row in rows
    }
    for row in rows:
        weights = found.term_weights([row["docid"]], np.asarray(row["sparse_ids"], np.int32))[0]
        assert weights.tolist() == [float(weight) for weight in row["sparse_weights"]]
    vectors = np.array([row["dense"] for row in rows], np.float32)
    batch = QueryBatch(vectors, np.zeros(51, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32), [None] * 50, 1)
    for position, (row, hits) in enumerate(zip(rows, found.search(batch, k=1, mode="dense"), strict=True)):
        assert [hit.docid for hit in hits] == ([] if position == WITHOUT_VECTOR else [row["docid"]])
    manifest = Shard(folder / "shard-00000").manifest
    assert manifest.without_terms == [rows[WITHOUT_TERMS]["docid"]]
    assert manifest.without_vector == [rows[WITHOUT_VECTOR]["docid"]]
    lookup = read_json(config.root / "tabulate" / "lookup.json")
    assert manifest.table_fingerprint == lookup["table_sha256"]
    assert manifest.model_fingerprint == "model"


def test_many_shards_find_what_one_shard_finds(encoded: Make) -> None:
    one, many = encoded(), encoded("index.documents_per_shard=15")
    (_, first), (result, second) = build(one, "one"), build(many, "many")
    assert result["shards"] == 4
    batch = queries(one)
    for mode in ("dense", "sparse", "hybrid"):
        hits = HybridIndex.open(first).search(batch, k=20, mode=mode)  # type: ignore[arg-type]
        assert hits == HybridIndex.open(second).search(batch, k=20, mode=mode)  # type: ignore[arg-type]
        assert all(hits)


def test_built_again_over_what_a_killed_build_left_it_has_the_same_bytes(encoded: Make) -> None:
    config = encoded("index.documents_per_shard=30")
    _, folder = build(config)
    before = {str(path.relative_to(folder)): sha256_file(path) for path in folder.rglob("*") if path.is_file()}
    (folder / "shard-00000" / "manifest.json").unlink()
    (folder / "shard-00000" / "dense.faiss").write_bytes(b"half")
    (folder / "shard-00001" / "stale.npy").write_bytes(b"")
    build(config)
    assert {str(path.relative_to(folder)): sha256_file(path) for path in folder.rglob("*") if path.is_file()} == before


def test_the_dense_side_is_tuned_with_looked_up_queries(encoded: Make) -> None:
    config = encoded("index.dense=IVF1,SQfp16")
    texts = pa.chunked_array([["the lift of a wing in a slipstream depends on the angle", "", "heat"]])
    found = index.sample_queries(texts, config.root / "tabulate")
    encoder = QueryEncoder.load(config.root / "tabulate")
    wanted = encoder.encode(["the lift of a wing in a slipstream", "heat"]).dense
    np.testing.assert_array_equal(found, wanted)  # eight words; the empty text gives no query
    result, folder = build(config)
    assert Shard(folder / "shard-00000").manifest.dense_probes == 1
    assert result["dense_recall_at_10"] == 1.0


def test_texts_may_be_left_out(encoded: Make) -> None:
    _, folder = build(encoded("index.texts=false"))
    assert HybridIndex.open(folder).documents(["d03"]) == {"d03": ("", "")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_fingerprint": "other"}, "model_fingerprint is model, but the documents were encoded with other"),
        ({"text_fingerprint": "other"}, "text_fingerprint"),
        ({"vocabulary_size": 7}, "vocabulary_size"),
        ({"documents": 51}, "indexed 50 documents of 51"),
    ],
)
def test_documents_and_table_that_do_not_fit_are_refused(
    encoded: Make, tiny_text: Text, changes: dict[str, Any], message: str
) -> None:
    config = encoded()
    encode_manifest(config, tiny_text, **changes)
    with pytest.raises(ValueError, match=message):
        build(config)


def test_a_damaged_encoded_shard_is_named(encoded: Make) -> None:
    config = encoded()
    path = config.root / "encode" / "shard-00002.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"shard-00002\.parquet: its SHA-256"):
        build(config)


def test_an_encoded_document_that_the_corpus_does_not_have_is_named(encoded: Make) -> None:
    config = encoded()
    path = config.root / "data" / "corpus" / "part-00001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 29), path)
    with pytest.raises(ValueError, match=f"the first is '{table['docid'][29].as_py()}'"):
        build(config)


@pytest.mark.parametrize("fault", ["nan", "twice"])
def test_a_bad_row_that_reached_the_encoded_files_is_named_by_its_docid(
    encoded: Make, tiny_text: Text, fault: str
) -> None:
    config = encoded()
    path = config.root / "encode" / "shard-00001.parquet"
    table = pq.read_table(path)
    docids = table["docid"].to_pylist()
    if fault == "nan":
        dense = np.array(table["dense"].to_pylist(), np.float16)
        dense[4, 2] = np.nan
        column = pa.FixedSizeListArray.from_arrays(pa.array(dense.ravel()), HIDDEN)
        table = table.set_column(1, table.schema.field("dense"), column)
    else:
        table = table.set_column(0, table.schema.field("docid"), pa.array([*docids[:5], docids[4], *docids[6:]]))
    pq.write_table(table, path)
    encode_manifest(config, tiny_text)
    with pytest.raises(ValueError, match=f"'{docids[4]}'"):
        build(config)


def test_one_document_in_two_shards_is_refused_when_they_are_opened(encoded: Make, tiny_text: Text) -> None:
    config = encoded("index.documents_per_shard=12")
    first, second = (config.root / "encode" / f"shard-0000{number}.parquet" for number in (0, 1))
    table, docid = pq.read_table(second), pq.read_table(first)["docid"][3].as_py()
    column = pa.array([docid, *table["docid"].to_pylist()[1:]])
    pq.write_table(table.set_column(0, table.schema.field("docid"), column), second)
    encode_manifest(config, tiny_text)
    _, folder = build(config)
    with pytest.raises(ValueError, match=f"{docid!r}.*two shards"):
        HybridIndex.open(folder)


def test_a_task_never_asks_for_more_cpus_than_a_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 64.0}}, {"Alive": True, "Resources": {}}] * 2
    monkeypatch.setattr(index.ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 999.0}}])
    assert [index.cpus_per_task(tasks) for tasks in (1, 2, 4, 1000)] == [64, 64, 32, 1]


def test_encoded_shards_are_grouped_up_to_the_limit() -> None:
    shards = [{"rows": rows} for rows in (10, 10, 10, 25, 5)]
    assert [[s["rows"] for s in group] for group in index.group_shards(shards, 20)] == [[10, 10], [10], [25], [5]]
