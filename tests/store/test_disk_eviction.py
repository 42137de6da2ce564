"""What leaves the disk tier when room is needed."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.store import disk
from ragjax.store.disk import DiskStore, WriteError
from ragjax.store.entry import Damaged
from tests.support.disks import (
    adds_up,
    bounded,
    digest,
    flip,
    holds,
    kept,
    open_store,
    path_of,
    put,
    put_alike,
    read_entry,
    record_of,
)


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


def test_a_clock_that_is_set_back_makes_no_entry_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours, clock = 10 * 3600 * 10**9, time.time_ns
    monkeypatch.setattr("ragjax.store.repair.time.time_ns", lambda: clock() + hours)
    with bounded(tmp_path, 3) as store:
        put_alike(store, *"abc")
    monkeypatch.setattr("ragjax.store.repair.time.time_ns", clock)
    with bounded(tmp_path, 3) as store:
        put_alike(store, "d", "e")
        assert kept(store, *"abcde") == [*"cde"]


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
        read_entry(store, digest("c"))
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
            read_entry(store, digest("a"))
        assert store.stats().aside_files == 1
        put_alike(store, "d")
        assert kept(store, *"abcd") == [*"bcd"]
        assert (store.stats().aside_files, store.stats().evicted) == (0, 0)


def test_gc_shrinks_and_empties_aside(store: DiskStore) -> None:
    size = put_alike(store, *"abcde")
    flip(path_of(store, "e"))
    with pytest.raises(Damaged):
        read_entry(store, digest("e"))
    assert store.gc(2 * size + 1) == 3 * size
    stats = store.stats()
    assert kept(store, *"abcde") == [*"cd"] and adds_up(store)
    assert (stats.bytes, stats.aside_files, stats.evicted) == (2 * size, 0, 2)
    assert store.gc(10 * size) == 0
