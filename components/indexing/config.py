"""How an index is built."""

from __future__ import annotations

from pydantic import Field, field_validator

from components.indexing.dense import check_factory
from components.section import Section


class IndexConfig(Section):
    """Shards, the FAISS factory of the dense side, and the floor under its recall."""

    documents_per_shard: int = Field(1_000_000, ge=1)
    """Most documents a shard; shards are built side by side and searched together."""
    dense: str = "auto"
    """A FAISS factory string, or auto: exact half-precision vectors up to 200,000 documents a shard, IVF above."""
    training_vectors: int = Field(200_000, ge=1)
    """Most vectors that an IVF or PQ index is trained on, a sample spread evenly over the shard."""
    probes: int | None = Field(None, ge=1)
    """Lists that an IVF index reads a query; by default as many as a recall@10 of .985 takes (see `write_shard`)."""
    recall_floor: float = Field(0.9, ge=0, le=1)
    """A build is refused when recall@10 against exact search, on sample queries, is below this."""
    texts: bool = True
    """Keep titles and texts beside the vectors, so that serving can show them."""

    @field_validator("dense")
    @classmethod
    def _known_to_faiss(cls, value: str) -> str:
        return value if value == "auto" else check_factory(value)
