"""The digests of a closed store's files, in a file beside them, which are compared before the store is opened again.

RocksDB, under pyoxigraph, checks the blocks that it reads. Yet it takes a log or manifest that was cut short for the
end of what was written and opens without the rest, and other damage makes it hang or fill the memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ragjax.core import DamageError
from ragjax.core.file import durable_path

_NAME = "seal"
_LASTING = ".sst"  # never changed; gone when the database has put their rows into others
_KEPT = (f"*{_LASTING}", "*.log", "MANIFEST-*", "CURRENT")
_OPEN, _CLOSED = "open", "closed"


def verify(folder: Path) -> dict[str, str]:
    """Compare a store that nobody has open with what it was when it was closed; the digests of files for `unseal`.

    After a kill, only files that never change are compared. A store without a seal is taken as it is.

    Raises:
        DamageError: a file is gone, or is not as it was.
        OSError: a file cannot be read.
    """
    state, digests = _read(folder / _NAME) if (folder / _NAME).exists() else (_OPEN, {})
    found = _digests(folder)
    for name, digest in digests.items():
        if found.get(name, digest) != digest:
            raise DamageError(f"{name} is not as it was written")
        if name not in found and state == _CLOSED:
            raise DamageError(f"{name} is gone")
    return {name: digest for name, digest in found.items() if name.endswith(_LASTING)}


def unseal(folder: Path, digests: Mapping[str, str]) -> None:
    """Note that the store is open and its files change, all but those that `verify` found before it was opened."""
    _write(folder, _OPEN, digests)


def seal(folder: Path) -> None:
    """Note what the files of a store are that was just closed."""
    _write(folder, _CLOSED, _digests(folder))


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: _digest(path) for pattern in _KEPT for path in sorted(folder.glob(pattern))}


def _read(place: Path) -> tuple[str, dict[str, str]]:
    text = place.read_bytes().decode("ascii", "replace")
    body, _, own = text.rpartition("\n")
    if own != hashlib.blake2b(body.encode(), digest_size=16).hexdigest():
        raise DamageError(f"{place.name} is not as it was written")
    state, *lines = body.split("\n")
    return state, {name: digest for name, _, digest in (line.rpartition(" ") for line in lines)}


def _write(folder: Path, state: str, digests: Mapping[str, str]) -> None:
    body = "\n".join([state, *(f"{name} {digest}" for name, digest in digests.items())])
    with durable_path(folder / _NAME) as part:
        part.write_text(f"{body}\n{hashlib.blake2b(body.encode(), digest_size=16).hexdigest()}", encoding="ascii")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
