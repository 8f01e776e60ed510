"""The whole job as users start it: from a collection and a model to a searchable index; started again; changed; submitted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from components.indexing import HybridIndex
from components.lookup import QueryEncoder
from components.storage import read_json
from tests.workflows.conftest import WORDS

ROOT = Path(__file__).parents[2]
STAGES = ("data", "prune", "train", "tabulate", "encode", "index", "evaluate")


@pytest.fixture
def config_file(tmp_path: Path, tiny_model_folder: Path) -> Path:
    """A BEIR folder of 40 documents and a config that runs everything on it in seconds."""
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    documents = [
        {
            "_id": f"d{i}",
            "title": f"{WORDS[i % 16]} {WORDS[(i * 5 + 1) % 16]}",
            "text": " ".join(WORDS[(i * k) % 16] for k in range(1, 9)),
        }
        for i in range(40)
    ]
    queries = [{"_id": f"q{i}", "text": documents[i * 3]["title"]} for i in range(10)]
    (beir / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (beir / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    judged = "\n".join(f"q{i}\td{i * 3}\t1" for i in range(10))
    (beir / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}\n")
    config = {
        "run_name": "tiny", "runs": str(tmp_path / "runs"),
        "data": {"source": f"beir:{beir}", "pairs": [{"name": "titles", "kind": "title_body"}]},
        "model": {"source": str(tiny_model_folder)},
        "text": {"document_max_tokens": 32},
        "prune": {"drop_mlps": 1, "calibration": {"samples": 2, "tokens": 16}, "speed_rounds": 0},
        "train": {
            "steps": 2, "batch_size": 4, "negatives": 0, "checkpoint_every": 1, "log_every": 1, "warmup_steps": 1, "center_documents": 8,
            "retriever": {"pooling": "mean", "center": True, "lexical_weight": 1.0, "query_weights": "idf", "sparse_activation": "log_probability"},
        },
        "encode": {"rows_per_shard": 16, "batch_tokens": 128},
        "cluster": {"local_cpus": 2},
        "evaluate": {"significance_samples": 200},
    }  # fmt: skip
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(config_file: Path, *more: str) -> str:
    command = [sys.executable, "workflows/full_pipeline.py", "--config", str(config_file), *more]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=420, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr


def test_from_a_collection_to_hits_then_again_then_changed(config_file: Path, tmp_path: Path) -> None:
    log = start(config_file)
    run = tmp_path / "runs" / "tiny"
    assert all((run / stage / "result.json").exists() for stage in STAGES)
    metrics = read_json(run / "evaluate" / "result.json")["metrics"]
    assert set(metrics) == {"BM25", "dense", "sparse", "hybrid"}
    for word in ("BM25", "hybrid", "nDCG@10", "report.html", "serve.client", "µs a query"):
        assert word in log
    assert (tmp_path / "runs" / "mlflow.db").exists()
    encoder, index = QueryEncoder.load(run / "tabulate"), HybridIndex.open(run / "index")
    hits = index.search(encoder.encode(["lift of a wing"]), k=5)[0]
    assert len(hits) == 5
    again = start(config_file)
    assert again.count("already done") == len(STAGES)
    changed = start(config_file, "index.texts=false")
    assert changed.count("already done") == len(STAGES) - 2


def test_a_wrong_key_ends_before_any_work_with_status_2(config_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "workflows/train.py", "--config", str(config_file), "train.stepz=1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "did you mean 'steps'" in result.stderr
    assert not (tmp_path / "runs").exists()


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("working_dir", [False, True], ids=["as-is", "working-dir"])
def test_ray_job_submit(config_file: Path, tmp_path: Path, working_dir: bool) -> None:
    """Against a head started in the repository, token authentication on."""
    ray = str(Path(sys.executable).parent / "ray")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "RAY_AUTH_MODE": "token",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    dashboard = "http://127.0.0.1:28265"
    head = [
        ray,
        "start",
        "--head",
        "--block",
        "--num-cpus=2",
        "--port=26379",
        "--dashboard-port=28265",
        "--dashboard-agent-listen-port=28266",
    ]
    # --block: its end ends its cluster; `ray stop` would end every cluster on the machine
    cluster = subprocess.Popen(head, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.time() + 120
        while subprocess.run(
            [ray, "job", "list", "--address", dashboard], env=environment, capture_output=True, check=False
        ).returncode:
            assert time.time() < deadline, "the head did not come up"
            time.sleep(1)
        place = ["--working-dir", "."] if working_dir else []
        script = ["python", "workflows/full_pipeline.py", "--config", str(config_file)]
        command = [ray, "job", "submit", "--address", dashboard, *place, "--", *script]
        result = _run(command, environment)
        while "No available agent" in result.stdout + result.stderr and time.time() < deadline:  # its agent comes later
            time.sleep(2)
            result = _run(command, environment)
        assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
        assert (tmp_path / "runs" / "tiny" / "evaluate" / "result.json").exists()
    finally:
        cluster.terminate()
        cluster.wait(timeout=60)
