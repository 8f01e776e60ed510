"""Read a collection, check it, write it as Parquet: `python workflows/ingest.py --config F --run-name N`.

Each file of the corpus is streamed by a Ray Data task of its own into one Parquet part; the driver sees 20 bytes a
document. The same input gives the same bytes, in the order of the source.
"""

from __future__ import annotations

import logging
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from components.config import Config
from components.data import checks, duplicates, pairs
from components.data.config import KINDS, DataConfig, PairSource
from components.data.files import is_local, locate
from components.data.rows import DataError, Document
from components.data.schemas import PAIRS
from components.data.sources import Piece, corpus_pieces, query_rows
from components.data.writing import (
    Marks,
    Slice,
    documents_of,
    find_repeats,
    repeated,
    rewrite_without_repeats,
    slices,
    write_part,
    write_table,
)
from components.storage import write_json
from workflows.stage import Stage, StageContext, StageError, main

log = logging.getLogger("almanac")
Item = TypeVar("Item")
Result = TypeVar("Result")


def run(context: StageContext) -> dict[str, Any]:
    """Write corpus, queries, qrels, pairs and checks.json; returns the counts. StageError: the data cannot be used."""
    try:
        return _ingest(context.config, context.folder)
    except DataError as error:
        raise StageError(f"data: {error}") from error


def _ingest(config: Config, folder: Path) -> dict[str, Any]:
    data = config.data
    for stale in folder.iterdir():
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    parts, marks = _write_corpus(data, folder / "corpus")
    counts = marks.counts
    counts["documents"] = len(marks.docids)
    counts["documents_empty"] = int((marks.lengths == 0).sum())
    counts["documents_repeated_text"] = checks.repeated_texts(marks.texts, marks.lengths)
    report: dict[str, Any] = {"characters": checks.length_summary(marks.lengths), "grades": data.grades}
    evaluated: frozenset[int] = frozenset()
    found = query_rows(data.source or data.queries or "", data.qrels, data.split) if data.source or data.qrels else None
    if found is not None:
        queries, qrels = checks.query_table(found[0], counts), checks.qrel_table(found[1], data.grades, counts)
        checks.cross_check(queries, qrels, marks.docids, counts)
        if data.credit_duplicates:
            qrels = duplicates.credit(qrels, duplicates.same_texts(parts, marks), counts)
        write_table(queries, folder / "queries.parquet")
        write_table(qrels, folder / "qrels.parquet")
        report["query_characters"] = checks.length_summary(checks.text_lengths(queries))
        measured = queries.filter(pc.is_in(queries["qid"], value_set=pc.unique(qrels["qid"])))
        evaluated = frozenset(map(pairs.query_mark, measured["text"].to_pylist()))
    for line in checks.sizes(counts, report["characters"]):
        log.info("data      %s", line)
    for line in checks.warnings(counts):
        log.warning("data      %s", line)
    _write_pairs(config, parts, folder / "pairs", evaluated, counts)
    report["counts"] = dict.fromkeys(checks.WARNED, 0) | counts
    write_json(folder / "checks.json", report)
    return {"documents": counts["documents"], "dataset": data.label, "split": data.split, **report}


def source_state(config: Config) -> Any:
    """Size and time of every local source file, so that a changed file makes the stage run again."""
    data = config.data
    places = [*data.corpora, data.queries, data.qrels]
    for pair in data.pairs:
        places += [pair.source, pair.queries, pair.qrels]
    state = {}
    for source in filter(None, places):
        kind, _, inner = source.partition(":")
        place = inner if kind in KINDS else source
        if kind != "ir_datasets" and is_local(place):
            filesystem, path = locate(f"{place.rstrip('/')}/**" if kind in ("beir", "hf") else place)
            files = [Path(name) for name in sorted(filesystem.glob(path)) if Path(name).is_file()]
            state[source] = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return state


def _each(task: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[int, Result]]:
    """(number, result) of the task for every item as they end, one Ray task an item. DataError: the first one there."""

    def work(row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"number": row["number"], "error": "", "result": pickle.dumps(task(items[row["number"]]))}
        except DataError as error:
            return {"number": row["number"], "error": str(error), "result": b""}

    if not items:
        return
    numbers = [{"number": number} for number in range(len(items))]
    for row in ray.data.from_items(numbers, override_num_blocks=len(items)).map(work).iter_rows():
        if row["error"]:
            raise DataError(row["error"])
        yield int(row["number"]), pickle.loads(row["result"])


def _write_corpus(config: DataConfig, folder: Path) -> tuple[list[Path], Marks]:
    """The corpus parts in order and the marks of their rows; docids are unique when it returns."""
    found = [piece for source in config.corpora for piece in corpus_pieces(source)]
    parts = [folder / f"part-{number:05d}.parquet" for number in range(len(found))]
    rows_per_group = config.rows_per_group

    def write(item: tuple[Piece, Path]) -> dict[str, Any]:
        return write_part(*item, rows_per_group).packed()

    done: dict[int, Marks] = {}
    for number, packed in _each(write, list(zip(found, parts, strict=True))):
        done[number] = Marks.unpacked(packed)
        place, documents = found[number].place, len(done[number].docids)
        log.info("data      %s: %d documents (%d of %d files)", place, documents, len(done), len(found))
    marks = _without_repeats(found, parts, [done[number] for number in range(len(found))], config)
    if len(marks.docids) == 0:
        raise DataError(f"{config.label}: there is not one document. Check the path.")
    written = sum(pq.read_metadata(part).num_rows for part in parts)
    if written != len(marks.docids):
        raise RuntimeError(f"{folder}: {written} rows were written of {len(marks.docids)} documents read")
    return parts, marks


def _without_repeats(found: list[Piece], parts: list[Path], each: list[Marks], config: DataConfig) -> Marks:
    """The marks of all rows, with each docid once: repeats are refused, or dropped from the parts (case T-062)."""
    marks = Marks.joined(each)
    suspects = repeated(marks.docids)
    repeats = find_repeats(parts, suspects)
    if not repeats:
        return marks
    numbers = {path.name: number for number, path in enumerate(parts)}
    if config.duplicates == "error":
        shown = [
            f"{docid!r} again in {found[numbers[file]].place}, document {row + 1}" for docid, file, row in repeats[:5]
        ]
        raise DataError(
            f"{len(repeats)} documents have an id that occurred before ({'; '.join(shown)}"
            f"{'; …' if len(repeats) > 5 else ''}). Give each document an id of its own, or keep the first of each "
            f"with data.duplicates=first"
        )
    begins = np.cumsum([0, *(len(m.docids) for m in each)])
    marks = marks.without([int(begins[numbers[file]]) + row for _, file, row in repeats])
    marks.counts["documents_dropped"] = len(rewrite_without_repeats(parts, suspects, config.rows_per_group))
    return marks


def _write_pairs(
    config: Config, parts: list[Path], folder: Path, evaluated: frozenset[int], counts: Counter[str]
) -> None:
    """Write every pair source's parts, `part-<source>-<slice>.parquet`; a source without any pair is an error."""
    for number, source in enumerate(config.data.pairs):
        try:
            found = _source_pairs(source, config, parts, folder / f"part-{number:03d}", evaluated)
        except DataError as error:
            raise DataError(f"pairs {source.name!r}: {error}") from error
        names = [f"pairs.{source.name}.{split}" for split in ("train", "dev", "evaluated")]
        train, dev, left_out = (found[name] for name in names)
        counts.update({name: found[name] for name in names})
        if train + dev == 0:
            raise DataError(f"pairs {source.name!r}: its source gives no pair. See the titles or judgements it has.")
        log.info("data      pairs %s: %d train, %d dev", source.name, train, dev)
        if left_out:
            log.warning("data      pairs %s: %d left out, because their query is evaluated", source.name, left_out)
    if not config.data.pairs:
        write_table(PAIRS.empty_table(), folder / "part-000-00000.parquet")


def _source_pairs(
    source: PairSource, config: Config, parts: list[Path], target: Path, evaluated: frozenset[int]
) -> Counter[str]:
    """Write the pairs of one source to files that begin with `target`; returns their number by split."""
    seed, rows = config.seed, config.data.rows_per_group

    def path(number: int) -> Path:
        return target.with_name(f"{target.name}-{number:05d}.parquet")

    def write(item: tuple[int, Slice | Piece]) -> Counter[str]:
        number, place = item
        if isinstance(place, Piece) and source.kind == "file":
            made = pairs.file_pairs(place.rows(), source, seed, f"{source.name}-{number}")
        else:
            made = pairs.title_body_pairs(_documents(place), source, seed)
        return pairs.write_pairs(made, path(number), source, evaluated, rows)

    if source.kind == "qrels":
        return pairs.write_pairs(_qrel_pairs(source, config, parts), path(0), source, evaluated, rows)
    found = dict(_each(write, list(enumerate(_places(source, parts)))))
    total: Counter[str] = Counter()
    names = [f"pairs.{source.name}.{split}" for split in ("train", "dev")]
    for number in sorted(found):
        counted = found[number]
        room = (source.limit or 1 << 62) - sum(total[name] for name in names)
        if sum(counted[name] for name in names) > room:
            counted = pairs.shorten(path(number), source, room)
        total.update(counted)
    return total


def _places(source: PairSource, parts: list[Path]) -> list[Slice | Piece]:
    """What a pair source reads: parts of its own collection, or of the run's corpus."""
    return [*corpus_pieces(source.source)] if source.source else [*slices(parts)]


def _qrel_pairs(source: PairSource, config: Config, parts: list[Path]) -> Iterator[pairs.Pair]:
    """Pairs of judged queries; only the judged documents' texts are gathered, by tasks that each read a slice."""
    data, ignored = config.data, Counter[str]()
    own = source.source is None or source.source == data.source
    place = (source.queries or data.queries) if source.qrels else (source.source or data.source)
    found = query_rows(place or "", source.qrels, source.split or "train")
    if found is None:
        raise DataError(f"{place} has no judged queries")
    table = checks.query_table(found[0], ignored)
    queries = dict(zip(table["qid"].to_pylist(), table["text"].to_pylist(), strict=True))
    qrels = checks.qrel_table(found[1], source.grades or (data.grades if own else None), ignored)
    relevant = qrels.filter(pc.field("grade") >= 1)
    positives = list(zip(relevant["qid"].to_pylist(), relevant["docid"].to_pylist(), strict=True))
    wanted = frozenset(docid for qid, docid in positives if qid in queries)

    def gather(place: Slice | Piece) -> dict[str, str]:
        return {row.docid: row.text for row in _documents(place) if row.docid in wanted}

    texts: dict[str, str] = {}
    for _, some in _each(gather, [*slices(parts)] if own else _places(source, parts)):
        texts.update(some)
    return pairs.qrel_pairs(queries, positives, texts, source, config.seed)


def _documents(place: Slice | Piece) -> Iterator[Document]:
    return place.documents() if isinstance(place, Slice) else documents_of(place, Counter())


STAGE = Stage(name="data", sections=("data", "seed"), inputs=(), run=run, external=source_state)

if __name__ == "__main__":
    main(STAGE)
