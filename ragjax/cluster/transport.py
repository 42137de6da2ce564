"""The messages between a fleet and its replicas, and the interface that carries them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ragjax.core import Divergence, Event, Inventory, RagjaxError, Request, StepLimits
from ragjax.engine.stats import Stats
from ragjax.quality.report import Setting

Choose = Callable[[Collection[str]], Sequence[str]]
"""Names of replicas that run, to the same in the order in which they are to be tried."""


@dataclass(frozen=True)
class Card:
    """The model, as every replica has it."""

    model_name: str
    context_length: int  # most tokens of a prompt and its answer
    identity: bytes  # digest of what KV depends on besides tokens
    dtype: str  # of weights and KV
    strategies: tuple[str, ...]
    limits: StepLimits  # what one step can read


@dataclass
class Call:
    """A request on its way to a replica; its prompt is made. choose: which replica; it stays with the fleet."""

    request: Request
    choose: Choose | None

    def __reduce__(self) -> tuple[Any, ...]:
        return Call, (self.request, None)


@dataclass(frozen=True)
class Begun:
    """A replica of this name has the request."""

    replica: str


Item = Begun | Event | RagjaxError
"""What comes back: the replica, events, and after them an error if there was one."""


@dataclass(frozen=True)
class Status:
    """Periodic report of a replica.

    name: of this process; one that takes its place has another. rank: from 0 on, which its successor has too.
    pick: the setting that `auto` picks. fault: what its answers say of one that was labelled exact and is not; None: it
    found none. shadows: strategies and divergences of replays since the last.
    """

    name: str
    rank: int
    stats: Stats
    pick: Setting
    fault: str | None = None
    shadows: tuple[tuple[str, Divergence], ...] = ()


class Transport(Protocol):
    """Reaches the replicas that run. All but `serve` may wait, and are called by threads."""

    def serve(self, call: Call) -> AsyncGenerator[Item, None]:
        """Serve a request at one replica; closing the iterator cancels it there.

        Raises:
            LostError: if the replica went away.
        """
        ...

    def card(self) -> Card:
        """Description of the model by any replica; waits until one runs."""
        ...

    def statuses(self) -> Sequence[Status]:
        """Current status of each replica."""
        ...

    def inventories(self, tenant: str) -> Mapping[int, Inventory]:
        """KV of a tenant in each replica's cache, by rank."""
        ...

    def wanted(self) -> int:
        """The number of replicas there should be."""
        ...

    def close(self) -> None:
        """Let go of them."""
        ...
