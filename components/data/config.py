"""Which collection a run works on and which training pairs are made from it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from components.section import Section

KINDS = ("ir_datasets", "beir", "jsonl", "parquet", "hf")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def split_source(source: str) -> tuple[str, str]:
    """(kind, place) of a source; a bare path or glob is JSON lines or Parquet by its ending. ValueError otherwise."""
    kind, _, place = source.partition(":")
    if kind in KINDS and place:
        return kind, place
    plain = next((source.removesuffix(end) for end in _COMPRESSED if source.endswith(end)), source)
    for suffix, by_ending in _SUFFIXES.items():
        if plain.endswith(suffix) and kind not in KINDS:
            return by_ending, source
    raise ValueError(
        f"source {source!r}: wanted <kind>:<place> with kind one of {', '.join(KINDS)} (for example "
        f"beir:/data/scifact), or files that end in {', '.join(_SUFFIXES)}"
    )


class PairSource(Section):
    """Where training pairs come from."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Data set name; batches are drawn from one data set at a time."""
    kind: Literal["qrels", "title_body", "file"]
    """Judged queries and their relevant documents (grade ≥ 1); a document's title and its body; or files of pairs."""
    source: str | None = None
    """A collection of its own (as `data.source`), or the files for kind `file`; by default the run's own collection."""
    split: str | None = None
    """Split of the judgements, for kind `qrels` on a BEIR folder. The split that is evaluated is refused."""
    queries: str | None = None
    """Queries, for kind `qrels` on a collection of plain files; by default `data.queries`."""
    qrels: str | None = None
    """Judgements, for kind `qrels` on a collection of plain files. Those that are evaluated are refused."""
    grades: dict[int, int] | None = None
    """Grade in the source → gain; by default `data.grades` for the run's own collection, none for another."""
    dev_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the queries held out as dev pairs, chosen by a hash of the query id."""
    limit: int | None = Field(None, ge=1)
    """Most pairs to take, the first ones in the source's order."""

    @model_validator(mode="after")
    def _readable(self) -> PairSource:
        for place in (self.source, self.queries):
            if place is not None:
                split_source(place)
        if self.kind == "file" and (
            self.source is None or split_source(self.source)[0] not in ("jsonl", "parquet", "hf")
        ):
            raise ValueError(f"pairs {self.name!r}: kind `file` needs `source`, for example jsonl:pairs/*.jsonl")
        if self.kind != "qrels" and (self.split or self.queries or self.qrels or self.grades):
            raise ValueError(f"pairs {self.name!r}: `split`, `queries`, `qrels` and `grades` go with kind `qrels` only")
        return self


class DataConfig(Section):
    """A collection: one `source` that has everything, or `corpus` with optional `queries` and `qrels`.

    Sources: `ir_datasets:<id>`, `beir:<folder>`, `jsonl:<glob>`, `parquet:<glob>`, `hf:<folder>`. Globs and folders may
    be local paths or URIs that fsspec or pyarrow.fs opens; files may end in .gz. `qrels` are files too: BEIR's or
    TREC's columns, JSON lines, or Parquet.
    """

    source: str | None = None
    corpus: str | list[str] | None = None
    queries: str | None = None
    qrels: str | None = None
    split: str = "test"
    """The split that is evaluated."""
    grades: dict[int, int] | None = None
    """Grade in the source → gain. Without a map, grades are gains; below zero counts as zero."""
    duplicates: Literal["error", "first"] = "error"
    """What a docid that occurs twice is: a reason to stop, or dropped after its first occurrence."""
    credit_duplicates: bool = False
    """Judge a document with the very text of a relevant one relevant too (the denominators grow with it)."""
    rows_per_group: int = Field(1000, ge=1)
    """Documents in a Parquet row group: what ingest holds in memory at a time."""
    pairs: list[PairSource] = Field(default_factory=list)

    @property
    def corpora(self) -> list[str]:
        """The sources that hold documents, in order."""
        if self.source is not None:
            return [self.source]
        return [self.corpus] if isinstance(self.corpus, str) else list(self.corpus or ())

    @property
    def label(self) -> str:
        """What the collection is called in results."""
        return ", ".join(self.corpora)

    @model_validator(mode="after")
    def _one_way(self) -> DataConfig:
        if (self.source is None) == (not self.corpora or self.corpus is None):
            raise ValueError(
                "give either `source` (a whole collection) or `corpus` (with optional `queries` and `qrels`)"
            )
        if self.source is not None and (self.queries or self.qrels):
            raise ValueError("`queries` and `qrels` go with `corpus`; `source` brings its own")
        if (self.queries is None) != (self.qrels is None):
            raise ValueError("`queries` and `qrels` come together or not at all")
        for place in (*self.corpora, *([self.queries] if self.queries else [])):
            split_source(place)
        names = [pair.name for pair in self.pairs]
        if len(set(names)) != len(names):
            raise ValueError(f"pairs: each needs a name of its own, found {', '.join(names)}")
        for pair in self.pairs:
            self._never_the_evaluated(pair)
        return self

    def _never_the_evaluated(self, pair: PairSource) -> None:
        if pair.kind != "qrels":
            return
        why = "training on what is evaluated would make every reported number worthless"
        if pair.qrels is not None:
            if pair.qrels == self.qrels:
                raise ValueError(f"pairs {pair.name!r}: `qrels` is data.qrels, which is evaluated; {why}")
            if pair.queries is None and self.queries is None:
                raise ValueError(f"pairs {pair.name!r}: `qrels` needs `queries`")
            return
        source = pair.source or self.source
        if source is None or split_source(source)[0] not in ("ir_datasets", "beir"):
            raise ValueError(f"pairs {pair.name!r}: its source is plain files, so it needs `qrels` (and `queries`)")
        kind = split_source(source)[0]
        if kind == "beir" and pair.split is None:
            raise ValueError(
                f"pairs {pair.name!r}: needs a `split`, other than {self.split!r} for the evaluated collection"
            )
        if source == self.source and (kind == "ir_datasets" or pair.split == self.split):
            wanted = (
                "a `split` other than it"
                if kind == "beir"
                else "a `source` with other queries (ir_datasets:<id>/train)"
            )
            raise ValueError(f"pairs {pair.name!r}: these judgements are the evaluated ones; {why}. Give {wanted}.")
