"""Folders of knowledge bases whose place no option names: one for each source, so that a later start finds it read.

A folder belongs to one process at a time. Others that read the same source meanwhile get folders of their own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ragjax.core import ConfigError
from ragjax.retrieval.database import HeldError

if TYPE_CHECKING:
    from ragjax.retrieval.knowledge import KnowledgeBase

MOST_BYTES = 4 * 2**30
"""Bytes of all folders; what was used longest ago leaves."""

_PLACES = 4  # of one source: so many processes may read it at once

_log = logging.getLogger(__name__)


def open_kept(
    root: Path, source: str | Path, facts: Sequence[str], open_at: Callable[[Path | None], KnowledgeBase]
) -> KnowledgeBase:
    """Open the base of a source in its folder; in memory if there can be none.

    facts: on what the base depends besides; other ones have another folder. open_at: opens a base in a folder.
    """
    path = Path(source).resolve()
    digest = hashlib.blake2b(json.dumps([str(path), *facts]).encode(), digest_size=8).hexdigest()
    reason = "all its places are in use"
    for number in range(_PLACES):
        place = root / f"{re.sub(r'[^-.0-9A-Za-z]', '_', path.stem)[:40]}-{digest}-{number}"
        try:
            base = _opened(root, place, open_at)
        except HeldError:
            continue
        except (ConfigError, OSError) as error:
            reason = str(error)
            break
        _log.info("what is read of %s is kept in %s (--index-dir names another place)", source, place)
        shrink_kept(root)
        return base
    _log.warning("%s: kept in memory, and read again at the next start: %s", source, reason)
    return open_at(None)


def _opened(root: Path, place: Path, open_at: Callable[[Path | None], KnowledgeBase]) -> KnowledgeBase:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        base = open_at(place)
    except HeldError:
        raise
    except ConfigError as error:
        if not place.exists():
            raise
        _log.warning("%s; the folder is made anew", error)
        shutil.rmtree(place)
        base = open_at(place)
    os.utime(place)
    return base


def shrink_kept(root: Path, most_bytes: int = MOST_BYTES) -> list[int]:
    """Remove folders that nobody has open, the least used first, until all have this size; sizes of the others."""
    found = []
    for place in root.iterdir() if root.exists() else ():
        with suppress(OSError):  # another process removed it
            found.append((place.stat().st_mtime, sum(file.stat().st_size for file in place.iterdir()), place))
    sizes = list[int]()
    left = sum(size for _, size, _ in found)
    for _, size, place in sorted(found):
        if left > most_bytes and _free(place):
            shutil.rmtree(place, ignore_errors=True)
            left -= size
        else:
            sizes.append(size)
    return sizes


def _free(place: Path) -> bool:
    try:
        with closing(sqlite3.connect(place / "chunks.sqlite", timeout=0)) as database:
            database.execute("begin exclusive")
    except sqlite3.OperationalError as error:
        return "locked" not in str(error)
    except sqlite3.DatabaseError:  # no database
        return True
    return True
