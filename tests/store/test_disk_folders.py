"""Folders of the disk tier: whose they are, and what happens where a disk refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragjax.core import ConfigError, RagjaxError
from ragjax.store.disk import DiskStore, Missing, WriteError
from ragjax.store.entry import Damaged
from tests.support import disks as shelves
from tests.support.disks import IDENTITY, adds_up, digest, holds, open_store, path_of, put


def manifest_of(store: DiskStore) -> Path:
    return store.folder / "manifest.json"


def test_models_do_not_share(tmp_path: Path) -> None:
    with open_store(tmp_path) as one, open_store(tmp_path, identity=b"other") as other:
        put(one, "x")
        assert one.folder != other.folder and not holds(other, "x") and holds(one, "x")
        assert one.folder.name == IDENTITY.hex()


FOREIGN: dict[str, Callable[[Path], object]] = {
    "older": lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 0')),
    "newer": lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 2')),
    "another identity": lambda path: path.write_text(path.read_text().replace(IDENTITY.hex(), "ab" * 32)),
    "garbage": lambda path: path.write_bytes(b"\xff\0"),
    "empty": lambda path: path.write_bytes(b""),
    "no fields": lambda path: path.write_text("[]"),
}


@pytest.mark.parametrize("harm", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_folder_is_left_alone_counted_and_never_used(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    with open_store(tmp_path) as store:
        put(store, "x")
    harm(manifest_of(store))
    before = {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()}
    with open_store(tmp_path) as fresh, open_store(tmp_path) as again:
        assert fresh.folder == again.folder != store.folder
        assert not holds(fresh, "x") and fresh.stats().foreign == 1
        put(fresh, "y")
        assert holds(again, "y")
    assert {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()} == before


def test_a_lost_manifest_is_written_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "x")
    manifest_of(store).unlink()
    with open_store(tmp_path) as store:
        assert holds(store, "x") and json.loads(manifest_of(store).read_bytes())["about"] == shelves.ABOUT


def test_a_directory_removed_in_use_is_made_again(tmp_path: Path, store: DiskStore) -> None:
    put(store, "x")
    shutil.rmtree(store.folder)
    assert store.find(digest("y")) is None
    put(store, "y")
    assert not holds(store, "x") and holds(store, "y") and manifest_of(store).is_file() and adds_up(store)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"max_bytes": 0}, "max_bytes"), ({"identity": b""}, "identity"), ({"identity": b"x" * 65}, "identity")],
)
def test_a_wrong_argument_is_named(tmp_path: Path, arguments: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DiskStore.open(tmp_path, **{"identity": IDENTITY, "about": {}, "max_bytes": 1, **arguments})


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=str(directory)):
            open_store(directory)


@contextmanager
def read_only(folder: Path, folders: int = 0o555) -> Iterator[None]:
    """Nothing below the folder can be written; root, which may write anywhere, is nobody meanwhile.

    folders: their mode.
    """
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(folders if path.is_dir() else 0o444)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in paths:
            path.chmod(stat.S_IRWXU)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.mark.parametrize("name", ["loop", 300 * "n"])
def test_a_directory_that_no_folder_can_be_looked_for_in_is_named(tmp_path: Path, name: str) -> None:
    """Every name in it fails alike, so it does not help to try another."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="cannot be used as a disk cache"):
        open_store(tmp_path / name / "kv")


def test_a_directory_that_cannot_be_entered_or_written_is_named(open_to_all: Path) -> None:
    kept, refused = open_to_all / "kv", pytest.raises(ConfigError, match="cannot be used as a disk cache")
    with open_store(kept) as store:
        put(store, "a")
    for folders in (0, 0o555):
        with read_only(kept, folders=folders), refused:
            open_store(kept)


def test_a_directory_that_becomes_read_only_says_so(open_to_all: Path) -> None:
    with open_store(open_to_all) as store:
        put(store, "a")
        with read_only(open_to_all):
            with pytest.raises(WriteError, match=str(store.folder)):
                put(store, "b")
            assert holds(store, "a")
        put(store, "b")
        assert holds(store, "b") and adds_up(store)


@pytest.mark.parametrize("moment", ["fsync", "replace", "row", "commit"])
def test_a_full_disk_is_an_error_and_leaves_nothing(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    put(store, "a")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_database(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    true_change = store._index.change

    @contextmanager
    def change_that_fails_at_its_end() -> Iterator[object]:
        with true_change() as index:
            yield index
            if path_of(store, "b").exists():
                full_database()

    with monkeypatch.context() as patch:
        if moment == "fsync":
            patch.setattr(os, "fsync", full)
        elif moment == "replace":
            patch.setattr(Path, "replace", full)
        elif moment == "commit":
            patch.setattr(store._index, "change", change_that_fails_at_its_end)
        else:
            patch.setattr(store._index, "add", full_database)
        with pytest.raises(WriteError, match=r"No space left|disk is full"):
            put(store, "b")
    assert holds(store, "a") and not holds(store, "b")
    assert adds_up(store)
    put(store, "b")
    assert holds(store, "b") and adds_up(store)


def test_errors_are_the_projects_own() -> None:
    assert all(issubclass(one, RagjaxError) for one in (Missing, Damaged, WriteError))
