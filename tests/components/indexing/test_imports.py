"""The query side imports without torch, transformers and ray (and faiss lives beside torch in either order, T-102)."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "ray", "mlflow", "peft"}:
            raise ModuleNotFoundError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    "module",
    [
        "components.indexing",
        "components.lookup.encoder",
        "components.text",
        "components.storage",
        "components.encoding",
        "serve.search",
    ],
)
def test_no_torch_on_the_query_side(module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"{BLOCKER}import {module}"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("order", ["import faiss, torch", "import torch, faiss"])
def test_faiss_and_torch_in_one_process(order: str) -> None:
    search = "i = faiss.IndexFlatIP(4); i.add(np.eye(4, dtype='float32')); print(i.ntotal)"
    code = f"{order}; import numpy as np; torch.arange(40000).sum(); {search}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "4", result.stderr
