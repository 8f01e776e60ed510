"""Threads that search, with a bound on what they take on and a deadline on each piece of work.

A query costs about a millisecond of native code, a batch of 256 may cost a second. On the event loop that second would
stall health checks, timeouts and every other request; the hop to a thread and back costs some 50 µs, which is little
beside what HTTP costs. The bound is what keeps latency honest under overload: work beyond it is refused at once, never
queued for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class Busy(Exception):
    """As much work as is allowed is being done or waiting already."""


class Worker:
    """A small thread pool in front of which at most `max_ongoing` calls run and wait."""

    def __init__(self, threads: int, max_ongoing: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="search")
        self._slots = threading.BoundedSemaphore(max_ongoing)

    async def run(self, work: Callable[[], Result], timeout: float, *, admit: bool = True) -> Result:
        """The result of `work`, done in a thread. Raises Busy at once when full, TimeoutError after `timeout` seconds.

        What has not begun when its caller times out or goes away is dropped, so abandoned requests cost nothing
        (T-131); what has begun keeps its slot until it ends. `admit=False` (health checks) waits in line but is never
        refused.
        """
        if admit and not self._slots.acquire(blocking=False):
            raise Busy
        try:
            future = self._pool.submit(work)
        except BaseException:
            if admit:
                self._slots.release()
            raise
        if admit:
            future.add_done_callback(lambda _: self._slots.release())
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout)

    def close(self) -> None:
        """Drop what waits and let what runs end in its own time."""
        self._pool.shutdown(wait=False, cancel_futures=True)
