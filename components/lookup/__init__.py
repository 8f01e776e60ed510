"""Queries by table lookup: the table on disk, the exact fast tokeniser in front of it, and the torch-free encoder."""

from components.lookup.artefact import Manifest, Storage, load_table, save_table
from components.lookup.encoder import QueryBatch, QueryEncoder
from components.lookup.tokens import TokenBatch, TokenMemo

__all__ = ["Manifest", "QueryBatch", "QueryEncoder", "Storage", "TokenBatch", "TokenMemo", "load_table", "save_table"]
