"""The files of one model's disk tier: names, manifest, those set aside, the lock on the folder.

A file is written as a draft and appears under its name whole or not at all, whatever happens to its writer.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from filelock import FileLock

from ragjax.store.entry import FORMAT, Damaged

_DRAFT_SUFFIX = ".tmp"


@contextmanager
def draft(path: Path, pieces: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """Write a file beside `path`, on disk when this yields its name; to be renamed there within, else it is removed.

    Folders are made as needed. The draft is locked while its writer lives, on this machine or in its containers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{_DRAFT_SUFFIX}")
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
    return path.name.startswith(".") and path.name.endswith(_DRAFT_SUFFIX)


def remove_draft(path: Path) -> None:
    """Remove a draft, unless somebody is writing it or it cannot be removed."""
    with suppress(OSError), open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path

    @property
    def index(self) -> Path:
        return self.path / "index.sqlite"

    def lock(self) -> FileLock:
        return FileLock(self.path / "lock")

    def entry(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / "entries" / name[:2] / (name + _SUFFIX)

    def name(self, path: Path) -> str:
        return str(path.relative_to(self.path))

    def key(self, path: Path) -> bytes | None:
        """The key of the entry whose file this is; None if the file is no entry's, or not at its place."""
        with suppress(ValueError):
            key = bytes.fromhex(path.stem)
            if path == self.entry(key):
                return key
        return None

    def files(self) -> Iterator[Path]:
        yield from (path for file in _scan(self.path) if is_draft(path := Path(file.path)))
        for shard in _scan(self.path / "entries"):
            files = _scan(Path(shard.path)) if shard.is_dir(follow_symlinks=False) else [shard]
            yield from (Path(file.path) for file in files if not file.is_dir(follow_symlinks=False))

    def aside(self) -> list[tuple[Path, int]]:
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
    """Describe an error without its number and the file's name."""
    return getattr(error, "strerror", None) or str(error)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
        return list(files)
    return []


_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    identity: bytes
    about: Mapping[str, str]

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        try:
            fields = json.loads((folder / _NAME).read_bytes())
            version, identity, about = fields["format"], bytes.fromhex(fields["identity"]), dict(fields["about"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, KeyError, TypeError, ValueError, RecursionError):
            raise Damaged("its manifest cannot be read") from None
        if version != FORMAT:
            raise Damaged(f"its format is {version!r}, this program's is {FORMAT}")
        return Manifest(identity, about)

    def write(self, folder: Path) -> None:
        fields = {"format": FORMAT, "identity": self.identity.hex(), "about": dict(self.about)}
        path = folder / _NAME
        with draft(path, [json.dumps(fields, indent=1).encode()]) as file:
            file.replace(path)


def claim(directory: Path, manifest: Manifest) -> tuple[Path, int]:
    """The folder of a model, made if need be, and the number of folders passed over.

    It is named by the identity. One whose manifest is of another version, another identity or not readable is left as
    it is (a process of that version may be using it), and the name with ".1", ".2" and so on is tried.
    """
    directory.mkdir(parents=True, exist_ok=True)
    os.stat(os.path.join(directory, "."))  # as a string: a Path would leave the point out, and so not enter it
    for number in count():
        folder = directory / (manifest.identity.hex() + (f".{number}" if number else ""))
        try:
            found = Manifest.read(folder)
        except Damaged:
            continue
        if found is None:
            manifest.write(folder)
        elif found.identity != manifest.identity:
            continue
        return folder, number
    raise AssertionError("unreachable")


def folders(directory: Path) -> Iterator[tuple[Path, Manifest | Damaged]]:
    for folder in sorted(directory.iterdir()):
        try:
            manifest = Manifest.read(folder)
        except Damaged as error:
            yield folder, error
            continue
        if manifest is not None:
            yield folder, manifest


def link(source: Path, target: Path) -> None:
    """Link all entries of a directory, of all models, into another one; entries that are there stay.

    An entry is never changed, so both may have its file. A store enters the files that its index lacks when it opens
    the folder (`ragjax/store/disk.py`). Folders whose manifest is of another version, or not readable, are left out.
    """
    for path, manifest in folders(source) if source.is_dir() else ():
        if isinstance(manifest, Damaged):
            continue
        old, new = Folder(path), Folder(claim(target, manifest)[0])
        for file in old.files():
            key = old.key(file)
            if key is None:
                continue
            place = new.entry(key)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, place)
            except (FileExistsError, FileNotFoundError):  # it is there already, or has left its cache meanwhile
                continue
            except OSError:  # no links here
                with draft(place, [file.read_bytes()]) as copy:
                    copy.replace(place)
