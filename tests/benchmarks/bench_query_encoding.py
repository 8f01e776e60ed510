"""Query encoding side by side, one process, one thread: ours, model2vec, sentence-transformers, `tokenizers`, the LM.

    python tests/benchmarks/bench_query_encoding.py                 # the demo's model, real queries of ../shared/data
    python tests/benchmarks/bench_query_encoding.py --model FOLDER --rounds 9 --no-lm

Everybody gets the same table (the model's input embeddings), the same tokenizer and the same queries in the same
batches, and gives back the same unit vectors, which is checked before anything is timed. Ours gives sparse vectors on
top. Rounds are interleaved, so a noisy neighbour meets all alike; figures are medians in microseconds a query.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["NUMBA_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import json
import statistics
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from components.lookup import QueryEncoder, save_table
from components.models.backbone import load_causal_lm
from components.models.sources import ModelConfig, resolve_model
from components.models.tokenizer import text_for_model
from components.text import Text, TextConfig, instruction_prompt

ROOT = Path(__file__).resolve().parents[2]
BATCH = 256
WANTED = 5_000
BARS = {"batch": 3.0, "single": 4.0}


class Contender(NamedTuple):
    name: str
    batch: Callable[[list[str]], Any]
    single: Callable[[str], Any]
    before_round: Callable[[], object] = lambda: None


class Timing(NamedTuple):
    batch: float
    single: float | None


def read_queries(data: Path) -> tuple[list[str], str]:
    """(at least 5,000 queries, where they are from): the collections under `data`, else the project's own Cranfield."""
    names = ("msmarco_sub2287", "nq_sub1997", "scifact")
    paths = [data / name / "queries.jsonl" for name in names]
    if all(path.is_file() for path in paths):
        queries = [json.loads(line)["text"] for path in paths for line in path.read_text("utf-8").splitlines()]
        return queries, f"{len(queries):,} real queries of {', '.join(names)}"
    archive = next((path for path in ROOT.rglob("cran.tar.gz") if ".venv" not in path.parts), None)
    if archive is None:
        raise SystemExit(f"no queries: neither {paths[0]} nor a cran.tar.gz under {ROOT}; name a folder with --data")
    with tarfile.open(archive) as tar:
        queries = [*_cranfield(tar, "cran.qry", ".W"), *_cranfield(tar, "cran.all.1400", ".T")]
    repeats = -(-WANTED // len(queries))
    note = f"{len(queries):,} Cranfield queries and titles, {repeats} times over (no larger collection under {data})"
    return queries * repeats, note


def _cranfield(tar: tarfile.TarFile, name: str, field: str) -> list[str]:
    """The texts of one field (`.W` text, `.T` title) of a file in SMART's format."""
    member = tar.extractfile(name)
    assert member is not None
    texts: list[list[str]] = []
    inside = False
    for line in member.read().decode("latin-1").splitlines():
        if line.startswith("."):
            inside = line.startswith(field)
            if inside:
                texts.append([])
        elif inside:
            texts[-1].append(line.strip())
    return [" ".join(lines) for lines in texts if lines]


def contenders(encoders: dict[str, QueryEncoder], table: np.ndarray, text: Text) -> list[Contender]:
    """Everybody on the same table and tokenizer."""
    from model2vec import StaticModel
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

    def copy() -> Tokenizer:
        return Tokenizer.from_str(text.tokenizer.to_str())

    ours = encoders["float32"]
    model2vec = StaticModel(table, copy(), normalize=True)
    transformer = SentenceTransformer(modules=[StaticEmbedding(copy(), table), Normalize()], device="cpu")
    plain = copy()
    return [
        Contender("ours: dense and sparse", ours.encode, lambda query: ours.encode([query])),
        Contender("ours: dense only", ours.encode_dense, lambda query: ours.encode_dense([query])),
        Contender(
            "ours: dense and sparse, memo emptied before each round",
            ours.encode, lambda query: ours.encode([query]), ours.tokens.clear,
        ),
        *(
            Contender(f"ours: dense and sparse, {name} table", other.encode, lambda query, e=other: e.encode([query]))
            for name, other in encoders.items() if name != "float32"
        ),
        Contender(
            "model2vec StaticModel",
            lambda queries: model2vec.encode(queries, use_multiprocessing=False), model2vec.encode,
        ),
        Contender(
            "sentence-transformers StaticEmbedding",
            lambda queries: transformer.encode(queries, batch_size=BATCH, show_progress_bar=False),
            lambda query: transformer.encode(query, show_progress_bar=False),
        ),
        Contender("our tokeniser alone (dense and sparse ids)", ours.tokens, lambda query: ours.tokens([query])),
        Contender(
            "`tokenizers` encode_batch_fast alone (dense ids)",
            lambda queries: plain.encode_batch_fast(queries, add_special_tokens=False),
            lambda query: plain.encode_batch_fast([query], add_special_tokens=False),
        ),
    ]  # fmt: skip


def check(them: Sequence[Contender], encoder: QueryEncoder, queries: list[str], text: Text) -> str:
    """What was compared; an AssertionError if dense vectors differ or our sparse ones are not the token counts."""
    batch = encoder.encode(queries)
    largest = 0.0
    for contender in them:
        if contender.name.startswith(("model2vec", "sentence-transformers")):
            difference = np.abs(contender.batch(queries) - batch.dense).max()
            assert difference < 1e-5, f"{contender.name} gives other vectors: they differ by {difference}"
            largest = max(largest, float(difference))
    for i, ids in enumerate(text.sparse_queries(queries)):
        part = slice(batch.indptr[i], batch.indptr[i + 1])
        found = dict(zip(batch.indices[part].tolist(), batch.weights[part].tolist(), strict=True))
        assert found == Counter(ids), f"the sparse vector of query {i} is not its token counts"
    return f"Before timing: dense vectors of all three equal (largest difference {largest:.1e}), sparse = token counts."


def measure(them: Sequence[Contender], queries: list[str], singles: list[str], rounds: int) -> dict[str, Timing]:
    """Medians over interleaved rounds, in microseconds a query."""
    batches = [queries[start : start + BATCH] for start in range(0, len(queries), BATCH)]
    for contender in them:  # everybody once, untimed
        for batch in batches:
            contender.batch(batch)
    times: dict[str, tuple[list[float], list[float]]] = {contender.name: ([], []) for contender in them}
    for _ in range(rounds):
        for name, batched, single, before_round in them:
            before_round()
            start = time.perf_counter()
            for batch in batches:
                batched(batch)
            times[name][0].append((time.perf_counter() - start) / len(queries) * 1e6)
            before_round()
            start = time.perf_counter()
            for query in singles:
                single(query)
            times[name][1].append((time.perf_counter() - start) / len(singles) * 1e6)
    return {
        name: Timing(statistics.median(batch), statistics.median(single)) for name, (batch, single) in times.items()
    }


def measure_model(model: torch.nn.Module, text: Text, queries: list[str], rounds: int) -> Timing:
    """The LM itself as query encoder: `[bos] instruction + query [eos]`, last hidden states, batches of 8 and of 1."""
    backbone: Any = getattr(model, "base_model", model)
    ids = text.full_queries(queries, instruction_prompt("Given a web search query, retrieve relevant passages"))

    def run(rows: list[list[int]]) -> None:
        width = max(map(len, rows))
        padded = torch.tensor([row + [text.pad_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        backbone(input_ids=padded, attention_mask=mask)

    def timed(size: int, some: list[list[int]]) -> float:
        start = time.perf_counter()
        for first in range(0, len(some), size):
            run(some[first : first + size])
        return (time.perf_counter() - start) / len(some) * 1e6

    with torch.inference_mode():
        timed(8, ids[:8])
        found = [(timed(8, ids), timed(1, ids[:8])) for _ in range(rounds)]
    return Timing(statistics.median(batch for batch, _ in found), statistics.median(single for _, single in found))


def table_of(timings: dict[str, Timing], reference: str) -> str:
    """The Markdown table; ratios say how many times the time of `reference` each one takes."""
    lines = ["| one thread, microseconds a query | batch | × | one at a time | × |", "|---|---:|---:|---:|---:|"]
    base = timings[reference]
    for name, (batch, single) in timings.items():
        lines.append(
            f"| {name} | {batch:,.2f} | {batch / base.batch:,.1f} | {single:,.1f} | {single / base.single:,.1f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=ModelConfig().source, help="any model source; default: the demo's")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of BEIR collections")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--singles", type=int, default=1000, help="queries encoded one at a time")
    parser.add_argument("--model-queries", type=int, default=32, help="queries that the LM itself encodes")
    parser.add_argument("--no-lm", action="store_true", help="leave the LM itself out")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    queries, origin = read_queries(options.data)
    folder = resolve_model(options.model, Path(ModelConfig().cache))
    text = text_for_model(folder, TextConfig())
    model = load_causal_lm(folder, "float32")
    table = model.get_input_embeddings().weight.detach().numpy()[: text.vocabulary_size].copy()
    with tempfile.TemporaryDirectory() as temporary:
        encoders = {}
        for storage in ("float32", "float16", "int8"):
            save_table(
                Path(temporary) / storage, {"query": table}, np.ones(len(table)), text, instructions={"query": ""},
                storage=storage, model_fingerprint="benchmark",
            )  # fmt: skip
            encoders[storage] = QueryEncoder.load(Path(temporary) / storage)
        them = contenders(encoders, table, text)
        checked = check(them, encoders["float32"], queries, text)
        step = max(1, len(queries) // options.singles)
        timings = measure(them, queries, queries[::step][: options.singles], options.rounds)
    if not options.no_lm:
        step = max(1, len(queries) // options.model_queries)
        timings["the LM itself (batches of 8)"] = measure_model(
            model, text, queries[::step][: options.model_queries], 3
        )
    ours, theirs = timings["ours: dense and sparse"], timings["model2vec StaticModel"]
    characters = sum(map(len, queries)) / len(queries)
    print(
        f"\n## Query encoding\n\n{origin}, {characters:.0f} characters on average; "
        f"table of {table.shape[0]:,} × {table.shape[1]},"
    )
    print(f"batches of {BATCH}, {options.rounds} interleaved rounds, medians. {checked}\n")
    print(table_of(timings, "ours: dense and sparse"))
    print("\nDense **and** sparse of ours against model2vec's dense:")
    for kind, bar in BARS.items():
        ratio = getattr(theirs, kind) / getattr(ours, kind)
        print(f"- {kind}: {ratio:.1f} times as fast (bar: {bar:g}) {'met' if ratio >= bar else 'MISSED'}")
    if not options.no_lm:
        ratio = timings["the LM itself (batches of 8)"].batch / ours.batch
        print(f"- the LM as query encoder takes {ratio:,.0f} times as long in batch (LightRetriever: 2,657)")


if __name__ == "__main__":
    main()
