"""The decorator of the compiled query kernels: numba without the GIL, cached on disk where there is a place for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

OPTIONS: dict[str, Any] = {
    "nogil": True, "_nrt": False, "forceinline": True, "error_model": "numpy", "fastmath": {"reassoc", "contract"},
}  # fmt: skip


def kernel(function: Callable[..., Any]) -> Any:
    """`function` compiled by numba at its first call; machine code is kept in numba's cache, if one can be written.

    Kernels allocate nothing and return numbers. So numba's reference counting is left out (`_nrt`): it made the
    tokeniser 4 times slower. A kernel that does allocate then fails to compile.
    `reassoc` lets sums be vectorised; the compiler then fixes their order, so results stay the same run after run and
    the same for one query as for a batch.
    """
    dispatcher = numba.njit(**OPTIONS)(function)
    try:
        dispatcher.enable_caching()
        # numba only asks whether the function's own file has changed, but kernels inline kernels of the other files.
        dispatcher._cache._cache_file._source_stamp = _stamp(Path(function.__code__.co_filename).parent)
    except (RuntimeError, AttributeError):  # no folder to write to, or another numba: compile in every process
        return numba.njit(**OPTIONS)(function)
    return dispatcher


@cache
def _stamp(folder: Path) -> str:
    """Changes with every file of kernels in the folder and with this one."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(folder.glob("*.py")):
        if b"@kernel" in (content := path.read_bytes()):
            digest.update(content)
    return digest.hexdigest()
