"""Build the index from the encoded documents: `python workflows/index.py --config F --run-name N`.

Each index shard is a Ray task of its own: it reads the encoded shards that make it, looks titles and texts up by docid, and
writes one folder. Shards are built side by side and never merged.
"""

from __future__ import annotations

import logging
import os
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
from components.indexing.dense import set_threads
from components.storage import read_json, sha256_file
from workflows.stage import Stage, StageContext, main

log = logging.getLogger("almanac")


def run(context: StageContext) -> dict[str, Any]:
    """Build every shard; returns counts, bytes and the lowest recall of the dense side."""
    config = context.config.index
    encode = context.inputs["encode"]
    manifest = read_json(encode / ENCODE_MANIFEST)
    model = read_json(context.inputs["tabulate"] / "lookup.json")["model_fingerprint"]
    if model != manifest["model_fingerprint"]:
        raise ValueError(f"documents were encoded by model {manifest['model_fingerprint']}, the table is of {model}: run both stages again")
    groups = group_shards(manifest["shards"], config.documents_per_shard)
    corpus = sorted(str(path) for path in (context.inputs["data"] / "corpus").glob("*.parquet"))
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)) // max(1, len(groups)))
    build = ray.remote(num_cpus=cpus, max_retries=2)(build_shard)
    pending = {
        build.remote(
            str(context.folder / f"shard-{number:05d}"), [(str(encode / s["file"]), s["sha256"]) for s in group], corpus,
            manifest["vocabulary_size"], model, config, cpus,
        ): number
        for number, group in enumerate(groups)
    }  # fmt: skip
    results: dict[int, dict[str, Any]] = {}
    while pending:
        ready, _ = ray.wait(list(pending))
        number = pending.pop(ready[0])
        results[number] = ray.get(ready[0])
        log.info("index     shard %d of %d: %s", number + 1, len(groups), results[number]["summary"])
    documents = sum(result["documents"] for result in results.values())
    if documents != manifest["documents"]:
        raise ValueError(f"indexed {documents} documents of {manifest['documents']} encoded: run index again")
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
    folder: str, encoded: list[tuple[str, str]], corpus: list[str], vocabulary_size: int, model: str, config: IndexConfig, threads: int
) -> dict[str, Any]:  # fmt: skip
    """Build one index shard from encoded files (path, SHA-256); runs in a Ray task and starts over when retried."""
    set_threads(threads)
    os.environ["NUMBA_NUM_THREADS"] = "1"
    for path, wanted in encoded:
        if sha256_file(Path(path)) != wanted:
            raise ValueError(f"{path}: its checksum is not the one in the encode manifest. Delete the encode folder and encode again.")
    table = pa.concat_tables(pq.read_table(path) for path, _ in encoded)
    docids = table["docid"].to_pylist()
    dense, sparse = vectors(table, vocabulary_size)
    titles, texts = find_texts(corpus, table["docid"]) if config.texts else (None, None)
    manifest = write_shard(
        Path(folder), docids, dense, sparse, model_fingerprint=model, titles=titles, texts=texts, config=config
    )
    files = [path for path in Path(folder).iterdir() if path.name != "documents.arrow"]
    return {
        "documents": manifest.documents, "nonzeros": manifest.nonzeros, "recall": manifest.dense_recall,
        "without_terms": len(manifest.without_terms), "without_vector": len(manifest.without_vector),
        "bytes": sum(path.stat().st_size for path in files),
        "summary": f"{manifest.documents} documents, dense {manifest.dense_factory} (recall@10 {manifest.dense_recall:.3f}), "
                   f"{manifest.nonzeros / max(1, manifest.documents):.0f} terms a document",
    }  # fmt: skip


def vectors(table: pa.Table, vocabulary_size: int) -> tuple[np.ndarray, csr_matrix]:
    """(dense float16 [N, H], sparse CSR float32 [N, V]) of encoded rows."""
    dense = table["dense"].combine_chunks()
    size = dense.type.list_size
    matrix = dense.flatten().to_numpy(zero_copy_only=False).reshape(len(table), size)
    ids, weights = (table[name].combine_chunks() for name in ("sparse_ids", "sparse_weights"))
    indptr = np.concatenate([[0], np.cumsum(pc.list_value_length(ids).to_numpy())]).astype(np.int64)
    data = weights.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    columns = ids.flatten().to_numpy(zero_copy_only=False).astype(np.int32)
    return matrix, csr_matrix((data, columns, indptr), shape=(len(table), vocabulary_size))


def find_texts(corpus: list[str], docids: pa.ChunkedArray) -> tuple[list[str], list[str]]:
    """Titles and texts of `docids`, looked up by id (never by position) with one pass over the corpus files."""
    wanted = docids.combine_chunks()
    titles, texts = [""] * len(wanted), [""] * len(wanted)
    missing = len(wanted)
    for path in corpus:
        for batch in pq.ParquetFile(path).iter_batches(columns=["docid", "title", "text"]):
            places = pc.index_in(batch["docid"], value_set=wanted)
            for row, place in enumerate(places.to_pylist()):
                if place is not None:
                    titles[place], texts[place] = batch["title"][row].as_py(), batch["text"][row].as_py()
                    missing -= 1
        if missing == 0:
            break
    if missing:
        raise ValueError(f"{missing} encoded documents are not in the corpus: encode and data are of different runs")
    return titles, texts


STAGE = Stage(name="index", sections=("index",), inputs=("data", "encode", "tabulate"), run=run)

if __name__ == "__main__":
    main(STAGE)
