"""The host tier: KV entries in ordinary memory, and the way between there and the device.

A GPU copies at full speed, and beside its computing, only from and to host memory that is pinned. Pinned memory is
scarce and slow to get, so entries do not lie in it: they pass through.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from ragjax.store.codec import Arrays
from ragjax.store.device import Excerpt

PINNED = "pinned_host"


@dataclass(eq=False, slots=True)
class HostEntry:
    """KV of one saved run; `ready` once it has arrays or an error. users: the cache until it forgets it, and jobs."""

    ready: Future[None] = field(default_factory=Future)
    arrays: Arrays | None = None
    error: str | None = None
    users: int = 1

    def read(self) -> Arrays:
        if self.arrays is None:
            raise OSError(f"the host entry was never saved: {self.error}")
        return self.arrays


class HostStore:
    """Entries by number; the arrays of forgotten ones go with their last user. Any thread may call it."""

    def __init__(self) -> None:
        self._entries: dict[int, HostEntry] = {}
        self._lock = Lock()

    def begin(self, number: int) -> HostEntry:
        """A new entry, whose arrays will come; as after `use`, to be released by who brings them."""
        with self._lock:
            self._entries[number] = HostEntry(users=2)
            return self._entries[number]

    def use(self, number: int) -> HostEntry:
        with self._lock:
            entry = self._entries[number]
            entry.users += 1
            return entry

    def release(self, entry: HostEntry) -> None:
        with self._lock:
            entry.users -= 1
            if entry.users == 0:
                entry.arrays = None

    def forget(self, number: int) -> None:
        with self._lock:
            entry = self._entries.pop(number)
        self.release(entry)


def download(excerpts: Sequence[Excerpt]) -> list[Excerpt]:
    """Begin to copy to pinned host memory, where the device has such; `to_numpy` waits for it."""

    def begin(x: jax.Array) -> jax.Array:
        stage = staging(x.sharding)
        return x if stage is None else jax.device_put(x, stage)

    begun: list[Excerpt] = jax.tree.map(begin, list(excerpts))
    return begun


def upload(x: NDArray[Any], sharding: Sharding) -> jax.Array:
    """Begin to copy an array to the device, through pinned host memory where it has such; x must not change again."""
    stage = staging(sharding)
    there: jax.Array = jax.device_put(x if stage is None else jax.device_put(x, stage), sharding)
    return there


def staging(sharding: Sharding) -> Sharding | None:
    """The sharding's twin in pinned host memory; None on CPU, whose memory is the host's, and where there is none."""
    device: Any = next(iter(sharding.device_set))
    if device.platform == "cpu" or all(memory.kind != PINNED for memory in device.addressable_memories()):
        return None
    return sharding.with_memory_kind(PINNED)


def to_numpy(x: jax.Array, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The array's bits as `dtype`, once they are there; on CPU a view that keeps x alive."""
    return np.asarray(x).view(dtype)
