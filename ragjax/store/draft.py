"""Files that appear under their name whole or not at all, whatever happens to whoever writes them."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SUFFIX = ".tmp"


@contextmanager
def draft(path: Path, pieces: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """Write a file beside `path`, on disk when this yields its name; to be renamed there within, else it is removed.

    Folders are made as needed. The draft is locked while its writer lives, on this machine or in its containers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{_SUFFIX}")
    with open(name, "xb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            yield name
        finally:
            name.unlink(missing_ok=True)


def is_draft(path: Path) -> bool:
    """Whether a file's name is that of a draft."""
    return path.name.startswith(".") and path.name.endswith(_SUFFIX)


def remove_draft(path: Path) -> None:
    """Remove a draft, unless somebody is writing it or it cannot be removed."""
    with suppress(OSError), open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
