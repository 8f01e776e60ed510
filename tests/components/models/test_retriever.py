"""The retriever folder: saved and loaded whole, refused when anything is missing, added, changed or inconsistent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.models.backbone import load_causal_lm
from components.models.config import RetrieverConfig
from components.models.retriever import Extras, load_retriever, save_retriever
from components.text import Text


@pytest.fixture
def saved(tiny_model_folder: Path, tiny_text: Text, tmp_path: Path) -> Callable[..., Path]:
    def save(config: RetrieverConfig | None = None, **extras: Any) -> Path:
        size = tiny_text.vocabulary_size
        values = {"token_scores": np.full(size, 2.0), "center": np.arange(32.0), "idf": np.ones(size)} | extras
        folder = tmp_path / "model"
        save_retriever(
            folder, load_causal_lm(tiny_model_folder), tiny_text, config or RetrieverConfig(), Extras(**values)
        )
        return folder

    return save


def test_everything_comes_back(saved: Callable[..., Path], tiny_model_folder: Path, tiny_text: Text) -> None:
    config = RetrieverConfig(query_weights="idf", instruction="find it", lexical_weight=1.0)
    folder = saved(config, average_length=7.5)
    found = load_retriever(folder)
    assert found.config == config
    assert found.text.fingerprint == tiny_text.fingerprint
    assert found.extras.average_length == 7.5
    assert np.array_equal(found.extras.center, np.arange(32, dtype=np.float32))
    assert np.array_equal(found.extras.token_scores, 2.0 * tiny_text.producible)
    assert found.row_weights is not None
    for name, weight in load_causal_lm(tiny_model_folder).state_dict().items():
        assert torch.equal(found.model.state_dict()[name], weight)
    assert found.fingerprint == json.loads((folder / "retriever.json").read_text())["fingerprint"]


def test_the_fingerprint_follows_weights_and_settings(saved: Callable[..., Path]) -> None:
    marks = []
    for config in (RetrieverConfig(), RetrieverConfig(), RetrieverConfig(pooling="mean")):
        marks.append(load_retriever(saved(config)).fingerprint)
    marks.append(load_retriever(saved(center=np.zeros(32))).fingerprint)
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "text.json", "extras.safetensors"])
def test_a_missing_file_is_named(saved: Callable[..., Path], name: str) -> None:
    folder = saved()
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"missing files .'{name}'"):
        load_retriever(folder)


def test_a_stray_adapter_is_refused_and_a_folder_without_retriever_json_is_none(saved: Callable[..., Path]) -> None:
    folder = saved()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"do not belong .'adapter_config\.json'"):
        load_retriever(folder)
    (folder / "retriever.json").unlink()
    with pytest.raises(FileNotFoundError, match="Run the train stage"):
        load_retriever(folder)


def test_another_format_version_is_refused(saved: Callable[..., Path]) -> None:
    folder = saved()
    state = json.loads((folder / "retriever.json").read_text())
    (folder / "retriever.json").write_text(json.dumps(state | {"format_version": 99}))
    with pytest.raises(ValueError, match="format version 99"):
        load_retriever(folder)


@pytest.mark.parametrize(
    ("config", "extras", "message"),
    [
        ({"center": True}, {"center": None}, "need center"),
        ({"query_weights": "idf"}, {"idf": None}, "need idf"),
        ({"lexical_weight": 1.0}, {}, "average_length > 0"),
        ({}, {"token_scores": np.ones(5)}, "token_scores has shape"),
        ({}, {"center": np.full(32, np.nan)}, "finite numbers"),
    ],
)
def test_what_the_settings_need_must_be_there(
    saved: Callable[..., Path], config: dict[str, Any], extras: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        saved(RetrieverConfig(**config), **extras)


def test_a_pruned_backbone_comes_back_pruned(tiny_model_folder: Path, tiny_text: Text, tmp_path: Path) -> None:
    from components.pruning.depth import drop_mlps

    model = load_causal_lm(tiny_model_folder)
    full = sum(p.numel() for p in model.parameters())
    drop_mlps(model, [1, 3])
    extras = Extras(token_scores=np.ones(tiny_text.vocabulary_size, np.float32))
    save_retriever(tmp_path / "model", model, tiny_text, RetrieverConfig(), extras)
    again = load_retriever(tmp_path / "model").model
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters()) < full
    ids = torch.tensor([[1, 30, 40, 2]])
    assert torch.equal(again(ids).logits, model(ids).logits)
