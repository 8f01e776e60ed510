"""The one place that decides bos, eos, truncation, lower-casing and prompts. Needs `tokenizers` only, so serving shares it.

A `Text` is the model's tokenizer stripped to what turns plain text into ids: its post-processor and its added tokens are
removed, so that a special token typed by a user is plain text (spec trap 5) and no library version adds or forgets a bos
or an eos (cases T-003, T-006). bos and eos are then added here, exactly once and after truncation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import Field
from tokenizers import Tokenizer, normalizers

from components.section import Section
from components.storage import fingerprint, read_json, write_atomic, write_json

TOKENIZER_FILE = "tokenizer.json"
TEXT_FILE = "text.json"


class TextConfig(Section):
    """How text becomes token ids, the same for training, tables, encoding and serving (LightRetriever 1.2)."""

    lowercase: bool = True
    bos: bool = True
    """Begin documents and prompts with the bos token. Leaving it out of the table costs up to 12 nDCG points (spec trap 3)."""
    eos: bool = True
    document_max_tokens: int = Field(512, ge=3)
    """Longest document in tokens, bos and eos included."""
    query_max_tokens: int = Field(512, ge=1)
    """Longest query in tokens, without instruction and special tokens."""


class Text:
    """Turns documents, queries and prompts into token ids; saved beside every model and every lookup table."""

    def __init__(
        self, tokenizer: Tokenizer, config: TextConfig, *, bos_id: int | None, eos_id: int | None, pad_id: int,
        special_ids: Sequence[int], vocabulary_size: int,
    ) -> None:  # fmt: skip
        if config.bos and bos_id is None:
            raise ValueError(
                "text.bos is true but the tokenizer has no bos token: set text.bos=false or name a bos token"
            )
        if config.eos and eos_id is None:
            raise ValueError(
                "text.eos is true but the tokenizer has no eos token: set text.eos=false or name an eos token"
            )
        self.tokenizer = tokenizer
        self.config = config
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.special_ids = frozenset(special_ids)
        self.vocabulary_size = vocabulary_size

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, config: TextConfig, *, bos_id: int | None, eos_id: int | None, pad_id: int | None
    ) -> Text:
        """Strip a model's tokenizer (a copy of it) to plain text → ids and remember its special ids.

        V, the vocabulary size, is the largest token id + 1 over the model vocabulary and the added tokens (spec trap 19).
        """
        state = json.loads(tokenizer.to_str())
        added = [token["id"] for token in state["added_tokens"]]
        vocabulary_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        state["added_tokens"] = []
        state["post_processor"] = None
        state["truncation"] = state["padding"] = None
        plain = Tokenizer.from_str(json.dumps(state))
        if config.lowercase:
            steps = [normalizers.Lowercase()] + ([plain.normalizer] if plain.normalizer is not None else [])
            plain.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
        special = {*added, *(i for i in (bos_id, eos_id, pad_id) if i is not None)}
        pad = pad_id if pad_id is not None else eos_id
        if pad is None:
            raise ValueError("the tokenizer has neither a pad nor an eos token: one is needed to fill batches")
        return cls(
            plain, config, bos_id=bos_id, eos_id=eos_id, pad_id=pad, special_ids=sorted(special),
            vocabulary_size=vocabulary_size,
        )  # fmt: skip

    @classmethod
    def load(cls, folder: Path) -> Text:
        """Read `tokenizer.json` and `text.json`; refuses a tokenizer that is not the one the folder was written with."""
        folder = Path(folder)
        state = read_json(folder / TEXT_FILE)
        content = (folder / TOKENIZER_FILE).read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != state["tokenizer_sha256"]:
            raise ValueError(
                f"{folder / TOKENIZER_FILE}: its checksum is {found[:12]}… but {TEXT_FILE} was written for "
                f"{state['tokenizer_sha256'][:12]}…: the tokenizer was changed after training. Restore the file or train again."
            )
        return cls(
            Tokenizer.from_str(content.decode()), TextConfig(**state["config"]), bos_id=state["bos_id"],
            eos_id=state["eos_id"], pad_id=state["pad_id"], special_ids=state["special_ids"],
            vocabulary_size=state["vocabulary_size"],
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `text.json` into `folder`."""
        content = self.tokenizer.to_str().encode()
        write_atomic(Path(folder) / TOKENIZER_FILE, content)
        state = self._state() | {"tokenizer_sha256": hashlib.sha256(content).hexdigest()}
        write_json(Path(folder) / TEXT_FILE, state)

    def _state(self) -> dict[str, object]:
        return {
            "config": self.config.model_dump(), "bos_id": self.bos_id, "eos_id": self.eos_id, "pad_id": self.pad_id,
            "special_ids": sorted(self.special_ids), "vocabulary_size": self.vocabulary_size,
        }  # fmt: skip

    @cached_property
    def fingerprint(self) -> str:
        """Changes with anything that changes the ids of any text."""
        return fingerprint(self._state(), hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest())

    @cached_property
    def producible(self) -> np.ndarray:
        """bool [V]: the ids that plain text can produce, i.e. tokens of the model vocabulary that are not special."""
        mask = np.zeros(self.vocabulary_size, dtype=bool)
        mask[list(self.tokenizer.get_vocab(with_added_tokens=False).values())] = True
        mask[sorted(self.special_ids)] = False
        return mask

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text: no special tokens, not truncated."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """`[bos] ids [eos]` of each document, at most `document_max_tokens` long; a truncated one still ends in eos."""
        return [self.wrap(ids) for ids in self.plain(texts)]

    def wrap(self, ids: Sequence[int], limit: int | None = None) -> list[int]:
        """`[bos] ids [eos]` with the ids cut so that the whole is at most `limit` long (default: `document_max_tokens`)."""
        head, tail = self._bos, self._eos
        room = (limit or self.config.document_max_tokens) - len(head) - len(tail)
        return [*head, *ids[:room], *tail]

    def queries(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each query for the dense table: tokenised alone, no special tokens, no leading space (LightRetriever 1.3)."""
        return [ids[: self.config.query_max_tokens] for ids in self.plain(texts)]

    def sparse_queries(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of `" " + query`, so that the first word gets its in-sentence form (LightRetriever 1.6, spec trap 1)."""
        return [ids[: self.config.query_max_tokens] for ids in self.plain([" " + text for text in texts])]

    def prompt(self, instruction: str) -> list[int]:
        """`[bos] ids(instruction)`, tokenised apart from the query, as in the packed form (LightRetriever 1.3)."""
        return [*self._bos, *(self.plain([instruction])[0] if instruction else [])]

    def full_queries(self, texts: Sequence[str], instruction: str) -> list[list[int]]:
        """`[bos] ids(instruction + query) [eos]` for the symmetric encoder; the query is cut, never the instruction."""
        prompt_length = len(self.plain([instruction])[0]) if instruction else 0
        limit = prompt_length + self.config.query_max_tokens
        return [[*self._bos, *ids[:limit], *self._eos] for ids in self.plain([instruction + text for text in texts])]

    @property
    def _bos(self) -> list[int]:
        return [self.bos_id] if self.config.bos and self.bos_id is not None else []

    @property
    def _eos(self) -> list[int]:
        return [self.eos_id] if self.config.eos and self.eos_id is not None else []


def instruction_prompt(task: str) -> str:
    """The E5-Mistral query prompt of LightRetriever (A.6): `Instruct: {task}`, a newline, `Query: `; no task, no prompt."""
    return f"Instruct: {task}\nQuery: " if task else ""
