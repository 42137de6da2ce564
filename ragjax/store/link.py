"""Entries of one directory put into another, as links: they take no room of their own."""

from __future__ import annotations

import os
from pathlib import Path

from ragjax.store.draft import draft
from ragjax.store.entry import Damaged
from ragjax.store.folder import Folder
from ragjax.store.manifest import claim, folders


def link(source: Path, target: Path) -> None:
    """Have the entries of a directory, of all models, in another one too; what is there already stays.

    An entry is never changed, so both may have its file. A store enters the files that its index lacks when it opens
    the folder (`ragjax/store/disk.py`). Folders whose manifest is of another version, or not readable, are left out.

    Raises:
        OSError: one of the two cannot be read or written; some entries may have been put there.
    """
    for path, manifest in folders(source) if source.is_dir() else ():
        if isinstance(manifest, Damaged):
            continue
        old, new = Folder(path), Folder(claim(target, manifest)[0])
        for file in old.files():
            key = old.key(file)
            if key is not None:
                _place(file, new.entry(key))


def _place(source: Path, path: Path) -> None:
    """Have a file at a second place, if nothing is there: a link, or where there are no links a copy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, path)
    except (FileExistsError, FileNotFoundError):  # it is there already, or has left its cache meanwhile
        return
    except OSError:
        with draft(path, [source.read_bytes()]) as copy:
            copy.replace(path)
