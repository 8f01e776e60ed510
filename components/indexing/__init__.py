"""Dense and sparse indexes in shards, joined at search. Needs numpy, numba, scipy, pyarrow and faiss; never torch."""

from components.indexing.config import IndexConfig
from components.indexing.fusion import FusionConfig
from components.indexing.hybrid import Hit, HybridIndex
from components.indexing.shard import Shard, ShardManifest, write_shard

__all__ = ["FusionConfig", "Hit", "HybridIndex", "IndexConfig", "Shard", "ShardManifest", "write_shard"]
