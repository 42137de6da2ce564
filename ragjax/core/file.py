"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Give a path to write to; it becomes `target` when the block ends well, and is deleted otherwise."""
    with _draft(target, f"{target.name}.{os.getpid()}.part") as part:
        yield part


@contextmanager
def durable_path(target: Path) -> Iterator[Path]:
    """Like `atomic_path`, for a file that no other process writes: it is on the disk before it becomes `target`.

    What a kill leaves has the same name each time, so that it is written over.
    """
    with _draft(target, f"{target.name}.part") as part:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _draft(target: Path, name: str) -> Iterator[Path]:
    part = target.with_name(name)
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
