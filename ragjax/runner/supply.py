"""Makes programs in threads of its own while others run: what is planned, and beside it what requests wait for."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from ragjax.runner.device import give_back
from ragjax.runner.programs import Name, Programs

log = logging.getLogger(__name__)


THREADS = 2
"""The second makes what requests wait for, while the first one's program, which they do not need, is finished."""


PATIENCE = 2.0
"""Seconds that the next planned program waits for requests to end: it takes a core of theirs for about a second."""


class Supply:
    """The threads, which end when all is made. Any thread may use it.

    `notify` is called in them after each program. While `busy` says that requests run, what is planned waits.
    """

    def __init__(self, programs: Programs, planned: Iterable[Name]):
        self.notify: Callable[[], object] = lambda: None
        self.busy: Callable[[], bool] = lambda: False
        self._programs = programs
        self._asked = deque[Name]()
        self._planned = deque(dict.fromkeys(planned))
        self._making: set[Name] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._start()

    @property
    def left(self) -> int:
        with self._lock:
            names = {*self._asked, *self._planned, *self._making}
            return len({name for name in names if not self._programs.settled(name)})

    def lacks(self, names: Iterable[Name]) -> bool:
        missing = [name for name in names if not self._programs.settled(name)]
        if not missing or self._closed:
            return False
        with self._lock:
            self._asked.extend(name for name in missing if name not in self._asked)
        self._start()
        return True

    def close(self) -> None:
        """Make no more. Programs that are being made are not waited for, but at the end of the process."""
        self._closed = True

    def _start(self) -> None:
        with self._lock:
            waiting = self._asked if self._threads else (*self._asked, *self._planned)
            if waiting and not self._closed and len(self._threads) < THREADS:
                if not self._threads:
                    atexit.register(self._finish)  # XLA does not bear that the interpreter ends while it compiles
                self._threads.append(threading.Thread(target=self._run, name="ragjax-programs", daemon=True))
                self._threads[-1].start()

    def _finish(self) -> None:
        self.close()
        for thread in tuple(self._threads):
            thread.join()

    def _next(self) -> Name | None:
        with self._lock:
            first = self._threads[0] is threading.current_thread()
            for names in (self._asked, self._planned)[: 1 + first]:
                while names and not self._closed:
                    name = names.popleft()
                    if name not in self._making and not self._programs.settled(name):
                        self._making.add(name)
                        return name
            self._threads.remove(threading.current_thread())
            if not self._threads:
                atexit.unregister(self._finish)
            return None

    def _run(self) -> None:
        while (name := self._next()) is not None:
            self._programs.try_make(name)
            with self._lock:
                self._making.remove(name)
            self.notify()
            until = time.monotonic() + PATIENCE
            while self.busy() and not self._asked and not self._closed and time.monotonic() < until:
                time.sleep(0.01)
        give_back()
        self.notify()
