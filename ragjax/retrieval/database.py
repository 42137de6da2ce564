"""SQLite files that one process holds alone, and what is said when one cannot be had."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ragjax.core import ConfigError


def exclusive(
    place: Path | None, prepare: Callable[[sqlite3.Connection], None], remedy: str, *, implicit: bool = True
) -> sqlite3.Connection:
    """An open database, prepared; its folder is made if need be. None: in memory.

    prepare: makes tables and checks what is there; what it raises closes the database.
    remedy: what to do about a broken file. implicit: whether sqlite3 begins transactions by itself.

    Raises:
        ConfigError: the file cannot be opened or used, is broken, or another process has it open.
    """
    try:
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
        level: Literal["DEFERRED"] | None = "DEFERRED" if implicit else None
        database = sqlite3.connect(place or ":memory:", timeout=1.0, isolation_level=level, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{place}: cannot be opened: {error}") from error
    try:
        database.execute("pragma locking_mode = exclusive")
        database.execute("pragma secure_delete = on")  # what is deleted is overwritten
        prepare(database)
    except sqlite3.OperationalError as error:
        database.close()
        hint = "; another process has it open" if "locked" in str(error) else ""
        raise ConfigError(f"{place}: cannot be used: {error}{hint}") from error
    except sqlite3.DatabaseError as error:
        database.close()
        raise ConfigError(f"{place}: broken ({error}); {remedy}") from error
    except BaseException:
        database.close()
        raise
    return database
