"""The serving side of the lookup imports and works where torch, transformers and ray are not installed (bar 5)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from components.lookup import QueryEncoder, save_table
from components.text import Text, TextConfig

PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "ray", "mlflow", "faiss"}:
            raise ModuleNotFoundError(f"{name} was imported")

sys.meta_path.insert(0, Blocker())
import components.text, components.storage, components.section, components.lookup
from components.lookup.encoder import QueryEncoder
batch = QueryEncoder.load(sys.argv[1]).encode(["what is lift"])
print(batch.dense.tolist(), batch.indices.tolist())
"""
STALE = """
from kernels.outer import outer
print(outer())
"""
INNER = """
from components.lookup.jit import kernel
@kernel
def inner():
    return {}
"""
OUTER = """
from components.lookup.jit import kernel
from kernels.inner import inner
@kernel
def outer():
    return inner()
"""


def run(program: str, *arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_lookup_works_without_torch(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    text = Text.from_tokenizer(tiny_tokenizer, TextConfig(), bos_id=1, eos_id=2, pad_id=0)
    rows = np.random.default_rng(0).normal(size=(text.vocabulary_size, 8)).astype(np.float32)
    save_table(
        tmp_path, {"x": rows}, np.ones(text.vocabulary_size), text, instructions={"x": ""}, storage="float16",
        model_fingerprint="f",
    )  # fmt: skip
    batch = QueryEncoder.load(tmp_path).encode(["what is lift"])
    assert run(PROGRAM, str(tmp_path)) == f"{batch.dense.tolist()} {batch.indices.tolist()}"


def test_a_changed_kernel_is_compiled_again_where_others_inlined_it(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "outer.py").write_text(OUTER)
    for number in (1, 2):
        (package / "inner.py").write_text(INNER.format(number))
        assert run(STALE, cwd=tmp_path) == str(number)
    assert list((package / "__pycache__").glob("*.nbc"))
