"""Work in steps: generators that yield nothing, between which others get their turn."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")


def finish(steps: Generator[None, None, T]) -> T:
    """What comes of all steps, taken at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made


def checked(steps: Generator[None, None, T], check: Callable[[], None]) -> Generator[None, None, T]:
    """The same steps, with a check before each but the first; an error of it ends them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made
        yield
        check()
