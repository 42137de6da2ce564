"""Turns at what serves one request at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """Requests of a tenant have their turn one after another, and the tenants take turns. For one event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # of each tenant, the next first

    def waiting(self, tenant: str) -> int:
        """Requests of a tenant that wait for their turn."""
        return len(self._waiting.get(tenant, ()))

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None, None]:
        """Wait for a turn, and have it."""
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    def close(self) -> None:
        """Cancel what waits."""
        for waiting in self._waiting.values():
            for turn in waiting:
                turn.cancel()
        self._waiting.clear()

    async def _wait(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            else:  # it was its turn already
                self._pass_on()
            raise

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        """A request waits no longer."""
        waiting = self._waiting.get(tenant)
        if waiting is not None and turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[tenant]

    def _pass_on(self) -> None:
        """Give the turn to the next request, whose tenant is then behind the others."""
        self._taken = False
        while self._waiting and not self._taken:
            tenant, waiting = next(iter(self._waiting.items()))
            turn = waiting.popleft()
            del self._waiting[tenant]
            if waiting:
                self._waiting[tenant] = waiting
            if not turn.cancelled():
                turn.set_result(None)
                self._taken = True
