"""Which collection a run works on and which training pairs are made from it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from components.section import Section


class PairSource(Section):
    """Where training pairs come from."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Data set name; batches are drawn from one data set at a time."""
    kind: Literal["qrels", "title_body", "file"]
    """Judged queries and their relevant documents; a document's title and its body; or JSON lines that hold pairs."""
    source: str | None = None
    """A collection of its own (as `data.source`), or the files for kind `file`; by default the run's own collection."""
    split: str | None = None
    """Split of the judgements, for kind `qrels`. The split that is evaluated is refused."""
    dev_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the queries held out as dev pairs, chosen by a hash of the query id."""
    limit: int | None = Field(None, ge=1)
    """Most pairs to take, the first ones in the source's order."""


class DataConfig(Section):
    """A collection: one `source` that has everything, or `corpus` with optional `queries` and `qrels`.

    Sources: `ir_datasets:<id>`, `beir:<folder>`, `jsonl:<glob>`, `parquet:<glob>`, `hf:<folder>`. Globs and folders may be
    local paths or URIs that fsspec opens; files may end in .gz.
    """

    source: str | None = None
    corpus: str | None = None
    queries: str | None = None
    qrels: str | None = None
    split: str = "test"
    """The split that is evaluated."""
    grades: dict[int, int] | None = None
    """Grade in the source → gain. Without a map, grades are gains; below zero counts as zero."""
    duplicates: Literal["error", "first"] = "error"
    """What a docid that occurs twice is: a reason to stop, or dropped after its first occurrence."""
    rows_per_group: int = Field(1000, ge=1)
    """Documents in a Parquet row group: what ingest holds in memory at a time."""
    pairs: list[PairSource] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_way(self) -> DataConfig:
        if (self.source is None) == (self.corpus is None):
            raise ValueError("give either `source` (a whole collection) or `corpus` (with optional `queries` and `qrels`)")
        if self.source is not None and (self.queries or self.qrels):
            raise ValueError("`queries` and `qrels` go with `corpus`; `source` brings its own")
        if (self.queries is None) != (self.qrels is None):
            raise ValueError("`queries` and `qrels` come together or not at all")
        for pair in self.pairs:
            if pair.kind == "qrels" and pair.source is None and (pair.split is None or pair.split == self.split):
                raise ValueError(
                    f"pairs {pair.name!r}: needs a `split` other than {self.split!r}, which is evaluated: training on it would "
                    f"make every reported number worthless"
                )
            if pair.kind == "file" and pair.source is None:
                raise ValueError(f"pairs {pair.name!r}: kind `file` needs `source`, for example jsonl:pairs/*.jsonl")
        names = [pair.name for pair in self.pairs]
        if len(set(names)) != len(names):
            raise ValueError(f"pairs: each needs a name of its own, found {', '.join(names)}")
        return self
