"""The lookup artefact on disk: a table with its tokenizer, refused when its parts do not belong together.

    tabulate/
      table.safetensors   rows.<instruction> [V, H], scales.<instruction> [V] (int8 only), token_scores [V]
      tokenizer.json text.json
      lookup.json         written last: sizes, instructions, storage, checksums of the others (case T-048)

Tables are written in blocks and read through a memory map, so that neither needs a second copy in memory and the
processes of a machine share one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
from pydantic import Field, ValidationError

from components.section import Section
from components.storage import read_json, sha256_file, write_atomic, write_json
from components.text import TOKENIZER_FILE, Text

FORMAT_VERSION = 1
TABLE_FILE = "table.safetensors"
LOOKUP_FILE = "lookup.json"
BLOCK_ROWS = 8192

Storage = Literal["float32", "float16", "int8"]
_SAFETENSORS = {"F32": np.float32, "F16": np.float16, "I8": np.int8}
_NAMES = {"float32": "F32", "float16": "F16", "int8": "I8"}


class Manifest(Section):
    """The content of lookup.json."""

    format_version: int
    vocabulary_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    instructions: dict[str, str] = Field(min_length=1)
    """Name → instruction text; one table each (spec trap 20)."""
    default_instruction: str
    storage: Storage
    normalize: bool
    tokenizer_sha256: str
    model_fingerprint: str
    table_sha256: str


def save_table(
    folder: Path, rows: Mapping[str, np.ndarray], token_scores: np.ndarray, text: Text, *,
    instructions: Mapping[str, str], storage: Storage, model_fingerprint: str, normalize: bool = True,
    default_instruction: str | None = None,
) -> Manifest:  # fmt: skip
    """Write the whole artefact into `folder`; gives back what lookup.json says.

    rows: float32 [V, H] for each name in `instructions`; memory maps are read block by block.
    token_scores: float [V] ≥ 0, the sparse weight of one occurrence of a token; ids that no query can contain get 0.
    normalize: whether query vectors are unit vectors or plain means. default_instruction: the first one unless named.
    """
    if storage not in get_args(Storage):
        raise ValueError(f"save_table: storage is {storage!r}; wanted one of {', '.join(get_args(Storage))}")
    if not instructions or set(rows) != set(instructions):
        raise ValueError(f"save_table: rows are given for {sorted(rows)} but instructions for {sorted(instructions)}")
    default = default_instruction if default_instruction is not None else next(iter(instructions))
    if default not in instructions:
        raise ValueError(f"save_table: default_instruction is {default!r}; wanted one of {sorted(instructions)}")
    size, hidden = text.vocabulary_size, next(iter(rows.values())).shape[-1]
    for name, table in rows.items():
        if table.shape != (size, hidden):
            raise ValueError(
                f"save_table: rows[{name!r}] has shape {table.shape}; wanted ({size}, {hidden}): one row a token id of "
                "the tokenizer. Cut padded rows off; a tokenizer larger than the model cannot be used (case T-046)."
            )
    scores = _check_scores(token_scores, text)
    tensors: dict[str, tuple[str, tuple[int, ...], Callable[[], Iterator[np.ndarray]]]] = {}
    for name, table in rows.items():
        tensors[f"rows.{name}"] = (_NAMES[storage], table.shape, lambda t=table, n=name: _blocks(t, n, storage))  # type: ignore[misc]
        if storage == "int8":
            scales = np.concatenate([row_scales(block) for block in _row_blocks(table, name)])
            tensors[f"scales.{name}"] = ("F32", scales.shape, lambda s=scales: iter([s]))  # type: ignore[misc]
    tensors["token_scores"] = ("F32", scores.shape, lambda: iter([scores]))
    folder = Path(folder)
    write_atomic(folder / TABLE_FILE, lambda handle: _write_safetensors(handle, tensors))
    text.save(folder)
    manifest = Manifest(
        format_version=FORMAT_VERSION, vocabulary_size=size, hidden_size=hidden, instructions=dict(instructions),
        default_instruction=default, storage=storage, normalize=normalize, model_fingerprint=model_fingerprint,
        tokenizer_sha256=sha256_file(folder / TOKENIZER_FILE), table_sha256=sha256_file(folder / TABLE_FILE),
    )  # fmt: skip
    write_json(folder / LOOKUP_FILE, manifest.model_dump())
    return manifest


def load_table(folder: Path, verify: bool = True) -> tuple[Manifest, dict[str, np.ndarray], Text]:
    """(manifest, read-only memory-mapped tensors by name, text) of an artefact whose parts fit together.

    verify: also compare the table's checksum, which reads the file once. ValueError: a part is missing, changed, or of
    another model (cases T-046, T-048).
    """
    folder = Path(folder)
    path = folder / LOOKUP_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there. {folder} holds no finished lookup table; run the tabulate stage.")
    try:
        manifest = Manifest.model_validate(read_json(path))
    except ValidationError as error:
        raise ValueError(
            f"{path}: not a lookup manifest of format {FORMAT_VERSION}: {error}. Run the tabulate stage again."
        ) from error
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version is {manifest.format_version}; this version reads {FORMAT_VERSION}. "
            "Run the tabulate stage again."
        )
    _compare(folder / TOKENIZER_FILE, manifest.tokenizer_sha256)
    if verify:
        _compare(folder / TABLE_FILE, manifest.table_sha256)
    text = Text.load(folder)
    tensors = read_safetensors(folder / TABLE_FILE)
    if text.vocabulary_size != manifest.vocabulary_size:
        raise ValueError(
            f"{path}: vocabulary_size is {manifest.vocabulary_size} but the tokenizer has {text.vocabulary_size} ids: "
            "they are of different models. Run the tabulate stage again."
        )
    size, hidden = manifest.vocabulary_size, manifest.hidden_size
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {"token_scores": ("float32", (size,))}
    for name in manifest.instructions:
        wanted[f"rows.{name}"] = (manifest.storage, (size, hidden))
        if manifest.storage == "int8":
            wanted[f"scales.{name}"] = ("float32", (size,))
    found = {name: (str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
    if found != wanted:
        raise ValueError(
            f"{folder / TABLE_FILE}: holds {found}; {LOOKUP_FILE} says {wanted}. Run the tabulate stage again."
        )
    return manifest, tensors, text


def row_scales(rows: np.ndarray) -> np.ndarray:
    """float32 [V]: what int8 values of each row are multiplied by, so that its largest magnitude is 127."""
    return (np.abs(rows).max(axis=1, initial=0.0) / 127.0).astype(np.float32)


def quantise(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """int8 [V, H]: the symmetric quantisation of float32 rows; a zero row stays zero."""
    safe = np.where(scales > 0, scales, 1).astype(np.float32)
    return np.clip(np.rint(rows / safe[:, None]), -127, 127).astype(np.int8)


def _row_blocks(table: np.ndarray, name: str) -> Iterator[np.ndarray]:
    for start in range(0, len(table), BLOCK_ROWS):
        block = np.asarray(table[start : start + BLOCK_ROWS], dtype=np.float32)
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            raise ValueError(f"save_table: rows[{name!r}], row {start + int(np.argmin(finite))} holds NaN or infinity")
        yield block


def _blocks(table: np.ndarray, name: str, storage: Storage) -> Iterator[np.ndarray]:
    for block in _row_blocks(table, name):
        if storage == "int8":
            yield quantise(block, row_scales(block))
        elif storage == "float16":
            largest = float(np.abs(block).max(initial=0.0))
            if largest >= 65520:
                raise ValueError(
                    f"save_table: rows[{name!r}] reach {largest:g}, beyond float16; use storage int8 or float32"
                )
            yield block.astype(np.float16)
        else:
            yield block


def _check_scores(token_scores: np.ndarray, text: Text) -> np.ndarray:
    scores = np.asarray(token_scores, dtype=np.float32)
    if scores.shape != (text.vocabulary_size,):
        raise ValueError(f"save_table: token_scores has shape {scores.shape}; wanted ({text.vocabulary_size},)")
    wrong = ~(np.isfinite(scores) & (scores >= 0))
    if wrong.any():
        token = int(np.argmax(wrong))
        raise ValueError(f"save_table: token_scores[{token}] is {scores[token]}; wanted a finite number ≥ 0")
    return np.where(text.producible, scores, np.float32(0))


def _compare(path: Path, wanted: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: not there, though {LOOKUP_FILE} is. Restore it or run the tabulate stage again."
        )
    found = sha256_file(path)
    if found != wanted:
        raise ValueError(
            f"{path}: its checksum is {found[:12]}… but {LOOKUP_FILE} was written for {wanted[:12]}…: the file was "
            "changed or is of another run. Restore it or run the tabulate stage again."
        )


def _write_safetensors(
    handle: BinaryIO, tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], Iterator[np.ndarray]]]]
) -> None:
    """Stream tensors, given as (dtype, shape, blocks), in the safetensors format, the widest dtype first."""
    order = sorted(tensors, key=lambda name: (-np.dtype(_SAFETENSORS[tensors[name][0]]).itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    end = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        start, end = end, end + math.prod(shape) * np.dtype(_SAFETENSORS[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 64)
    handle.write(len(encoded).to_bytes(8, "little") + encoded)
    for name in order:
        for block in tensors[name][2]():
            handle.write(np.ascontiguousarray(block).data)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as read-only arrays over one memory map (`safetensors` copies them)."""
    content = np.memmap(path, dtype=np.uint8, mode="r")
    try:
        length = int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8 : 8 + length].tobytes())
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                raw = np.asarray(content[start:end])
                tensors[name] = raw.view(_SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a whole safetensors file of F32, F16 and I8 tensors ({error}). Write it again."
        ) from error
    return tensors
