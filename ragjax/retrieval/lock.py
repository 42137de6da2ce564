"""A lock of which others get their share while one thread takes it again and again."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """A lock that no thread takes again while another one waits for it; `threading.Lock` mostly goes to the former."""

    def __init__(self) -> None:
        self._door = threading.Lock()  # held by the one that is next
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
