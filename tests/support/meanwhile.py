"""Threads that do something over and over while a test does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def meanwhile(work: Callable[[], object], threads: int = 2) -> Iterator[None]:
    """Threads call `work` again and again within the block; an error of one is raised at its end."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            work()

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(repeat) for _ in range(threads)]
        try:
            yield
        finally:
            over.set()
    for one in running:
        one.result()
