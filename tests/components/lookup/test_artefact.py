"""The lookup artefact: what is written is read back, by safetensors too, and parts that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from components.lookup import artefact
from components.lookup.artefact import load_table, quantise, read_safetensors, row_scales, save_table
from components.storage import write_json
from components.text import Text, TextConfig

STORAGES = ["float32", "float16", "int8"]


@pytest.fixture(scope="module")
def text(tiny_tokenizer: Tokenizer) -> Text:
    return Text.from_tokenizer(tiny_tokenizer, TextConfig(), bos_id=1, eos_id=2, pad_id=0)


def random_rows(text: Text, hidden: int = 24, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(text.vocabulary_size, hidden)).astype(np.float32)


def save(folder: Path, text: Text, **changes: object) -> Path:
    settings: dict = {
        "rows": {"web": random_rows(text), "facts": random_rows(text, seed=1)},
        "token_scores": np.ones(text.vocabulary_size), "instructions": {"web": "Find pages", "facts": "Find facts"},
        "storage": "float32", "model_fingerprint": "abc",
    } | changes  # fmt: skip
    save_table(folder, settings.pop("rows"), settings.pop("token_scores"), text, **settings)
    return folder


@pytest.mark.parametrize("storage", STORAGES)
def test_round_trip(tmp_path: Path, text: Text, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "BLOCK_ROWS", 7)  # several blocks and a partial one
    save(tmp_path, text, storage=storage, default_instruction="facts", normalize=False)
    manifest, tensors, loaded = load_table(tmp_path)
    assert (manifest.storage, manifest.default_instruction, manifest.normalize) == (storage, "facts", False)
    assert manifest.instructions == {"web": "Find pages", "facts": "Find facts"}
    assert (manifest.vocabulary_size, manifest.hidden_size) == (text.vocabulary_size, 24)
    assert loaded.fingerprint == text.fingerprint
    for name, seed in (("web", 0), ("facts", 1)):
        wanted, found = random_rows(text, seed=seed), tensors[f"rows.{name}"].astype(np.float32)
        if storage == "int8":
            found = found * tensors[f"scales.{name}"][:, None]
        cosine = (wanted * found).sum(1) / np.linalg.norm(wanted, axis=1) / np.linalg.norm(found, axis=1)
        assert cosine.min() > 0.999
        if storage == "float32":
            assert np.array_equal(found, wanted)
    by_safetensors = load_file(tmp_path / "table.safetensors")
    assert set(by_safetensors) == set(tensors)
    for name, tensor in tensors.items():
        assert tensor.dtype == by_safetensors[name].dtype
        assert np.array_equal(tensor, by_safetensors[name])
        assert not tensor.flags.writeable
        assert tensor.flags.aligned


def test_token_scores_of_ids_no_query_contains_are_zero(tmp_path: Path, text: Text) -> None:
    _, tensors, _ = load_table(save(tmp_path, text))
    assert np.array_equal(tensors["token_scores"], text.producible.astype(np.float32))
    assert tensors["token_scores"][[0, 1, 2]].sum() == 0


def test_quantise() -> None:
    rows = (
        np.random.default_rng(0).standard_t(3, size=(500, 64)).astype(np.float32)
        * 10.0 ** np.arange(-3, 2).repeat(100)[:, None]
    )
    rows = rows.astype(np.float32)
    rows[3] = 0
    scales = row_scales(rows)
    values = quantise(rows, scales)
    assert values.dtype == np.int8
    assert scales.dtype == np.float32
    assert np.abs(values[np.arange(500) != 3]).max(1).tolist() == [127] * 499
    assert not values[3].any()
    assert (np.abs(values * scales[:, None] - rows) <= scales[:, None] * 0.5001).all()


def test_blocks_may_be_memory_maps(tmp_path: Path, text: Text) -> None:
    rows = random_rows(text)
    np.save(tmp_path / "rows.npy", rows)
    save(tmp_path, text, rows={"a": np.load(tmp_path / "rows.npy", mmap_mode="r")}, instructions={"a": ""})
    assert np.array_equal(load_table(tmp_path)[1]["rows.a"], rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": "int4"}, "storage is 'int4'"),
        ({"instructions": {"web": ""}}, r"rows are given for \['facts', 'web'\] but instructions for \['web'\]"),
        ({"default_instruction": "x"}, "default_instruction is 'x'"),
        ({"rows": {"a": np.zeros((9, 4), np.float32)}, "instructions": {"a": ""}}, "one row a token id"),
        ({"token_scores": np.ones(3)}, r"token_scores has shape \(3,\)"),
    ],
)
def test_what_does_not_fit_is_not_saved(tmp_path: Path, text: Text, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save(tmp_path, text, **changes)
    assert not list(tmp_path.iterdir())


def test_numbers_that_cannot_be_stored_are_refused(tmp_path: Path, text: Text) -> None:
    rows, scores = random_rows(text), np.ones(text.vocabulary_size)
    rows[11, 3] = np.nan
    with pytest.raises(ValueError, match=r"rows\['a'\], row 11 holds NaN or infinity"):
        save(tmp_path, text, rows={"a": rows}, instructions={"a": ""})
    rows[11, 3] = 7e4
    with pytest.raises(ValueError, match="beyond float16; use storage int8 or float32"):
        save(tmp_path, text, rows={"a": rows}, instructions={"a": ""}, storage="float16")
    for wrong in (np.nan, np.inf, -1.0):
        scores[5] = wrong
        with pytest.raises(ValueError, match=r"token_scores\[5\] is"):
            save(tmp_path, text, token_scores=scores)
    assert not list(tmp_path.iterdir())


def test_parts_of_other_models_are_refused(tmp_path: Path, text: Text, tiny_tokenizer: Tokenizer) -> None:
    folder = save(tmp_path / "a", text)
    other = Text.from_tokenizer(tiny_tokenizer, TextConfig(lowercase=False), bos_id=1, eos_id=2, pad_id=0)
    save(tmp_path / "b", other, token_scores=np.full(text.vocabulary_size, 2.0))
    table = (folder / "table.safetensors").read_bytes()
    (folder / "table.safetensors").write_bytes((tmp_path / "b" / "table.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"table\.safetensors: its checksum is"):
        load_table(folder)
    assert load_table(folder, verify=False)[0].storage == "float32"
    (folder / "table.safetensors").write_bytes(table)
    for name in ("tokenizer.json", "text.json"):
        (folder / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ValueError, match=r"tokenizer\.json: its checksum is"):
        load_table(folder, verify=False)


def test_unfinished_or_edited_folders_are_refused(tmp_path: Path, text: Text) -> None:
    with pytest.raises(FileNotFoundError, match="run the tabulate stage"):
        load_table(tmp_path)
    save(tmp_path, text)
    manifest = json.loads((tmp_path / "lookup.json").read_text())
    for change, message in (
        ({"format_version": 99}, "format_version is 99"),
        ({"vocabulary_size": 7}, "vocabulary_size is 7 but the tokenizer has"),
        ({"storage": "int8"}, "lookup.json says"),
        ({"hidden_size": 5}, "lookup.json says"),
        ({"surprise": 1}, "surprise"),
        ({"instructions": {}}, "instructions"),
    ):
        write_json(tmp_path / "lookup.json", manifest | change)
        with pytest.raises(ValueError, match=message):
            load_table(tmp_path)
    write_json(tmp_path / "lookup.json", manifest)
    (tmp_path / "table.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"table\.safetensors: not there"):
        load_table(tmp_path)


def test_a_cut_table_is_refused(tmp_path: Path, text: Text) -> None:
    path = save(tmp_path, text) / "table.safetensors"
    content = path.read_bytes()
    for keep in (4, 100, len(content) - 10):
        path.write_bytes(content[:keep])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            read_safetensors(path)
