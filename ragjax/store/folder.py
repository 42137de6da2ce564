"""The files of one model's disk tier: their names, those set aside, and the lock on the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from ragjax.store.draft import is_draft

_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of entries; see `ragjax.store.disk` for what lies where."""

    path: Path

    @property
    def index(self) -> Path:
        """The file of the index."""
        return self.path / "index.sqlite"

    def lock(self) -> FileLock:
        """Held as a context: no other process opens or repairs the index meanwhile."""
        return FileLock(self.path / "lock")

    def entry(self, key: bytes) -> Path:
        """The file of an entry, be it there or not."""
        name = key.hex()
        return self.path / "entries" / name[:2] / (name + _SUFFIX)

    def name(self, path: Path) -> str:
        """A file's path relative to the folder."""
        return str(path.relative_to(self.path))

    def key(self, path: Path) -> bytes | None:
        """The key of the entry whose file this is; None if the file is no entry's, or not at its place."""
        with suppress(ValueError):
            key = bytes.fromhex(path.stem)
            if path == self.entry(key):
                return key
        return None

    def files(self) -> Iterator[Path]:
        """What lies where entries lie, and drafts of the manifest."""
        yield from (path for file in _scan(self.path) if is_draft(path := Path(file.path)))
        for shard in _scan(self.path / "entries"):
            files = _scan(Path(shard.path)) if shard.is_dir(follow_symlinks=False) else [shard]
            yield from (Path(file.path) for file in files if not file.is_dir(follow_symlinks=False))

    def aside(self) -> list[tuple[Path, int]]:
        """Files that were set aside and their bytes, oldest first."""
        found = []
        for file in _scan(self.path / "aside"):
            with suppress(FileNotFoundError):
                found.append((Path(file.path), file.stat(follow_symlinks=False).st_size))
        return sorted(found, key=lambda one: one[0].suffix)

    def set_aside(self, path: Path, tick: int) -> None:
        """Move a file aside; where the folder cannot be written it stays. tick: later than that of all before."""
        aside = self.path / "aside"
        with suppress(OSError):
            aside.mkdir(exist_ok=True)
            path.replace(aside / f"{path.name}.{tick}")


def stamp(path: Path) -> tuple[int, int] | None:
    """Tells a file from another that took its place; None if there is none."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def reason(error: Exception) -> str:
    """What went wrong, without the number of the error and the name of the file."""
    return getattr(error, "strerror", None) or str(error)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
        return list(files)
    return []
