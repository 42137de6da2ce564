"""Work in one thread that another thread stops."""

from __future__ import annotations

from concurrent.futures import CancelledError


class Cancellation:
    """A flag that ends work. Loops over what a client sent call `check` at each step."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def check(self) -> None:
        if self._cancelled:
            raise CancelledError
