"""From a model folder to the project's `Text`: which ids are bos, eos and pad is settled here, once, and then
stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from components.storage import read_json
from components.text import TEXT_FILE, TOKENIZER_FILE, Text, TextConfig

_NAMES = {"bos": ("bos_token", "cls_token"), "eos": ("eos_token", "sep_token"), "pad": ("pad_token",)}


def text_for_model(folder: Path, config: TextConfig) -> Text:
    """The `Text` of the model in `folder`; read back, if the folder holds one of ours, and then `config` must be its
    own.

    The ids come from tokenizer_config.json, else special_tokens_map.json, else config.json, never from the tokenizer's
    post-processor, which library versions disagree about (T-003, T-004). A model without bos (Qwen) and `text.bos=true`
    is a ValueError: an added bos would be an untrained embedding row.
    """
    folder = Path(folder)
    if (folder / TEXT_FILE).is_file():
        text = Text.load(folder)
        if text.config != config:
            raise ValueError(
                f"{folder}: made with text settings {text.config!r}, wanted {config!r}: make the folder again"
            )
        return text
    tokenizer = _tokenizer(folder)
    sources = [read_json(path) for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json")
               if (path := folder / name).is_file()]  # fmt: skip
    ids = {kind: _special_id(tokenizer, sources, kind, names) for kind, names in _NAMES.items()}
    try:
        return Text.from_tokenizer(tokenizer, config, bos_id=ids["bos"], eos_id=ids["eos"], pad_id=ids["pad"])
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _tokenizer(folder: Path) -> Tokenizer:
    if (folder / TOKENIZER_FILE).is_file():
        return Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    from transformers import AutoTokenizer

    try:
        slow: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return Tokenizer.from_str(slow.backend_tokenizer.to_str())
    except (OSError, ValueError, AttributeError) as error:
        raise FileNotFoundError(
            f"{folder}: no {TOKENIZER_FILE}, and what is there cannot be converted to one ({error}). "
            f"Save the model's fast tokenizer into the folder."
        ) from error


def _special_id(tokenizer: Tokenizer, sources: list[dict[str, Any]], kind: str, names: tuple[str, ...]) -> int | None:
    for source in sources:
        for name in names:
            token = source.get(name)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                found = tokenizer.token_to_id(content)
                if found is None:
                    raise ValueError(f"{name} is {json.dumps(content)}, which is not in the tokenizer's vocabulary")
                return found
        value = source.get(f"{kind}_token_id")
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return None
