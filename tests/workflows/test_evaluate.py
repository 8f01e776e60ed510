"""The evaluate stage on a small made-up run: files, measures against a by-hand check, dev weights, bare corpora."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.config import Config, load_config
from components.data.schemas import CORPUS, PAIRS, QRELS, QUERIES
from components.evaluation.closing import closing_table
from components.evaluation.dev_weights import SHARES, fuse_rankings, with_share
from components.evaluation.metrics import METRICS
from components.indexing import FusionConfig, HybridIndex, write_shard
from components.lookup import QueryEncoder, save_table
from components.storage import read_json, write_json
from components.text import Text
from workflows.evaluate import run
from workflows.stage import StageContext, StageError
from workflows.tracking import Tracker

SUBJECTS = ["lift", "wing", "flow", "heat", "plate", "cone", "body", "shell", "layer", "speed", "angle", "pressure"]
SYSTEMS = ["BM25", "dense", "sparse", "hybrid"]


def documents() -> list[tuple[str, str]]:
    """36 (docid, text): each pair of neighbouring subjects, in three wordings."""
    texts = []
    for i, subject in enumerate(SUBJECTS):
        other = SUBJECTS[(i + 1) % len(SUBJECTS)]
        texts += [
            f"the {subject} of a {other}",
            f"{subject} and {subject} at {other}",
            f"an experimental study of {other}",
        ]
    return [(f"d{i:02d}", text) for i, text in enumerate(texts)]


def write_data(folder: Path, queries: bool = True) -> None:
    """A data folder as ingest leaves it; one query has no known word, one no relevant document, one id no query."""
    (folder / "corpus").mkdir(parents=True)
    (folder / "pairs").mkdir()
    docids, texts = zip(*documents(), strict=True)
    titles = [text.split()[-1] for text in texts]
    for part, rows in enumerate((slice(0, 20), slice(20, None))):
        table = pa.table([docids[rows], titles[rows], texts[rows]], schema=CORPUS)
        pq.write_table(table, folder / "corpus" / f"part-{part:05d}.parquet")
    pairs = [
        {"dataset": "other" if i == 0 else "titles", "qid": docid, "query": text.split()[1], "positive_docid": docid,
         "positive": text, "negative_docids": [], "negatives": [], "split": "dev" if i % 2 == 0 else "train"}
        for i, (docid, text) in enumerate(documents())
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(pairs, schema=PAIRS), folder / "pairs" / "part-000.parquet")
    write_json(folder / "result.json", {"documents": len(docids), "seconds": 1.0})
    if not queries:
        return
    asked = [(f"q{i}", f"{subject} {SUBJECTS[i + 1]}") for i, subject in enumerate(SUBJECTS[:8])]
    asked += [("blank", "\u200b"), ("hopeless", "shell"), ("d03", "flow"), ("unjudged", "wing")]
    pq.write_table(pa.table(list(zip(*asked, strict=True)), schema=QUERIES), folder / "queries.parquet")
    judged = [(f"q{i}", f"d{3 * i:02d}", 2) for i in range(8)] + [(f"q{i}", f"d{3 * i + 1:02d}", 1) for i in range(8)]
    judged += [
        ("blank", "d00", 1),
        ("hopeless", "d00", 0),
        ("d03", "d06", 1),
        ("textless", "d00", 1),
        ("q0", "nowhere", 1),
    ]
    pq.write_table(pa.table(list(zip(*judged, strict=True)), schema=QRELS), folder / "qrels.parquet")


@pytest.fixture
def make_context(tmp_path: Path, tiny_text: Text) -> Callable[..., StageContext]:
    """Builds data, table and index (documents encoded as queries are) and gives the stage's context."""

    def make(*overrides: str, queries: bool = True) -> StageContext:
        config: Config = load_config(None, [
            f"runs={tmp_path}", "run_name=small", "tracking.enabled=false",
            "data.source=null", "data.corpus=jsonl:corpus.jsonl", "data.grades=null",
            "data.pairs=[{name: titles, kind: title_body}, {name: other, kind: title_body, source: beir:x}]",
            "evaluate.significance_samples=500", "evaluate.timing_rounds=2", *overrides,
        ])  # fmt: skip
        root = config.root
        write_data(root / "data", queries)
        rows = np.random.default_rng(0).normal(size=(tiny_text.vocabulary_size, 16)).astype(np.float32)
        scores = np.where(tiny_text.producible, 1.0, 0.0).astype(np.float32)
        (root / "tabulate").mkdir()
        save_table(
            root / "tabulate", {"default": rows}, scores, tiny_text, instructions={"default": ""}, storage="float32",
            model_fingerprint="tiny",
        )  # fmt: skip
        docids, texts = zip(*documents(), strict=True)
        encoded = QueryEncoder.load(root / "tabulate").encode(texts)
        for part, picked in enumerate((slice(0, 25), slice(25, None))):
            write_shard(
                root / "index" / f"shard-{part:05d}", docids[picked], encoded.dense[picked], encoded.sparse[picked],
                model_fingerprint="tiny", titles=texts[picked], texts=texts[picked],
            )  # fmt: skip
        folder = root / ".evaluate.partial"
        folder.mkdir()
        inputs = {name: root / name for name in ("data", "tabulate", "index")}
        return StageContext(config, folder, inputs, "fingerprint", Tracker(root, None))

    return make


def read_run(folder: Path, name: str) -> list[Any]:
    return list(ir_measures.read_trec_run(str(folder / name)))


def test_everything_is_measured_and_written(make_context: Callable[..., StageContext]) -> None:
    context = make_context()
    result = run(context)
    write_json(context.folder / "result.json", result)  # strict: no NaN anywhere
    assert list(result["metrics"]) == SYSTEMS
    assert set(result["metrics"]["BM25"]) == {"nDCG@10", "MRR@10", "R@20", "R@50", "R@100"}
    assert result["judged"] == 11
    assert result["judged_without_text"] == 1
    assert result["without_relevant"] == 1
    assert result["without_tokens"] == 1
    assert result["without_results"]["sparse"] == 1
    assert result["query_microseconds"] > 0
    assert set(result["search_milliseconds"]) == set(SYSTEMS)
    assert result["index_bytes"] > 0
    assert set(result["significance"]) == {"dense", "sparse", "hybrid"}
    assert set(result["significance"]["dense"]) == set(result["metrics"]["dense"])
    names = {path.name for path in context.folder.iterdir()}
    assert names == {
        "run.trec", "run.BM25.trec", "run.dense.trec", "run.sparse.trec", "per_query.parquet", "report.html",
        "systems.png", "gains.png", "result.json",
    }  # fmt: skip


def test_other_tools_find_the_reported_values_in_the_files(make_context: Callable[..., StageContext]) -> None:
    context = make_context()
    result = run(context)
    table = pq.read_table(context.folder / "per_query.parquet")
    qids = table["qid"].to_pylist()
    judged = pq.read_table(context.inputs["data"] / "qrels.parquet").to_pylist()
    qrels = [ir_measures.Qrel(row["qid"], row["docid"], row["grade"]) for row in judged if row["qid"] in qids]
    for system, name in zip(SYSTEMS, ["run.BM25.trec", "run.dense.trec", "run.sparse.trec", "run.trec"], strict=True):
        found = ir_measures.calc_aggregate(
            [ir_measures.nDCG @ 10, ir_measures.R @ 100], qrels, read_run(context.folder, name)
        )
        assert result["metrics"][system]["nDCG@10"] == pytest.approx(found[ir_measures.nDCG @ 10], abs=1e-6)
        assert result["metrics"][system]["R@100"] == pytest.approx(found[ir_measures.R @ 100], abs=1e-6)
        for metric in METRICS:
            mean = float(np.mean(table[f"{system} {metric}"].to_numpy()))
            assert result["metrics"][system][metric] == pytest.approx(mean, abs=1e-6)
    assert dict(zip(qids, table["relevant"].to_pylist(), strict=True))["q0"] == 3


def test_the_dense_share_is_chosen_on_this_collections_dev_pairs(make_context: Callable[..., StageContext]) -> None:
    context = make_context("evaluate.fusion_weights=dev")
    result = run(context)
    curve = result["dev_curve"]
    assert [share for share, _ in curve] == list(SHARES)
    assert result["dev_queries"] == 17  # of 18 dev pairs one is of another collection
    best = max(value for _, value in curve)
    chosen = result["fusion"]["dense_weight"]
    assert dict(map(tuple, curve))[chosen] == best
    assert result["fusion"]["sparse_weight"] == pytest.approx(1 - chosen)
    assert (context.folder / "shares.png").exists()
    assert "Dense share" in (context.folder / "report.html").read_text()


def test_fusing_for_the_curve_is_what_the_index_does(make_context: Callable[..., StageContext]) -> None:
    context = make_context()
    index, encoder = HybridIndex.open(context.inputs["index"]), QueryEncoder.load(context.inputs["tabulate"])
    batch = encoder.encode(["wing flow", "the lift"])
    for method in ("minmax", "rrf"):
        fusion = FusionConfig(method=method, candidates=20)  # type: ignore[arg-type]
        sides = [index.search(batch, 20, mode) for mode in ("dense", "sparse")]  # type: ignore[arg-type]
        dense, sparse = ([[(hit.docid, hit.score) for hit in hits] for hits in side] for side in sides)
        for share in (0.0, 0.3, 1.0):
            weights = with_share(fusion, share)
            for i, hits in enumerate(index.search(batch, 10, "hybrid", weights)):
                assert fuse_rankings(dense[i], sparse[i], weights) == [(hit.docid, hit.score) for hit in hits]


def test_dev_weights_without_dev_pairs_say_what_to_do(make_context: Callable[..., StageContext]) -> None:
    context = make_context("evaluate.fusion_weights=dev", "data.pairs=[]")
    with pytest.raises(StageError, match=r"or use evaluate\.fusion_weights=fixed"):
        run(context)


def test_self_hits_leave_runs_and_measures_alike(make_context: Callable[..., StageContext]) -> None:
    """Case T-119: query d03 is document d03."""
    context = make_context("evaluate.drop_self_hits=true")
    run(context)
    for name in ("run.trec", "run.BM25.trec"):
        rows = read_run(context.folder, name)
        assert any(row.query_id == "d03" for row in rows)
        assert not any(row.query_id == row.doc_id for row in rows)


def test_without_bm25_there_is_no_comparison(make_context: Callable[..., StageContext]) -> None:
    context = make_context("evaluate.bm25=false")
    result = run(context)
    assert list(result["metrics"]) == SYSTEMS[1:]
    assert result["significance"] == {}
    assert not (context.folder / "gains.png").exists()
    assert "BM25" not in (context.folder / "report.html").read_text()


def test_a_bare_corpus_is_no_crash(make_context: Callable[..., StageContext]) -> None:
    context = make_context(queries=False)
    result = run(context)
    assert result["judged"] == 0
    assert result["metrics"] == {}
    assert result["query_microseconds"] > 0
    assert "no judged queries" in result["note"]
    assert "no judged queries" in (context.folder / "report.html").read_text()


def test_table_and_index_of_different_models_are_refused(make_context: Callable[..., StageContext]) -> None:
    context = make_context()
    lookup = context.inputs["tabulate"] / "lookup.json"
    write_json(lookup, read_json(lookup) | {"model_fingerprint": "another"})
    with pytest.raises(StageError, match="run tabulate, encode and index again"):
        run(context)


@pytest.mark.parametrize("queries", [True, False])
def test_the_closing_table_says_what_the_issue_asks(make_context: Callable[..., StageContext], queries: bool) -> None:
    context = make_context(queries=queries)
    results = {
        "data": {"documents": 36, "seconds": 1.0},
        "index": {"bytes": 5 * 2**20, "vector_bytes_per_document": 2048.0, "seconds": 2.0},
        "evaluate": run(context) | {"seconds": 3.0},
    }
    text = closing_table(results, context.config.root, "sqlite:////runs/mlflow.db")
    for wanted in ("µs a query", "5.0 MiB", "all 6 s", "report.html", "mlflow ui", "serve run serve.app:app", "index"):
        assert wanted in text
    for system in SYSTEMS if queries else ():
        row = next(line for line in text.splitlines() if line.strip().startswith(f"{system} "))
        for metric in METRICS:
            assert f"{results['evaluate']['metrics'][system][metric]:.4f}" in row
    assert all(name in text for name in METRICS) is queries
    assert ("no judged queries" in text) is not queries
