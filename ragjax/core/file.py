"""Files that are written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_path(target: Path, *, durable: bool = False) -> Iterator[Path]:
    """A file that becomes `target` at the end of the block.

    durable: no other process writes it, and it is on the disk before it becomes `target`. What a kill leaves has the
    same name each time, so that it is written over.
    """
    part = target.with_name(f"{target.name}.part" if durable else f"{target.name}.{os.getpid()}.part")
    try:
        yield part
        if durable:
            with part.open("rb") as file:
                os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


_MAGIC = b"ragjax kept 1\n"


class PrivateFolder:
    """Files that are as good as code: folder and files belong to the user who runs ragjax, and nobody else may write.

    Several threads and processes may use it; a file is there as a whole or not at all. fault: why it cannot be used.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.fault: str | None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.fault = _exposed(folder.stat())
        except OSError as error:
            self.fault = str(error)

    def read(self, name: str) -> bytes | None:
        """A file's content; None if there is none, ValueError if it is damaged, or not the user's own."""
        try:
            fd = os.open(self._folder / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            fault = _exposed(os.fstat(fd))
            if fault is not None:
                raise ValueError(fault)
            magic, digest, payload = file.read(len(_MAGIC)), file.read(32), file.read()
        if magic != _MAGIC or hashlib.sha256(payload).digest() != digest:
            raise ValueError("it is damaged")
        with suppress(OSError):
            os.utime(self._folder / name)
        return payload

    def write(self, name: str, payload: bytes) -> None:
        fd, draft = tempfile.mkstemp(dir=self._folder)  # for its owner alone
        try:
            with open(fd, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(draft, self._folder / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise


def _exposed(status: os.stat_result) -> str | None:
    """Why a file or folder may hold what another user wrote."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write it (chmod go-w)"
    return None
