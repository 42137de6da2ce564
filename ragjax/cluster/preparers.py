"""The threads in which the front prepares requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ragjax.core import OverloadError
from ragjax.engine.overload import Overload

T = TypeVar("T")


class Preparers:
    """Prepares requests, and refuses those that are too many at a time. Nothing else takes its threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(thread_name_prefix="ragjax-prepare")
        self._lock = threading.Lock()
        self._present = 0
        self._overload = Overload()

    async def run(self, work: Callable[[], T], most: int) -> T:
        """What comes of the work for one request. most: requests that may be here, this one included.

        Raises:
            OverloadError: if there are more.
        """
        self._begin(most)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            with self._lock:
                self._present -= 1
                self._overload.end(time.perf_counter())

    def close(self) -> None:
        """Begin nothing more; what waits is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, most: int) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._present >= most:
                message = f"{self._present} requests are being prepared; try again later"
                raise OverloadError(message, retry_after=self._overload.retry_after(now))
            self._present += 1
            self._overload.begin(now)
