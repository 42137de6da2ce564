"""Work in the caller's thread ends soon after its request is cancelled."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ragjax.core import Document, Graph, Message, Rag, Request
from ragjax.core.cancellation import Cancellation
from ragjax.engine import Engine
from tests.support.audit import audit_engine

WORDS = "some words of a long passage "
ASKED = (Message("user", "Which?"),)
PATHS = tuple(("a", f"r{i}", "b") for i in range(20))
REQUESTS = {
    "messages": Request((Message("user", WORDS), Message("assistant", WORDS)) * 10 + ASKED),
    "prompt": Request(prompt=WORDS * 20),
    "documents": Request(ASKED, rag=Rag(documents=tuple(Document(f"d{i}", WORDS) for i in range(10)))),
    "long document": Request(ASKED, rag=Rag(documents=(Document("d", WORDS * 20),))),
    "relation paths": Request(
        ASKED, rag=Rag(graph=Graph(relation_paths=tuple(("a", f"r{i}", "b") for i in range(20))))
    ),
}


class Gate:
    """Holds the work at its first check until the gate is opened, and counts the checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.checks = 0
        self.reached, self.open = threading.Event(), threading.Event()
        original = Cancellation.check

        def check(cancellation: Cancellation) -> None:
            self.checks += 1
            self.reached.set()
            assert self.open.wait(20)
            original(cancellation)

        monkeypatch.setattr(Cancellation, "check", check)


async def leave(engine: Engine, request: Request, gate: Gate) -> None:
    """Cancel a request at its first check, and wait for the thread to end."""
    first: asyncio.Task[Any] = asyncio.create_task(anext(engine.submit(request)))
    assert await asyncio.to_thread(gate.reached.wait, 20)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.open.set()
    engine._preparers.shutdown()
    engine._preparers = ThreadPoolExecutor()


@pytest.mark.parametrize("name", REQUESTS)
def test_work_ends_when_the_client_leaves(name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    asyncio.run(leave(engine, REQUESTS[name], gate))
    assert gate.checks == 1, "it goes on after the first check"
    audit_engine(engine)


@pytest.mark.parametrize("name", REQUESTS)
def test_work_is_checked_all_along(name: str, engine: Engine) -> None:
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1

    engine._preparation.checked(check).state(REQUESTS[name], lambda event: None, 0.0)
    assert checks >= (1 if name == "prompt" else 20), "a prompt is one text, and encoded at once if it may fit"
