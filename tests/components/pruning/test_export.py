"""Saved pruned models: equal after loading (T-113), never a silently full or random model, stock where possible."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from components.models.backbone import load_causal_lm, save_causal_lm
from components.pruning.architecture import PRUNING_KEY, layout_of, parameter_count
from components.pruning.depth import drop_attentions, drop_blocks, drop_mlps
from components.pruning.export import load_pruned, save_pruned
from components.pruning.neurons import random_scores
from components.pruning.width import attach_gates, rank_neurons, slice_widths
from components.storage import read_json, write_json

WEIGHTS = "model.almanac.safetensors"


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("what", ["mlps", "attentions", "widths", "all"])
def test_loaded_model_is_the_pruned_one(any_model: PreTrainedModel, ids: Tensor, tmp_path: Path, what: str) -> None:
    """T-113: parameter count, layout and outputs; by load_pruned and by the loader everybody uses."""
    if what == "all":
        drop_blocks(any_model, [1])
    if what in ("mlps", "all"):
        drop_mlps(any_model, [0, 2])
    if what in ("attentions", "all"):
        drop_attentions(any_model, [1])
    if what in ("widths", "all"):
        slice_widths(any_model, rank_neurons(random_scores(any_model, 0), 0.3))
    save_pruned(any_model, tmp_path, {"note": 1})
    for loaded in (load_pruned(tmp_path, attention="eager"), load_causal_lm(tmp_path, attention="eager")):
        assert type(loaded) is type(any_model)
        assert layout_of(loaded) == layout_of(any_model)
        assert parameter_count(loaded) == parameter_count(any_model)
        assert not loaded.training
        assert {name: p.shape for name, p in loaded.state_dict().items()} == {
            name: p.shape for name, p in any_model.state_dict().items()
        }
        torch.testing.assert_close(logits(loaded, ids), logits(any_model, ids), rtol=0, atol=0)
        torch.testing.assert_close(loaded(ids, labels=ids).loss, any_model(ids, labels=ids).loss, rtol=0, atol=0)
    assert read_json(tmp_path / "pruning.json") == {"note": 1}


def test_no_dead_weights_in_the_file(llama: PreTrainedModel, tmp_path: Path) -> None:
    save_pruned(llama, tmp_path / "full")
    drop_mlps(llama, [1, 2])
    save_pruned(llama, tmp_path / "pruned")
    saved = load_file(tmp_path / "pruned" / WEIGHTS)
    assert sum(tensor.numel() for tensor in saved.values()) == parameter_count(llama)
    assert not [name for name in saved if ".layers.1.mlp" in name or ".layers.2.post_attention" in name]
    full = (tmp_path / "full" / "model.safetensors").stat().st_size
    assert full - (tmp_path / "pruned" / WEIGHTS).stat().st_size > 2 * 3 * 32 * 48 * 4


def test_stock_loaders_refuse_the_folder(llama: PreTrainedModel, tmp_path: Path) -> None:
    """T-113: a stock loader would fill the dropped MLPs with random numbers, so it must not get that far."""
    drop_mlps(llama, [1])
    save_pruned(llama, tmp_path)
    for loader in (AutoConfig, AutoModel, AutoModelForCausalLM):
        with pytest.raises((ValueError, KeyError), match="almanac_llama"):
            loader.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises((ValueError, KeyError), match="almanac_llama"):
        AutoModelForCausalLM.from_pretrained(tmp_path, variant="almanac")


@pytest.mark.parametrize("what", ["nothing", "blocks", "uniform"])
def test_what_stock_can_express_loads_with_stock(
    any_model: PreTrainedModel, ids: Tensor, tmp_path: Path, what: str
) -> None:
    if what == "blocks":
        drop_blocks(any_model, [0, 2])
    if what == "uniform":
        slice_widths(any_model, rank_neurons(random_scores(any_model, 0), 0.25, scope="layer"))
    save_pruned(any_model, tmp_path)
    assert PRUNING_KEY not in read_json(tmp_path / "config.json")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert parameter_count(loaded) == parameter_count(any_model)
    torch.testing.assert_close(logits(loaded, ids), logits(any_model, ids), rtol=0, atol=0)
    torch.testing.assert_close(logits(load_causal_lm(tmp_path, attention="eager"), ids), logits(any_model, ids))
    encoder = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert encoder.config.intermediate_size == (36 if what == "uniform" else 48)


def test_training_round_trip_keeps_the_layout(llama: PreTrainedModel, ids: Tensor, tmp_path: Path) -> None:
    """prune → load → LoRA → merge → save_causal_lm → load, as the train stage does."""
    drop_mlps(llama, [0, 3])
    save_causal_lm(llama, tmp_path / "prune")
    loaded = load_causal_lm(tmp_path / "prune", attention="eager")
    wrapped = get_peft_model(loaded, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    merged = wrapped.merge_and_unload()
    save_causal_lm(merged, tmp_path / "train")
    again = load_causal_lm(tmp_path / "train", attention="eager")
    assert layout_of(again) == layout_of(llama)
    torch.testing.assert_close(logits(again, ids), logits(merged, ids), rtol=0, atol=0)
    assert not torch.allclose(logits(again, ids), logits(llama, ids))


def test_tied_head_stays_tied_and_is_kept(tiny_model_folder: Path, tmp_path: Path, ids: Tensor) -> None:
    model = load_causal_lm(tiny_model_folder)
    drop_mlps(model, [3])
    save_pruned(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    loaded = load_pruned(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=0, atol=0)
    untied = copy.deepcopy(model)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach() + 1)
    with pytest.raises(ValueError, match="LM head differs"):
        save_pruned(untied, tmp_path / "untied")


def test_dtype_is_kept_or_changed_as_asked(llama: PreTrainedModel, tmp_path: Path) -> None:
    drop_mlps(llama, [1])
    save_pruned(llama.to(torch.bfloat16), tmp_path)
    assert load_pruned(tmp_path).dtype == torch.bfloat16
    assert load_pruned(tmp_path, dtype="float32").dtype == torch.float32


@pytest.mark.parametrize("fault", ["missing", "unexpected", "misshapen"])
def test_weights_that_do_not_fit_are_named(llama: PreTrainedModel, tmp_path: Path, fault: str) -> None:
    drop_mlps(llama, [1])
    save_pruned(llama, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    if fault == "missing":
        del tensors["model.layers.0.mlp.up_proj.weight"]
    elif fault == "unexpected":
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32)
    else:
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(47, 32)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    name = "layers.1.mlp.up_proj" if fault == "unexpected" else "layers.0.mlp.up_proj"
    with pytest.raises(ValueError, match=name):
        load_pruned(tmp_path)


def test_layouts_that_do_not_fit_are_named(llama: PreTrainedModel, tmp_path: Path) -> None:
    drop_mlps(llama, [1])
    save_pruned(llama, tmp_path)
    config = read_json(tmp_path / "config.json")
    state = config[PRUNING_KEY]
    faults = [
        (state | {"format_version": 99}, "format_version is 99"),
        (state | {"intermediate_sizes": [48, 0, 48]}, "3 entries but num_hidden_layers is 4"),
        (state | {"dropped_mlps": [2]}, r"dropped_mlps is \[2\] but the zeros .* \[1\]"),
        (state | {"dropped_attentions": [7]}, r"dropped_attentions is \[7\]"),
        (state | {"model_type": "gpt2"}, "model_type"),
        (state | {"intermediate_sizes": [48, 0, 48, 40]}, "layers.3.mlp"),
    ]
    for changed, message in faults:
        write_json(tmp_path / "config.json", config | {PRUNING_KEY: changed})
        with pytest.raises(ValueError, match=message):
            load_pruned(tmp_path)


def test_folders_by_other_writers_are_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    """save_pretrained on a pruned model writes a config that stock would fill up at random; our loader says so."""
    drop_mlps(llama, [1])
    llama.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"save_pretrained, not save_pruned"):
        load_causal_lm(tmp_path)
    save_pruned(llama, tmp_path / "whole")
    (tmp_path / "whole" / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"no model.almanac.safetensors"):
        load_causal_lm(tmp_path / "whole")
    attach_gates(llama)
    with pytest.raises(TypeError, match="gates"):
        save_pruned(llama, tmp_path / "gated")
