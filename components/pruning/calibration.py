"""Calibration text: a seeded sample of any stream of texts, packed into rows without padding, and its hash (T-118)."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.text import Text

CHARACTERS_PER_TOKEN = 12
"""Sampled text a wanted token: more than any language needs, so that the sample is never too short for lack of text."""


@dataclass(frozen=True)
class Calibration:
    """Packed rows int32 [samples, tokens], the number of texts they come from, and the SHA-256 of the ids."""

    ids: np.ndarray
    texts: int
    sha256: str


def pack(texts: Iterable[str], text: Text, *, samples: int, tokens: int, seed: int) -> Calibration:
    """Up to `samples` rows of `tokens` ids from a random sample of `texts`, one after another as `[bos] ids [eos]`.

    The sample is drawn by a keyed hash of the text itself: one pass, bounded memory, the same whatever order the texts
    come in. Texts that occur twice count once. A stream too short for all rows gives fewer rows; one too short for a
    single row is a ValueError.
    """
    chosen = sample_texts(texts, characters=samples * tokens * CHARACTERS_PER_TOKEN, seed=seed)
    bos = [text.bos_id] if text.config.bos and text.bos_id is not None else []
    eos = [text.eos_id] if text.config.eos and text.eos_id is not None else []
    stream: list[int] = []
    used = 0
    for start in range(0, len(chosen), 64):
        for ids in text.plain(chosen[start : start + 64]):
            if len(stream) < samples * tokens:
                stream += [*bos, *ids, *eos]
                used += 1
    rows = min(samples, len(stream) // tokens)
    if not rows:
        raise ValueError(
            f"the calibration text has {len(stream)} tokens ({len(chosen)} texts), too few for one row of {tokens}: "
            f"lower prune.calibration.tokens or give a longer prune.calibration.source"
        )
    ids_ST = np.asarray(stream[: rows * tokens], dtype="<i4").reshape(rows, tokens)
    digest = hashlib.sha256(f"{rows}x{tokens}:".encode() + ids_ST.tobytes()).hexdigest()
    return Calibration(ids_ST, used, digest)


def sample_texts(texts: Iterable[str], *, characters: int, seed: int) -> list[str]:
    """Distinct texts in random order, as many as it takes to reach `characters`; blank ones are passed over.

    Each text's place in the order is a hash of it keyed by `seed`, so this is a uniform sample without replacement.
    """
    key = seed.to_bytes(8, "little", signed=True)
    heap: list[tuple[int, str]] = []
    held, total = set(), 0
    for item in texts:
        if not item.strip():
            continue
        place = int.from_bytes(hashlib.blake2b(item.encode("utf-8", "surrogatepass"), key=key, digest_size=8).digest())
        if place in held or (total >= characters and -heap[0][0] < place):
            continue
        heapq.heappush(heap, (-place, item))
        held.add(place)
        total += len(item)
        while total - len(heap[0][1]) >= characters:
            worst, dropped = heapq.heappop(heap)
            held.discard(-worst)
            total -= len(dropped)
    return [item for _, item in sorted(heap, reverse=True)]


def read_texts(source: Path) -> Iterator[str]:
    """The texts of a .txt file (a text a line) or of the `text` column of a .parquet file or folder, streamed."""
    import pyarrow.parquet as pq

    source = Path(source)
    if source.suffix == ".txt" and source.is_file():
        with source.open(encoding="utf-8") as lines:
            yield from (line.strip() for line in lines)
        return
    files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    if not files or not all(path.is_file() and path.suffix == ".parquet" for path in files):
        raise FileNotFoundError(
            f"prune.calibration.source {str(source)!r}: no such .txt or .parquet file, or folder of .parquet "
            f"files; `corpus` stands for the run's own documents"
        )
    for path in files:
        with pq.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise ValueError(f"{path}: no column `text`, found {', '.join(file.schema_arrow.names)}")
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                yield from (value for value in batch.column(0).to_pylist() if value)
