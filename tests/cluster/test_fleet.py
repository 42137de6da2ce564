"""A fleet over two engines of this process serves as one engine does, and goes on when one of them is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from ragjax.cluster.fleet import Fleet, _Attempts
from ragjax.cluster.replica import Call
from ragjax.cluster.router import KnowledgeRouter, Need, Router
from ragjax.core import (
    Answer,
    Attachment,
    Delta,
    Divergence,
    Document,
    Event,
    Graph,
    Grounded,
    Kind,
    LostError,
    Message,
    OverloadError,
    Prompt,
    Rag,
    Request,
    RequestError,
)
from ragjax.engine import Engine
from ragjax.engine.compose import Composer
from ragjax.quality.contract import AUTO, LEAST, Contract
from ragjax.quality.report import PREFIX, Budget, Measurement, Report, Setting
from ragjax.reuse import strategies
from tests.support import tiny
from tests.support.fleets import DOCUMENTS, QUESTION, answer, asked, events, fleet_of_two
from tests.support.pace import Hold
from tests.support.serving import serving, wait_for


@pytest.fixture(autouse=True)
def looked_at_by_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that the fleet's thread had begun would put what it saw before in the place of what a test's look saw."""
    monkeypatch.setattr("ragjax.cluster.fleet.PERIOD", 3600.0)


def content(made: Answer) -> object:
    """What an answer says, its times and reuse apart."""
    assert made.prompt is not None
    return made.text, made.tokens, made.prompt.tolist(), made.exact_to, [one.id for one in made.segments]


EXACT = [name for name, strategy in strategies().items() if strategy.exact]
PREPROCESSED = frozenset(name for name, strategy in strategies().items() if strategy.preprocessed)


def test_a_fleet_answers_as_one_engine_does() -> None:
    questions = [QUESTION, "What about the red one?", "And the green ferry?", QUESTION]
    with tiny.engine(top_k=2) as alone:
        alone.add_documents(DOCUMENTS, "ferries")
        expected = [content(answer(alone, asked(q, strategy=s))) for s in EXACT for q in questions]
    with fleet_of_two() as (fleet, transport, engines):
        found = [answer(fleet, asked(q, strategy=s)) for s in EXACT for q in questions]
        assert EXACT and [content(one) for one in found] == expected
        assert set(transport.sent) == {"replica 0", "replica 1"}
        assert all(one.exact_to == "full" and one.timings.ttft >= one.timings.retrieve > 0 for one in found)
        assert any(one.cached_tokens for one in found)
        for engine in engines:
            tiny.check_ended(engine, [])


@pytest.mark.parametrize(
    ("rag", "param", "words"),
    [
        (Rag(strategy="magic"), "rag.strategy", "unknown strategy 'magic'"),
        (Rag(strategy="packet"), "rag.strategy", "no packets"),
    ],
)
def test_what_no_strategy_can_serve_is_refused(rag: Rag, param: str, words: str) -> None:
    with fleet_of_two() as (fleet, _, _):
        with pytest.raises(RequestError, match=words) as refused:
            answer(fleet, Request((Message("user", QUESTION),), rag=rag))
        assert refused.value.param == param


def test_a_warm_request_for_a_graph_is_answered() -> None:
    paths = (("Ann", "likes", "Bob", "likes", "Cid"), ("Ann", "likes", "Dan"), ("Eve", "knows", "Ann"))
    request = replace(asked("Whom does Ann like?"), rag=Rag(graph=Graph(relation_paths=paths), detail=True))
    with fleet_of_two(KnowledgeRouter()) as (fleet, transport, _):
        cold, warm = answer(fleet, request), answer(fleet, request)
        assert warm.tokens == cold.tokens and warm.cached_tokens > cold.cached_tokens == 0
        assert len(set(transport.sent)) == 1


# ------------------------------------------------------------------------------------- quality


NAIVE = Setting("naive")
PATHS = (("Ann", "likes", "Bob", "likes", "Cid"), ("Ann", "likes", "Dan"))


def budgeted() -> Contract:
    """`auto`, by a report of naive."""
    made = Measurement(NAIVE, 10, 0.02, 0.03, 0.95, 0.9, 10.0, 0.0)
    exact = Measurement(PREFIX, 10, 0.0, 0.0, 1.0, 1.0, 100.0, 0.0)
    report = Report("ab12", "tiny", "float32", "2026-01-01T00:00:00+00:00", "cd", 3, (made, exact))
    return Contract(Setting(AUTO), "float32", report=report, budget=Budget(0.05))


def find_fault(engine: Engine) -> None:
    """As shadow replay does."""
    engine.contract.observe(PREFIX, True, Divergence(0.5, 0.1))


@pytest.mark.parametrize("rag", [None, Rag(), Rag(graph=Graph(relation_paths=PATHS))])
def test_a_fault_that_one_replica_finds_has_all_run_full(rag: Rag | None) -> None:
    request = replace(asked("Whom does Ann like?"), rag=rag)
    with fleet_of_two() as (fleet, transport, engines):
        find_fault(engines[1])
        fleet.look()
        found = [answer(fleet, request) for _ in engines]
        assert transport.sent == ["replica 0", "replica 1"]
        for one in found:
            assert (one.strategy, one.exact_to) == ("full", "full")
            assert len([n for n in one.notices if "labelled exact and is not" in n]) == 1 == len(one.notices)
        assert fleet.default_setting == Setting("full") and fleet.strategy_summary == "full"
        named = answer(fleet, asked(strategy="prefix"))
        assert (named.strategy, named.notices) == ("prefix", ())
        transport.dead.add("replica 1")  # what takes its place knows of nothing
        fleet.look()
        assert answer(fleet, request).strategy == "full"


def test_facts_are_told_in_full_once_trees_are_not_served() -> None:
    """A prompt of trees leaves out what two paths begin with; full attention gets every path."""
    request = replace(asked("Whom does Ann like?"), rag=Rag(graph=Graph(relation_paths=PATHS), detail=True))
    with fleet_of_two() as (fleet, _, engines):
        find_fault(engines[0])
        fleet.look()
        made = answer(fleet, request)
        assert made.prompt is not None and "".join(fleet.pieces(made.prompt)).count("Ann") == 3


def test_a_setting_that_shadow_replay_changed_is_what_the_fleet_routes_by() -> None:
    with fleet_of_two(contract=budgeted) as (fleet, _, engines):
        assert fleet.default_setting == Setting(AUTO) and answer(fleet, asked()).strategy == "prefix"
        bare = fleet.composer.ground(asked())
        marked = [replace(s, behind=b"x" * 32) if s.kind is Kind.CHUNK else s for s in bare.prompt.segments]
        made = Grounded(Prompt(tuple(marked)))
        assert fleet._is_exact(asked().rag, bare) and not fleet._is_exact(asked().rag, made)
        for engine in engines:
            for _ in range(LEAST):
                engine.contract.observe(NAIVE, False, Divergence(0.08, 0.5))
        fleet.look()
        assert fleet._is_exact(asked().rag, made)


# ------------------------------------------------------------------------------------- placing and losing


class LeastLoaded(Router):
    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        return sorted(loads, key=lambda name: loads[name])


def test_requests_that_are_placed_at_once_see_each_other() -> None:
    with fleet_of_two(LeastLoaded()) as (fleet, _, _):
        need, names = Need.of(fleet.composer.ground(asked()).prompt, "", True), ("replica 0", "replica 1")
        tries = [_Attempts() for _ in range(4)]
        first = [fleet._order(need, names, one)[0] for one in tries]
        assert sorted(first) == ["replica 0", "replica 0", "replica 1", "replica 1"]
        fleet._order(need, names, tries[0])
        assert sum(fleet._loads.values()) == 4, "each request counts once, however often it is placed"
        for one in tries:
            fleet._count_in(one, "")
        assert not fleet._loads


def test_a_replica_that_is_chosen_after_the_client_left_counts_nothing() -> None:
    """The transport may choose in a thread of its own, which is told late."""
    with fleet_of_two() as (fleet, transport, _):
        calls: list[Call] = []

        async def serve(call: Call) -> AsyncGenerator[Event, None]:
            calls.append(call)
            await asyncio.Event().wait()
            yield Delta("never seen")

        async def leave() -> None:
            task = asyncio.create_task(events(fleet, asked()))
            while not calls:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        transport.serve = serve  # type: ignore[method-assign, assignment]
        asyncio.run(leave())
        assert calls[0].choose is not None and calls[0].choose(list(transport.replicas))
        assert not fleet._loads


def test_knowledge_is_the_fronts_and_tenants_are_kept_apart() -> None:
    with fleet_of_two() as (fleet, _, _):
        store = fleet.library.create("ada", "notes", {}, None, "")
        file = fleet.library.upload("ada", "note.txt", "user_data", b"The purple ferry never leaves.")
        fleet.library.attach("ada", [Attachment(store.id, file.id, 0)])
        wait_for(lambda: fleet.library.counts("ada", store.id)[0].completed == 1)
        for _ in range(2):  # on either replica
            request = asked("purple ferry", tenant="ada")
            made = answer(fleet, Request(request.messages, rag=Rag(knowledge=store.id, detail=True), tenant="ada"))
            assert made.prompt is not None and "purple" in "".join(fleet.pieces(made.prompt))
        with pytest.raises(RequestError, match="unknown knowledge base"):
            answer(fleet, Request(request.messages, rag=Rag(knowledge=store.id), tenant="bob"))


def test_a_request_without_text_goes_elsewhere_when_its_replica_is_lost() -> None:
    with fleet_of_two() as (fleet, transport, _):
        transport.replicas["replica 0"].serve = lost_at_once(transport.replicas["replica 0"].name, transport.dead)  # type: ignore[method-assign]
        made = answer(fleet, asked())
        assert made.tokens and transport.sent == ["replica 0", "replica 1"]
        fleet.look()
        assert (fleet.replicas().up, fleet.replicas().wanted) == (1, 2)


def test_a_replica_that_lost_a_request_is_asked_again_after_the_others() -> None:
    """One whose engine has ended is listed until its next health check."""
    with fleet_of_two(KnowledgeRouter()) as (fleet, transport, engines):
        answer(fleet, asked())
        (first,) = transport.sent
        engines[int(first[-1])].close()
        made = answer(fleet, asked())  # its KV lies where it cannot be served
        assert made.tokens and transport.sent[1] == first != transport.sent[2] and len(transport.sent) == 3


def test_replicas_that_are_gone_are_told_though_nobody_says_how_many_there_should_be() -> None:
    def gone() -> int:
        raise RuntimeError("the controller is gone")

    with fleet_of_two() as (fleet, transport, _), serving(fleet) as served:
        transport.dead |= {"replica 0", "replica 1"}
        transport.wanted = gone  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="controller"):
            fleet.look()
        health = served.get("/health")
        assert (health.status_code, health.json()["replicas"]) == (503, {"up": 0, "wanted": 2})


def lost_at_once(name: str, dead: set[str]):  # type: ignore[no-untyped-def]
    async def serve(call: object) -> AsyncGenerator[Event, None]:
        dead.add(name)
        yield Delta("never seen")

    return serve


def test_an_answer_that_began_ends_with_an_error_when_its_replica_is_lost() -> None:
    async def run(fleet: Fleet, dead: set[str]) -> None:
        async with aclosing(fleet.submit(asked(tokens=60))) as found:
            assert isinstance(await anext(found), Delta)
            dead.add("replica 0")
            with pytest.raises(LostError, match="send the request again"):
                async for _ in found:
                    pass

    with fleet_of_two() as (fleet, transport, engines):
        asyncio.run(run(fleet, transport.dead))
        wait_for(lambda: not engines[0].stats()["running"])  # what it computed for nobody was cancelled
        assert transport.sent == ["replica 0"]


def test_a_full_queue_sends_requests_on_and_all_full_refuses_them() -> None:
    async def run(fleet: Fleet, engines: list[Engine]) -> list[object]:
        with Hold(engines[0]), Hold(engines[1]):
            many = [asyncio.create_task(events(fleet, asked(f"Ferry {i}?", tokens=24))) for i in range(12)]
            while sum(one.done() for one in many) < 8:  # each takes one that is to start, and one behind it
                await asyncio.sleep(0.001)
        return await asyncio.gather(*many, return_exceptions=True)

    with fleet_of_two(max_queue=1) as (fleet, transport, engines):
        outcomes = asyncio.run(run(fleet, engines))
        refused = [one for one in outcomes if isinstance(one, OverloadError)]
        assert len(refused) == 8 and all((one.retry_after or 0) > 0 for one in refused)
        assert all(isinstance(one, OverloadError | list) for one in outcomes)
        assert len(transport.sent) > 12  # some were asked of both
        assert not fleet._loads


def test_requests_in_preparation_at_the_front_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    going, threads, ground = threading.Event(), set[str](), Composer.ground

    def slow(self: Composer, request: Request) -> Grounded:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        assert going.wait(60)
        return ground(self, request)

    monkeypatch.setattr(Composer, "ground", slow)

    async def run(fleet: Fleet) -> None:
        tasks = [asyncio.create_task(events(fleet, asked(f"Ferry {i}?"))) for i in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadError, match="4 requests are being prepared") as refused:
            await events(fleet, asked())
        assert (refused.value.retry_after or 0) > 0
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        tasks[0] = asyncio.create_task(events(fleet, asked()))
        await asyncio.sleep(0)
        going.set()
        assert all(isinstance(told[-1], Answer) for told in await asyncio.gather(*tasks))

    with fleet_of_two() as (fleet, _, _):
        fleet._max_queue = 1
        asyncio.run(run(fleet))
        assert threads == {"ragjax-prepare"}


def test_the_server_tells_of_replicas() -> None:
    with fleet_of_two() as (fleet, transport, _), serving(fleet) as served:
        for _ in range(2):
            body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 3}
            assert served.post(json=body).status_code == 200
        fleet.look()
        assert served.get("/health").json()["replicas"] == {"up": 2, "wanted": 2}
        lines = served.get("/metrics").text.splitlines()
        for rank in "01":
            assert f'ragjax_requests_total{{replica="{rank}",strategy="prefix"}} 1.0' in lines
            assert f'ragjax_routed_total{{replica="{rank}"}} 1.0' in lines
            took = [line for line in lines if line.startswith(f'ragjax_routing_seconds_total{{replica="{rank}"}}')]
            assert 0 < float(took[0].split()[1]) < 60
        seen = served.get("/v1/cache").json()
        assert set(seen["replicas"]) == {"0", "1"}
        assert seen["nodes"] == sum(one["nodes"] for one in seen["replicas"].values()) > 0
        ids = [one["id"] for one in seen["holdings"]]
        assert len(set(ids)) == len(ids) and len(seen["requests"]) == 2
        transport.dead |= {"replica 0", "replica 1"}
        fleet.look()
        health = served.get("/health")
        assert health.status_code == 503 and health.json()["ready"] is False


def test_documents_that_come_and_go_are_seen_at_once() -> None:
    with fleet_of_two() as (fleet, _, _):
        base = fleet.knowledge.bases.get("ferries")
        base.add([Document("new", "The orange ferry leaves at midnight.")])
        for gone in (False, True):
            if gone:
                base.delete(["new"])
            for _ in range(2):
                made = answer(fleet, asked("orange ferry"))
                assert made.prompt is not None
                assert ("midnight" in "".join(fleet.pieces(made.prompt))) is not gone
