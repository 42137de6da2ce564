"""The disk tier: what is read is what was written, bit for bit, whatever happened to files, index and writers."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open

from ragjax.core import ConfigError, RagjaxError
from ragjax.store import disk, entry
from ragjax.store.disk import DiskStore, Missing, WriteError
from ragjax.store.draft import draft
from ragjax.store.entry import DTYPES, Damaged
from tests.support import disks as shelves
from tests.support.disks import IDENTITY, arrays_of, digest, files, open_store, record_of, same

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with open_store(tmp_path) as store:
        yield store


def put(store: DiskStore, *names: object, **fields: object) -> int:
    """Write entries; returns the bytes of the last."""
    size = 0
    for name in names:
        record = record_of(name, **fields)
        size = store.write(record, arrays_of(record.key))
    return size


def put_alike(store: DiskStore, *names: object) -> int:
    """Write entries of equal size; returns the bytes of one."""
    (size,) = {store.write(replace(record_of("alike"), key=digest(name)), arrays_of(b"alike")) for name in names}
    return size


def path_of(store: DiskStore, name: object) -> Path:
    return store.folder / "entries" / digest(name).hex()[:2] / f"{digest(name).hex()}.safetensors"


def holds(store: DiskStore, name: object) -> bool:
    """Whether an entry is served, intact; it must be a clean miss otherwise."""
    key = digest(name)
    if store.find(key) is None:
        with pytest.raises(Missing):
            store.read(key)
        return False
    assert store.find(key) == record_of(name)
    assert same(store.read(key), arrays_of(key))
    return True


def kept(store: DiskStore, *names: object) -> list[object]:
    return [name for name in names if store.find(digest(name)) is not None]


def adds_up(store: DiskStore) -> bool:
    """The index counts what lies on disk, and nothing else lies there."""
    stats, on_disk = store.stats(), files(store)
    drafts = [path for path in store.folder.rglob(".*") if path.is_file()]
    return not drafts and (stats.entries, stats.bytes) == (len(on_disk), sum(on_disk.values()))


# ---------------------------------------------------------------------------------------- what is written is read


shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
kv = st.sampled_from(list(DTYPES)).flatmap(
    lambda dtype: hnp.arrays(np.uint8, shapes.map(lambda shape: (*shape, dtype.itemsize))).map(
        lambda raw: raw.view(dtype).squeeze(-1)
    )
)
names = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__")


@given(st.dictionaries(names, kv, max_size=4))
def test_any_arrays_survive(arrays: dict[str, np.ndarray]) -> None:
    record = record_of("any")
    data = np.concatenate(entry.encode(record, arrays, IDENTITY))
    back, got = entry.decode(data, IDENTITY)
    assert back == record and same(got, arrays)
    assert all(array.flags.aligned and array.flags.writeable for array in got.values())


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_every_dtype_survives_on_disk(store: DiskStore, dtype: np.dtype) -> None:
    every_bit = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    arrays = {"k": every_bit.view(dtype).reshape(2, 4, -1, 8), "v": np.zeros((2, 0), dtype)}
    size = store.write(record_of("x"), arrays)
    assert same(store.read(digest("x")), arrays)
    assert path_of(store, "x").stat().st_size == size == store.stats().bytes


def test_views_of_longer_arrays_survive(store: DiskStore) -> None:
    long = arrays_of(digest("x"))["k"]
    part = {"k": long[:, :, 2:5], "v": long[:, ::-1, 5:2:-1].swapaxes(0, 3)}
    store.write(record_of("x"), part)
    assert same(store.read(digest("x")), part)


@pytest.mark.parametrize("field", ["tokens", "provenance", "method", "local_start", "lossy", "meta", "place"])
def test_every_field_of_a_record_survives_a_restart_and_a_lost_index(tmp_path: Path, field: str) -> None:
    other = {
        "tokens": np.array([-1, 2**31 - 1], "<i4").tobytes(),
        "provenance": "isolated",
        "method": "méthode \N{SNOWMAN}",
        "local_start": -5,
        "lossy": True,
        "meta": bytes(range(256)),
        "place": digest("elsewhere"),
    }
    record = replace(record_of("x"), **{field: other[field]})
    for lost in (False, True):
        with open_store(tmp_path) as store:
            store.write(record, arrays_of(record.key))
        if lost:
            (store.folder / "index.sqlite").unlink()
        with open_store(tmp_path) as store:
            assert store.find(record.key) == record
            assert same(store.read(record.key), arrays_of(record.key))


def test_the_files_are_safetensors(store: DiskStore) -> None:
    put(store, "x")
    path = path_of(store, "x")
    assert same(safetensors.numpy.load_file(path), arrays_of(digest("x")))
    with safe_open(path, "np") as file:
        assert file.metadata()["key"] == digest("x").hex()
    exotic = {"b": np.ones(3, ml_dtypes.bfloat16), "f": np.ones((2, 2), ml_dtypes.float8_e4m3fn)}
    data = np.concatenate(entry.encode(record_of("y"), exotic, IDENTITY)).tobytes()
    described = {name: one for name, one in safetensors.deserialize(data)}
    assert {name: (one["dtype"], bytes(one["data"])) for name, one in described.items()} == {
        "b": ("BF16", exotic["b"].tobytes()),
        "f": ("F8_E4M3", exotic["f"].tobytes()),
    }


@pytest.mark.parametrize(
    ("record", "arrays", "named"),
    [
        (record_of("x"), {"k": np.zeros(2, np.float64)}, "'k' has dtype float64"),
        (record_of("x"), {"k": np.zeros(2, ">f4")}, "'k' has dtype >f4"),
        (record_of("x"), {"__metadata__": np.zeros(2, np.int8)}, "__metadata__"),
        (replace(record_of("x"), key=b"short"), {}, "key and place"),
        (replace(record_of("x"), tokens=b""), {}, "tokens"),
        (replace(record_of("x"), tokens=b"12345"), {}, "tokens"),
        (replace(record_of("x"), local_start=2**40), {}, "local_start"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(store: DiskStore, record: object, arrays: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        store.write(record, arrays)
    assert store.stats().entries == 0 and adds_up(store)


def test_an_entry_is_written_once(store: DiskStore) -> None:
    size = put(store, "x")
    before = path_of(store, "x").stat().st_ino
    assert put(store, "x") == size
    assert path_of(store, "x").stat().st_ino == before and store.stats().writes == 1


def test_an_entry_whose_file_is_gone_or_cut_is_written_again(store: DiskStore) -> None:
    put(store, "gone", "cut")
    path_of(store, "gone").unlink()
    os.truncate(path_of(store, "cut"), 100)
    put(store, "gone", "cut")
    assert holds(store, "gone") and holds(store, "cut") and adds_up(store)


def test_an_entry_with_another_record_takes_the_place_of_the_first(store: DiskStore) -> None:
    put(store, "x")
    record = replace(record_of("x"), meta=b"a longer note", lossy=True)
    store.write(record, arrays_of(record.key))
    assert store.find(record.key) == record and same(store.read(record.key), arrays_of(record.key)) and adds_up(store)


# ---------------------------------------------------------------------------------------- the shelf


def test_children_are_radix_entries_of_one_place_and_first_token(store: DiskStore) -> None:
    put(store, "a", "b", place="p", first=7)
    put(store, "c", place="p", first=8)
    put(store, "d", place="q", first=7, provenance="dependency")
    put(store, "e", place="p", first=7, provenance="approximate")
    put(store, "f", place="p", first=-7)
    assert sorted(one.key for one in store.children(digest("p"), 7)) == sorted([digest("a"), digest("b")])
    assert [one.key for one in store.children(digest("p"), 8)] == [digest("c")]
    assert [one.key for one in store.children(digest("q"), 7)] == [digest("d")]
    assert [one.key for one in store.children(digest("p"), -7)] == [digest("f")]
    assert list(store.children(digest("q"), 8)) == [] == list(store.children(digest("nowhere"), 7))
    assert store.find(digest("e")).provenance == "approximate"
    store.forget(digest("a"))
    assert [one.key for one in store.children(digest("p"), 7)] == [digest("b")]
    assert store.find(digest("a")) is None and adds_up(store)


def test_questions_wait_for_no_writer(tmp_path: Path, store: DiskStore) -> None:
    put(store, "x")
    with open_store(tmp_path) as other, other._index.change() as index:
        index.drop(digest("x"))
        assert store.find(digest("x")) == record_of("x")
        assert list(store.children(digest("root"), 7)) == [record_of("x")]
        store.touch([digest("x")])
        assert same(store.read(digest("x")), arrays_of(digest("x")))
        assert store.stats().failed == 0


def test_what_one_process_writes_another_finds(tmp_path: Path, store: DiskStore) -> None:
    with open_store(tmp_path) as other:
        put(other, "x")
        assert holds(store, "x")
        store.forget(digest("x"))
        assert not holds(other, "x")


# ---------------------------------------------------------------------------------------- what leaves


def bounded(tmp_path: Path, entries: int) -> DiskStore:
    """A store with room for so many entries of `put_alike`, and half a one."""
    with open_store(tmp_path / "probe") as probe:
        size = put_alike(probe, "probe")
    return open_store(tmp_path / "bounded", size * entries + size // 2)


def test_what_was_accessed_longest_ago_leaves_first(tmp_path: Path) -> None:
    with bounded(tmp_path, 4) as store:
        put_alike(store, *"abcd")
        store.touch([digest("a")])
        put_alike(store, "e")
        assert kept(store, *"abcde") == [*"acde"]
        put_alike(store, "c")  # kept already, which is an access too
        put_alike(store, "f", "g")
        assert kept(store, *"abcdefg") == [*"cefg"]
        assert store.stats().evicted == 3 and adds_up(store)


def test_a_touch_is_in_order_of_the_call(tmp_path: Path) -> None:
    with bounded(tmp_path, 4) as store:
        put_alike(store, *"abcd")
        store.touch([digest(name) for name in "dcba"])
        left = []
        for new in "efg":
            put_alike(store, new)
            left.append(kept(store, *"abcd"))
        assert left == [[*"abc"], [*"ab"], ["a"]]


def test_accesses_survive_a_restart(tmp_path: Path) -> None:
    with bounded(tmp_path, 3) as store:
        put_alike(store, *"abc")
        store.touch([digest("a")])
    with bounded(tmp_path, 3) as store:
        put_alike(store, "d", "e")
        assert kept(store, *"abcde") == [*"ade"]


def test_many_touches_reach_other_processes_without_a_write(tmp_path: Path) -> None:
    with bounded(tmp_path, 3) as store, bounded(tmp_path, 3) as other:
        put_alike(store, *"abc")
        store.touch([digest("a"), *(digest(number) for number in range(disk._BATCH))])
        store.read(digest("c"))
        put_alike(other, "d")
        assert kept(store, *"abcd") == [*"acd"]


def test_a_later_access_by_another_process_counts(tmp_path: Path) -> None:
    with bounded(tmp_path, 3) as store:
        put_alike(store, *"abc")
        store.touch([digest("a")])
        with bounded(tmp_path, 3) as other:
            other.touch([digest("b"), digest("a")])
        put_alike(store, "d", "e")
        assert kept(store, *"abcde") == [*"ade"]


def test_without_an_index_the_order_is_that_of_writing(tmp_path: Path) -> None:
    with bounded(tmp_path, 3) as store:
        put_alike(store, *"abc")
        for age, name in enumerate("cab"):
            os.utime(path_of(store, name), ns=(0, 10**18 - age))
    (store.folder / "index.sqlite").unlink()
    with bounded(tmp_path, 3) as store:
        put_alike(store, "d")
        assert kept(store, *"abcd") == [*"acd"]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=40), st.integers(20_000, 60_000))
def test_the_limit_holds_at_every_step(steps: list[tuple[int, bool]], limit: int) -> None:
    with tempfile.TemporaryDirectory() as directory, open_store(Path(directory), limit) as store:
        for name, is_write in steps:
            if is_write:
                put(store, name)
                assert holds(store, name)  # never the entry being written
            else:
                store.touch([digest(name)])
            assert store.stats().bytes <= limit and adds_up(store)


def test_the_limit_holds_though_another_process_writes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bounded(tmp_path, 2) as store, bounded(tmp_path, 2) as other:
        put_alike(store, "a")
        true_sync = os.fsync

        def sync(file: int) -> None:
            monkeypatch.setattr(os, "fsync", true_sync)
            put_alike(other, "b")

        monkeypatch.setattr(os, "fsync", sync)
        put_alike(store, "c")
        assert kept(store, *"abc") == [*"bc"] and adds_up(store)


def test_opening_with_a_lower_limit_makes_room(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        size = put_alike(store, *"abcd")
    with open_store(tmp_path, 2 * size) as store:
        assert kept(store, *"abcd") == [*"cd"] and adds_up(store)


def test_an_entry_beyond_the_limit_is_refused_and_nothing_leaves_for_it(tmp_path: Path) -> None:
    with bounded(tmp_path, 2) as store:
        put_alike(store, *"ab")
        big = {"k": np.zeros(store.stats().max_bytes, np.uint8)}
        with pytest.raises(WriteError, match="the limit is"):
            store.write(record_of("big"), big)
        assert kept(store, "a", "b", "big") == [*"ab"] and adds_up(store)


def test_what_lies_aside_counts_and_goes_first(tmp_path: Path) -> None:
    with bounded(tmp_path, 3) as store:
        put_alike(store, *"abc")
        flip(path_of(store, "a"))
        with pytest.raises(Damaged):
            store.read(digest("a"))
        assert store.stats().aside_files == 1
        put_alike(store, "d")
        assert kept(store, *"abcd") == [*"bcd"]
        assert (store.stats().aside_files, store.stats().evicted) == (0, 0)


def test_gc_shrinks_and_empties_aside(store: DiskStore) -> None:
    size = put_alike(store, *"abcde")
    flip(path_of(store, "e"))
    with pytest.raises(Damaged):
        store.read(digest("e"))
    assert store.gc(2 * size + 1) == 3 * size
    stats = store.stats()
    assert kept(store, *"abcde") == [*"cd"] and adds_up(store)
    assert (stats.bytes, stats.aside_files, stats.evicted) == (2 * size, 0, 2)
    assert store.gc(10 * size) == 0


# ---------------------------------------------------------------------------------------- damage


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << random.Random(at).randrange(8)
    path.write_bytes(data)


def test_no_bit_of_a_file_can_change_unnoticed() -> None:
    arrays = {"k": np.arange(40, dtype=np.uint16), "v": np.ones(3, np.float32)}
    good = np.concatenate(entry.encode(record_of("x"), arrays, IDENTITY))
    entry.decode(good.copy(), IDENTITY)
    for at in range(len(good)):
        for bit in range(8):
            bad = good.copy()
            bad[at] ^= 1 << bit
            with pytest.raises(Damaged):
                entry.decode(bad, IDENTITY)


def test_no_other_length_is_taken(tmp_path: Path) -> None:
    good = np.concatenate(entry.encode(record_of("x"), {"k": np.arange(9, dtype=np.uint8)}, IDENTITY))
    path = tmp_path / "x"
    for length in [*range(len(good)), len(good) + 1]:
        bad = np.resize(good, length)
        with pytest.raises(Damaged):
            entry.decode(bad, IDENTITY)
        bad.tofile(path)
        with pytest.raises(Damaged):
            entry.peek(path, IDENTITY)
    good.tofile(path)
    assert entry.peek(path, IDENTITY) == record_of("x")


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_damage(garbage: bytes, framed: bool) -> None:
    data = len(garbage).to_bytes(8, "little") + garbage if framed else garbage
    with pytest.raises(Damaged):
        entry.decode(np.frombuffer(data, np.uint8), IDENTITY)


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
        entry.decode(np.frombuffer(data, np.uint8), IDENTITY)


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
    "another entry": lambda path: shutil.copy(path.parents[1] / digest("y").hex()[:2] / _file_name("y"), path),
    "another model": _of_another_model,
    "another format": _of_another_format,
    "another program": _by_another_program,
}


def _file_name(name: object) -> str:
    return f"{digest(name).hex()}.safetensors"


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_set_aside_and_never_served(store: DiskStore, harm: Callable[[Path], object]) -> None:
    put(store, "x", "y")
    harm(path_of(store, "x"))
    with pytest.raises(Damaged, match=digest("x").hex()):
        store.read(digest("x"))
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
        store.read(digest("x"))


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_however_the_index_was_lost(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    with open_store(tmp_path) as store:
        put(store, "x", "y")
    harm(path_of(store, "x"))
    (store.folder / "index.sqlite").unlink()
    with open_store(tmp_path) as store:
        if store.find(digest("x")) is not None:  # headers alone were read
            with pytest.raises(Damaged):
                store.read(digest("x"))
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
        store.read(record.key)


def test_verify_names_every_flaw(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, *"abcdef")
        assert store.verify() == ()
        flip(path_of(store, "a"))
        os.truncate(path_of(store, "b"), 10)
        path_of(store, "c").unlink()
        stray = store.folder / "entries" / "stray.txt"
        stray.write_text("hello")
        path_of(store, "d").rename(path_of(store, "d").with_name(_file_name("elsewhere")))
        flaws = store.verify()
        assert {Path(flaw.name).name for flaw in flaws} == {
            _file_name("a"),
            _file_name("b"),
            "stray.txt",
            _file_name("elsewhere"),
        }
        assert kept(store, *"abcdef") == [*"ef"] and adds_up(store)
        assert store.stats().aside_files == store.stats().set_aside == 4
    with open_store(tmp_path) as store:
        assert store.verify() == ()


def test_a_disk_that_fails_to_read_is_damage_and_any_other_failure_is_not(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "x")

    def failing(number: int) -> Callable[[Path], object]:
        def load(path: Path) -> object:
            raise OSError(number, os.strerror(number))

        return load

    with monkeypatch.context() as patch:
        patch.setattr(entry, "load", failing(errno.EMFILE))
        with pytest.raises(disk.DiskError, match="Too many open files"):
            store.read(digest("x"))
    assert holds(store, "x")
    with monkeypatch.context() as patch:
        patch.setattr(entry, "load", failing(errno.EIO))
        with pytest.raises(Damaged):
            store.read(digest("x"))
    assert not holds(store, "x") and store.stats().aside_files == 1


# ---------------------------------------------------------------------------------------- index and files disagree


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
        assert len(store.children(digest("root"), 7)) == 3
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
    assert store.find(digest("a")) is None and store.children(digest("root"), 7) == ()
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
        store.read(digest("x"))
    assert holds(store, "x") and adds_up(store)
    assert len(store.children(digest("root"), 7)) == 1 and not store.children(digest("y"), 7)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_row_without_a_file_is_a_miss_and_goes(tmp_path: Path, reopened: bool) -> None:
    with open_store(tmp_path) as store:
        put(store, *"ab")
        path_of(store, "a").unlink()
        if not reopened:
            assert store.find(digest("a")) is not None
            with pytest.raises(Missing):
                store.read(digest("a"))
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


@pytest.mark.parametrize("name", ["entries/x.safetensors", "entries/ab/notes.txt", "entries/ff/" + _file_name("a")])
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
    true_load = entry.load

    def load_and_lose_a_race(path: Path) -> object:
        data = true_load(path)
        path.unlink()
        path.write_bytes(good)
        os.utime(path, ns=(0, 5))
        return data

    with monkeypatch.context() as patch, pytest.raises(Damaged):
        patch.setattr(entry, "load", load_and_lose_a_race)
        store.read(digest("x"))
    assert holds(store, "x") and store.stats().aside_files == 0


# ---------------------------------------------------------------------------------------- manifests and folders


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


# ---------------------------------------------------------------------------------------- disks that refuse


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing below the folder can be written; root, which may write anywhere, is nobody meanwhile."""
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
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


def test_a_read_only_directory_is_read_from(open_to_all: Path) -> None:
    with open_store(open_to_all) as store:
        put(store, *"abc")
    flip(path_of(store, "c"))
    with read_only(open_to_all), open_store(open_to_all) as store:
        assert holds(store, "a") and len(store.children(digest("root"), 7)) == 3
        store.touch([digest("a")])
        with pytest.raises(WriteError, match="Permission denied"):
            put(store, "d")
        with pytest.raises(Damaged):
            store.read(digest("c"))
        assert store.find(digest("c")) is None
        with pytest.raises(WriteError):
            store.gc(0)
        store.verify()
        assert holds(store, "a") and holds(store, "b")
    with open_store(open_to_all) as store:
        assert holds(store, "a") and holds(store, "b")
        with pytest.raises(Damaged):
            store.read(digest("c"))


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


# ---------------------------------------------------------------------------------------- threads and processes


def test_threads_share_a_store(tmp_path: Path) -> None:
    with bounded(tmp_path, 12) as store:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(40):
                    name = int(rng.integers(25))
                    put(store, name)
                    store.touch([digest(name)])
                    with suppress(Missing):
                        assert same(store.read(digest(name)), arrays_of(digest(name)))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for name in range(25):
                assert store.find(digest(name)) in (None, record_of(name))
            assert store.stats().bytes <= store.stats().max_bytes
        for thread in threads:
            thread.join()
        assert not failures
        assert adds_up(store) and store.stats().set_aside == store.stats().failed == 0


LIMIT = 800_000
"""Room for about a third of what the processes write."""


def start(directory: Path, seed: int, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.disks", str(directory), str(seed), str(steps), str(LIMIT)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def check(store: DiskStore) -> int:
    """Every entry served is intact, nothing has leaked, nothing is damaged; returns the number of entries."""
    for name in range(shelves.NAMES):
        key = digest(name)
        record = store.find(key)
        if record is not None:
            assert record == record_of(name)
            assert same(store.read(key), arrays_of(key, scale=4))
    stats = store.stats()
    assert adds_up(store) and stats.bytes <= LIMIT
    assert stats.set_aside == stats.aside_files == stats.missing == 0
    return stats.entries


def test_processes_write_and_read_at_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, seed, 250) for seed in (1, 2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    with open_store(tmp_path, LIMIT) as store:
        while any(process.poll() is None for process in processes):
            assert store.stats().bytes <= LIMIT
            for name in range(shelves.NAMES):
                assert store.find(digest(name)) in (None, record_of(name))
        counts = [json.loads(process.communicate()[0]) for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert check(store) > 5
    assert all(count["written"] and count["read"] and count["missing"] for count in counts), counts
    assert sum(count["evicted"] for count in counts) > 0


def kill_writers(directory: Path, seed: int, kills: int) -> int:
    """Kill two writers, again and again, in the same directory; returns the drafts that they left in all."""
    rng, drafts = random.Random(seed), 0
    for number in range(kills):
        processes = [start(directory, rng.randrange(2**32), 10**9) for _ in range(1 + number % 2)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        threading.Event().wait(rng.uniform(0, 0.25))
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        drafts += len(list(directory.rglob(".*.tmp")))
        with open_store(directory, LIMIT) as store:
            check(store)
    assert check_is_full(directory)
    return drafts


def check_is_full(directory: Path) -> bool:
    with open_store(directory, LIMIT) as store:
        return check(store) > 5


def test_killed_writers_leave_whole_entries(tmp_path: Path) -> None:
    kill_writers(tmp_path, seed=1, kills=10)


@pytest.mark.long
def test_killed_writers_leave_whole_entries_however_often(tmp_path: Path) -> None:
    assert kill_writers(tmp_path, seed=2, kills=100) > 10, "most kills should hit a writer at work"


@pytest.mark.parametrize("moment", ["written", "entered", "renamed", "evicted"])
def test_a_writer_killed_between_two_steps_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    """The moments that chance seldom finds."""
    program = """
import os, sys
from pathlib import Path
from tests.support import disks as shelves
def die(*_): os._exit(9)
moment, directory = sys.argv[1:]
store = shelves.open_store(Path(directory), 60_000)
for name in range(20):
    record = shelves.record_of(name)
    if name == 19:
        if moment == "written": os.fsync = die
        if moment == "entered": Path.replace = die
        if moment == "renamed": Path.replace = lambda path, target: (os.replace(path, target), die())
        if moment == "evicted": Path.unlink = lambda path, missing_ok: (os.unlink(path), die())
    store.write(record, shelves.arrays_of(record.key))
"""
    done = subprocess.run([sys.executable, "-c", program, moment, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == 9
    assert len(list(tmp_path.rglob(".*.tmp"))) == (moment in ("written", "entered"))
    with open_store(tmp_path, 60_000) as store:
        assert adds_up(store) and store.stats().set_aside == 0
        assert holds(store, 19) is (moment == "renamed")
        assert sum(holds(store, name) for name in range(20)) == store.stats().entries > 1


def test_a_draft_is_removed_only_if_nobody_writes_it(tmp_path: Path, store: DiskStore) -> None:
    put(store, "x")
    target = path_of(store, "x")
    with draft(target, [b"half"]) as name:
        left = name.with_name(".left.tmp")
        shutil.copy(name, left)
        shutil.copy(name, store.folder / ".manifest.left.tmp")
        with open_store(tmp_path) as other:
            assert name.exists() and not left.exists()
            assert holds(other, "x") and other.stats().set_aside == 0
    assert not name.exists() and adds_up(store)


# ---------------------------------------------------------------------------------------- the tests themselves


def test_without_the_checksum_damage_would_be_served(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_checksum", lambda *_: "0" * 64)
    put(store, "x")
    flip(path_of(store, "x"))
    assert not same(store.read(digest("x")), arrays_of(digest("x")))


def test_without_the_check_of_the_name_another_entry_would_be_served(tmp_path: Path) -> None:
    """The content of y is intact; only its name is x's."""
    with open_store(tmp_path) as store:
        put(store, "x", "y")
        shutil.copy(path_of(store, "y"), path_of(store, "x"))
        record, arrays = entry.decode(entry.load(path_of(store, "x")), IDENTITY)
        assert record == record_of("y") and same(arrays, arrays_of(digest("y")))
        with pytest.raises(Damaged, match="another entry"):
            store.read(digest("x"))
