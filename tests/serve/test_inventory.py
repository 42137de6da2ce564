"""GET /v1/cache: what a key may see of the cache."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from ragjax import core
from ragjax.core.inventory import TEXT_CHARS
from ragjax.serve.app import FRESH, RecentInventories
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, serving


def test_each_key_sees_what_is_its_tenants() -> None:
    with serving(FakeEngine(), keys={"master": "", "k1": "acme"}) as served:
        served.post(json=CHAT, headers={"authorization": "Bearer k1"})
        assert served.get("/v1/cache").status_code == 401
        bearers = {key: {"authorization": f"Bearer {key}"} for key in ("master", "k1")}
        of = {key: served.get("/v1/cache", headers=bearer).json() for key, bearer in bearers.items()}
    assert of["master"]["holdings"][1]["text"] == "harbour of" and of["k1"]["departures"][0]["text"] == "ferry of acme"
    assert of["master"]["tiers"] == {"device": {"tokens": 20, "used": 0.25}, "host": {"tokens": 20, "used": 0.5}}
    assert of["k1"]["tiers"]["device"] == {"tokens": 20, "used": None}
    (request,) = of["k1"]["requests"]
    assert request == {"age": 0.0, "strategy": "naive", "prompt_tokens": 130, "reused": 117, "ttft": 60.0}
    assert of["k1"]["holdings"][0] == {
        **{"id": "aa", "parent": None, "tokens": 20, "below": 117, "tiers": ["device", "host"], "hits": 3},
        **{"in_use": True, "provenance": "causal", "method": "", "text": "system of acme"},
    }


def test_the_engine_is_held_up_once_a_second_at_most_for_each_tenant() -> None:
    asked: list[str] = []
    seconds = 0.0

    def look(tenant: str) -> core.Inventory:
        asked.append(tenant)
        return FakeEngine().inventory(tenant)

    async def run() -> None:
        nonlocal seconds
        looks = RecentInventories(look, lambda: seconds)
        await asyncio.gather(*(looks.body_for("a") for _ in range(5)), looks.body_for("b"))
        seconds = FRESH
        again = await looks.body_for("a")
        assert again["holdings"][0]["text"] == "system of a"

    asyncio.run(run())
    assert asked == ["a", "b", "a"]


def test_the_body_is_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by: list[threading.Thread] = []
    made = core.Inventory.body
    monkeypatch.setattr(core.Inventory, "body", lambda seen: made_by.append(threading.current_thread()) or made(seen))
    body = asyncio.run(RecentInventories(FakeEngine().inventory).body_for(""))
    assert made_by and threading.main_thread() not in made_by
    assert body == FakeEngine().inventory("").body()


def test_nodes_departures_and_requests_are_listed_of_all_replicas_together_alone() -> None:
    one = FakeEngine().inventory("")
    body = replace(one, replicas={"0": one, "1": one}).body()
    lists = {"holdings", "departures", "requests"}
    assert lists <= body.keys() and body["holdings"]
    for name in "01":
        assert body["replicas"][name] == {k: v for k, v in one.body().items() if k not in lists}


def test_texts_are_one_short_line() -> None:
    left = core.Departure(1.23456, 3, "host", None, "The ferry\n\n leaves " + "x" * 200)
    body = core.Inventory("lru", {}, {"disk": 0.5}, 0, (), True, (left,), ()).body()
    assert body["departures"][0]["text"] == ("The ferry leaves " + "x" * 200)[:TEXT_CHARS]
    assert body["departures"][0]["age"] == 1.235 and body["tiers"] == {"disk": {"tokens": None, "used": 0.5}}
