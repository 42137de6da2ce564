"""Damage to entries of the disk tier is found, and nothing damaged is served."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ragjax.store import disk, entry
from ragjax.store.disk import DiskStore
from ragjax.store.entry import Damaged
from tests.support.disks import (
    IDENTITY,
    adds_up,
    arrays_of,
    decode,
    digest,
    file_name,
    flip,
    holds,
    kept,
    open_store,
    path_of,
    put,
    read_entry,
    record_of,
    same,
)


def test_no_bit_of_a_file_can_change_unnoticed() -> None:
    arrays = {"k": np.arange(40, dtype=np.uint16), "v": np.ones(3, np.float32)}
    good = np.concatenate(entry.encode(record_of("x"), arrays, IDENTITY))
    decode(good)
    for at in range(len(good)):
        for bit in range(8):
            bad = good.copy()
            bad[at] ^= 1 << bit
            with pytest.raises(Damaged):
                decode(bad)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_shares_are_checked_before_the_last_one_comes(count: int) -> None:
    arrays = {"k": np.arange(60, dtype=np.uint16).reshape(6, 10), "v": np.ones((6, 3, 2), np.float32)}
    good = np.concatenate(entry.encode(record_of("x"), arrays, IDENTITY))
    shares = decode(good, count)
    assert len(shares) == count
    assert same({name: np.concatenate([share[name] for share in shares]) for name in arrays}, arrays)
    for at in range(len(good)):
        bad = good.copy()
        bad[at] ^= 1
        with pytest.raises(Damaged):
            decode(bad, count)


def test_an_array_that_does_not_fall_into_shares_is_damage() -> None:
    for array in (np.ones((3, 4), np.uint16), np.ones((), np.uint16)):
        with pytest.raises(Damaged, match="array k of shape"):
            decode(np.concatenate(entry.encode(record_of("x"), {"k": array}, IDENTITY)), 2)


def test_no_other_length_is_taken(tmp_path: Path) -> None:
    good = np.concatenate(entry.encode(record_of("x"), {"k": np.arange(9, dtype=np.uint8)}, IDENTITY))
    path = tmp_path / "x"
    for length in [*range(len(good)), len(good) + 1]:
        bad = np.resize(good, length)
        with pytest.raises(Damaged):
            decode(bad)
        bad.tofile(path)
        with pytest.raises(Damaged):
            entry.peek(path, IDENTITY)
    good.tofile(path)
    assert entry.peek(path, IDENTITY) == record_of("x")


@pytest.mark.parametrize(
    "header",
    [
        "[[" * 50_000,
        "{}",
        "[]",
        '{"__metadata__":[]}',
        '{"__metadata__":{"format":1}}',
        '{"__metadata__":{},"k":{"dtype":"F32"}}',
        "1" * 5000,
    ],
)
def test_a_foreign_header_is_damage(header: str) -> None:
    data = len(header).to_bytes(8, "little") + header.encode()
    with pytest.raises(Damaged):
        decode(data)


def _of_another_model(path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory, open_store(Path(directory), identity=b"other") as other:
        put(other, "x")
        shutil.copy(path_of(other, "x"), path)


def _of_another_format(path: Path) -> None:
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"format":"1"', b'"format":"2"'))


def _by_another_program(path: Path) -> None:
    safetensors.numpy.save_file(arrays_of(digest("x")), path, metadata={"key": digest("x").hex()})


def _header_of_length(length: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "bit of the data": flip,
    "bit of the header": lambda path: flip(path, 40),
    "bit of the length": lambda path: flip(path, 0),
    "huge header": _header_of_length(2**63),
    "no header": _header_of_length(0),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, 50),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(b"garbage" * 1000),
    "another entry": lambda path: shutil.copy(path.parents[1] / digest("y").hex()[:2] / file_name("y"), path),
    "another model": _of_another_model,
    "another format": _of_another_format,
    "another program": _by_another_program,
    "no file": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_set_aside_and_never_served(store: DiskStore, harm: Callable[[Path], object]) -> None:
    put(store, "x", "y")
    harm(path_of(store, "x"))
    with pytest.raises(Damaged, match=digest("x").hex()):
        read_entry(store, digest("x"))
    stats = store.stats()
    assert (stats.set_aside, stats.aside_files, stats.reads) == (1, 1, 0)
    assert [path.name.startswith(digest("x").hex()) for path in (store.folder / "aside").iterdir()] == [True]
    assert not holds(store, "x") and holds(store, "y") and adds_up(store)
    put(store, "x")
    assert holds(store, "x") and adds_up(store)


@pytest.mark.parametrize("harm", [_of_another_model, _of_another_format])
def test_what_belongs_elsewhere_is_called_so(store: DiskStore, harm: Callable[[Path], object]) -> None:
    put(store, "x")
    harm(path_of(store, "x"))
    with pytest.raises(Damaged, match="of another format or model"):
        read_entry(store, digest("x"))


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_however_the_index_was_lost(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    with open_store(tmp_path) as store:
        put(store, "x", "y")
    harm(path_of(store, "x"))
    (store.folder / "index.sqlite").unlink()
    with open_store(tmp_path) as store:
        if store.find(digest("x")) is not None:  # headers alone were read
            with pytest.raises(Damaged):
                read_entry(store, digest("x"))
        assert (store.stats().set_aside, store.stats().aside_files) == (1, 1)
        assert not holds(store, "x") and holds(store, "y") and adds_up(store)


def test_a_header_that_lies_is_found_by_its_checksum(store: DiskStore) -> None:
    """A file that would be well formed, with other tokens than the KV was computed for."""
    put(store, "x")
    path, record = path_of(store, "x"), record_of("x")
    header, *data = entry.encode(record, arrays_of(record.key), IDENTITY)
    checksum = json.loads(header[8:].tobytes())["__metadata__"]["checksum"]
    lie = replace(record, tokens=record.tokens[::-1])
    false_header = entry.encode(lie, arrays_of(record.key), IDENTITY)[0].tobytes()
    theirs = json.loads(false_header[8:])["__metadata__"]["checksum"]
    path.write_bytes(false_header.replace(theirs.encode(), checksum.encode()) + b"".join(x.tobytes() for x in data))
    assert entry.peek(path, IDENTITY) == lie
    with pytest.raises(Damaged, match="checksum"):
        read_entry(store, record.key)


def test_verify_names_every_flaw(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, *"abcdef")
        assert store.verify() == ()
        flip(path_of(store, "a"))
        os.truncate(path_of(store, "b"), 10)
        path_of(store, "c").unlink()
        stray = store.folder / "entries" / "stray.txt"
        stray.write_text("hello")
        path_of(store, "d").rename(path_of(store, "d").with_name(file_name("elsewhere")))
        flaws = store.verify()
        assert {Path(flaw.name).name for flaw in flaws} == {
            file_name("a"),
            file_name("b"),
            "stray.txt",
            file_name("elsewhere"),
        }
        assert kept(store, *"abcdef") == [*"ef"] and adds_up(store)
        assert store.stats().aside_files == store.stats().set_aside == 4
    with open_store(tmp_path) as store:
        assert store.verify() == ()


def test_a_disk_that_fails_to_read_is_damage_and_any_other_failure_is_not(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "x")

    def failing(number: int) -> Callable[..., int]:
        def read(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        return read

    with monkeypatch.context() as patch:
        patch.setattr(entry.Reader, "_fill", failing(errno.EMFILE))
        with pytest.raises(disk.DiskError, match="Too many open files"):
            read_entry(store, digest("x"))
    assert holds(store, "x")
    with monkeypatch.context() as patch:
        patch.setattr(entry.Reader, "_fill", failing(errno.EIO))
        with pytest.raises(Damaged):
            read_entry(store, digest("x"))
    assert not holds(store, "x") and store.stats().aside_files == 1
