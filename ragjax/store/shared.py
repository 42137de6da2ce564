"""The shared tier: entries as the disk tier keeps them, on a Redis server that several processes use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from numpy.typing import NDArray

from ragjax.core import AtRest, ConfigError, SharedTierState
from ragjax.core.tiers import Record, first_of
from ragjax.store import entry
from ragjax.store.disk import DiskStore, Missing, WriteError
from ragjax.store.entry import Arrays, Damaged
from ragjax.store.exchange import Directory, Link, Outbox, by_key
from ragjax.store.redis import Parcel, RedisServer, RemoteError, chunk_place, continuation_place, place_of

_log = logging.getLogger(__name__)

CLOSING = 3.0
"""Seconds that the end waits for entries that are still to be written."""

LARGEST = 500 * 2**20
"""Bytes of an entry, at most; Redis takes 512 MiB in a value."""


class SharedTier:
    """A `DiskIndex` of disk and server together, and their bytes (`store.load.Disk`).

    What the disk has is read from it. What is written goes to both: to the disk at once, to the server behind. The
    index waits for nobody: of the server it gives what is known, and asks for the rest (`Directory`). timeout: seconds
    that a request waits for the server.
    """

    def __init__(
        self,
        remote: RedisServer,
        identity: bytes,
        disk: DiskStore | None = None,
        *,
        timeout: float,
        link: Link | None = None,
    ):
        self.patience = timeout
        self._remote = remote
        self._identity = identity
        self._disk = disk
        self._link = link or Link(remote.address)
        try:
            remote.ping()
        except RemoteError as error:  # the tier is off, and the server is probed again
            self._link.fail(error)
        self._directory = Directory(remote, identity, self._link)
        self._outbox = Outbox(remote, identity, self._link)

    def listen(self, notify: Callable[[], None]) -> None:
        self._directory.notify = notify

    def find(self, key: bytes) -> Record | None:
        found = None if self._disk is None else self._disk.find(key)
        return found or next(iter(self._directory.known(by_key(key))), None)

    def children(self, place: bytes, tokens: bytes) -> Sequence[Record]:
        near = self._disk.children(place, tokens) if self._disk is not None else ()
        return _together(near, self._directory.known(continuation_place(place, first_of(tokens))))

    def chunks(self, place: bytes) -> Sequence[Record]:
        near = self._disk.chunks(place) if self._disk is not None else ()
        return _together(near, self._directory.known(chunk_place(place)))

    def touch(self, keys: Sequence[bytes]) -> None:
        if self._disk is not None:
            self._disk.touch(keys)

    def asked(self) -> Collection[str]:
        return self._directory.asked()

    def waits(self, questions: Collection[str]) -> bool:
        return self._directory.waits(questions)

    def serves(self, key: bytes) -> bool:
        return self._disk is None or self._disk.find(key) is None

    def write(self, record: Record, arrays: Arrays) -> int:
        """Keep an entry on disk, and have it written to the server; returns its bytes, or raises WriteError."""
        if self._disk is None:
            size, refusal = self._offer(record, arrays)
            if refusal is not None:
                raise WriteError(f"{self._remote.address}: an entry is not written: {refusal}")
            return size
        try:
            return self._disk.write(record, arrays)
        finally:
            self._offer(record, arrays)

    def read_shares(self, key: bytes, count: int, expected: Record | None = None) -> Iterator[dict[str, NDArray[Any]]]:
        """The arrays of an entry in equal shares, as `DiskStore.read_shares` gives them."""
        found = self._disk.find(key) if self._disk is not None else None
        if self._disk is not None and found is not None and expected in (None, found):
            yield from self._disk.read_shares(key, count, expected)
        else:
            yield from self._fetch(key, count, expected)

    def standing(self) -> SharedTierState:
        room, on = self._directory.room, self._directory.is_on()
        counts, dropped = self._link.counts()
        counts = {**counts, "evicted": room.evicted}
        return SharedTierState(
            self._remote.address, on, self._link.error, room.entries, room.bytes, room.max_bytes, counts, dropped
        )

    def flush(self, seconds: float = CLOSING) -> bool:
        return self._outbox.flush(seconds)

    def close(self) -> None:
        self._outbox.close(CLOSING)
        self._directory.close()
        self._remote.close()

    def _offer(self, record: Record, arrays: Arrays) -> tuple[int, str | None]:
        """Queue an entry if the server answers and has room; returns its bytes, and the reason if it is not queued."""
        size = sum(array.nbytes for array in arrays.values())
        if not self._link.on:
            self._link.drop("off")
            return 0, f"the server is off ({self._link.error})"
        if size > LARGEST:
            self._link.drop("large")
            return 0, f"it takes {size} bytes, and the limit is {LARGEST}"
        if not self._outbox.has_room(size):
            self._link.drop("full")
            return 0, "too many wait to be written"
        head, *data = entry.encode(record, arrays, self._identity)
        parcel = Parcel(record.key, place_of(record) or "", head.tobytes(), b"".join(piece.data for piece in data))
        self._outbox.put(parcel)
        return parcel.size, None

    def _fetch(self, key: bytes, count: int, expected: Record | None) -> Iterator[dict[str, NDArray[Any]]]:
        if not self._link.on:
            raise RemoteError(f"the shared cache is off: {self._link.error}")
        with self._link.call():
            found = self._remote.fetch(key)
        if found is None:
            self._directory.forget(key)
            self._link.count(missing=1)
            raise Missing(f"{key.hex()}: there is no such entry in the shared cache")
        try:
            reader = entry.Reader(BytesIO(found[0] + found[1]), self._identity)
            if reader.record.key != key:
                raise Damaged("it is another entry's content")
            if expected not in (None, reader.record):  # what it says of itself counts only if it is intact
                list(reader.shares(1))
                self._directory.forget(key)
                raise Missing(f"{key.hex()}: another process has replaced it since it was looked up")
            yield from reader.shares(count)
        except Damaged as error:
            _log.warning("entry %s of the shared cache is not used: %s", key.hex(), error)
            self._link.count(damaged=1)
            self._directory.forget(key)
            with suppress(RemoteError), self._link.call():
                self._remote.delete(key)  # for all
            raise
        self._link.count(reads=1, read_bytes=reader.size)


def _together(near: Sequence[Record], far: Sequence[Record]) -> Sequence[Record]:
    """Both, without those of the second whose keys the first has."""
    keys = {record.key for record in near}
    return [*near, *(record for record in far if record.key not in keys)]


@dataclass(frozen=True)
class _Limits:
    days: float = 7.0  # days without a use after which an entry expires
    timeout: float = 0.25  # seconds that a request waits for the server, and that it may take to answer


def open_shared(url: str, identity: bytes, kind: AtRest, disk: DiskStore | None) -> SharedTier:
    """The shared tier of a model.

    url: redis://[[user]:password@]host[:port][/db][?days=7&timeout=0.25], or rediss:// for TLS. disk: the tier
    before it.
    """
    address, limits = _parsed(url)
    life = max(1, int(limits.days * 86400))
    remote = RedisServer.open(address, identity, kind, life=life, timeout=limits.timeout)
    return SharedTier(remote, identity, disk, timeout=limits.timeout)


def _parsed(url: str) -> tuple[str, _Limits]:
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise ConfigError(f"the address of the shared cache cannot be used: {error}") from None
    others, limits = [], dict[str, float]()
    for name, text in given:
        if name == "gb":
            raise ConfigError("--remote-cache: the server bounds itself: leave gb out, and set its maxmemory")
        if name not in _Limits.__dataclass_fields__:
            others.append((name, text))
            continue
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = 0.0
        if not 0 < limits[name] <= 1e9:
            raise ConfigError(f"--remote-cache: {name} must be a number above 0, up to 1e9, not {text!r}")
    return parts._replace(query=urlencode(others)).geturl(), _Limits(**limits)
