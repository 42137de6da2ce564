"""The traffic of a process with the server of the shared tier: look-ups and writes, each in a thread of its own."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, get_args

from ragjax.core.tiers import Record
from ragjax.store.entry import Damaged, record_of
from ragjax.store.redis import Parcel, RedisServer, RefusedError, ServerRoom, place_of

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
"""Seconds between questions for the room of the server."""

WAITING_BYTES = 256 * 2**20
"""Bytes that may wait to be written; an entry that comes while there are more is dropped."""

TOGETHER = 16
"""Entries whose presence is asked for in one round trip."""

Drop = Literal["full", "off", "large", "failed"]
"""Why an entry was not written: too many waited, the server was off, it exceeds the limit, the server failed."""


@dataclass(eq=False)
class Link:
    """Decides if a server may be asked, and counts. Any thread may call any method; each change is logged once.

    - asked: questions sent to the server; found: entries that answers named
    - reads, read_bytes: entries fetched and found intact; missing: named by an answer, and gone when they were read;
      damaged: not as they were written, and removed
    - writes, written_bytes: entries put; kept: entries that were there already
    - failures: calls that the server did not answer; refused: calls that it answered with an error
    - changes: how often it went off or came back

    pause: seconds that it is left alone after it failed. error: why it is off; None: it is on.
    """

    name: str
    pause: float = PAUSE
    error: str | None = None
    _probe_at: float = 0.0
    _numbers: Counter[str] = field(default_factory=Counter)
    _dropped: Counter[Drop] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    @property
    def on(self) -> bool:
        return self.error is None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call of the server: one that it does not answer turns it off."""
        try:
            yield
        except RefusedError:
            self.count(refused=1)
            raise
        except Exception as error:  # of another server that took the place of ours, too
            self.count(failures=1)
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        with self._lock:
            was_on, self.error = self.on, str(error)
            self._probe_at = time.monotonic() + self.pause
            self._numbers["changes"] += was_on
        if was_on:
            _log.warning("the shared cache %s is off: %s", self.name, error)

    def recover(self) -> None:
        with self._lock:
            was_on, self.error = self.on, None
            self._numbers["changes"] += not was_on
        if not was_on:
            _log.warning("the shared cache %s is on again", self.name)

    def takes_probe(self) -> bool:
        """True, once in each pause, while it is off: the caller is to see whether the server is back."""
        with self._lock:
            due = not self.on and time.monotonic() >= self._probe_at
            if due:
                self._probe_at = time.monotonic() + self.pause
            return due

    def count(self, **more: int) -> None:
        with self._lock:
            self._numbers.update(more)

    def drop(self, reason: Drop, count: int = 1) -> None:
        with self._lock:
            self._dropped[reason] += count

    def counts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        with self._lock:
            return dict(self._numbers), {reason: self._dropped[reason] for reason in get_args(Drop)}


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
        room: of the server, as last heard.
    """

    def __init__(self, remote: RedisServer, identity: bytes, link: Link):
        self.notify: Callable[[], None] = lambda: None
        self.room = ServerRoom()
        self._remote = remote
        self._identity = identity
        self._link = link
        self._lock = Lock()  # guards all below
        self._answers: OrderedDict[str, _Known] = OrderedDict()
        self._open: dict[str, None] = {}
        self._asked: set[str] = set()
        self._sized = -SIZED
        self._work: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "ragjax-ask")

    def known(self, question: str) -> tuple[Record, ...]:
        """The entries that answer a question, as far as is known; it is asked, if that may have changed.

        While the server is off there are none: to read one would fail.
        """
        if not self.is_on():
            return ()
        with self._lock:
            answer = self._answers.get(question)
            if self._work is not None and (answer is None or time.monotonic() >= answer.until):
                self._asked.add(question)
                if question not in self._open:
                    self._open[question] = None
                    self._work.submit(self._answer)
            return () if answer is None else answer.records

    def is_on(self) -> bool:
        """True if the server is used; now and then a thread sees whether one that is off is back."""
        with self._lock:
            if self._work is not None and self._link.takes_probe():
                self._work.submit(self._probe)
        return self._link.on

    def asked(self) -> Collection[str]:
        with self._lock:
            asked, self._asked = self._asked, set()
            return asked

    def waits(self, questions: Collection[str]) -> bool:
        with self._lock:
            return any(question in self._open for question in questions)

    def forget(self, key: bytes) -> None:
        with self._lock:
            for question, answer in list(self._answers.items()):
                if any(record.key == key for record in answer.records):
                    del self._answers[question]

    def close(self) -> None:
        with self._lock:
            work, self._work = self._work, None
            self._open.clear()
        if work is not None:
            work.shutdown(cancel_futures=True)

    def _probe(self) -> None:
        with suppress(Exception):
            with self._link.call():
                self._remote.ping()
            self._link.recover()

    def _answer(self) -> None:
        """Answer the open questions; those that came since are answered with the next one."""
        with self._lock:
            questions = list(self._open)[:BATCH]
        if not questions:
            return
        found: Mapping[str, tuple[Record, ...]] | None = None
        try:
            if self._link.on:
                with self._link.call():
                    found = self._ask(questions)
                    self._look_round()
        except RefusedError:  # the next look is not to ask again at once
            found = found or dict.fromkeys(questions, ())
        except Exception:
            _log.debug("questions to the shared cache came to nothing", exc_info=True)
        now = time.monotonic()
        with self._lock:
            for question in questions:
                self._open.pop(question, None)
            for question, records in (found or {}).items():
                self._answers[question] = _Known(records, now + (FOUND if records else MISSED))
                self._answers.move_to_end(question)
            while len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        self.notify()

    def _look_round(self) -> None:
        if time.monotonic() < self._sized + SIZED:
            return
        first, self._sized = self._sized < 0, time.monotonic()
        self.room = self._remote.room()
        if first and not self.room.max_bytes:
            _log.warning("the shared cache %s has no maxmemory: nothing leaves it before it expires", self._link.name)

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
        self._link.count(asked=len(questions), found=sum(map(len, found.values())))
        return found

    def _record(self, key: bytes, head: bytes) -> Record | None:
        """Parse a header; an entry whose header is not its own is removed."""
        with suppress(Damaged):
            record = record_of(head, self._identity)
            if record.key == key:
                return record
        _log.warning("an entry of the shared cache is not used: its header is damaged")
        self._link.count(damaged=1)
        self._remote.delete(key)
        return None


def by_key(key: bytes) -> str:
    return f"k:{key.hex()}"


class Outbox:
    """Puts entries behind the caller's back. Any thread may call anything; only `flush` and `close` wait."""

    def __init__(self, remote: RedisServer, identity: bytes, link: Link):
        self._remote = remote
        self._identity = identity
        self._link = link
        self._lock = Lock()  # guards the two below
        self._parcels: deque[Parcel] = deque()
        self._bytes = 0
        self._work = ThreadPoolExecutor(1, "ragjax-put")

    def has_room(self, size: int) -> bool:
        """True if an entry of so many bytes may wait; a single one may, however large."""
        with self._lock:
            return not self._bytes or self._bytes + size <= WAITING_BYTES

    def put(self, parcel: Parcel) -> None:
        with self._lock:
            self._parcels.append(parcel)
            self._bytes += parcel.size
        self._work.submit(self._send)

    def flush(self, seconds: float) -> bool:
        return not wait([self._work.submit(lambda: None)], seconds).not_done

    def close(self, seconds: float) -> None:
        self.flush(seconds)
        with self._lock:
            self._link.drop("failed", len(self._parcels))
            self._parcels.clear()
        self._work.shutdown(wait=False, cancel_futures=True)

    def _send(self) -> None:
        """Write what waits; nothing is left for the call of an entry that went with one before it."""
        with self._lock:
            parcels = [self._parcels.popleft() for _ in range(min(TOGETHER, len(self._parcels)))]
        try:
            if self._link.on:
                with self._link.call():
                    self._write(parcels)
            else:
                self._link.drop("off", len(parcels))
        except Exception as error:
            self._link.drop("failed", len(parcels))
            if isinstance(error, RefusedError):
                _log.warning("the shared cache refuses to keep entries: %s", error)
        with self._lock:
            self._bytes -= sum(parcel.size for parcel in parcels)

    def _write(self, parcels: Sequence[Parcel]) -> None:
        """Put what is not there; two servers may well compute the same."""
        new, kept = list[Parcel](), list[Parcel]()
        for parcel, head in zip(parcels, self._remote.heads([parcel.key for parcel in parcels]), strict=True):
            same = False
            with suppress(Damaged):
                same = head is not None and record_of(head, self._identity) == record_of(parcel.head, self._identity)
            (kept if same else new).append(parcel)
        self._remote.put(new)
        self._remote.renew(kept)
        self._link.count(writes=len(new), written_bytes=sum(p.size for p in new), kept=len(kept))
