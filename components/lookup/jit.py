"""The one decorator of the compiled query kernels: numba, without the GIL, cached on disk where there is a place for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """`function` compiled by numba at its first call; machine code is kept in numba's cache, if one can be written.

    Kernels allocate nothing and return numbers. So numba's reference counting can be left out (`_nrt`): it made the
    tokeniser 4 times slower, and with it on, a kernel that does allocate would go unnoticed instead of failing to compile.
    `reassoc` lets sums be vectorised; their order is then fixed by the compiler, so results stay the same run after run
    and the same for one query as for a batch.
    """
    options: dict[str, Any] = {
        "nogil": True, "_nrt": False, "forceinline": True, "error_model": "numpy", "fastmath": {"reassoc", "contract"},
    }  # fmt: skip
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # a read-only installation without a writable cache folder: compile in every process
        return numba.njit(**options)(function)
