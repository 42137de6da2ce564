"""Work in steps: generators that yield nothing, between which others get their turn."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def finish(steps: Generator[None, None, T]) -> T:
    """What comes of all steps, taken at once."""
    kept = _Kept(steps)
    for _ in kept:
        pass
    return kept.made


def checked(steps: Generator[None, None, T], check: Callable[[], None]) -> Generator[None, None, T]:
    """The same steps, with a check before each but the first; an error of it ends them."""
    kept = _Kept(steps)
    for _ in kept:
        yield
        check()
    return kept.made


def at_once(work: Callable[P, T]) -> Callable[P, Generator[None, None, T]]:
    """The same work, as steps of which there is one."""

    def steps(*args: P.args, **options: P.kwargs) -> Generator[None, None, T]:
        yield from ()
        return work(*args, **options)

    return steps


class _Kept(Generic[T]):
    """Iterates over steps, and keeps what comes of them."""

    made: T

    def __init__(self, steps: Generator[None, None, T]):
        self._steps = steps

    def __iter__(self) -> Iterator[None]:
        self.made = yield from self._steps
