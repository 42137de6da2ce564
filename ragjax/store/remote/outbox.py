"""Entries and accesses on their way to the server: a bounded queue, and the thread that empties it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from threading import Condition, Thread

from ragjax.store.entry import Damaged, record_of
from ragjax.store.remote.base import Parcel, RefusedError, Remote
from ragjax.store.remote.breaker import Breaker
from ragjax.store.remote.count import Counts, Drop

_log = logging.getLogger(__name__)

ROOM = 256 * 2**20
"""Bytes that may wait; an entry that comes while there are more is dropped."""

TOGETHER = 16
"""Entries whose presence is asked for in one round trip."""

TOUCHES = 4096
"""Accesses that wait, at most; the oldest are forgotten first."""

PATIENCE = 0.05
"""Seconds that accesses are gathered."""


class Outbox:
    """Puts entries behind the caller's back. Any thread may call anything; only `flush` and `close` wait."""

    def __init__(self, remote: Remote, identity: bytes, breaker: Breaker, counts: Counts, room: int = ROOM):
        self._remote = remote
        self._identity = identity
        self._breaker = breaker
        self._counts = counts
        self._room = room
        self._change = Condition()  # guards all below
        self._parcels: deque[Parcel] = deque()
        self._bytes = 0
        self._touched: dict[bytes, None] = {}
        self._busy = False
        self._closed = False
        self._thread = Thread(target=self._run, name="ragjax-put", daemon=True)
        self._thread.start()

    def has_room(self, size: int) -> bool:
        """Whether an entry of so many bytes may wait; one does, however large."""
        with self._change:
            return not self._bytes or self._bytes + size <= self._room

    def put(self, parcel: Parcel) -> None:
        """Have an entry written."""
        with self._change:
            self._parcels.append(parcel)
            self._bytes += parcel.size
            self._change.notify_all()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Have accesses noted, in this order."""
        with self._change:
            for key in keys:
                self._touched.pop(key, None)
                self._touched[key] = None
            while len(self._touched) > TOUCHES:
                del self._touched[next(iter(self._touched))]
            self._change.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all that waited was written or dropped, so many seconds at most; whether it was."""
        with self._change:
            return self._change.wait_for(lambda: not (self._parcels or self._touched or self._busy), seconds)

    def close(self, seconds: float) -> None:
        """Write what waits, for so many seconds at most, and drop the rest."""
        self.flush(seconds)
        with self._change:
            self._closed = True
            self._drop("failed")
            self._change.notify_all()
        self._thread.join(seconds)

    # --------------------------------------------------------------------------------------- in its thread

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                self._send(*work)
            except RefusedError as error:
                self._counts.add(refused=1)
                self._counts.drop("failed", len(work[0]))
                _log.warning("the shared cache refuses to keep entries: %s", error)
            except Exception as error:
                self._counts.add(failures=1)
                self._counts.drop("failed", len(work[0]))
                self._breaker.failed(error)
            with self._change:
                self._busy = False
                self._bytes -= sum(parcel.size for parcel in work[0])
                if not self._breaker.on:
                    self._drop("off")
                self._change.notify_all()

    def _next(self) -> tuple[list[Parcel], list[bytes]] | None:
        with self._change:
            self._change.wait_for(lambda: self._closed or self._parcels or self._touched)
            if not self._parcels and not self._closed:
                self._change.wait_for(lambda: self._closed or bool(self._parcels), PATIENCE)
            if self._closed:
                return None
            parcels = [self._parcels.popleft() for _ in range(min(TOGETHER, len(self._parcels)))]
            touched, self._touched = list(self._touched), {}
            self._busy = True
            return parcels, touched

    def _drop(self, reason: Drop) -> None:
        self._counts.drop(reason, len(self._parcels))
        self._bytes -= sum(parcel.size for parcel in self._parcels)
        self._parcels.clear()
        self._touched.clear()

    def _send(self, parcels: Sequence[Parcel], touched: Sequence[bytes]) -> None:
        """Put what is not there; what is counts as an access, since two servers may well compute the same."""
        heads = self._remote.heads([parcel.key for parcel in parcels])
        there = [self._same(parcel, head) for parcel, head in zip(parcels, heads, strict=True)]
        new = [parcel for parcel, kept in zip(parcels, there, strict=True) if not kept]
        kept = [parcel.key for parcel, is_kept in zip(parcels, there, strict=True) if is_kept]
        evicted = self._remote.put(new)
        if keys := [*touched, *kept]:
            self._remote.touch(keys)
        self._counts.add(writes=len(new), written_bytes=sum(p.size for p in new), kept=len(kept), evicted=evicted)

    def _same(self, parcel: Parcel, head: bytes | None) -> bool:
        """Whether the entry with this key is of the same record, as the disk tier asks too."""
        try:
            return head is not None and record_of(head, self._identity) == record_of(parcel.head, self._identity)
        except Damaged:
            return False
