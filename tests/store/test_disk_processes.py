"""Threads and processes share a directory of the disk tier, also when they are killed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ragjax.store.disk import DiskStore, Missing
from ragjax.store.folder import draft
from tests.support import disks as shelves
from tests.support.disks import (
    adds_up,
    arrays_of,
    bounded,
    digest,
    holds,
    open_store,
    path_of,
    put,
    read_entry,
    record_of,
    same,
)

ROOT = Path(__file__).parents[2]


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
                        assert same(read_entry(store, digest(name)), arrays_of(digest(name)))
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
            assert same(read_entry(store, key), arrays_of(key, scale=4))
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
    """Kill two writers, again and again, in the same directory; returns the drafts that they left in all.

    So often, and where a writer is slow until some entries were written.
    """
    rng, drafts, entries = random.Random(seed), 0, 0
    for number in range(20 * kills):
        if number >= kills and entries > 5:
            break
        processes = [start(directory, rng.randrange(2**32), 10**9) for _ in range(1 + number % 2)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        threading.Event().wait(rng.uniform(0, 0.25))
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        drafts += len(list(directory.rglob(".*.tmp")))
        with open_store(directory, LIMIT) as store:
            entries = check(store)
    assert entries > 5
    return drafts


@pytest.mark.smoke
@pytest.mark.slow
def test_killed_writers_leave_whole_entries(tmp_path: Path) -> None:
    kill_writers(tmp_path, seed=1, kills=10)


@pytest.mark.long
def test_killed_writers_leave_whole_entries_however_often(tmp_path: Path) -> None:
    assert kill_writers(tmp_path, seed=2, kills=100) > 10, "most kills should hit a writer at work"


@pytest.mark.slow
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
