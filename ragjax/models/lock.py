"""One process at a time prepares a model's files; the others wait, and say so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that a process waits before it says so."""


@contextmanager
def locked(file: Path, what: str) -> Iterator[None]:
    """Hold a lock that processes share. what: what is done under it, for the log."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        _log.warning("%s: waiting for another process that does this; if it hangs, end it. It holds %s", what, file)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
