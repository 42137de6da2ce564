"""Index and files of the disk tier are brought into agreement, whatever was lost."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragjax.store.disk import DiskStore, Missing
from ragjax.store.entry import Damaged, Reader
from tests.support.disks import (
    adds_up,
    begins,
    continued,
    digest,
    file_name,
    flip,
    holds,
    open_store,
    path_of,
    put,
    read_entry,
    record_of,
)


def _edit(path: Path, sql: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    connection.execute(sql, values)
    connection.commit()
    connection.close()


INDEX_LOSS: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(b"garbage" * 5000),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "header": lambda path: flip(path, 3),
    "pages": lambda path: path.write_bytes(path.read_bytes()[:4096] + os.urandom(path.stat().st_size - 4096)),
    "another version": lambda path: _edit(path, "PRAGMA user_version = 2"),
    "another database": lambda path: (path.unlink(), _edit(path, "CREATE TABLE other (x)")),
    "without a table": lambda path: _edit(path, "DROP TABLE total"),
    "wrong sums": lambda path: _edit(path, "UPDATE total SET bytes = bytes - 1"),
}


@pytest.mark.parametrize("loss", INDEX_LOSS)
def test_a_lost_index_is_built_from_the_entries(tmp_path: Path, loss: str) -> None:
    with open_store(tmp_path) as store:
        put(store, *"abc")
        put(store, "d", provenance="isolated")
    INDEX_LOSS[loss](store.folder / "index.sqlite")
    with open_store(tmp_path) as store:
        assert all(holds(store, name) for name in "abc")
        assert continued(store, *"abc")
        assert store.find(digest("d")).provenance == "isolated"
        assert adds_up(store) and store.stats().aside_files == (loss not in ("removed", "emptied"))
        put(store, "e")
        assert holds(store, "e")


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_bytes(b"garbage" * 999)])
def test_leftovers_of_a_lost_index_are_not_believed(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    """The write-ahead log outlives a killed process, and may outlive its database."""
    with open_store(tmp_path) as store:
        put(store, *"ab")
        for name in ("index.sqlite-wal", "index.sqlite-shm"):
            shutil.copy(store.folder / name, tmp_path / name)
    harm(store.folder / "index.sqlite")
    path_of(store, "a").unlink()
    for name in ("index.sqlite-wal", "index.sqlite-shm"):
        shutil.copy(tmp_path / name, store.folder / name)
    with open_store(tmp_path) as store:
        assert not holds(store, "a") and holds(store, "b") and adds_up(store)


def test_an_index_lost_in_use_is_built_anew_by_the_next_read_or_write(tmp_path: Path, store: DiskStore) -> None:
    put(store, "a")
    (store.folder / "index.sqlite").unlink()
    put(store, "b")
    assert holds(store, "a") and holds(store, "b")
    (store.folder / "index.sqlite").unlink()
    assert holds(store, "a")
    with open_store(tmp_path) as other:
        assert holds(other, "a") and holds(other, "b")
    assert adds_up(store)


def test_an_index_found_damaged_in_use_answers_nothing_and_is_built_anew(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a")

    def broken(*_: object) -> object:
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(store._index, "find", broken)
    monkeypatch.setattr(store._index, "children", broken)
    assert store.find(digest("a")) is None and store.children(digest("root"), begins(7)) == ()
    assert store.stats().failed == 2
    put(store, "b")
    assert holds(store, "a") and holds(store, "b") and adds_up(store)


@pytest.mark.parametrize("column", ["place", "tokens", "bytes", "meta"])
def test_an_index_that_lies_about_an_entry_is_put_right_and_the_entry_not_used(store: DiskStore, column: str) -> None:
    put(store, "x")
    value = 5 if column == "bytes" else digest("y")
    _edit(store.folder / "index.sqlite", f"UPDATE entry SET {column} = ?", value)
    if column == "bytes":
        _edit(store.folder / "index.sqlite", "UPDATE total SET bytes = 5")
    else:
        assert store.find(digest("x")) != record_of("x")
    with pytest.raises(Damaged, match="the index says otherwise"):
        read_entry(store, digest("x"))
    assert holds(store, "x") and adds_up(store)
    assert continued(store, "x") and not store.children(digest("y"), begins(7))


@pytest.mark.parametrize("reopened", [False, True])
def test_a_row_without_a_file_is_a_miss_and_goes(tmp_path: Path, reopened: bool) -> None:
    with open_store(tmp_path) as store:
        put(store, *"ab")
        path_of(store, "a").unlink()
        if not reopened:
            assert store.find(digest("a")) is not None
            with pytest.raises(Missing):
                read_entry(store, digest("a"))
            assert not holds(store, "a") and holds(store, "b") and adds_up(store)
            assert store.stats().set_aside == 0
            return
    with open_store(tmp_path) as store:
        assert not holds(store, "a") and holds(store, "b") and adds_up(store)


def test_a_file_without_a_row_is_adopted(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, *"ab")
    _edit(store.folder / "index.sqlite", "DELETE FROM entry WHERE key = ?", digest("a"))
    with open_store(tmp_path) as store:
        assert holds(store, "a") and holds(store, "b") and adds_up(store)
        assert store.stats().set_aside == 0


@pytest.mark.parametrize("name", ["entries/x.safetensors", "entries/ab/notes.txt", "entries/ff/" + file_name("a")])
@pytest.mark.parametrize("moved", [False, True])
def test_a_file_where_none_belongs_is_set_aside(tmp_path: Path, name: str, moved: bool) -> None:
    with open_store(tmp_path) as store:
        put(store, "a")
    (store.folder / name).parent.mkdir(exist_ok=True)
    (shutil.move if moved else shutil.copy)(path_of(store, "a"), store.folder / name)
    with open_store(tmp_path) as store:
        assert (store.stats().set_aside, store.stats().aside_files) == (1, 1)
        assert adds_up(store) and holds(store, "a") is not moved


def test_a_file_written_anew_in_the_meantime_is_not_set_aside(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "x")
    good = path_of(store, "x").read_bytes()
    flip(path_of(store, "x"))
    true_fill, path = Reader._fill, path_of(store, "x")

    def fill_and_lose_a_race(*arguments: Any) -> Any:
        got = true_fill(*arguments)
        path.unlink()
        path.write_bytes(good)
        os.utime(path, ns=(0, 5))
        return got

    with monkeypatch.context() as patch, pytest.raises(Damaged):
        patch.setattr(Reader, "_fill", fill_and_lose_a_race)
        read_entry(store, digest("x"))
    assert holds(store, "x") and store.stats().aside_files == 0
