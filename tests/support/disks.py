"""Entries whose content follows from their key, so that whoever reads one knows what it must hold; and processes that
write and read them until they are done, or killed (`python -m tests.support.disks DIRECTORY SEED STEPS LIMIT`).
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from ragjax.core.tiers import Record
from ragjax.store import entry
from ragjax.store.disk import DiskStore, Missing

IDENTITY = bytes(range(32))
ABOUT = {"model": "tiny", "dtype": "bfloat16"}
NAMES = 60
"""Entries the processes take turns to write: few, so that they meet."""


def digest(name: object) -> bytes:
    return blake2b(str(name).encode(), digest_size=32).digest()


def record_of(name: object, *, place: object = "root", first: int = 7, provenance: str = "causal") -> Record:
    length = 5 + digest(name)[0] % 40
    tokens = np.concatenate([[first], np.frombuffer(digest(name), np.uint8)[: length - 1]]).astype("<i4")
    return Record(digest(name), digest(place), tokens.tobytes(), provenance, "prefix", 3, meta=b"note")


def begins(first: int) -> bytes:
    """A token as records write them."""
    return first.to_bytes(4, "little", signed=True)


def continued(store: DiskStore, *names: str, place: object = "root") -> bool:
    """Whether each of these entries is found behind its place by its own tokens."""
    records = [store.find(digest(name)) for name in names]
    return all(one is not None and one in store.children(digest(place), one.tokens) for one in records)


def read_entry(store: DiskStore, key: bytes, expected: Record | None = None) -> dict[str, np.ndarray]:
    [arrays] = store.read_shares(key, 1, expected)
    return arrays


def arrays_of(key: bytes, scale: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(int.from_bytes(key, "little"))
    shape = (2, 2, scale * int(rng.integers(8, 64)), 16)
    return {
        "k": rng.integers(0, 2**16, shape, np.uint16),
        "v": rng.integers(0, 2**16, shape, np.uint16),
        "scale": rng.random((2, 16), np.float32),
    }


def same(got: dict[str, np.ndarray], what: dict[str, np.ndarray]) -> bool:
    """Equal names, dtypes, shapes and bits."""
    return got.keys() == what.keys() and all(
        got[name].dtype == what[name].dtype
        and got[name].shape == what[name].shape
        and got[name].tobytes() == what[name].tobytes()
        for name in what
    )


def decode(data: bytes | np.ndarray, count: int = 1) -> list[dict[str, np.ndarray]]:
    """The shares of a file of these bytes."""
    with open(os.memfd_create("entry"), "r+b", buffering=0) as file:
        file.write(bytes(data))
        file.seek(0)
        return list(entry.Reader(file, IDENTITY).shares(count))


def open_store(directory: Path, limit: int = 2**40, identity: bytes = IDENTITY) -> DiskStore:
    return DiskStore.open(directory, identity, about=ABOUT, max_bytes=limit)


class Faults:
    """What happens before a share of an entry is read: the first one waits for the gate, and fails as often as said."""

    def __init__(self) -> None:
        self.failing = 0
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, number: int) -> None:
        if number == 0:
            self.gate.wait(30)
            if self.failing:
                self.failing -= 1
                raise OSError("the disk is on fire")


def paced(store: DiskStore, before: Callable[[int], object]) -> DiskStore:
    """The store; before each share of an entry is read `before` is called with its number, and may raise."""
    read_shares = store.read_shares

    def read(key: bytes, count: int, expected: Record | None = None) -> Iterator[dict[str, np.ndarray]]:
        shares = read_shares(key, count, expected)
        for number in range(count):
            before(number)
            yield next(shares)

    store.read_shares = read  # type: ignore[method-assign]
    return store


def files(store: DiskStore) -> dict[str, int]:
    """Bytes of each file among the entries, hidden ones too."""
    return {path.name: path.stat().st_size for path in (store.folder / "entries").rglob("*") if path.is_file()}


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


def file_name(name: object) -> str:
    return f"{digest(name).hex()}.safetensors"


def holds(store: DiskStore, name: object) -> bool:
    """Whether an entry is served, intact; it must be a clean miss otherwise."""
    key = digest(name)
    if store.find(key) is None:
        with pytest.raises(Missing):
            read_entry(store, key)
        return False
    assert store.find(key) == record_of(name)
    assert same(read_entry(store, key), arrays_of(key))
    return True


def kept(store: DiskStore, *names: object) -> list[object]:
    return [name for name in names if store.find(digest(name)) is not None]


def adds_up(store: DiskStore) -> bool:
    """The index counts what lies on disk, and nothing else lies there."""
    stats, on_disk = store.stats(), files(store)
    drafts = [path for path in store.folder.rglob(".*") if path.is_file()]
    return not drafts and (stats.entries, stats.bytes) == (len(on_disk), sum(on_disk.values()))


def bounded(tmp_path: Path, entries: int) -> DiskStore:
    """A store with room for so many entries of `put_alike`, and half a one."""
    with open_store(tmp_path / "probe") as probe:
        size = put_alike(probe, "probe")
    return open_store(tmp_path / "bounded", size * entries + size // 2)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << random.Random(at).randrange(8)
    path.write_bytes(data)


def work(directory: Path, seed: int, steps: int, limit: int) -> dict[str, int]:
    """Write, read, touch and forget entries at random; whatever is read must be right."""
    rng = np.random.default_rng(seed)
    counts = dict.fromkeys(("written", "read", "missing", "evicted"), 0)
    with open_store(directory, limit) as store:
        print("ready", flush=True)
        for _ in range(steps):
            record = record_of(int(rng.integers(NAMES)))
            action = rng.random()
            if action < 0.5:
                store.write(record, arrays_of(record.key, scale=4))
                counts["written"] += 1
            elif action < 0.53:
                store.forget(record.key)
            else:
                found = store.find(record.key)
                assert found in (None, record)
                store.touch([record.key])
                try:
                    assert same(read_entry(store, record.key), arrays_of(record.key, scale=4))
                    counts["read"] += 1
                except Missing:
                    counts["missing"] += 1
        assert store.stats().set_aside == 0
        counts["evicted"] = store.stats().evicted
    return counts


if __name__ == "__main__":
    print(json.dumps(work(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
