"""The pace of an engine: tests that need requests in some state hold its thread there, or have requests rest."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from ragjax.core import Answer, Prompt
from ragjax.engine import Engine
from ragjax.runner.runner import Runner
from ragjax.schedule.state import RequestState

LIMIT = 60.0
"""Seconds after which something never happens, on the slowest machine."""


def until(condition: Callable[[], object]) -> None:
    """Wait until something is true that stays true."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.001)


class Hold:
    """Within it the engine's thread stands still between two steps; what is begun there comes together.

    when: looked at by the engine's thread from now on, before each step; it stands still at the first time that it is
    true.
    """

    def __init__(self, engine: Engine, when: Callable[[], object] = lambda: True):
        self._reached, self._over = threading.Event(), threading.Event()
        loop = engine._loop
        receive = loop._receive

        def held() -> bool:
            if not self._reached.is_set() and when():
                self._reached.set()
                self._over.wait(2 * LIMIT)
            return receive()

        loop._receive = held  # type: ignore[method-assign]
        loop.wake()

    def __enter__(self) -> None:
        assert self._reached.wait(LIMIT), "it never happens"

    def __exit__(self, *_: object) -> None:
        self._over.set()


def failing(patch: pytest.MonkeyPatch, owner: object, name: str, *at: int, lose: bool = False) -> itertools.count[int]:
    """Calls of this name fail that have these numbers, from 1; returns the number of the next one.

    lose: the device's memory goes with it, until the runner makes it anew.
    """
    calls, call, reset, lost = itertools.count(1), getattr(owner, name), Runner.reset, list[bool]()

    def counted(*given: Any, **named: Any) -> Any:
        if next(calls) in at:
            lost.append(lose)
            raise RuntimeError("the device is busy")
        return call(*given, **named)

    def restored(runner: Runner) -> None:
        lost.clear()
        reset(runner)

    patch.setattr(owner, name, counted)
    if lose:
        patch.setattr(Runner, "lost", property(lambda _: bool(lost)))
        patch.setattr(Runner, "reset", restored)
    return calls


@contextmanager
def resting(engine: Engine, which: Callable[[RequestState], object] = lambda state: True) -> Iterator[None]:
    """Within it requests have no steps behind their first token: they run until it is over, or they are cancelled."""
    over = threading.Event()
    _rest(engine, lambda state: not over.is_set() and which(state))
    try:
        yield
    finally:
        over.set()
        engine._loop.wake()


def _rest(engine: Engine, which: Callable[[RequestState], object]) -> None:
    scheduler = engine._loop._scheduler
    active = scheduler._active
    scheduler._active = lambda: [one for one in active() if not (one.decoding and which(one))]  # type: ignore[method-assign]


def lasting(engine: Engine, prompt: Prompt, **options: Any) -> Future[Answer]:
    """A request that runs until it is cancelled, at rest behind its first token. It runs when this returns."""
    found: list[RequestState] = []
    _rest(engine, lambda state: state in found)
    enqueue = engine._loop.enqueue

    def noted(state: RequestState, place: object = None) -> None:
        found.append(state)
        enqueue(state, place)

    engine._loop.enqueue = noted  # type: ignore[method-assign]
    try:
        begun = engine.begin_prompt(prompt, **options)
    finally:
        engine._loop.enqueue = enqueue  # type: ignore[method-assign]
    until(lambda: found[0].decoding)
    return begun
