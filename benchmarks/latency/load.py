"""Memory of a process, and how busy others are while it works."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import psutil


def peak_mb(pid: int) -> float | None:
    """Most memory a process had resident since its start or the last `reset_peak`, in 1e6 bytes (Linux)."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024 / 1e6


def reset_peak(pid: int) -> None:
    """Begin a new peak, where the system allows it; else peaks include the start."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        print("peak memory includes the start: this system does not let it be reset", file=sys.stderr)


def resident_mb(pid: int) -> float:
    """Memory a process has resident now, in 1e6 bytes."""
    return float(psutil.Process(pid).memory_info().rss / 1e6)


class OtherLoad:
    """Measures how many cores other processes keep busy while one, and those that it started, work."""

    def __init__(self, pid: int):
        """Begin."""
        self._process = psutil.Process(pid)
        self._began, self._busy, self._own = time.perf_counter(), self._all_busy(), self._own_busy()

    def so_far(self) -> float:
        """Mean number of cores since the beginning."""
        seconds = time.perf_counter() - self._began
        others = self._all_busy() - self._busy - self._own_busy() + self._own
        return round(max(0.0, others / seconds), 3)

    def _all_busy(self) -> float:
        times = psutil.cpu_times()
        return float(times.user + times.nice + times.system)

    def _own_busy(self) -> float:
        busy = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                times = process.cpu_times()
                busy += times.user + times.system
        return busy
