"""Makes programs in a thread of its own while others run: those that requests wait for first, then what is planned."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from ragjax.runner.device import give_back
from ragjax.runner.programs import Name, Programs

log = logging.getLogger(__name__)


class Supply:
    """The thread, which ends when all is made; `notify` is called in it after each program. Any thread may call it."""

    def __init__(self, programs: Programs, planned: Iterable[Name]):
        self.notify: Callable[[], object] = lambda: None
        self._programs = programs
        self._asked = deque[Name]()
        self._planned = deque(dict.fromkeys(planned))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._start()

    @property
    def left(self) -> int:
        with self._lock:
            return len({name for name in (*self._asked, *self._planned) if not self._programs.settled(name)})

    def lacks(self, names: Iterable[Name]) -> bool:
        missing = [name for name in names if not self._programs.settled(name)]
        if not missing or self._closed:
            return False
        with self._lock:
            self._asked.extend(name for name in missing if name not in self._asked)
        self._start()
        return True

    def close(self) -> None:
        """Make no more. The program that is being made is not waited for, but at the end of the process."""
        self._closed = True

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed and (self._asked or self._planned):
                self._thread = threading.Thread(target=self._run, name="ragjax-programs", daemon=True)
                atexit.register(self._finish)  # XLA does not bear that the interpreter ends while it compiles
                self._thread.start()

    def _finish(self) -> None:
        self.close()
        if (thread := self._thread) is not None:
            thread.join()

    def _next(self) -> Name | None:
        with self._lock:
            for names in (self._asked, self._planned):
                while names and self._programs.settled(names[0]):
                    names.popleft()
                if names and not self._closed:
                    return names[0]
            atexit.unregister(self._finish)
            self._thread = None
            return None

    def _run(self) -> None:
        while (name := self._next()) is not None:
            self._programs.try_make(name)
            self.notify()
        give_back()
        self.notify()
