"""A tiny run to serve: a random table over the tiny tokenizer, and an index of eight documents encoded with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from scipy.sparse import csr_matrix

from components.indexing import write_shard
from components.lookup import save_table
from components.text import Text
from serve.app import create_app
from serve.search import SearchService
from serve.settings import ServeSettings
from serve.worker import Worker

HIDDEN = 16
DOCUMENTS = [
    ("d01", "lift of a wing", "the lift of a wing in a slipstream depends on the angle of attack and on the chord."),
    ("d02", "heat transfer", "heat transfer in the laminar boundary layer of a flat plate at low speed."),
    ("d03", "cones", "what is the pressure distribution over a cone at supersonic speed? tests in a wind tunnel."),
    (
        "d04",
        "shells",
        "buckling of thin cylindrical shells under axial compression, with and without internal pressure.",
    ),
    ("d05", "flow past a body", "an experimental study of the flow past a body of revolution at an angle of attack."),
    ("d06", "", "the quick brown fox jumps over the lazy dog, isn't it? Größe 中文 😀"),
    ("d07", "<b>markup</b> & co", "a document with <script>alert('x')</script> in it, about the lift of a flat plate."),
    ("d08", "nothing of the kind", "0123456789 0123456789"),
]


def write_run(folder: Path, text: Text, *, index_model: str = "model-1") -> Path:
    """A run folder with `tabulate/` and `index/`: documents are the sum of their tokens' rows, so they are found."""
    random = np.random.default_rng(7)
    rows = random.normal(size=(text.vocabulary_size, HIDDEN)).astype(np.float32)
    scores = np.where(text.producible, 1.0, 0.0).astype(np.float32)
    save_table(
        folder / "tabulate",
        {"default": rows, "question": -rows},
        scores,
        text,
        instructions={"default": "", "question": "Given a question, find what answers it"},
        storage="float32",
        model_fingerprint="model-1",
    )
    dense = np.zeros((len(DOCUMENTS), HIDDEN), np.float32)
    sparse = np.zeros((len(DOCUMENTS), text.vocabulary_size), np.float32)
    for number, (_, title, body) in enumerate(DOCUMENTS):
        ids = text.plain([" " + f"{title} {body}".strip()])[0]
        vector = rows[ids].sum(axis=0)
        dense[number] = vector / np.linalg.norm(vector)
        for term in ids:
            sparse[number, term] = np.log1p(ids.count(term))
    sparse[1, text.plain([" lift"])[0]] = 0.5  # an expansion: "lift" is nowhere in d02's text
    (folder / "index").mkdir(parents=True)
    write_shard(
        folder / "index" / "shard-00000",
        [docid for docid, _, _ in DOCUMENTS],
        dense,
        csr_matrix(sparse),
        model_fingerprint=index_model,
        titles=[title for _, title, _ in DOCUMENTS],
        texts=[f"{title} {body}".strip() for _, title, body in DOCUMENTS],
    )
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, tiny_text: Text) -> Path:
    """A finished run of eight documents."""
    return write_run(tmp_path_factory.mktemp("run"), tiny_text)


@pytest.fixture(scope="session")
def settings(run_folder: Path) -> ServeSettings:
    """Settings that serve `run_folder`, with limits low enough to run into."""
    return ServeSettings(run_folder=run_folder, max_k=20, max_batch=8, max_query_characters=500, max_body_bytes=20_000)


@pytest.fixture(scope="session")
def service(settings: ServeSettings) -> SearchService:
    """The loaded service."""
    return SearchService.load(settings)


@pytest.fixture
def api(service: SearchService, settings: ServeSettings) -> Iterator[TestClient]:
    """The HTTP side in this process; a failure inside is raised here and not hidden behind a 500."""
    worker = Worker(settings.search_threads, settings.max_ongoing)
    with TestClient(create_app(service, worker, settings), base_url="http://127.0.0.1") as client:
        yield client
