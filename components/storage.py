"""Files that are whole or absent: atomic writes, strict JSON, checksums, fingerprints, folder swaps."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

FORMAT_VERSION = 1
"""Part of every fingerprint: raising it makes every stage of every old run stale."""

_RECORDED = (
    "ray",
    "torch",
    "transformers",
    "peft",
    "faiss-cpu",
    "mlflow",
    "pyarrow",
    "ir-datasets",
    "tokenizers",
    "numpy",
    "numba",
)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of `path`; when the block ends well it is synced to disk and renamed to `path`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write `content` (bytes, or a function that fills the open file) so that `path` is never seen half-written."""
    with atomic_file(path) as temporary, temporary.open("wb") as handle:
        if isinstance(content, bytes):
            handle.write(content)
        else:
            content(handle)
        handle.flush()


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON (keys sorted, NaN and infinity refused with a ValueError) atomically."""
    try:
        text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise ValueError(f"{path}: not written, because a number in it is NaN or infinite: {error}") from error
    write_atomic(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """The value in a JSON file; the error of a broken one names the file, the line and what to do."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: not valid JSON ({error.msg}). Delete the folder and run its stage again."
        ) from error


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file as 64 hex digits, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fingerprint(*parts: Any) -> str:
    """16 hex digits that change when any of `parts` (JSON values) or the format version does."""
    text = json.dumps([FORMAT_VERSION, *parts], sort_keys=True, allow_nan=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def replace_folder(temporary: Path, final: Path) -> None:
    """Put the finished folder `temporary` where `final` is, moving an older `final` out of the way and deleting it."""
    old = final.with_name(f".{final.name}.old-{uuid.uuid4().hex[:8]}")
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    if old.exists():
        shutil.rmtree(old)


def versions() -> dict[str, str]:
    """Versions of the libraries that decide results, plus the git commit of the code (with `-dirty`, or `unknown`)."""
    found = {}
    for name in _RECORDED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["commit"] = _commit()
    return found


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("ALMANAC_COMMIT", "unknown")
    return described.stdout.strip()
