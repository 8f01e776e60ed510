"""A shard of the index: one folder with dense and sparse files, the documents' ids and texts, and a manifest over all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix

from components.indexing.config import IndexConfig
from components.indexing.dense import DenseIndex, choose_factory
from components.indexing.sparse import FILES, SparseIndex
from components.section import Section
from components.storage import read_json, sha256_file, write_json

FORMAT_VERSION = 1
MANIFEST, DENSE_FILE, DOCUMENTS_FILE = "manifest.json", "dense.faiss", "documents.arrow"


class ShardManifest(Section):
    """What `manifest.json` of a shard says."""

    format_version: int
    documents: int
    hidden_size: int
    vocabulary_size: int
    model_fingerprint: str
    dense_factory: str
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
    titles: Sequence[str] | None = None, texts: Sequence[str] | None = None, config: IndexConfig | None = None,
) -> ShardManifest:  # fmt: skip
    """Build a shard in `folder` (created): row i of everything belongs to `docids[i]`.

    dense float [N, H], unit or zero rows; sparse CSR [N, V], weights ≥ 0. ValueError: lengths differ, a docid twice, a
    NaN (the docid is named), or recall below the floor.
    """
    config = config or IndexConfig()
    _refuse(docids, dense, sparse)
    folder.mkdir(parents=True, exist_ok=True)
    filled = np.flatnonzero(np.abs(dense.astype(np.float32)).sum(axis=1) > 0)
    factory = choose_factory(config.dense, len(filled))
    index = DenseIndex.build(dense[filled], filled, factory, config.training_vectors)
    recall = index.recall(dense[filled], filled)
    if recall < config.recall_floor:
        raise ValueError(
            f"{folder}: recall@10 of {factory} against exact search is {recall:.3f}, below index.recall_floor="
            f"{config.recall_floor}. Choose another index.dense, or lower the floor."
        )
    index.save(folder / DENSE_FILE)
    postings = SparseIndex.build(sparse, _ranks(docids))
    postings.save(folder)
    _write_documents(folder / DOCUMENTS_FILE, docids, titles, texts)
    lengths = np.diff(sparse.indptr)
    manifest = ShardManifest(
        format_version=FORMAT_VERSION, documents=len(docids), hidden_size=dense.shape[1],
        vocabulary_size=sparse.shape[1], model_fingerprint=model_fingerprint, dense_factory=factory,
        dense_vectors=len(filled), dense_recall=round(recall, 4), nonzeros=postings.nonzeros,
        without_terms=[docids[i] for i in np.flatnonzero(lengths == 0)],
        without_vector=[docids[i] for i in np.setdiff1d(np.arange(len(docids)), filled)],
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
            raise ValueError(f"{folder / MANIFEST}: format {self.manifest.format_version}, wanted {FORMAT_VERSION}. Index again.")
        for name, wanted in self.manifest.files.items():
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name}: missing. Index again.")
            if verify and sha256_file(folder / name) != wanted:
                raise ValueError(f"{folder / name}: its checksum is not the one in {MANIFEST}: damaged or exchanged. Index again.")
        self._documents = _open_documents(folder / DOCUMENTS_FILE)
        self.docids: list[str] = self._documents["docid"].to_pylist()
        self.dense = DenseIndex.open(folder / DENSE_FILE, self.manifest.dense_factory)
        self.ranks = _ranks(self.docids)
        self.sparse = SparseIndex.open(folder, self.ranks)
        counts = {"documents": len(self.docids), "dense_vectors": len(self.dense), "nonzeros": self.sparse.nonzeros}
        for name, found in counts.items():
            if found != getattr(self.manifest, name):
                raise ValueError(f"{folder}: {found} {name}, but {MANIFEST} says {getattr(self.manifest, name)} (case T-061). Index again.")

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
        raise ValueError(f"{len(docids)} docids, {dense.shape[0]} dense and {sparse.shape[0]} sparse rows: they must be equal")
    if len(set(docids)) != len(docids):
        seen: set[str] = set()
        double = next(docid for docid in docids if docid in seen or seen.add(docid))  # type: ignore[func-returns-value]
        raise ValueError(f"docid {double!r} occurs twice in one shard")
    bad = ~np.isfinite(dense).all(axis=1)
    wrong = np.flatnonzero(~np.isfinite(sparse.data) | (sparse.data < 0))
    bad[np.searchsorted(sparse.indptr, wrong, side="right") - 1] = True
    if bad.any():
        raise ValueError(f"document {docids[int(bad.argmax())]!r}: NaN, infinity or a negative weight in its vector")


def _write_documents(path: Path, docids: Sequence[str], titles: Sequence[str] | None, texts: Sequence[str] | None) -> None:
    blank = [""] * len(docids)
    columns: dict[str, Any] = {
        "docid": pa.array(docids, pa.string()),
        "title": pa.array(titles if titles is not None else blank, pa.large_string()),
        "text": pa.array(texts if texts is not None else blank, pa.large_string()),
    }
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=65_536)


def _open_documents(path: Path) -> pa.Table:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a whole Arrow file ({error}). Index again.") from error
