"""What a process knows of the server's entries: answers to the questions of look-ups, asked for in a thread of its own.

Other processes add entries all the time, so nothing is listed at start. A look-up gets at once what is known. What is
not known, or was not there a moment ago, is asked: all open questions in two round trips, first for the keys at a
place, then for headers.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from ragjax.core.tiers import Record
from ragjax.store.entry import Damaged, record_of
from ragjax.store.remote.base import RefusedError, Remote, place_of
from ragjax.store.remote.breaker import Breaker
from ragjax.store.remote.count import Counts

_log = logging.getLogger(__name__)

FOUND = 60.0
"""Seconds that what was found is believed; a load that finds it gone corrects it at once."""

MISSED = 1.0
"""Seconds that nothing is believed to be where nothing was."""

REMEMBERED = 20_000
"""Questions whose answers are kept, those asked last."""

BATCH = 256
"""Questions of one round trip."""

SIZED = 10.0
"""Seconds between questions for the size of all entries."""


@dataclass(frozen=True, slots=True)
class _Answer:
    records: tuple[Record, ...]
    until: float


class Directory:
    """Answers by question: "k:<key, hex>", or the name of a place (`base.place_of`).

    `notify` is called, in any thread, when answers have come. size: entries and bytes on the server, as last heard.
    """

    def __init__(self, remote: Remote, identity: bytes, breaker: Breaker, counts: Counts):
        self.notify: Callable[[], None] = lambda: None
        self.size = (0, 0)
        self._remote = remote
        self._identity = identity
        self._breaker = breaker
        self._counts = counts
        self._change = Condition()  # guards all below
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._open: dict[str, None] = {}
        self._asked: set[str] = set()
        self._closed = False
        self._sized = -SIZED
        self._thread = Thread(target=self._run, name="ragjax-ask", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------- waits for nobody

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
        """Questions that look-ups raised since the last call, also those answered meanwhile."""
        with self._change:
            asked, self._asked = self._asked, set()
            return asked

    def waits(self, questions: Collection[str]) -> bool:
        """Whether one of them is still open."""
        with self._change:
            return any(question in self._open for question in questions)

    def forget(self, key: bytes) -> None:
        """An entry is not there any more."""
        with self._change:
            for question, answer in list(self._answers.items()):
                if any(record.key == key for record in answer.records):
                    del self._answers[question]

    def close(self) -> None:
        """Ask nothing more."""
        with self._change:
            self._closed = True
            self._open.clear()
            self._change.notify_all()
        self._thread.join()

    # --------------------------------------------------------------------------------------- in its thread

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
        """Questions to ask now; none: it is time to probe; None: the end."""
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
            self._measure()
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
                self._answers[question] = _Answer(records, now + (FOUND if records else MISSED))
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
        found = {
            question: self._fitting(question, [records[key] for key in keys[question] if key in records])
            for question in questions
        }
        self._counts.add(asked=len(questions), found=sum(map(len, found.values())))
        return found

    def _record(self, key: bytes, head: bytes) -> Record | None:
        """What a header says; an entry whose header is not its own is removed."""
        try:
            record = record_of(head, self._identity)
            if record.key == key:
                return record
        except Damaged:
            pass
        _log.warning("an entry of the shared cache is not used: its header is damaged")
        self._counts.add(damaged=1)
        self._remote.delete([key])
        return None

    def _fitting(self, question: str, records: Sequence[Record]) -> tuple[Record, ...]:
        """Those that lie where they were looked for."""
        return tuple(record for record in records if question.startswith("k:") or place_of(record) == question)

    def _measure(self) -> None:
        if time.monotonic() >= self._sized + SIZED:
            self._sized = time.monotonic()
            self.size = self._remote.size()


def by_key(key: bytes) -> str:
    """The question for the entry with a key."""
    return f"k:{key.hex()}"
