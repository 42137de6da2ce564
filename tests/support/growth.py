"""How the work of a function grows, in calls: repeatable, unlike seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def calls(function: Callable[[], object]) -> int:
    """Number of Python and C functions that a call of `function` calls; steps of a generator count."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what other tests left would be counted
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count


def assert_linear(cost: Callable[[int], int], size: int, slack: float = 1.25) -> None:
    """Four times the input takes about four times the work."""
    once, four = cost(size), cost(4 * size)
    assert four <= 4 * once * slack, f"{once} operations for {size}, {four} for {4 * size}"


class Scanned(str):
    """A text that counts the characters that are compared, searched or copied."""

    def __init__(self, text: str):
        self.scanned = 0

    def startswith(self, prefix: str, start: int = 0) -> bool:  # type: ignore[override]
        """As `str.startswith`."""
        self.scanned += len(prefix)
        return super().startswith(prefix, start)

    def find(self, part: str, start: int) -> int:  # type: ignore[override]
        """As `str.find`."""
        found = super().find(part, start)
        self.scanned += (len(self) if found < 0 else found + len(part)) - start
        return found

    def __getitem__(self, key: slice) -> str:  # type: ignore[override]
        """As `str.__getitem__`."""
        part = super().__getitem__(key)
        self.scanned += len(part)
        return part
