"""The manifest of a folder of entries, and which folder of a directory is a model's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ragjax.store.draft import draft
from ragjax.store.entry import FORMAT, Damaged

_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder of entries belongs to. about: the model, its dtype and the like, for people to read."""

    identity: bytes
    about: Mapping[str, str]

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """The manifest of a folder, or None if it has none.

        Raises:
            Damaged: it cannot be read, or is of another version.
        """
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
        """Make the folder if need be, and write its manifest."""
        fields = {"format": FORMAT, "identity": self.identity.hex(), "about": dict(self.about)}
        path = folder / _NAME
        with draft(path, [json.dumps(fields, indent=1).encode()]) as file:
            file.replace(path)


def claim(directory: Path, manifest: Manifest) -> tuple[Path, int]:
    """The folder of a model, made if need be, and the number of folders passed over.

    It is named by the identity. One whose manifest is of another version, another identity or not readable is left as
    it is (a process of that version may be using it), and the name with ".1", ".2" and so on is tried.

    Raises:
        OSError: the directory cannot be made or entered, so that every name would fail.
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
    """The folders of a directory that have a manifest, or else why it cannot be used; by name.

    Raises:
        OSError: the directory cannot be read.
    """
    for folder in sorted(directory.iterdir()):
        try:
            manifest = Manifest.read(folder)
        except Damaged as error:
            yield folder, error
            continue
        if manifest is not None:
            yield folder, manifest
