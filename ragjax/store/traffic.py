"""What moved between the tiers so far: jobs, bytes, seconds, failures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal, get_args

Direction = Literal["device_to_host", "host_to_device", "host_to_disk", "disk_to_host"]


@dataclass
class Traffic:
    """What went one way so far. bytes: moved, by jobs that succeeded; seconds: workers spent on it."""

    jobs: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    retries: int = 0


class TrafficMeter:
    """Traffic by direction. Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._total: dict[Direction, Traffic] = {direction: Traffic() for direction in get_args(Direction)}

    def read(self) -> dict[Direction, Traffic]:
        """A copy of what was counted."""
        with self._lock:
            return {direction: replace(traffic) for direction, traffic in self._total.items()}

    def add(self, direction: Direction, more: Traffic) -> None:
        """Count more."""
        with self._lock:
            total = self._total[direction]
            for name, value in vars(more).items():
                setattr(total, name, getattr(total, name) + value)

    @contextmanager
    def measure(self, direction: Direction) -> Iterator[Traffic]:
        """Count what happens within as one job; its bytes and retries are those set in what this yields."""
        start = time.monotonic()
        moved = Traffic(jobs=1)
        try:
            yield moved
        except BaseException:
            moved.jobs, moved.bytes, moved.failures = 0, 0, 1
            raise
        finally:
            moved.seconds = time.monotonic() - start
            self.add(direction, moved)
