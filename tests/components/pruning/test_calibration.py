"""Calibration text: packed rows, the same sample in any order, the hash, the sources, refusals (T-118)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.pruning.calibration import pack, read_texts, sample_texts
from components.text import Text, TextConfig

TEXTS = [f"document number {i} about the lift of wing {i * i} in a slipstream" for i in range(300)]


def test_rows_are_full_and_are_documents_one_after_another(tiny_text: Text) -> None:
    packed = pack(TEXTS, tiny_text, samples=4, tokens=50, seed=1)
    assert packed.ids.shape == (4, 50)
    stream = packed.ids.reshape(-1).tolist()
    assert stream[0] == tiny_text.bos_id
    assert tiny_text.pad_id not in stream
    chosen = sample_texts(TEXTS, characters=4 * 50 * 12, seed=1)
    expected = [i for text in chosen for i in [tiny_text.bos_id, *tiny_text.plain([text])[0], tiny_text.eos_id]]
    assert stream == expected[:200]
    assert 0 < packed.texts < len(TEXTS)


def test_special_tokens_follow_the_text_config(tiny_tokenizer: object) -> None:
    text = Text.from_tokenizer(tiny_tokenizer, TextConfig(bos=False, eos=False), bos_id=1, eos_id=2, pad_id=0)  # type: ignore[arg-type]
    stream = pack(TEXTS, text, samples=2, tokens=40, seed=1).ids.reshape(-1).tolist()
    assert not set(stream) & {0, 1, 2}


def test_sample_depends_on_the_seed_and_not_on_the_order(tiny_text: Text) -> None:
    shuffled = random.Random(3).sample(TEXTS, len(TEXTS))
    one = pack(TEXTS, tiny_text, samples=4, tokens=32, seed=7)
    two = pack(iter(shuffled + TEXTS), tiny_text, samples=4, tokens=32, seed=7)
    assert one.sha256 == two.sha256
    np.testing.assert_array_equal(one.ids, two.ids)
    assert pack(TEXTS, tiny_text, samples=4, tokens=32, seed=8).sha256 != one.sha256
    assert pack(TEXTS, tiny_text, samples=2, tokens=64, seed=7).sha256 != one.sha256, "the shape is in the hash"


def test_sample_holds_no_more_than_it_needs_and_is_fair() -> None:
    texts = [f"{i:05d}" * 2 for i in range(2000)]
    counts = np.zeros(len(texts))
    for seed in range(200):
        chosen = sample_texts(texts, characters=1000, seed=seed)
        assert len(chosen) == len(set(chosen)) == 100
        counts[[int(text[:5]) for text in chosen]] += 1
    assert counts.mean() == pytest.approx(10)
    assert 300 * 0.8 < ((counts - 10) ** 2).mean() / 9.5 * 300 < 300 * 1.2, "like drawing without preference"
    assert sample_texts(["", "  ", "x"], characters=100, seed=0) == ["x"]


def test_short_text_gives_fewer_rows_or_an_error_with_numbers(tiny_text: Text) -> None:
    few = pack(TEXTS[:6], tiny_text, samples=50, tokens=30, seed=0)
    assert 1 <= len(few.ids) < 50
    with pytest.raises(ValueError, match=r"has \d+ tokens \(1 texts\), too few for one row of 4096"):
        pack(TEXTS[:1], tiny_text, samples=1, tokens=4096, seed=0)
    with pytest.raises(ValueError, match=r"has 0 tokens"):
        pack([], tiny_text, samples=1, tokens=8, seed=0)


def test_sources(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for part in (0, 1):
        table = pa.table({"docid": ["a", "b"], "text": pa.array([f"text {part}", None], pa.large_string())})
        pq.write_table(table, tmp_path / "corpus" / f"part-0000{part}.parquet")
    assert list(read_texts(tmp_path / "corpus")) == ["text 0", "text 1"]
    assert list(read_texts(tmp_path / "corpus" / "part-00001.parquet")) == ["text 1"]
    (tmp_path / "lines.txt").write_text("one\ntwo\n", encoding="utf-8")
    assert list(read_texts(tmp_path / "lines.txt")) == ["one", "two"]
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"other.parquet: no column `text`, found body"):
        list(read_texts(tmp_path / "other.parquet"))
    for wrong in ("nothing.txt", "nothing.parquet", "nothing"):
        with pytest.raises(FileNotFoundError, match=r"prune.calibration.source .*nothing"):
            list(read_texts(tmp_path / wrong))
