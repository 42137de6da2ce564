"""Many engines that serve as one: one front owns the knowledge, and each request goes to the replica that suits it.

The front is here because documents are: what is added or deleted is so for all replicas at once, and where a request
goes is decided by the passages that it gets. A replica gets the finished prompt.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nlargest
from typing import TypeVar

from ragjax import core
from ragjax.cluster.replica import Begun, Call, Card, Status, Transport
from ragjax.cluster.router import ROUTERS, Need, Router
from ragjax.core.cancellation import Cancellation
from ragjax.core.overload import Overload
from ragjax.engine import Engine
from ragjax.engine.build import contract_of, strategies_of
from ragjax.engine.compose import Composer
from ragjax.engine.front import Front
from ragjax.engine.knowledge import Knowledge, check_documents
from ragjax.engine.stats import Stats
from ragjax.models.hub import resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.quality.contract import AUTO, FULL
from ragjax.quality.report import Setting

_log = logging.getLogger(__name__)

PERIOD = 1.0
"""Seconds between two looks at the replicas."""

ROUTING = ("routed_total", "routing_seconds_total")
"""Figures of a replica that the fleet counts: requests sent to it, and the seconds that choosing it took."""

RESENDS = 8
"""Times that a request is sent to another replica because one was lost."""

LATEST = 50
"""Departures and requests that are shown of all replicas together."""

LARGEST = 200
"""Nodes that are shown of all replicas together, as many as of one."""

T = TypeVar("T")


@dataclass
class _Attempts:
    lost: int = 0
    losers: set[str] = field(default_factory=set)  # replicas that lost it
    ended: bool = False  # nobody waits for it any more, so no load is to count it
    routing_s: float = 0.0  # seconds that choosing a replica took since one had the request
    counted: str = ""  # the replica whose load it counts in, from when it is chosen on
    refusals: dict[str, core.OverloadError] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()  # replicas that ran at the last attempt

    def lose(self, error: core.RagjaxError) -> None:
        """A replica went away, and has told the client nothing yet."""
        self.losers.add(self.counted)
        self.lost += 1
        if self.lost > RESENDS:
            raise core.LostError(
                f"{self.lost} replicas in a row were lost with the request; try again later"
            ) from error

    def refuse(self, replica: str, error: core.OverloadError) -> None:
        """A replica's queue is full; an error once those of all are."""
        self.refusals[replica] = error
        if self.seen <= self.refusals.keys():
            raise min(self.refusals.values(), key=lambda one: one.retry_after or 0.0)


class Preparers:
    """Prepares requests, and refuses those that are too many at a time. Nothing else takes its threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(thread_name_prefix="ragjax-prepare")
        self._lock = threading.Lock()
        self._overload = Overload()

    async def run(self, work: Callable[[], T], most: int) -> T:
        """Run the work of one request in a thread. most: requests that may be here, this one included."""
        with self._lock:
            now = time.perf_counter()
            if self._overload.present >= most:
                message = f"{self._overload.present} requests are being prepared; try again later"
                raise core.OverloadError(message, retry_after=self._overload.retry_after(now))
            self._overload.begin(now)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            with self._lock:
                self._overload.end(time.perf_counter())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Fleet(Front):
    """Serves as an engine does: it has the members of `Engine` that the HTTP server uses. Its close ends the transport.

    Requests are answered from `knowledge`, which the replicas do not have. max_queue: requests that may wait at each.
    """

    def __init__(
        self, card: Card, knowledge: Knowledge, composer: Composer, transport: Transport, router: Router, max_queue: int
    ):
        self.model_name = card.model_name
        self.context_length = card.context_length
        self.knowledge = knowledge
        self.composer = composer
        self._transport = transport
        self._max_queue = max_queue
        self._router = router
        self._loads: Counter[str] = Counter()
        self._lock = threading.Lock()  # over _loads, _routing and the router
        self._routing: dict[str, tuple[int, float]] = {}  # requests sent to a replica, seconds of choosing it
        self._observer: Callable[[str, core.Divergence], None] | None = None
        self._statuses: Sequence[Status] = ()
        self._count = core.Replicas(0, 0)
        self._fault: str | None = None  # what a replica told of one; it holds for all of them, also for new ones
        self._closed = threading.Event()
        self._preparers = Preparers()
        self.look()
        self._thread = threading.Thread(target=self._watch, name="ragjax-fleet", daemon=True)
        self._thread.start()

    @property
    def default_setting(self) -> Setting:
        return FULL if self._fault is not None else super().default_setting

    @property
    def strategy_summary(self) -> str:
        return str(FULL) if self._fault is not None else super().strategy_summary

    def observe_shadows(self, observer: Callable[[str, core.Divergence], None]) -> None:
        self._observer = observer

    def figures(self) -> dict[str, Stats]:
        """Counters and gauges of each replica, by its rank, and of the requests that were sent to it."""
        return {
            str(one.rank): {**one.stats, **dict(zip(ROUTING, self._routing.get(one.name, (0, 0.0)), strict=True))}
            for one in self._statuses
        }

    def replicas(self) -> core.Replicas:
        return self._count

    @property
    def shares(self) -> bool | None:
        """True if the shared cache answered all replicas at the last look; None without one."""
        up = [one.stats["remote_up"] for one in self._statuses if "remote_up" in one.stats]
        return all(up) if up else None

    def preprocessed(self, tenants: bool = True) -> None:
        """Replicas preprocess nothing: the documents are here, and the KV is with them."""

    @property
    def programs_left(self) -> int:
        found = (one.stats.get("programs_left", 0.0) for one in self._statuses)
        return int(sum(left for left in found if isinstance(left, float | int)))

    def inventory(self, tenant: str = "") -> core.Inventory:
        return merged(self._transport.inventories(tenant))

    def look(self) -> None:
        """Ask the replicas how they are, and then how many there should be: that may fail when all are gone."""
        self._statuses = sorted(self._transport.statuses(), key=lambda one: one.rank)
        self._count = replace(self._count, up=len(self._statuses))
        for one in self._statuses:
            if one.fault is not None and self._fault is None:  # nothing that any replica keeps is trusted any more
                self._fault = one.fault
                _log.error("replica %d: %s", one.rank, one.fault)
            for strategy, seen in one.shadows:
                if self._observer is not None:
                    self._observer(strategy, seen)
        self._count = replace(self._count, wanted=self._transport.wanted())

    def _watch(self) -> None:
        while not self._closed.wait(PERIOD):
            try:
                self.look()
            except Exception:  # the next look may find them
                _log.warning("the replicas cannot be asked how they are", exc_info=True)

    async def submit(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
        """See `Engine.submit`. A request without text yet goes to another replica if its own is lost, or refuses it."""
        arrival = time.perf_counter()
        asked, made = await self._ground(request)
        need = Need.of(made.prompt, asked.tenant, self._is_exact(asked.rag, made))
        attempts, told, served = _Attempts(), False, False
        try:
            while not served:
                grounded = replace(made, spent_ms=(time.perf_counter() - arrival) * 1e3)
                call = Call(replace(asked, grounded=grounded), lambda names: self._order(need, names, attempts))
                served = True
                try:
                    async with aclosing(self._transport.serve(call)) as items:
                        async for item in items:
                            if isinstance(item, Begun):
                                with self._lock:
                                    self._count_in(attempts, item.replica)
                                    count, seconds = self._routing.get(item.replica, (0, 0.0))
                                    self._routing[item.replica] = count + 1, seconds + attempts.routing_s
                                    attempts.routing_s = 0.0
                                    self._router.sent(need, item.replica)
                            elif isinstance(item, core.OverloadError):
                                attempts.refuse(attempts.counted, item)
                                served = False
                            elif isinstance(item, core.RagjaxError):
                                raise item
                            else:
                                told = True
                                yield item
                except (core.LostError, core.ClosedError) as error:
                    if told:
                        raise core.LostError(
                            "the replica that gave this answer was lost; send the request again"
                        ) from error
                    attempts.lose(error)
                    served = False
                finally:
                    with self._lock:
                        self._count_in(attempts, "")
        finally:
            with self._lock:  # the transport may still be choosing, in a thread of its own
                attempts.ended = True
                self._count_in(attempts, "")

    async def _ground(self, request: core.Request) -> tuple[core.Request, core.Grounded]:
        if self._closed.is_set():
            raise core.ClosedError("the fleet is closed")
        cancellation = Cancellation()
        rag, asked = request.rag, request
        if self._fault is not None and (rag is None or rag.strategy in (None, AUTO)):
            # it names full attention to its replica, whose own shadow replay may have found nothing
            asked = replace(request, rag=replace(rag or core.Rag(top_k=0), strategy=FULL.strategy))
        try:
            work = partial(self.composer.checked(cancellation.check).ground, asked)
            room = max(self._count.up, 1) * (self._max_queue + 1)  # as many as idle replicas take
            made = await self._preparers.run(work, room)
        finally:
            cancellation.cancel()  # of effect only if the thread is still at work
        if asked is not request and self._fault is not None:
            made = replace(made, notices=(*made.notices, self._fault))
        return asked, made

    def _is_exact(self, rag: core.Rag | None, made: core.Grounded) -> bool:
        chosen = self.composer.choose(rag or core.Rag(), made)
        if chosen.picked and self._statuses:
            return self.composer.strategies[self._statuses[0].pick.strategy].exact
        return chosen.strategy.exact

    def _order(self, need: Need, names: Collection[str], attempts: _Attempts) -> Sequence[str]:
        """The replicas that run, as they are to be tried: those that lost it come late, and those that refused last.
        Any thread may call it.

        The first of them counts the request from now on, so that requests which come at once see each other.
        """
        attempts.seen, begin = frozenset(names), time.perf_counter()
        with self._lock:
            self._count_in(attempts, "")
            order = self._router.order(need, {name: self._loads[name] for name in names})
            order = sorted(order, key=lambda name: (name in attempts.refusals, name in attempts.losers))
            self._count_in(attempts, order[0] if order and not attempts.ended else "")
            self._routing = {name: told for name, told in self._routing.items() if name in names}
        attempts.routing_s += time.perf_counter() - begin
        return order

    def _count_in(self, attempts: _Attempts, replica: str) -> None:
        """Move the request's load to this replica ("" removes it); the caller holds the lock."""
        before, attempts.counted = attempts.counted, replica
        if replica:
            self._loads[replica] += 1
        if before:
            self._loads[before] -= 1
            if not self._loads[before]:
                del self._loads[before]

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._preparers.close()
        self._transport.close()
        self.knowledge.close()


def merged(seen: Mapping[int, core.Inventory]) -> core.Inventory:
    """One inventory of several, by rank. Of the room of a tier the share is that of all replicas together, which are
    alike; nodes are named after their replica, since two may hold the same.
    """
    tokens: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for one in seen.values():
        tokens.update(one.tokens)
        used.update({tier: share / len(seen) for tier, share in one.used.items()})
    # a parent has no fewer tokens below than its child and comes before it, so it is among the largest if the child is
    held = ((holding, rank) for rank, one in seen.items() for holding in one.holdings)
    largest = nlargest(LARGEST, held, key=lambda pair: pair[0].below)
    # the tier is the same for all; one that does not get at it has more to tell
    shared = sorted((one.shared for one in seen.values() if one.shared is not None), key=lambda one: one.on)
    return core.Inventory(
        policy=next((one.policy for one in seen.values()), ""),
        tokens=dict(tokens),
        used=dict(used),
        nodes=sum(one.nodes for one in seen.values()),
        holdings=tuple(
            replace(one, id=f"{rank}/{one.id}", parent=None if one.parent is None else f"{rank}/{one.parent}")
            for one, rank in largest
        ),
        whole=all(one.whole for one in seen.values()),
        departures=tuple(sorted((d for one in seen.values() for d in one.departures), key=lambda d: d.age)[:LATEST]),
        requests=tuple(sorted((r for one in seen.values() for r in one.requests), key=lambda r: r.age)[:LATEST]),
        shared=next(iter(shared), None),
        replicas={str(rank): one for rank, one in seen.items()},
    )


def fleet_of(options: core.EngineOptions, transport: Transport, router: str) -> Fleet:
    check_documents(options)
    card = transport.card()
    local = resolve(options.model)
    tokenizer = Tokenizer.load(local.path)
    strategies = strategies_of(local, core.CraftVariants.parse(options.craft_variants))
    contract = contract_of(options, strategies, local.name, card.identity, card.dtype)
    knowledge = Knowledge.open(options, tokenizer)
    composer = Composer.of(options, knowledge, tokenizer, strategies, contract, card.limits, card.context_length)
    try:
        knowledge.fill(options, early=True)
        return Fleet(card, knowledge, composer, transport, ROUTERS.lookup(router)(), options.max_queue)
    except BaseException:
        knowledge.close()
        raise


Service = Engine | Fleet
"""What the HTTP server serves."""
