"""Bounded work with deadlines: full is said at once, abandoned work is dropped (T-128, T-131)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from serve.worker import Busy, Worker

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_result_and_error_come_through() -> None:
    worker = Worker(1, 1)
    assert await worker.run(lambda: 5, 5) == 5
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 // 0, 5)
    assert await worker.run(lambda: 6, 5) == 6


async def test_full_is_said_at_once_and_health_checks_are_let_in(gate: threading.Event) -> None:
    worker = Worker(2, 1)
    running = asyncio.create_task(worker.run(gate.wait, 5))
    await asyncio.sleep(0.05)
    with pytest.raises(Busy):
        await worker.run(lambda: 1, 5)
    assert await worker.run(lambda: 2, 5, admit=False) == 2
    gate.set()
    await running
    assert await worker.run(lambda: 3, 5) == 3


async def test_a_health_check_behind_hanging_threads_times_out(gate: threading.Event) -> None:
    worker = Worker(1, 4)
    hanging = asyncio.create_task(worker.run(gate.wait, 5))
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError):
        await worker.run(lambda: 1, 0.05, admit=False)
    gate.set()
    await hanging


async def test_after_a_storm_of_abandoned_requests_all_is_as_before(gate: threading.Event) -> None:
    worker = Worker(1, 50)
    done: list[int] = []
    first = asyncio.create_task(worker.run(gate.wait, 5))
    await asyncio.sleep(0.05)
    storm = [asyncio.create_task(worker.run(partial(done.append, n), 0.05)) for n in range(49)]
    results = await asyncio.gather(*storm, return_exceptions=True)
    assert all(isinstance(result, TimeoutError) for result in results)
    gate.set()
    await first
    answers = await asyncio.gather(*[worker.run(partial(abs, n), 5) for n in range(50)])
    assert answers == list(range(50))
    assert done == []
