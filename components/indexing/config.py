"""How an index is built."""

from __future__ import annotations

from pydantic import Field

from components.section import Section


class IndexConfig(Section):
    """Shards, the FAISS factory of the dense side, and the floor under its recall."""

    documents_per_shard: int = Field(1_000_000, ge=1)
    """Most documents a shard; shards are built side by side and searched together."""
    dense: str = "auto"
    """A FAISS factory string, or auto: exact half-precision vectors up to 200,000 documents a shard, IVF above."""
    training_vectors: int = Field(200_000, ge=1)
    """Most vectors that an IVF or PQ index is trained on, a sample spread evenly over the shard."""
    recall_floor: float = Field(0.9, ge=0, le=1)
    """The build is refused when recall@10 against exact search, on a sample of the shard's own vectors, is below this."""
    texts: bool = True
    """Keep titles and texts beside the vectors, so that serving can show them."""
