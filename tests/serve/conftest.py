"""A tiny run folder to serve: a random table over the tiny tokenizer, and an index of a dozen documents encoded with it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

try:
    import components.indexing
except ModuleNotFoundError:  # TEMPORARY
    from components.section import Section

    class FusionConfig(Section):
        method: str = "minmax"
        dense_weight: float = 0.7
        sparse_weight: float = 0.3
        candidates: int = 1000
        rrf_k: int = 60

    @dataclass
    class Hit:
        docid: str
        score: float
        dense: float | None
        sparse: float | None
        dense_part: float = 0.0
        sparse_part: float = 0.0

    class HybridIndex:
        fingerprint = "f4ke"
        shards = [0]

        @classmethod
        def open(cls, folder):
            import json

            self = cls()
            state = json.loads((Path(folder) / "fake.json").read_text())
            self.docs = state["docs"]
            self.model_fingerprint = state["model"]
            d = np.load(Path(folder) / "v.npz")
            self.dense, self.sparse = d["dense"], d["sparse"]
            self.hidden_size, self.vocabulary_size = self.dense.shape[1], self.sparse.shape[1]
            return self

        def __len__(self):
            return len(self.docs)

        def search(self, batch, k=10, mode="hybrid", fusion=None):
            f = fusion or FusionConfig()
            D = batch.dense @ self.dense.T
            S = np.asarray(batch.sparse @ self.sparse.T)
            out = []
            for d, s in zip(D, S):
                n = lambda x: (x - x.min()) / max(np.ptp(x), 1e-9)
                sc = {"dense": d, "sparse": s, "hybrid": f.dense_weight * n(d) + f.sparse_weight * n(s)}[mode]
                order = sorted(range(len(d)), key=lambda i: (-sc[i], self.docs[i][0]))[:k]
                out.append(
                    [
                        Hit(
                            self.docs[i][0],
                            float(sc[i]),
                            float(d[i]),
                            float(s[i]),
                            float(sc[i]) if mode == "dense" else 0.0,
                            float(sc[i]) if mode != "dense" else 0.0,
                        )
                        for i in order
                        if mode != "sparse" or s[i] > 0
                    ]
                )
            return out

        def documents(self, docids):
            return {d: (t, x) for d, t, x in self.docs if d in docids}

        def term_weights(self, docids, terms):
            rows = [next(i for i, x in enumerate(self.docs) if x[0] == d) for d in docids]
            return self.sparse[np.ix_(rows, terms)] if rows else np.zeros((0, len(terms)), np.float32)

    module = types.ModuleType("components.indexing")
    module.FusionConfig, module.Hit, module.HybridIndex = FusionConfig, Hit, HybridIndex
    sys.modules["components.indexing"] = module


from fastapi.testclient import TestClient  # noqa: E402

from components.lookup import save_table  # noqa: E402
from components.text import Text  # noqa: E402
from serve.app import create_app  # noqa: E402
from serve.search import SearchService  # noqa: E402
from serve.settings import ServeSettings  # noqa: E402
from serve.worker import Worker  # noqa: E402

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
    """A run folder with `tabulate/` and `index/`: documents are the mean of their tokens' rows, so queries find them."""
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
    write_index(folder / "index", dense, sparse, index_model)
    return folder


def write_index(folder, dense, sparse, model):
    import json

    folder.mkdir(parents=True)
    docs = [(d, t, f"{t} {b}".strip()) for d, t, b in DOCUMENTS]
    (folder / "fake.json").write_text(json.dumps({"docs": docs, "model": model}))
    np.savez(folder / "v.npz", dense=dense, sparse=sparse)


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
