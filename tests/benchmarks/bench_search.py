"""Search over 100,000 documents, one thread: our sparse index, bm25s and scipy on the same postings; dense and hybrid.

    python tests/benchmarks/bench_search.py                 # real texts of ../shared/data, else the shipped Cranfield
    python tests/benchmarks/bench_search.py --documents 20000 --rounds 3

Documents are resampled from real ones: each takes the terms of one abstract and, more weakly, of one of its nearest
neighbours, so posting lists are as uneven, terms as correlated and topics as clustered as in real text. Dense vectors
are the same documents' latent semantic ones (randomised SVD of tf·idf). Queries are real: the first 11 terms of a query
and its successor. Results are compared before anything is timed; rounds are interleaved. Figures are medians of CPU
time, which in one thread is what passes on an idle machine and does not depend on the neighbours.
"""

# ruff: noqa: E402

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import gzip
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from bm25s.numba.retrieve_utils import _retrieve_numba_functional as bm25s_retrieve
from scipy.sparse import csc_matrix, csr_matrix, diags

from components.indexing import HybridIndex, IndexConfig, write_shard
from components.indexing.dense import set_threads

ROOT = Path(__file__).resolve().parents[2]
TERMS, HIDDEN, VOCABULARY, QUERY_TERMS, K = 128, 576, 49_152, 11, 10
CANDIDATES = 1000
WORD = re.compile(r"\w+")
APPROXIMATE = "IVF2048,SQfp16"


@dataclass(frozen=True)
class Batch:
    """Encoded queries."""

    dense: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray

    def one(self, query: int) -> Batch:
        """Query number `query` alone."""
        part = slice(self.indptr[query], self.indptr[query + 1])
        indptr = np.array([0, part.stop - part.start])
        return Batch(self.dense[query : query + 1], indptr, self.indices[part], self.weights[part])


def read_texts(data: Path) -> tuple[list[str], list[str], str]:
    """(documents, queries, where they are from): collections under `data`, else the project's own Cranfield."""
    names = ("scifact", "vaswani_npl")
    if all((data / name / "corpus.jsonl.gz").is_file() for name in names):
        documents, queries = [], []
        for name in names:
            with gzip.open(data / name / "corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
                documents += [f"{row.get('title', '')} {row['text']}" for row in map(json.loads, lines)]
            rows = (data / name / "queries.jsonl").read_text("utf-8").splitlines()
            queries += [json.loads(row)["text"] for row in rows]
        return documents, queries, " and ".join(names)
    from components.data.sources import load_ir_dataset

    dataset = load_ir_dataset("cranfield")
    queries = [query.text for query in dataset.queries_iter()]
    return [f"{document.title} {document.text}" for document in dataset.docs_iter()], queries, "Cranfield"


def collection(data: Path, documents: int) -> tuple[np.ndarray, csr_matrix, Batch, str]:
    """(dense float16 [N, HIDDEN], sparse [N, V] with TERMS a row, queries, origin)."""
    random = np.random.default_rng(0)
    texts, asked, origin = read_texts(data)
    words = [WORD.findall(text.lower()) for text in texts]
    frequencies = Counter(word for row in words for word in row).most_common(VOCABULARY)
    place = {word: i for i, (word, _) in enumerate(frequencies)}
    counts = [Counter(place[word] for word in row if word in place) for row in words]
    real = csr_matrix(
        (
            np.concatenate([np.fromiter(row.values(), np.float32) for row in counts]),
            np.concatenate([np.fromiter(row, np.int32) for row in counts]),
            np.concatenate([[0], np.cumsum([len(row) for row in counts])]),
        ),
        shape=(len(texts), len(place)),
    )
    real.data = np.log1p(real.data)
    holders = np.bincount(real.indices, minlength=len(place))
    idf = diags(np.log(1 + (len(texts) - holders + 0.5) / (holders + 0.5)).astype(np.float32))
    axes = latent_axes(csr_matrix(real @ idf), random)
    sparse = resample(real, unit(real @ idf @ axes), documents, np.array([n for _, n in frequencies], float), random)
    dense = unit(sparse @ idf @ axes).astype(np.float16)
    rows = []
    for first, second in zip(asked, [*asked[1:], asked[0]], strict=True):
        terms = [place[word] for word in WORD.findall(f"{first} {second}".lower()) if word in place]
        rows.append(sorted(list(dict.fromkeys(terms))[:QUERY_TERMS]))
    rows = [row for row in rows if len(row) == QUERY_TERMS][:: max(1, len(rows) // 256)]
    indices = np.array(rows, np.int32).ravel()
    indptr = np.arange(len(rows) + 1, dtype=np.int64) * QUERY_TERMS
    queries = csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(rows), len(place)))
    return dense, sparse, Batch(unit(queries @ idf @ axes), indptr, indices, queries.data), origin


def latent_axes(matrix: csr_matrix, random: np.random.Generator) -> np.ndarray:
    """float32 [V, HIDDEN]: leading right singular vectors, by two rounds of subspace iteration."""
    basis = np.linalg.qr(matrix @ random.normal(size=(matrix.shape[1], HIDDEN + 32)).astype(np.float32))[0]
    for _ in range(2):
        basis = np.linalg.qr(matrix @ np.linalg.qr(matrix.T @ basis)[0])[0]
    return np.linalg.svd(basis.T @ matrix, full_matrices=False)[2][:HIDDEN].T.astype(np.float32)


def unit(rows: Any) -> np.ndarray:
    """The rows at length 1."""
    rows = np.asarray(rows, np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def resample(
    real: csr_matrix, vectors: np.ndarray, documents: int, frequencies: np.ndarray, random: np.random.Generator
) -> csr_matrix:
    """[documents, V], exactly TERMS terms a row: a real document's, a weaker neighbour's, frequent words to fill."""
    neighbours = faiss.knn(vectors, vectors, 11, metric=faiss.METRIC_INNER_PRODUCT)[1]
    shares = np.cumsum(frequencies) / frequencies.sum()
    columns, values = np.empty((documents, TERMS), np.int32), np.empty((documents, TERMS), np.float32)
    for row in range(documents):
        first = int(random.integers(real.shape[0]))
        pair = (first, int(neighbours[first, random.integers(1, 11)]))
        parts = [slice(real.indptr[i], real.indptr[i + 1]) for i in pair]
        terms = np.concatenate([real.indices[part] for part in parts])
        weights = np.concatenate([real.data[part] * share for part, share in zip(parts, (1.0, 0.5), strict=True)])
        while len(np.unique(terms)) < TERMS:
            terms = np.concatenate([terms, np.searchsorted(shares, random.random(64)).astype(np.int32)])
            weights = np.concatenate([weights, random.uniform(0.05, 0.35, 64)])
        terms, places = np.unique(terms, return_index=True)
        weights = weights[places] * random.uniform(0.7, 1.3, len(terms))
        kept = np.sort(np.argsort(-weights)[:TERMS])
        columns[row], values[row] = terms[kept], weights[kept]
    indptr = np.arange(documents + 1, dtype=np.int64) * TERMS
    half = values.ravel().astype(np.float16).astype(np.float32)
    return csr_matrix((half, columns.ravel(), indptr), shape=(documents, real.shape[1]))


def measure(actions: dict[str, tuple[Callable[[int], object], int]], rounds: int) -> dict[str, float]:
    """Median milliseconds of CPU time of each action, (function of a query's number, how many queries)."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, (action, count) in actions.items():
            for query in range(count):
                started = time.process_time()
                action(query)
                if number:  # the first round warms up
                    times[name].append((time.process_time() - started) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def scipy_scores(matrix: csr_matrix, batch: Batch, query: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, scores) of the K best by a product with the whole matrix and a partial sort."""
    one = batch.one(query)
    vector = np.zeros(matrix.shape[1], np.float32)
    vector[one.indices] = one.weights
    return best(matrix @ vector)


def best(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, scores) of the K largest, best first."""
    rows = np.argpartition(-scores, K)[:K]
    rows = rows[np.argsort(-scores[rows])]
    return rows, scores[rows]


def bench_sparse(index: HybridIndex, matrix: csr_matrix, batch: Batch, rounds: int) -> dict[str, float]:
    """Median milliseconds a query of each contender, after their scores were found to be equal."""
    ours, columns = index.shards[0].sparse, csc_matrix(matrix)
    postings = {
        "data": columns.data, "indices": columns.indices.astype(np.int32), "indptr": columns.indptr.astype(np.int32),
        "num_docs": matrix.shape[0],
    }  # fmt: skip
    singles = [batch.one(query) for query in range(len(batch.dense))]

    def search(query: int, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return ours.search(singles[query].indptr, singles[query].indices, singles[query].weights, k)

    def bm25s(query: int, k: int) -> Any:
        return bm25s_retrieve([singles[query].indices], postings, k=k, sorted=True, n_threads=1)

    for query in range(20):
        wanted = scipy_scores(matrix, batch, query)[1]
        for other in (search(query, K)[0][1], bm25s(query, K)[1][0]):
            np.testing.assert_allclose(other, wanted, rtol=1e-5)
    count = len(singles)
    return measure(
        {
            "ours": (lambda query: search(query, K), count),
            f"ours, k = {CANDIDATES}": (lambda query: search(query, CANDIDATES), count),
            "bm25s (numba)": (lambda query: bm25s(query, K), count),
            f"bm25s (numba), k = {CANDIDATES}": (lambda query: bm25s(query, CANDIDATES), count),
            "scipy CSR · q": (lambda query: scipy_scores(matrix, batch, query), 20),
            "scipy, sum of the CSC columns": (
                lambda query: best(np.asarray(columns[:, singles[query].indices].sum(axis=1)).ravel()), 20,
            ),
        },
        rounds,
    )  # fmt: skip


def bench_hybrid(indexes: dict[str, HybridIndex], batch: Batch, rounds: int) -> list[str]:
    """Table rows: one query at a time and in batch, with recall@10 against the exact index.

    Recall is that of every second query; the approximate index was tuned on the others.
    """
    singles = [batch.one(query) for query in range(len(batch.dense))]
    modes = ("dense", "hybrid")
    truth = {mode: indexes["auto"].search(batch, K, mode)[::2] for mode in modes}  # type: ignore[arg-type]
    actions: dict[str, tuple[Callable[[int], object], int]] = {}
    for name, index in indexes.items():
        for mode in modes:
            actions[f"{name} {mode}"] = (lambda query, i=index, m=mode: i.search(singles[query], K, m), 100)  # type: ignore[misc]
            actions[f"{name} {mode} batch"] = (lambda _, i=index, m=mode: i.search(batch, K, m), 1)  # type: ignore[misc]
    times = measure(actions, rounds)
    lines = []
    for name, index in indexes.items():
        manifest = index.shards[0].manifest
        label = manifest.dense_factory + (f", {manifest.dense_probes} lists" if manifest.dense_probes else ", exact")
        for mode in modes:
            found = index.search(batch, K, mode)[::2]  # type: ignore[arg-type]
            same = [len({h.docid for h in a} & {h.docid for h in b}) for a, b in zip(found, truth[mode], strict=True)]
            single, together = times[f"{name} {mode}"], times[f"{name} {mode} batch"] / len(singles)
            lines.append(f"| {mode}, {label} | {single:.2f} | {together:.2f} | {np.mean(same) / K:.3f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of BEIR collections")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    dense, sparse, queries, origin = collection(options.data, options.documents)
    docids = [f"d{i:07d}" for i in np.random.default_rng(1).permutation(options.documents)]
    with tempfile.TemporaryDirectory() as temporary:
        indexes, seconds = {}, {}
        for name, factory in (("auto", "auto"), ("approximate", APPROXIMATE)):
            folder, started = Path(temporary) / name, time.perf_counter()
            config = IndexConfig(dense=factory, training_vectors=80_000)
            write_shard(
                folder / "shard-00000", docids, dense, sparse, model_fingerprint="benchmark", config=config,
                queries=queries.dense[1::2],
            )  # fmt: skip
            seconds[name], indexes[name] = time.perf_counter() - started, HybridIndex.open(folder)
        set_threads(1)
        size = sum(path.stat().st_size for path in (Path(temporary) / "auto" / "shard-00000").glob("sparse.*"))
        times = bench_sparse(indexes["auto"], sparse, queries, options.rounds)
        hybrid = bench_hybrid(indexes, queries, options.rounds)
    postings = np.bincount(sparse.indices, minlength=sparse.shape[1])[queries.indices].sum() / len(queries.dense)
    print(
        f"{options.documents:,} documents resampled from {origin}, {TERMS} terms of {sparse.shape[1]:,} and {HIDDEN} "
        f"dimensions each;\n{len(queries.dense)} queries of {QUERY_TERMS} terms, {postings:,.0f} postings a query; one "
        f"thread, medians of CPU time over {options.rounds} interleaved rounds.\n"
    )
    print(f"| sparse, one query at a time, k = {K} | ms | × ours |\n|---|---:|---:|")
    for name, value in times.items():
        same_depth = times[f"ours, k = {CANDIDATES}"] if str(CANDIDATES) in name else times["ours"]
        print(f"| {name} | {value:.3f} | {value / same_depth:.1f} |")
    print(f"\n| k = {K}, {CANDIDATES} candidates a side | ms, one at a time | ms a query, batch | recall@10 |")
    print("|---|---:|---:|---:|\n" + "\n".join(hybrid))
    print("\nSparse files: " + f"{size / sparse.nnz:.3f} bytes a non-zero. Built in", end=" ")
    print(", ".join(f"{value:.0f} s ({name})" for name, value in seconds.items()) + ", one thread.")


if __name__ == "__main__":
    main()
