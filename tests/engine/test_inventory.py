"""What a tenant may see of the cache: its own KV alone, where it lies, what left, and its own requests."""

from __future__ import annotations

import pytest

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Document, Inventory
from ragjax.engine import Engine
from ragjax.engine import inventory as look
from tests.support.audit import audit_engine

pytestmark = pytest.mark.engine(pages=16, host_bytes=2**17, policy="lru")


def ask(engine: Engine, name: str, tenant: str = "") -> None:
    text = f"{name} keeps the lighthouse since the great gale."
    engine.answer(f"Where is {name}?", documents=[Document(name, text)], max_tokens=2, tenant=tenant)


def check(seen: Inventory) -> None:
    """Parents come before their children, and sums are sums."""
    known: dict[str, int] = {}
    for one in seen.holdings:
        assert one.parent is None or one.parent in known
        known[one.id] = one.tokens + sum(child.below for child in seen.holdings if child.parent == one.id)
        assert one.below >= known[one.id] if len(seen.holdings) < seen.nodes else one.below == known[one.id]
    assert len(seen.holdings) <= seen.nodes


def test_what_was_asked_is_there_with_its_text_and_its_hits(engine: Engine) -> None:
    assert engine.inventory().holdings == ()
    ask(engine, "Maud")
    ask(engine, "Maud")
    seen = engine.inventory()
    check(seen)
    (top,) = [one for one in seen.holdings if one.parent is None]
    assert top.text.startswith("<|start|>system") and top.hits == 1 and top.provenance == "causal"
    chunk = next(one for one in seen.holdings if one.text.startswith("Maud keeps"))
    assert chunk.tiers[0] == "device" and chunk.parent == top.id
    assert sum(one.tokens for one in seen.holdings if "device" in one.tiers) == seen.tokens["device"] > 0
    assert 0 < seen.used["device"] <= 1 and set(seen.used) == {"device", "host"}
    later, first = seen.requests
    assert first.reused == 0 < later.reused < later.prompt_tokens == first.prompt_tokens
    assert first.age >= later.age >= 0 < first.ttft and later.strategy == "prefix"
    audit_engine(engine)


def test_what_leaves_is_named_with_where_it_went(engine: Engine) -> None:
    for name in ("Maud", "Elspeth", "Odile", "Agnes", "Dorothea", "Winifred"):
        ask(engine, name)
    seen = engine.inventory()
    check(seen)
    assert seen.departures and seen.policy == "lacr"
    assert {(one.left, one.kept) for one in seen.departures} >= {("device", "host")}
    assert any("host" in one.tiers and "device" not in one.tiers for one in seen.holdings)
    ages = [one.age for one in seen.departures]
    assert ages == sorted(ages) and sum(one.tokens for one in seen.departures if one.left == "device") == int(
        engine.stats()["evicted_tokens_total"]
    )
    audit_engine(engine)


def test_a_tenant_sees_nothing_of_another(engine: Engine) -> None:
    for name, tenant in (("Maud", "acme"), ("Elspeth", "umbra"), ("Odile", "")) * 3:
        ask(engine, name, tenant)
    for name, tenant in (("Maud", "acme"), ("Elspeth", "umbra"), ("Odile", "")):
        seen = engine.inventory(tenant)
        check(seen)
        told = str(seen)
        assert name in told and seen.requests
        assert not any(other in told for other in {"Maud", "Elspeth", "Odile"} - {name})
        assert (seen.used == {}) == bool(tenant)
        assert len(seen.requests) == 3
    unknown = engine.inventory("nobody")
    assert (unknown.holdings, unknown.departures, unknown.requests, unknown.nodes) == ((), (), (), 0)
    assert set(unknown.tokens.values()) == {0}


def test_a_tenants_own_nodes_hang_below_public_ones_unseen(engine: Engine) -> None:
    ask(engine, "Odile")
    ask(engine, "Maud", "acme")  # behind the same system prompt, which is public now
    seen = engine.inventory("acme")
    assert next(one.text for one in seen.holdings if one.parent is None).startswith("Maud keeps")


@pytest.mark.engine(pages=16, host_bytes=0, policy="lru")  # where nothing is copied between two looks
def test_a_look_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Maud", "Elspeth", "Odile"):
        ask(engine, name)
    whole = engine.inventory()
    few = engine.inventory(most=2)
    assert whole.whole and few.holdings == whole.holdings[:2] and few.nodes == whole.nodes > 2
    monkeypatch.setattr(look, "SEEN", 3)
    part = engine.inventory()
    check(part)
    assert not part.whole and part.nodes == 2  # the root is the third
    cache: KnowledgeCache = engine._cache
    assert len(cache.tree) == whole.nodes
