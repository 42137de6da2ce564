"""Tiers, and the contract between those who decide (the cache) and those who move bytes (`store`).

The cache gives orders: save a run of the device to host memory, write a host entry to disk, load entries into a run.
A `TransferEngine` carries them out, batched and asynchronously, and reports each one; a `DiskIndex` is the index of
what lies on disk, where other processes and earlier lives of this one put things too. No arrays pass here, only names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from ragjax.core import Run


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Record:
    key: bytes  # digest of all that the KV depends on
    # Digest of the context the KV was computed on, where readers look for what continues it; of approximate KV, what it
    # says there (`KnowledgeTree.chunk_place`).
    place: bytes
    tokens: bytes  # int32 ids, little-endian
    provenance: str
    method: str
    local_start: int  # RoPE position at which token 0's K is stored rotated
    lossy: bool = False  # the bytes, or the context they were computed on, lost precision
    meta: bytes = b""  # a strategy's own

    def __len__(self) -> int:
        return len(self.tokens) // 4


def first_of(tokens: bytes) -> int:
    return int.from_bytes(tokens[:4], "little", signed=True)


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens [begin, begin + length) of an entry at rest."""

    entry: int | bytes  # a host entry's number, or the 32-byte key of an entry on disk
    begin: int
    length: int
    # What the entry on disk must be. Another process may have replaced it since it was looked up: a key says nothing of
    # where keys are rotated to, nor of the encoding. None: whatever has the key.
    record: Record | None = None

    def slice(self, begin: int, end: int) -> Copy:
        if not 0 <= begin <= end <= self.length:
            raise ValueError(f"[{begin}, {end}) is outside a copy of {self.length} tokens")
        return Copy(self.entry, self.begin + begin, end - begin, self.record)


@dataclass(frozen=True, slots=True)
class Save:
    entry: int
    run: Run


@dataclass(frozen=True, slots=True)
class Write:
    record: Record
    copy: Copy


@dataclass(frozen=True, slots=True)
class Load:
    """Fill `run`, which lies in fresh pages from a page's first slot on, with the pieces' tokens in order.

    The stages of layers arrive one after the other, the first one first.
    """

    number: int
    run: Run
    pieces: tuple[Copy, ...]


Job = Save | Write | Load


@dataclass(frozen=True, slots=True)
class Done:
    """A finished job. error: why it failed (None: all bytes arrived). loss: relative RMS error of its encoding."""

    job: Job
    error: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    loss: float = 0.0


class TransferEngine(Protocol):
    """Moves KV between tiers. All methods are called in the thread that owns the pool; none waits for bytes.

    The cache orders `save` (the runs are read as they are now), `write` and `load`, `forget`s entries once the jobs
    begun before have finished, and `poll`s what has finished. lossy: whether what it saves loses precision.
    """

    lossy: bool

    @property
    def backlog(self) -> int: ...

    def size(self, tokens: int) -> int: ...

    def save(self, jobs: Sequence[Save]) -> None: ...

    def write(self, jobs: Sequence[Write]) -> None: ...

    def load(self, jobs: Sequence[Load]) -> None: ...

    def give_up(self, number: int) -> None: ...

    def forget(self, entries: Iterable[int]) -> None: ...

    def poll(self) -> Sequence[Done]: ...

    def clear(self, pages: Sequence[int]) -> None: ...

    def arrived(self) -> Mapping[int, int]:
        """Leading stages of loads under way, by number, that later steps see in the pool, as of the last `poll`.

        What has arrived is not checked before the whole load is done: if the load fails, nothing computed on it may be
        used.
        """


class DiskIndex(Protocol):
    """The index of the disk tier. Answers at once, from the index alone."""

    def find(self, key: bytes) -> Record | None: ...

    def children(self, place: bytes, tokens: bytes) -> Sequence[Record]:
        """Entries whose context is `place` and whose first token is that of `tokens`; some of the best matches."""

    def chunks(self, place: bytes) -> Sequence[Record]: ...

    def touch(self, keys: Sequence[bytes]) -> None: ...


class Inquiry(Protocol):
    """Questions to the shared tier on behalf of requests that wait; its answers reach the `DiskIndex`.

    patience: seconds that a request may wait for them. asked: questions that look-ups raised since the last call.
    """

    patience: float

    def asked(self) -> Collection[str]: ...

    def waits(self, questions: Collection[str]) -> bool: ...

    def serves(self, key: bytes) -> bool: ...
