"""Build the index from the encoded documents: `python workflows/index.py --config F --run-name N`.

Each index shard is a Ray task of its own: it reads the encoded shards that make it, looks titles and texts up by docid,
and writes one folder. Shards are built side by side and never merged.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
from scipy.sparse import csr_matrix

from components.encoding import MANIFEST as ENCODE_MANIFEST
from components.indexing import IndexConfig, write_shard
from components.indexing.dense import SAMPLE, set_threads
from components.lookup import QueryEncoder
from components.lookup.artefact import LOOKUP_FILE
from components.storage import read_json, sha256_file
from components.text import Text
from workflows.stage import Stage, StageContext, main

log = logging.getLogger("almanac")
QUERY_WORDS = 8
"""Length of the queries that the dense side is tuned with."""


def run(context: StageContext) -> dict[str, Any]:
    """Build every shard; returns counts, bytes and the lowest recall of the dense side."""
    config, encode = context.config.index, context.inputs["encode"]
    manifest = read_json(encode / ENCODE_MANIFEST)
    origin = check_match(manifest, context.inputs["tabulate"])
    groups = group_shards(manifest["shards"], config.documents_per_shard)
    corpus = sorted(str(path) for path in (context.inputs["data"] / "corpus").glob("*.parquet"))
    cpus = cpus_per_task(len(groups))
    build = ray.remote(num_cpus=cpus, max_retries=2)(build_shard)
    pending = {
        build.remote(
            str(context.folder / f"shard-{number:05d}"), [(str(encode / s["file"]), s["sha256"]) for s in group],
            corpus, str(context.inputs["tabulate"]), manifest["vocabulary_size"], origin, config, cpus,
        ): number
        for number, group in enumerate(groups)
    }  # fmt: skip
    results: dict[int, dict[str, Any]] = {}
    while pending:
        ready, _ = ray.wait(list(pending))
        number = pending.pop(ready[0])
        results[number] = ray.get(ready[0])
        log.info("index     shard %d, %d of %d: %s", number, len(results), len(groups), results[number]["summary"])
        context.log({"index.documents": sum(result["documents"] for result in results.values())}, step=len(results))
    documents = sum(result["documents"] for result in results.values())
    if documents != manifest["documents"]:
        raise ValueError(
            f"indexed {documents} documents of {manifest['documents']} encoded: run encode and index again"
        )
    size = sum(path.stat().st_size for path in context.folder.rglob("*") if path.is_file())
    searchable = sum(result["bytes"] for result in results.values())
    return {
        "documents": documents, "shards": len(groups), "bytes": size, "vector_bytes": searchable,
        "vector_bytes_per_document": round(searchable / max(1, documents), 1),
        "nonzeros": sum(result["nonzeros"] for result in results.values()),
        "dense_recall_at_10": min(result["recall"] for result in results.values()),
        "without_terms": sum(result["without_terms"] for result in results.values()),
        "without_vector": sum(result["without_vector"] for result in results.values()),
    }  # fmt: skip


def check_match(manifest: dict[str, Any], tabulate: Path) -> dict[str, str]:
    """The fingerprints of model, text and table that a shard's manifest records, as arguments of `write_shard`.

    ValueError: the documents were encoded by another model, text or vocabulary than the look-up table was made for.
    """
    lookup, text = read_json(tabulate / LOOKUP_FILE), Text.load(tabulate)
    pairs = {
        "model_fingerprint": (manifest["model_fingerprint"], lookup["model_fingerprint"]),
        "text_fingerprint": (manifest["text_fingerprint"], text.fingerprint),
        "vocabulary_size": (manifest["vocabulary_size"], lookup["vocabulary_size"]),
    }
    for name, (documents, table) in pairs.items():
        if documents != table:
            raise ValueError(
                f"{tabulate / LOOKUP_FILE}: {name} is {table}, but the documents were encoded with {documents}: "
                "documents and queries would not meet. Run tabulate and encode again."
            )
    return {
        "model_fingerprint": lookup["model_fingerprint"], "text_fingerprint": text.fingerprint,
        "table_fingerprint": lookup["table_sha256"],
    }  # fmt: skip


def cpus_per_task(tasks: int) -> int:
    """An equal share of the cluster's CPUs for each task, but never more than its largest node has."""
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return max(1, min(sum(nodes) // max(1, tasks), max(nodes, default=1)))


def group_shards(shards: list[dict[str, Any]], documents_per_shard: int) -> list[list[dict[str, Any]]]:
    """Consecutive encoded shards put together up to `documents_per_shard` documents (at least one a group)."""
    groups: list[list[dict[str, Any]]] = []
    room = 0
    for shard in shards:
        if not groups or shard["rows"] > room:
            groups.append([])
            room = documents_per_shard
        groups[-1].append(shard)
        room -= shard["rows"]
    return groups


def build_shard(
    folder: str, encoded: list[tuple[str, str]], corpus: list[str], tabulate: str, vocabulary_size: int,
    origin: dict[str, str], config: IndexConfig, threads: int,
) -> dict[str, Any]:  # fmt: skip
    """Build one index shard from encoded files (path, SHA-256); runs in a Ray task and starts over when retried."""
    set_threads(threads)
    shutil.rmtree(folder, ignore_errors=True)  # what a killed attempt left
    for path, wanted in encoded:
        if sha256_file(Path(path)) != wanted:
            raise ValueError(
                f"{path}: its SHA-256 is not the one in {ENCODE_MANIFEST}. Delete the file and encode again."
            )
    table = pa.concat_tables(pq.read_table(path) for path, _ in encoded)
    dense, sparse = vectors(table, vocabulary_size)
    titles, texts = find_texts(corpus, table["docid"])
    kept = {"titles": titles, "texts": texts} if config.texts else {}
    manifest = write_shard(
        Path(folder), table["docid"].to_pylist(), dense, sparse, config=config,
        queries=sample_queries(texts, Path(tabulate)), **origin, **kept,
    )  # fmt: skip
    files = [path for path in Path(folder).iterdir() if path.name != "documents.arrow"]
    return {
        "documents": manifest.documents, "nonzeros": manifest.nonzeros, "recall": manifest.dense_recall,
        "without_terms": len(manifest.without_terms), "without_vector": len(manifest.without_vector),
        "bytes": sum(path.stat().st_size for path in files),
        "summary": f"{manifest.documents} documents, {manifest.dense_factory} (recall@10 {manifest.dense_recall:.3f}"
                   f"), {manifest.nonzeros / max(1, manifest.documents):.0f} terms a document",
    }  # fmt: skip


def vectors(table: pa.Table, vocabulary_size: int) -> tuple[np.ndarray, csr_matrix]:
    """(dense float16 [N, H], sparse CSR float32 [N, V]) of encoded rows; more than 2³¹ values are no problem."""

    def flat(name: str) -> np.ndarray:
        return np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table[name].chunks])

    dense = flat("dense").reshape(len(table), table.schema.field("dense").type.list_size)
    lengths = pc.list_value_length(table["sparse_ids"]).to_numpy()
    indptr = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    data = (flat("sparse_weights").astype(np.float32), flat("sparse_ids").astype(np.int32), indptr)
    return dense, csr_matrix(data, shape=(len(table), vocabulary_size))


def find_texts(corpus: list[str], docids: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Titles and texts of `docids`, looked up by id (never by position) with one pass over the corpus files.

    ValueError names the first docid that the corpus does not hold.
    """
    wanted = docids.combine_chunks()
    found: list[pa.RecordBatch] = []
    for path in corpus:
        for batch in pq.ParquetFile(path).iter_batches(columns=["docid", "title", "text"]):
            found.append(batch.filter(pc.is_in(batch["docid"], value_set=wanted)))
        if sum(map(len, found)) >= len(wanted):
            break
    documents = pa.Table.from_batches(found)
    places = pc.index_in(wanted, value_set=documents["docid"].combine_chunks())
    if places.null_count:
        missing = wanted.filter(pc.is_null(places))
        raise ValueError(
            f"{len(missing)} encoded documents are not in the corpus, the first is {missing[0].as_py()!r}: encode and "
            "data are of different runs. Run encode again."
        )
    return documents["title"].take(places), documents["text"].take(places)


def sample_queries(texts: pa.ChunkedArray, tabulate: Path) -> np.ndarray:
    """float32 [at most SAMPLE, H]: the first words of texts spread evenly, looked up in the table like real queries."""
    some = texts.take(np.linspace(0, len(texts) - 1, min(SAMPLE, len(texts)), dtype=np.int64)).to_pylist()
    vectors = QueryEncoder.load(tabulate).encode([" ".join(text.split()[:QUERY_WORDS]) for text in some]).dense
    return vectors[vectors.any(axis=1)]


STAGE = Stage(name="index", sections=("index",), inputs=("data", "encode", "tabulate"), run=run)

if __name__ == "__main__":
    main(STAGE)
