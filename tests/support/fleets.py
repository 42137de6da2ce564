"""Replicas in this process, in the place of Ray's: tiny engines, reached by what would be pickled."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import cache

from ragjax.cluster.fleet import Fleet, Service
from ragjax.cluster.replica import Begun, Call, Card, Item, Replica, Status
from ragjax.cluster.router import RoundRobin, Router
from ragjax.core import Answer, Document, EngineOptions, Event, Inventory, LostError, Message, Rag, Request, Sampling
from ragjax.engine import Engine
from ragjax.engine.compose import Composer
from ragjax.quality.contract import Contract
from ragjax.quality.report import Setting
from ragjax.reuse import strategies as all_strategies
from ragjax.runner.runner import Runner
from tests.support import tiny

DOCUMENTS = [
    Document(f"d{i}", f"The {colour} ferry leaves the harbour at {hour} and returns at night.", colour)
    for i, (colour, hour) in enumerate((("red", "nine"), ("blue", "ten"), ("green", "noon"), ("white", "dawn")))
]


QUESTION = "When does the blue ferry leave?"


def asked(text: str = QUESTION, tokens: int = 6, strategy: str | None = None, tenant: str = "") -> Request:
    return Request(
        (Message("user", text),),
        sampling=Sampling(max_tokens=tokens),
        rag=Rag(strategy=strategy, detail=True),
        tenant=tenant,
    )


async def events(service: Service, request: Request) -> list[Event]:
    return [event async for event in service.submit(request)]


def answer(service: Service, request: Request) -> Answer:
    *_, last = asyncio.run(events(service, request))
    assert isinstance(last, Answer)
    return last


class LocalTransport:
    """Carries calls to replicas of this process. `dead`: names of those that went away."""

    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = {one.name: one for one in replicas}
        self.dead: set[str] = set()
        self.sent: list[str] = []
        self.closed = False

    @property
    def _running(self) -> list[Replica]:
        return [one for name, one in self.replicas.items() if name not in self.dead]

    async def serve(self, call: Call) -> AsyncGenerator[Item, None]:
        assert call.choose is not None
        name = call.choose([one.name for one in self._running])[0]
        self.sent.append(name)
        carried = pickle.loads(pickle.dumps(call))
        assert carried.choose is None
        async with aclosing(self.replicas[name].serve(carried)) as items:
            async for item in items:
                if name in self.dead:
                    raise LostError(f"{name} went away")
                yield item if isinstance(item, Begun) else pickle.loads(pickle.dumps(item))

    def card(self) -> Card:
        return pickle.loads(pickle.dumps(self._running[0].card()))

    def statuses(self) -> list[Status]:
        return [pickle.loads(pickle.dumps(one.status())) for one in self._running]

    def inventories(self, tenant: str) -> dict[int, Inventory]:
        return dict(one.inventory(tenant) for one in self._running)

    def wanted(self) -> int:
        return len(self.replicas)

    def close(self) -> None:
        self.closed = True


@cache
def second_runner() -> Runner:
    """Beside the shared one, for a second engine at a time."""
    return tiny.make_runner()


def prefix_contract() -> Contract:
    return Contract(Setting("prefix"), "float32")


@contextmanager
def fleet_of_two(
    router: Router | None = None, contract: Callable[[], Contract] = prefix_contract, **options: int
) -> Iterator[tuple[Fleet, LocalTransport, list[Engine]]]:
    """A fleet over two engines, which holds DOCUMENTS, of which none is preprocessed.

    contract: makes one for each engine, and one for the front. options: fields of the engines' `EngineOptions`.
    """
    engines = [tiny.engine(runner, contract=contract(), **options) for runner in (tiny.runner(), second_runner())]
    try:
        transport = LocalTransport([Replica(engine, f"replica {i}", i) for i, engine in enumerate(engines)])
        card, own, knowledge, tokenizer = transport.card(), contract(), tiny.knowledge(), tiny.byte_tokenizer()
        options = EngineOptions("tiny", top_k=2)
        composer = Composer.of(options, knowledge, tokenizer, all_strategies(), own, card.limits, card.context_length)
        knowledge.bases.make("ferries").add(DOCUMENTS)
        fleet = Fleet(card, knowledge, composer, transport, router or RoundRobin(), options.max_queue)
        try:
            yield fleet, transport, engines
        finally:
            fleet.close()
    finally:
        for engine in engines:
            engine.close()
