"""Orders, which choose the waiting request that starts next, and the queue that lets nobody starve.

To add an order: a class that has `pick`, registered by `@ORDERS.register("name")`, in any module that is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from annotated_types import Ge

from ragjax.cache.lookahead import Look
from ragjax.core.registry import Registry

WINDOW = 32  # later requests that may start before a request (RAGCache, section 7.3: a reordering window of 32)
SIGHT = 2 * WINDOW  # waiting requests among which an order chooses, from the oldest on


@dataclass(eq=False, kw_only=True)
class Waiting:
    """A waiting request as an order sees it."""

    total: int = 0  # tokens of its prompt
    look: Callable[[], Look] = Look  # what of it is kept now
    overtaken: int = 0  # requests that came later and started before it

    @property
    def cached(self) -> int:
        return min(self.look().found, self.total - 1)


W = TypeVar("W", bound=Waiting)


class Order(ABC):
    """Chooses who starts next. window: later requests that may start before a request."""

    def __init__(self, window: Annotated[int, Ge(0)] = WINDOW):
        self.window = window

    @abstractmethod
    def pick(self, queue: Sequence[W]) -> W:
        """Choose one of the requests, which come in the order of their arrival."""


ORDERS: Registry[type[Order]] = Registry("order")


def make_order(text: str) -> Order:
    kind, settings = ORDERS.configured(text)
    return kind(**settings)


@ORDERS.register("fcfs")
class FCFS(Order):
    def pick(self, queue: Sequence[W]) -> W:
        return queue[0]


@ORDERS.register("ratio")
class Ratio(Order):
    """Most cached for each token that is computed; of equals the oldest (RAGCache, section 5.2: OrderPriority)."""

    def pick(self, queue: Sequence[W]) -> W:
        return max(queue, key=lambda waiting: (cached := waiting.cached) / (waiting.total - cached))


class Queue(Generic[W]):
    """Waiting requests in the order of their arrival, and who of them starts next.

    Nobody is overtaken more often than the order's window allows: then the oldest starts, whatever the order says.
    Requests that ran before (`put_back`) start before all others. `changes` counts arrivals and departures.
    """

    def __init__(self, order: Order):
        self._order = order
        self._window = order.window
        self._waiting: list[W] = []
        self._returned: list[W] = []
        self.changes = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._returned)

    def __iter__(self) -> Iterator[W]:
        return iter((*self._returned, *self._waiting))

    def add(self, waiting: W) -> None:
        self.changes += 1
        self._waiting.append(waiting)

    def put_back(self, waiting: W) -> None:
        self.changes += 1
        self._returned.insert(0, waiting)

    def remove(self, waiting: W) -> None:
        self.changes += 1
        (self._returned if waiting in self._returned else self._waiting).remove(waiting)

    def start(self, waiting: W) -> None:
        """A request starts; the older ones are overtaken, unless it started before."""
        self.changes += 1
        if waiting in self._returned:
            self._returned.remove(waiting)
            return
        at = self._waiting.index(waiting)
        del self._waiting[at]
        for older in self._waiting[:at]:
            older.overtaken += 1

    def next(self, may: Callable[[W], bool] = lambda waiting: True) -> W | None:
        """The request to start next of those that may; None if there is none.

        One that was overtaken as often as it bears is next even if it may not.
        """
        for waiting in self._returned:
            if may(waiting):
                return waiting
        if self._waiting and self._waiting[0].overtaken >= self._window:
            return self._waiting[0]
        able = [waiting for waiting in self._waiting[:SIGHT] if may(waiting)]
        return self._order.pick(able) if able else None

    def ahead(self, count: int) -> list[W]:
        """The first `count` in the order in which they would start if the cache stayed as it is."""
        found = self._returned[:count]
        left = self._waiting[:SIGHT]
        while left and len(found) < count:
            waiting = left[0] if left[0].overtaken >= self._window else self._order.pick(left)
            left.remove(waiting)
            found.append(waiting)
        return found
