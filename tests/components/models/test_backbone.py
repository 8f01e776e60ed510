"""Loading is strict: nothing random, nothing quietly left out (T-035), no tokenizer larger than its model (T-046)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.models.backbone import (
    check_vocabulary,
    embedding_weight,
    head_weight,
    last_hidden,
    load_causal_lm,
    save_causal_lm,
    unwrapped,
)
from components.text import Text


@pytest.fixture
def copy(tiny_model_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model_folder, tmp_path / "copy")


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("tied", [True, False])
def test_a_sequence_classifier_is_refused(tied: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"unexpected: score\.weight" if tied else r"missing: lm_head\.weight"):
        load_causal_lm(tmp_path)


def test_a_missing_weight_an_extra_one_and_a_wrong_shape_are_refused_by_name(copy: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    edit(copy, lambda tensors: tensors.update(stray=torch.zeros(2)))
    with pytest.raises(ValueError, match="unexpected: stray"):
        load_causal_lm(copy)
    edit(copy, lambda tensors: tensors.pop("stray"))
    load_causal_lm(copy)
    edit(copy, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj|do not fit"):
        load_causal_lm(copy)
    edit(copy, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"missing: {name}"):
        load_causal_lm(copy)


def test_a_tied_head_is_one_matrix_with_the_embedding(tiny_model_folder: Path) -> None:
    model = load_causal_lm(tiny_model_folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    assert model.config.use_cache is False


def test_a_folder_with_an_adapter_or_without_config_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="LoRA adapter"):
        load_causal_lm(copy)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_causal_lm(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="dtype"):
        load_causal_lm(copy, "float8")


def test_code_that_a_model_brings_along_is_never_run(copy: Path) -> None:
    edit_config(copy, auto_map={"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Config"})
    (copy / "evil.py").write_text("raise SystemExit('was run')")
    load_causal_lm(copy)


def test_a_tokenizer_larger_than_the_model_is_refused_and_phantom_rows_are_cut(
    tiny_model_folder: Path, tiny_text: Text
) -> None:
    model = load_causal_lm(tiny_model_folder)
    size, rows = tiny_text.vocabulary_size, model.config.vocab_size
    assert rows == size + 8
    check_vocabulary(model, tiny_text)
    assert head_weight(model, size).shape == embedding_weight(model, size).shape == (size, 32)
    model.resize_token_embeddings(size - 1)
    with pytest.raises(ValueError, match=f"largest id is {size - 1} but the model has {size - 1} embedding rows"):
        check_vocabulary(model, tiny_text)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dtype_and_attention_are_those_asked_for(tiny_model_folder: Path, attention: str) -> None:
    model = load_causal_lm(tiny_model_folder, "bfloat16", attention)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == attention
    assert load_causal_lm(tiny_model_folder, "auto").dtype == torch.float32


def test_a_peft_wrapped_model_is_seen_through_and_not_saved_unmerged(tiny_model_folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = load_causal_lm(tiny_model_folder)
    ids = torch.tensor([[1, 30, 2]])
    wanted = last_hidden(model, ids, torch.ones_like(ids))
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()
    assert unwrapped(wrapped) is model
    assert not torch.allclose(last_hidden(wrapped, ids, torch.ones_like(ids)), wanted, atol=1e-3)
    with pytest.raises(TypeError, match="merge"):
        save_causal_lm(wrapped, tmp_path)
    merged = wrapped.merge_and_unload()
    save_causal_lm(merged, tmp_path / "merged")
    again = load_causal_lm(tmp_path / "merged")
    states = (last_hidden(m, ids, torch.ones_like(ids)) for m in (merged, again))
    assert torch.equal(*states)
