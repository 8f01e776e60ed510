"""A shard of the index: a folder with dense and sparse files, the documents' ids and texts, a manifest over all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix

from components.encoding import bad_rows
from components.indexing.config import IndexConfig
from components.indexing.dense import DenseIndex, choose_factory, sample_rows
from components.indexing.sparse import FILES, SparseIndex, round_to_half
from components.section import Section
from components.storage import read_json, sha256_file, write_json

FORMAT_VERSION = 1
MANIFEST, DENSE_FILE, DOCUMENTS_FILE = "manifest.json", "dense.faiss", "documents.arrow"
Strings: TypeAlias = Sequence[str] | pa.Array | pa.ChunkedArray


class ShardManifest(Section):
    """What `manifest.json` of a shard says."""

    format_version: int
    documents: int
    hidden_size: int
    vocabulary_size: int
    model_fingerprint: str
    text_fingerprint: str = ""
    """Tokenizer and text rules that the documents were encoded with."""
    table_fingerprint: str = ""
    """SHA-256 of the look-up table that the queries of this run are encoded with."""
    dense_factory: str
    dense_probes: int | None = None
    """Lists that an IVF index reads a query."""
    dense_vectors: int
    dense_recall: float
    """Recall@10 of the dense index against exact search when it was built."""
    nonzeros: int
    without_terms: list[str]
    """Documents with an all-zero sparse vector: the sparse side never finds them (case T-050)."""
    without_vector: list[str]
    files: dict[str, str]
    """File → SHA-256."""


def write_shard(
    folder: Path, docids: Sequence[str], dense: np.ndarray, sparse: csr_matrix, *, model_fingerprint: str,
    text_fingerprint: str = "", table_fingerprint: str = "", titles: Strings | None = None,
    texts: Strings | None = None, config: IndexConfig | None = None, queries: np.ndarray | None = None,
) -> ShardManifest:  # fmt: skip
    """Build a shard in `folder` (created): row i of everything belongs to `docids[i]`.

    dense float [N, H], unit or zero rows; sparse CSR [N, V], weights ≥ 0. `queries` float32 [Q, H] are what the dense
    side is tuned and measured with, by default a sample of the documents, which flatters it: queries lie further off.
    ValueError: lengths differ, a docid twice, a NaN or a weight above half precision (the docid is named), or recall
    below the floor.
    """
    config = config or IndexConfig()
    sparse = round_to_half(sparse)
    _refuse(docids, dense, sparse)
    folder.mkdir(parents=True, exist_ok=True)
    filled = np.flatnonzero(dense.any(axis=1))
    vectors = dense if len(filled) == len(dense) else dense[filled]
    factory = choose_factory(config.dense, len(filled), config.training_vectors)
    queries = sample_rows(vectors) if queries is None else queries
    index = DenseIndex.build(vectors, filled, factory, config.training_vectors, config.probes, queries)
    recall = index.recall(vectors, filled, queries)
    if recall < config.recall_floor:
        raise ValueError(
            f"{folder}: recall@10 of {factory} against exact search is {recall:.3f}, below index.recall_floor="
            f"{config.recall_floor}. Choose another index.dense, more index.probes, or lower the floor."
        )
    index.save(folder / DENSE_FILE)
    postings = SparseIndex.build(sparse, _ranks(docids))
    postings.save(folder)
    _write_documents(folder / DOCUMENTS_FILE, docids, titles, texts)
    manifest = ShardManifest(
        format_version=FORMAT_VERSION, documents=len(docids), hidden_size=dense.shape[1],
        vocabulary_size=sparse.shape[1], model_fingerprint=model_fingerprint, text_fingerprint=text_fingerprint,
        table_fingerprint=table_fingerprint, dense_factory=factory, dense_probes=index.probes,
        dense_vectors=len(filled), dense_recall=round(recall, 4), nonzeros=postings.nonzeros,
        without_terms=[docids[i] for i in np.flatnonzero(np.diff(sparse.indptr) == 0).tolist()],
        without_vector=[docids[i] for i in np.setdiff1d(np.arange(len(docids)), filled).tolist()],
        files={name: sha256_file(folder / name) for name in (DENSE_FILE, *FILES, DOCUMENTS_FILE)},
    )  # fmt: skip
    write_json(folder / MANIFEST, manifest.model_dump())
    return manifest


class Shard:
    """An open shard."""

    def __init__(self, folder: Path, verify: bool = True) -> None:
        """Open a shard folder. ValueError names the file that is damaged, missing or does not fit the others."""
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"{folder}: no {MANIFEST}, so this is no finished shard. Run the index stage.")
        self.manifest = ShardManifest(**read_json(folder / MANIFEST))
        if self.manifest.format_version != FORMAT_VERSION:
            found_version = self.manifest.format_version
            raise ValueError(f"{folder / MANIFEST}: format {found_version}, wanted {FORMAT_VERSION}. Index again.")
        for name, wanted in self.manifest.files.items():
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name}: missing. Index again.")
            if verify and sha256_file(folder / name) != wanted:
                raise ValueError(
                    f"{folder / name}: damaged or exchanged, its SHA-256 is not that in {MANIFEST}. Index again."
                )
        self._documents = _open_documents(folder / DOCUMENTS_FILE)
        self.docids: list[str] = self._documents["docid"].to_pylist()
        self.dense = DenseIndex.open(folder / DENSE_FILE)
        self.ranks = _ranks(self.docids)
        self.sparse = SparseIndex.open(folder, self.ranks)
        counts = {"documents": len(self.docids), "dense_vectors": len(self.dense), "nonzeros": self.sparse.nonzeros}
        for name, found in counts.items():
            if found != (said := getattr(self.manifest, name)):
                raise ValueError(f"{folder}: {found} {name}, but {MANIFEST} says {said} (case T-061). Index again.")

    def __len__(self) -> int:
        return len(self.docids)

    def document(self, row: int) -> tuple[str, str]:
        """(title, text) of a row; empty where the index was built without texts."""
        return self._documents["title"][row].as_py(), self._documents["text"][row].as_py()


def _ranks(docids: Sequence[str]) -> np.ndarray:
    """int32 [N]: each row's place in ascending docid order."""
    ranks = np.empty(len(docids), np.int32)
    ranks[sorted(range(len(docids)), key=docids.__getitem__)] = np.arange(len(docids), dtype=np.int32)
    return ranks


def _refuse(docids: Sequence[str], dense: np.ndarray, sparse: csr_matrix) -> None:
    if not len(docids) == dense.shape[0] == sparse.shape[0]:
        counts = f"{len(docids)} docids, {dense.shape[0]} dense and {sparse.shape[0]} sparse rows"
        raise ValueError(f"{counts}: they must be equal")
    if len(set(docids)) != len(docids):
        seen: set[str] = set()
        double = next(docid for docid in docids if docid in seen or seen.add(docid))  # type: ignore[func-returns-value]
        raise ValueError(f"docid {double!r} occurs twice in one shard")
    bad = bad_rows(dense, sparse.indptr, sparse.data)
    if bad.any():
        raise ValueError(
            f"document {docids[int(bad.argmax())]!r}: its vector holds NaN, infinity, or a weight below 0 or above "
            "65,504. Look at the training loss, and encode again."
        )


def _write_documents(path: Path, docids: Sequence[str], titles: Strings | None, texts: Strings | None) -> None:
    def column(values: Strings | None) -> pa.Array | pa.ChunkedArray:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return values.cast(pa.large_string())
        return pa.array([""] * len(docids) if values is None else values, pa.large_string())

    columns: dict[str, Any] = {"docid": pa.array(docids, pa.string()), "title": column(titles), "text": column(texts)}
    table = pa.table(columns).combine_chunks()  # one layout however the values came, so equal shards have equal bytes
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=65_536)


def _open_documents(path: Path) -> pa.Table:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a whole Arrow file ({error}). Index again.") from error
