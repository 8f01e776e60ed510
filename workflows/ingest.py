"""Read a collection, check it, write it as Parquet: `python workflows/ingest.py --config F --run-name N`.

Each file of the corpus is streamed by a Ray Data task of its own into one Parquet part; the driver sees 20 bytes a document.
"""

from __future__ import annotations

import logging
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from components.config import Config
from components.data import checks, pairs
from components.data.config import DataConfig, PairSource
from components.data.schemas import PAIRS
from components.data.sources import Piece, corpus_pieces, expand, json_rows, parquet_rows, query_rows, split_source
from components.data.writing import Marks, documents_of, find_repeats, repeated, rewrite_without_repeats, write_part
from components.storage import atomic_file, write_json
from workflows.stage import Stage, StageContext, main

log = logging.getLogger("almanac")


def run(context: StageContext) -> dict[str, Any]:
    """Write corpus, queries, qrels, pairs and checks.json; returns the counts."""
    config, folder = context.config.data, context.folder
    corpus = config.source or config.corpus
    assert corpus is not None
    parts, marks = _write_corpus(corpus_pieces(corpus), folder / "corpus", config)
    counts: Counter[str] = marks.counts
    counts["documents"] = len(marks.docids)
    counts["documents_repeated_text"] = checks.repeated_texts(marks.texts, marks.lengths)
    if counts["documents"] == 0:
        raise ValueError(f"{corpus}: the corpus has no documents")
    found = query_rows(config.source or config.queries or corpus, config.qrels, config.split)
    if found is not None:
        queries, qrels = checks.query_table(found[0], counts), checks.qrel_table(found[1], config.grades, counts)
        checks.cross_check(queries, qrels, marks.docids, counts)
        _write_table(queries, folder / "queries.parquet")
        _write_table(qrels, folder / "qrels.parquet")
    _write_pairs(context.config, parts, folder / "pairs", counts)
    report = {"counts": dict(counts), "characters": checks.length_summary(marks.lengths), "grades": config.grades}
    write_json(folder / "checks.json", report)
    for line in checks.summary(counts):
        log.info("data      %s", line)
    return {"documents": counts["documents"], "dataset": corpus, "split": config.split, **report}


def source_state(config: Config) -> Any:
    """Size and time of every local source file, so that a changed file makes the stage run again."""
    data = config.data
    sources = [data.source, data.corpus, data.queries, data.qrels, *(pair.source for pair in data.pairs)]
    state = {}
    for source in filter(None, sources):
        kind, place = split_source(source) if ":" in source else ("jsonl", source)
        pattern = f"{place.rstrip('/')}/**" if kind in ("beir", "hf") else place
        filesystem, path = fsspec.core.url_to_fs(pattern)
        if kind != "ir_datasets" and filesystem.protocol[0] == "file":
            files = [Path(name) for name in sorted(filesystem.glob(path)) if Path(name).is_file()]
            state[source] = [[name.name, name.stat().st_size, name.stat().st_mtime_ns] for name in files]
    return state


def _write_corpus(pieces: list[Piece], folder: Path, config: DataConfig) -> tuple[list[Path], Marks]:
    rows = [{"number": i, "kind": piece.kind, "place": piece.place} for i, piece in enumerate(pieces)]

    def write(row: dict[str, Any]) -> dict[str, Any]:
        path = folder / f"part-{row['number']:05d}.parquet"
        marks = write_part(Piece(row["kind"], row["place"]), path, config.rows_per_group)
        return {"number": row["number"], **marks.packed()}

    done = {}
    for row in ray.data.from_items(rows, override_num_blocks=len(rows)).map(write).iter_rows():
        number = int(row.pop("number"))
        done[number] = Marks.unpacked(row)
        log.info("data      %s: %d documents", pieces[number].place, len(done[number].docids))
    parts = [folder / f"part-{i:05d}.parquet" for i in range(len(pieces))]
    ordered = [done[i] for i in range(len(pieces))]
    total = Marks(
        np.concatenate([m.docids for m in ordered]), np.concatenate([m.texts for m in ordered]),
        np.concatenate([m.lengths for m in ordered]), sum((m.counts for m in ordered), Counter()),
    )  # fmt: skip
    _settle_repeats(parts, total, config)
    return parts, total


def _settle_repeats(parts: list[Path], marks: Marks, config: DataConfig) -> None:
    suspects = repeated(marks.docids)
    if len(suspects) == 0:
        return
    found = find_repeats(parts, suspects)
    if found and config.duplicates == "error":
        shown = "; ".join(f"{docid!r} again in {file}, row {row}" for docid, file, row in found[:5])
        raise ValueError(
            f"{len(found)} documents have an id that occurred before ({shown}{' …' if len(found) > 5 else ''}). Give each "
            f"document an id of its own, or keep the first of each with data.duplicates=first"
        )
    marks.counts["documents_dropped"] = len(rewrite_without_repeats(parts, suspects, config.rows_per_group))
    first = np.sort(np.unique(marks.docids, return_index=True)[1]) if found else np.arange(len(marks.docids))
    marks.docids, marks.texts, marks.lengths = marks.docids[first], marks.texts[first], marks.lengths[first]


def _write_pairs(config: Config, parts: list[Path], folder: Path, counts: Counter[str]) -> None:
    for number, source in enumerate(config.data.pairs):
        made = islice(_pairs(source, config, parts, counts), source.limit)
        table = pairs.pair_table(made, counts)
        if table.num_rows == 0:
            raise ValueError(f"pairs {source.name!r}: its source gives no pair. Look at the titles or judgements it is made from.")
        _write_table(table, folder / f"part-{number:05d}.parquet")
        log.info("data      pairs %s: %d train, %d dev", source.name, counts[f"pairs.{source.name}.train"], counts[f"pairs.{source.name}.dev"])
    if not config.data.pairs:
        _write_table(PAIRS.empty_table(), folder / "part-00000.parquet")


def _pairs(source: PairSource, config: Config, parts: list[Path], counts: Counter[str]) -> Any:
    seed, ignored = config.seed, Counter[str]()
    if source.kind == "file":
        kind, place = split_source(source.source or "")
        rows = (row for path in expand(place) for row in (parquet_rows(path) if kind == "parquet" else json_rows(path)))
        return pairs.file_pairs(rows, source, seed)
    own = source.source is None
    place = source.source or config.data.source or config.data.corpus or ""
    pieces = [Piece("parquet", str(part)) for part in parts] if own else corpus_pieces(place)

    def documents() -> Any:
        return (row for piece in pieces for row in documents_of(piece, ignored)) if not own else _own_rows(parts)

    if source.kind == "title_body":
        return pairs.title_body_pairs(documents(), source, seed)
    found = query_rows(place, None, source.split or "train")
    if found is None:
        raise FileNotFoundError(f"pairs {source.name!r}: {place} has no judgements for split {source.split or 'train'!r}")
    queries = dict(zip(*(checks.query_table(found[0], ignored)[name].to_pylist() for name in ("qid", "text")), strict=True))
    qrels = checks.qrel_table(found[1], None if not own else config.data.grades, ignored)
    relevant = qrels.filter(pc.field("grade") >= 1)
    positives = list(zip(relevant["qid"].to_pylist(), relevant["docid"].to_pylist(), strict=True))
    wanted = {docid for _, docid in positives}
    texts = {row.docid: row.text for row in documents() if row.docid in wanted}
    return pairs.qrel_pairs(queries, positives, texts, source, seed)


def _own_rows(parts: list[Path]) -> Any:
    from components.data.rows import Document

    for part in parts:
        for batch in pq.ParquetFile(part).iter_batches(batch_size=1000):
            yield from (Document(**row) for row in batch.to_pylist())


def _write_table(table: pa.Table, path: Path) -> None:
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


STAGE = Stage(name="data", sections=("data", "seed"), inputs=(), run=run, external=source_state)

if __name__ == "__main__":
    main(STAGE)
