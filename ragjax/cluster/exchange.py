"""The traffic of a process with the server of the shared tier: look-ups and writes, each in a thread of its own."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Lock, Thread
from typing import Literal, get_args

from ragjax.cluster.redis import Parcel, RedisServer, RefusedError, place_of
from ragjax.core.tiers import Record
from ragjax.store.entry import Damaged, record_of

_log = logging.getLogger(__name__)

PAUSE = 5.0
"""Seconds that a server is left alone after it failed."""

FOUND = 60.0
"""Seconds that an entry is believed to be there; a load that finds it gone corrects it at once."""

MISSED = 1.0
"""Seconds that nothing is believed to be where nothing was."""

REMEMBERED = 20_000
"""Questions whose answers are kept, those asked last."""

BATCH = 256
"""Questions of one round trip."""

SIZED = 10.0
"""Seconds between questions for the size of all entries."""

ROOM = 256 * 2**20
"""Bytes that may wait to be written; an entry that comes while there are more is dropped."""

TOGETHER = 16
"""Entries whose presence is asked for in one round trip."""

TOUCHES = 4096
"""Accesses that wait, at most; the oldest are forgotten first."""

PATIENCE = 0.05
"""Seconds that accesses are gathered."""


class Breaker:
    """Decides if a server may be asked. Any thread may call any method; each change is logged once."""

    def __init__(self, name: str, pause: float = PAUSE, clock: Callable[[], float] = time.monotonic):
        self.name = name
        self.changes = 0
        self._pause = pause
        self._clock = clock
        self._lock = Lock()
        self.error: str | None = None
        self._probe_at = 0.0

    @property
    def on(self) -> bool:
        return self.error is None

    def failed(self, error: Exception) -> None:
        with self._lock:
            was_on, self.error = self.error is None, str(error)
            self._probe_at = self._clock() + self._pause
            self.changes += was_on
        if was_on:
            _log.warning("the shared cache %s is off: %s", self.name, error)

    def worked(self) -> None:
        """A probe was answered: on again. What was asked before it went off and is answered now changes nothing."""
        with self._lock:
            was_on, self.error = self.error is None, None
            self.changes += not was_on
        if not was_on:
            _log.warning("the shared cache %s is on again", self.name)

    def probe_in(self) -> float | None:
        """Seconds until it should be probed; None while it is on."""
        with self._lock:
            return None if self.error is None else max(0.0, self._probe_at - self._clock())


Drop = Literal["full", "off", "large", "failed"]
"""Why an entry was not written: too many waited, the server was off, it exceeds the limit, the server failed."""


@dataclass
class TierCounts:
    """Counters of one process; any thread may count.

    - asked: questions sent to the server; found: entries that answers named
    - reads, read_bytes: entries fetched and found intact; missing: named by an answer, and gone when they were read;
      damaged: not as they were written, and removed
    - writes, written_bytes: entries put; kept: entries that were there already; evicted: entries that left for them
    - failures: calls that the server did not answer; refused: calls that it answered with an error
    """

    numbers: Counter[str] = field(default_factory=Counter)
    dropped: Counter[Drop] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def add(self, **more: int) -> None:
        with self._lock:
            self.numbers.update(more)

    def drop(self, reason: Drop, count: int = 1) -> None:
        with self._lock:
            self.dropped[reason] += count

    def read(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        with self._lock:
            return dict(self.numbers), {reason: self.dropped[reason] for reason in get_args(Drop)}


@dataclass(frozen=True, slots=True)
class _Known:
    records: tuple[Record, ...]
    until: float


class Directory:
    """The entries of the server, as far as a process knows them: answers to the questions of look-ups.

    Other processes add entries all the time, so nothing is listed at start. A look-up gets at once what is known. What
    is not known, or was not there a moment ago, is asked in a thread: all open questions in two round trips, first for
    the keys at a place, then for headers. A question is "k:<key, hex>", or the name of a place (`redis.place_of`).

    Attributes:
        notify: called, in any thread, when answers have come.
        size: entries and bytes on the server, as last heard.
    """

    def __init__(self, remote: RedisServer, identity: bytes, breaker: Breaker, counts: TierCounts):
        self.notify: Callable[[], None] = lambda: None
        self.size = (0, 0)
        self._remote = remote
        self._identity = identity
        self._breaker = breaker
        self._counts = counts
        self._change = Condition()  # guards all below
        self._answers: OrderedDict[str, _Known] = OrderedDict()
        self._open: dict[str, None] = {}
        self._asked: set[str] = set()
        self._closed = False
        self._sized = -SIZED
        self._thread = Thread(target=self._run, name="ragjax-ask", daemon=True)
        self._thread.start()

    def known(self, question: str) -> tuple[Record, ...]:
        """The entries that answer a question, as far as is known; it is asked, if that may have changed.

        While the server is off there are none: to read one would fail.
        """
        with self._change:
            if not self._breaker.on or self._closed:
                return ()
            answer = self._answers.get(question)
            if answer is None or time.monotonic() >= answer.until:
                self._asked.add(question)
                self._open.setdefault(question)
                self._change.notify_all()
            return () if answer is None else answer.records

    def asked(self) -> Collection[str]:
        with self._change:
            asked, self._asked = self._asked, set()
            return asked

    def waits(self, questions: Collection[str]) -> bool:
        with self._change:
            return any(question in self._open for question in questions)

    def forget(self, key: bytes) -> None:
        with self._change:
            for question, answer in list(self._answers.items()):
                if any(record.key == key for record in answer.records):
                    del self._answers[question]

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._open.clear()
            self._change.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (questions := self._next()) is not None:
            try:
                self._step(questions)
            except Exception:  # a defect of ours: nobody is to wait for answers that never come
                _log.exception("questions to the shared cache came to nothing")
            with self._change:
                for question in questions:
                    self._open.pop(question, None)
            self.notify()

    def _next(self) -> Sequence[str] | None:
        with self._change:
            while not self._closed:
                probe = self._breaker.probe_in()
                if probe is not None:
                    self._open.clear()
                if probe == 0 or self._open:
                    return list(self._open)[:BATCH]
                self._change.wait(timeout=1.0 if probe is None else min(probe, 1.0))
            return None

    def _step(self, questions: Sequence[str]) -> None:
        try:
            if not questions:
                self._remote.ping()
                self._breaker.worked()
            found = self._ask(questions)
            if time.monotonic() >= self._sized + SIZED:
                self._sized = time.monotonic()
                self.size = self._remote.size()
        except RefusedError as error:  # the next look is not to ask again at once
            self._counts.add(refused=1)
            if not questions:
                self._breaker.failed(error)
            found = dict.fromkeys(questions, ())
        except Exception as error:  # of another server that took the place of ours, too
            self._counts.add(failures=1)
            self._breaker.failed(error)
            return
        now = time.monotonic()
        with self._change:
            for question in questions:
                records = found[question]
                self._answers[question] = _Known(records, now + (FOUND if records else MISSED))
                self._answers.move_to_end(question)
            while len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)

    def _ask(self, questions: Sequence[str]) -> Mapping[str, tuple[Record, ...]]:
        places = [question for question in questions if not question.startswith("k:")]
        keys = {place: members for place, members in zip(places, self._remote.members(places), strict=True)}
        keys |= {question: [bytes.fromhex(question[2:])] for question in questions if question.startswith("k:")}
        wanted = list(dict.fromkeys(key for some in keys.values() for key in some))
        records = {}
        for key, head in zip(wanted, self._remote.heads(wanted), strict=True):
            if head is not None and (record := self._record(key, head)) is not None:
                records[key] = record
        found = {}
        for question in questions:
            named = [records[key] for key in keys[question] if key in records]
            found[question] = tuple(one for one in named if question.startswith("k:") or place_of(one) == question)
        self._counts.add(asked=len(questions), found=sum(map(len, found.values())))
        return found

    def _record(self, key: bytes, head: bytes) -> Record | None:
        """Parse a header; an entry whose header is not its own is removed."""
        with suppress(Damaged):
            record = record_of(head, self._identity)
            if record.key == key:
                return record
        _log.warning("an entry of the shared cache is not used: its header is damaged")
        self._counts.add(damaged=1)
        self._remote.delete([key])
        return None


def by_key(key: bytes) -> str:
    return f"k:{key.hex()}"


class Outbox:
    """Puts entries behind the caller's back. Any thread may call anything; only `flush` and `close` wait."""

    def __init__(self, remote: RedisServer, identity: bytes, breaker: Breaker, counts: TierCounts, room: int = ROOM):
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
        """True if an entry of so many bytes may wait; a single one may, however large."""
        with self._change:
            return not self._bytes or self._bytes + size <= self._room

    def put(self, parcel: Parcel) -> None:
        with self._change:
            self._parcels.append(parcel)
            self._bytes += parcel.size
            self._change.notify_all()

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._change:
            for key in keys:
                self._touched.pop(key, None)
                self._touched[key] = None
            while len(self._touched) > TOUCHES:
                del self._touched[next(iter(self._touched))]
            self._change.notify_all()

    def flush(self, seconds: float) -> bool:
        with self._change:
            return self._change.wait_for(lambda: not (self._parcels or self._touched or self._busy), seconds)

    def close(self, seconds: float) -> None:
        self.flush(seconds)
        with self._change:
            self._closed = True
            self._drop("failed")
            self._change.notify_all()
        self._thread.join(seconds)

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
        new, kept = list[Parcel](), list[bytes]()
        for parcel, head in zip(parcels, self._remote.heads([parcel.key for parcel in parcels]), strict=True):
            same = False
            with suppress(Damaged):
                same = head is not None and record_of(head, self._identity) == record_of(parcel.head, self._identity)
            if same:
                kept.append(parcel.key)
            else:
                new.append(parcel)
        evicted = self._remote.put(new)
        if keys := [*touched, *kept]:
            self._remote.touch(keys)
        self._counts.add(writes=len(new), written_bytes=sum(p.size for p in new), kept=len(kept), evicted=evicted)
