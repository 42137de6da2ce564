"""SQLite files that one process holds alone, and what is said when one cannot be had."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
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
        database.text_factory = _text
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{place}: cannot be opened: {error}") from error
    try:
        database.execute("pragma locking_mode = exclusive")
        database.execute("pragma secure_delete = on")  # what is deleted is overwritten,
        database.execute("pragma journal_size_limit = 0")  # and the journal, which has a copy of it, cut to nothing
        if database.execute("pragma integrity_check(1)").fetchall() != [("ok",)]:  # finds wrong indexes too
            raise sqlite3.DatabaseError("its pages do not fit together")
        prepare(database)
    except sqlite3.OperationalError as error:
        database.close()
        hint = "; another process has it open" if "locked" in str(error) else ""
        raise ConfigError(f"{place}: cannot be used: {error}{hint}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter from messages that quote the file
        database.close()
        raise ConfigError(f"{place}: broken ({error}); {remedy}") from error
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """What is done within it is committed at its end; nothing of it if there is an error.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with database:
            yield
    except sqlite3.OperationalError as error:
        _, _, place = database.execute("pragma database_list").fetchone()
        raise ConfigError(f"{place}: cannot be written: {error}") from error


def compare(database: sqlite3.Connection, schema: str) -> None:
    """Compare the columns of tables with those of a schema.

    Raises:
        sqlite3.DatabaseError: they are others.
    """
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(schema)
        tables = [name for (name,) in fresh.execute("select name from sqlite_master where type = 'table'")]
        if any(_columns(database, table) != _columns(fresh, table) for table in tables):
            raise sqlite3.DatabaseError("its tables are others")


def grow(database: sqlite3.Connection, table: str, column: str, kind: str) -> bool:
    """Give a table that an older version made a column; whether it had none of this name."""
    if any(column == name for name, *_ in _columns(database, table)):
        return False
    database.execute(f"alter table {table} add column {column} {kind}")
    return True


def _columns(database: sqlite3.Connection, table: str) -> set[tuple[str, str, int]]:
    """Name, type, and whether it must be there, of each."""
    return {(name, kind, needed) for _, name, kind, needed, *_ in database.execute(f"pragma table_info({table})")}


def _text(stored: bytes) -> str:
    """Damaged text can be read, and then is not what it should be; `sqlite3` would raise while rows are fetched."""
    return stored.decode("utf-8", "replace")
