"""One engine that serves requests whose prompts were made elsewhere."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from ragjax.cluster.transport import Begun, Call, Item, Status
from ragjax.core import ClosedError, Divergence, EngineOptions, Inventory, RagjaxError
from ragjax.engine import Engine
from ragjax.engine.card import Card

_log = logging.getLogger(__name__)

SHADOWS = 256
"""Replays that are kept until the fleet asks; older ones are dropped."""


class Replica:
    """An engine among others. name, rank: as `Status` has them."""

    def __init__(self, engine: Engine, name: str, rank: int):
        self.name = name
        self.rank = rank
        self._engine = engine
        self._shadows: deque[tuple[str, Divergence]] = deque(maxlen=SHADOWS)
        engine.observe_shadows(lambda strategy, seen: self._shadows.append((strategy, seen)))

    async def serve(self, call: Call) -> AsyncGenerator[Item, None]:
        """The replica, then the engine's events; an error that a client is to know of comes as the last item."""
        yield Begun(self.name)
        try:
            async with aclosing(self._engine.submit_composed(call.made)) as events:
                async for event in events:
                    yield event
        except RagjaxError as error:
            yield error

    def card(self) -> Card:
        """Of its engine."""
        return self._engine.card()

    def status(self) -> Status:
        """As of now; the replays are told once."""
        shadows = tuple(self._shadows.popleft() for _ in range(len(self._shadows)))
        return Status(self.name, self.rank, self._engine.stats(), self._engine.default_setting, shadows)

    def inventory(self, tenant: str) -> tuple[int, Inventory]:
        """Its rank, and what its cache holds of a tenant's KV."""
        return self.rank, self._engine.inventory(tenant)

    def check(self) -> None:
        """Whether it can serve.

        Raises:
            ClosedError: if its engine has ended.
        """
        if self._engine.closed:
            raise ClosedError("the engine of this replica has ended")

    def close(self) -> None:
        """End its requests, and write what it keeps on disk."""
        self._engine.close()


def options_of(options: EngineOptions, rank: int) -> EngineOptions:
    """What a replica of this rank is loaded with: no knowledge, and a folder of its own on disk."""
    disk = options.storage.disk
    own = None if disk is None else Path(disk) / f"replica-{rank}"
    return replace(
        options,
        knowledge=None,
        graph=None,
        index_dir=None,
        graph_dir=None,
        storage=replace(options.storage, disk=own),
        progress=False,
    )
