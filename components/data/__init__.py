"""Collections in, Parquet with fixed schemas out: sources, checks and training pairs."""

from components.data.config import DataConfig, PairSource

__all__ = ["DataConfig", "PairSource"]
