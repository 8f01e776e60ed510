"""Encoding: killed and started again it gives the bytes of an undisturbed run, and nothing finished is done twice (T-078 … T-087)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.config import Config
from components.models.document_encoder import DocumentEncoder
from components.storage import read_json, sha256_file
from tests.workflows.test_training import context_of
from workflows import encode
from workflows.stage import StageContext
from workflows.tracking import Tracker

Make = Callable[..., Config]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def trained(tiny_run: Make, ray_cluster: None) -> Callable[[str], Config]:
    """A run with a `train/` folder (no training steps)."""
    from workflows import train

    def make(name: str) -> Config:
        config = tiny_run(
            name,
            "train.steps=0",
            "train.retriever={query_dense: packed, lexical_weight: 1.0, query_weights: idf, sparse_activation: log_probability}",
        )
        context = context_of(config)
        result = train.run(context)
        context.folder.rename(config.root / "train")
        from components.storage import write_json

        write_json(config.root / "train" / "result.json", {"fingerprint": "train", **result})
        return config

    return make


def encode_context(config: Config) -> StageContext:
    return context_of(config, "encode")


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.glob("shard-*.parquet"))}


def test_every_document_once_in_order_with_the_encoder_s_vectors(trained: Callable[[str], Config]) -> None:
    """T-078, T-079: rows in corpus order within shards, whatever order Ray finishes in; counts are asserted."""
    config = trained("plain")
    context = encode_context(config)
    result = encode.run(context)
    assert (result["documents"], result["shards"], result["encoded_now"]) == (60, 4, 60)
    table = pq.read_table(sorted(context.folder.glob("shard-*.parquet")))
    assert table["docid"].to_pylist() == [f"d{i:03d}" for i in range(60)]
    corpus = pq.read_table(config.root / "data" / "corpus")
    encoder = DocumentEncoder.load(config.root / "train" / "model")
    alone = encoder.encode([corpus["text"][17].as_py()])
    np.testing.assert_allclose(table["dense"][17].as_py(), alone.dense[0], atol=2e-3)
    assert table["sparse_ids"][17].as_py() == alone.sparse.ids.tolist()
    assert table["dense"][5].as_py() == [0.0] * 32  # the empty document
    assert table["sparse_ids"][5].as_py() == []
    manifest = read_json(context.folder / "manifest.json")
    assert [shard["rows"] for shard in manifest["shards"]] == [16, 16, 16, 12]
    assert [shard["sha256"] for shard in manifest["shards"]] == list(hashes(context.folder).values())


def test_only_missing_shards_are_encoded_and_the_bytes_are_the_same(trained: Callable[[str], Config]) -> None:
    config = trained("resumed")
    context = encode_context(config)
    encode.run(context)
    before = hashes(context.folder)
    kept = {name: (context.folder / name).stat().st_mtime_ns for name in before}
    for name in ("shard-00001.parquet", "shard-00003.parquet"):
        (context.folder / name).unlink()
    result = encode.run(context)
    assert result["encoded_now"] == 16 + 12
    assert hashes(context.folder) == before
    for name in ("shard-00000.parquet", "shard-00002.parquet"):
        assert (context.folder / name).stat().st_mtime_ns == kept[name]


def test_a_corpus_that_lost_rows_is_refused(trained: Callable[[str], Config]) -> None:
    config = trained("lost")
    path = config.root / "data" / "corpus" / "part-00000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 50), path)
    with pytest.raises(ValueError, match="encoded 50 documents but ingest wrote 60"):
        encode.run(encode_context(config))


def _driver(config: Config) -> subprocess.Popen[bytes]:
    """A driver of its own, with a cluster of its own, that encodes slowly enough to be killed."""
    code = (
        "import sys, time; from pathlib import Path; from components.config import load_config; from workflows import encode\n"
        "from workflows.cluster import connect; from workflows.stage import StageContext; from workflows.tracking import Tracker\n"
        f"config = load_config({str(config.root / 'config.yaml')!r}); connect(config.cluster)\n"
        "folder = config.root / '.encode.partial'; folder.mkdir(exist_ok=True)\n"
        "inputs = {name: config.root / name for name in ('data', 'train')}\n"
        "encode.run(StageContext(config, folder, inputs, 'f', Tracker(config.root, None)))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, start_new_session=True, env=os.environ | {"RAY_ADDRESS": ""}
    )


@pytest.fixture
def reaper() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_driver_killed_in_the_middle_and_started_again(
    trained: Callable[[str], Config], reaper: list[subprocess.Popen[bytes]]
) -> None:
    """Bar 3: SIGKILL while shards are being written; the same command then ends with the bytes of an undisturbed run."""
    calm, storm = trained("calm"), trained("storm")
    encode.run(encode_context(calm))
    (storm.root / "config.yaml").write_text(storm.to_yaml())
    folder = storm.root / ".encode.partial"
    first = _driver(storm)
    reaper.append(first)
    deadline = time.time() + 90
    while not list(folder.glob("shard-*.parquet")) and time.time() < deadline and first.poll() is None:
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    time.sleep(2)  # its cluster notices and goes
    done = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*.parquet")}
    assert done
    second = _driver(storm)
    reaper.append(second)
    assert second.wait(timeout=120) == 0
    assert hashes(folder) == hashes(encode_context(calm).folder)
    assert {name: (folder / name).stat().st_mtime_ns for name in done} == done
    assert not list(folder.glob("*.tmp"))


def test_a_tracker_is_not_needed() -> None:
    assert Tracker(Path("x"), None).log_metrics({"a": 1.0}) is None
