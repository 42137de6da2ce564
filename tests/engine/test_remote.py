"""Engines over one shared tier: they find each other's KV, bit for bit, and none waits long for a server that fails."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from ragjax.core import Answer, AtRest
from ragjax.engine import Engine
from ragjax.schedule.admission import Admission
from ragjax.store.exchange import Link
from ragjax.store.redis import RedisServer
from ragjax.store.shared import SharedTier
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.disks import open_store
from tests.support.pace import until
from tests.support.remotes import FakeRemote, Unreliable, free_port, real_server, settle, tier


def ask(engine: Engine, seed: int, strategy: str = "prefix", tenant: str = "") -> Answer:
    return engine.answer_prompt(tiny.prompt(seed), strategy=strategy, max_tokens=4, want_logits=True, tenant=tenant)


def tiers(answer: Answer) -> set[str | None]:
    return {report.tier for report in answer.segments if report.reused}


def same(one: Answer, other: Answer) -> bool:
    """Whether the answers are equal to the bit."""
    return one.tokens == other.tokens and np.array_equal(one.logits, other.logits)


@pytest.mark.parametrize("strategy", ["prefix", "naive", "epic", "craft"])
def test_engines_find_each_other_s_kv(strategy: str) -> None:
    """As soon as it is computed: the first one goes on meanwhile, and finds no more itself."""
    remote = FakeRemote()
    with tiny.engine(shared=tier(remote)) as first:
        ask(first, 0, strategy)
        settle(first)
        warm = ask(first, 0, strategy)
    with tiny.engine(shared=tier(remote)) as second:
        found = ask(second, 0, strategy)
        # a fresh engine has all of it from the shared tier; it may be on the device when the request starts
        assert tiers(found) <= {"remote", "device"} and found.cached_tokens == warm.cached_tokens > 90
        assert same(found, warm)
        stats = second.stats()
        assert stats["remote_late_total"] == 0 and stats["remote_damaged_total"] == 0
        assert stats["remote_reads_total"] > 0


@pytest.mark.parametrize("at_rest", ["int8", "int4"])
def test_kv_of_fewer_bits_is_found_and_labelled(at_rest: AtRest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "prefetch", lambda _: None)  # it may be on the device before the request starts
    remote = FakeRemote()
    with tiny.engine(shared=tier(remote), at_rest=at_rest) as first:
        ask(first, 0)
        settle(first)
    with tiny.engine(shared=tier(remote), at_rest=at_rest) as second:
        found = ask(second, 0)
        assert found.cached_tokens > 90 and tiers(found) == {"remote"} and found.exact_to is None


def test_tenants_find_their_own_kv_alone() -> None:
    remote = FakeRemote()
    with tiny.engine(shared=tier(remote)) as first:
        for strategy in ("prefix", "naive"):
            ask(first, 0, strategy, tenant="ann")
        settle(first)
    for strategy in ("prefix", "naive"):
        for tenant, found in (("bob", False), ("", False), ("ann", True)):
            with tiny.engine(shared=tier(remote)) as second:
                assert (ask(second, 0, strategy, tenant).cached_tokens > 90) == found


def test_two_at_once_share_while_they_run(tmp_path: Path) -> None:
    """A prompt in part: what its tree has, then what another process added later, then what only the disk has."""
    remote = FakeRemote()
    disk = open_store(tmp_path)
    with (
        tiny.engine(shared=tier(remote)) as first,
        tiny.engine(tiny.make_runner(), shared=tier(remote, disk)) as second,
    ):
        assert ask(second, 1).cached_tokens == 0
        ask(first, 0)
        settle(first)
        assert ask(second, 0).cached_tokens == 167
        settle(second)
        assert ask(first, 1).cached_tokens == 167
    with tiny.engine(disk=open_store(tmp_path)) as third:
        assert tiers(ask(third, 1)) == {"disk"}, "what an engine computes goes to its disk, too"


def test_a_server_that_hangs_costs_a_request_its_patience_once() -> None:
    remote = FakeRemote()
    shared = tier(remote)
    with tiny.engine(shared=shared) as engine:
        ask(engine, 0)
        shared.patience = 0.05  # only now: a machine may be as slow
        remote.held.clear()
        assert ask(engine, 1).tokens
        assert engine.stats()["remote_late_total"] == 1
        remote.held.set()


def test_a_dead_server_changes_nothing() -> None:
    remote = FakeRemote()
    remote.down = True
    with tiny.engine(shared=tier(remote, pause=60)) as engine, tiny.engine() as plain:
        assert same(ask(engine, 0), ask(plain, 0)) and engine.shares is False
        stats = engine.stats()
        assert stats["remote_up"] == 0 and stats["remote_late_total"] == 0
        sharing = engine.inventory().shared
        assert not sharing.on and "refused" in str(sharing.error)
        assert engine.inventory("ann").shared is None


def test_kv_that_vanishes_after_it_was_found_is_computed() -> None:
    remote = FakeRemote()
    with tiny.engine(shared=tier(remote)) as first:
        cold = ask(first, 0)
        settle(first)
    with tiny.engine(shared=tier(remote)) as second:
        remote.fetch = lambda key: None
        answer = ask(second, 0)
        assert answer.tokens == cold.tokens and "computed instead" in answer.notices[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_answers_are_those_without_a_tier_that_fails_at_random(seed: int) -> None:
    """Processes come and go until enough was found; what was found is never wrong."""
    remote = Unreliable(seed)
    random = np.random.default_rng(seed)
    with tiny.engine() as plain:
        wanted = [ask(plain, one, "full") for one in range(5)]
    found = processes = 0
    while found < 4:
        processes += 1
        assert processes < 90, "hardly anything is found"
        shared = tier(remote, timeout=0.5, pause=0.02)
        with tiny.engine(pages=60, shared=shared) as engine:
            for one in random.integers(0, 5, 4).tolist():
                answer = ask(engine, one)
                assert answer.exact_to == "full" and answer.tokens == wanted[one].tokens
                assert np.abs(answer.logits - wanted[one].logits).max() < 1e-4
                audit_engine(engine)
                found += "remote" in tiers(answer)
            shared.flush(1)  # on a slow machine a process ends before it wrote anything that the next one could find
    assert remote.harmed


@pytest.mark.long
def test_a_redis_that_is_killed_and_comes_back_empty_under_load() -> None:
    """Requests go on meanwhile, and their answers are right; the tier goes off, comes back and is used again."""
    with tiny.engine() as plain:
        wanted = [ask(plain, one, "full") for one in range(12)]

    def check(engine: Engine, seeds: Iterable[int]) -> int:
        found = 0
        for one in seeds:
            answer = ask(engine, one)
            assert answer.tokens == wanted[one].tokens and answer.exact_to == "full"
            found += "remote" in tiers(answer)
        audit_engine(engine)
        return found

    port = free_port()
    with real_server(port=port):
        with tiny.engine(pages=60, shared=over(port)) as first:
            check(first, range(6))
        second = tiny.engine(pages=60, shared=over(port))
        assert check(second, range(6)) == 6
    with second:
        check(second, [0, 7, 1, 8, 2, 9, 3, 10])
        assert second.shares is False and sum(second.stats()["load_fallbacks_total"].values()) <= 1
        with real_server(port=port):
            until(lambda: second.shares)
            check(second, [11, 4, 11, 5])
            settle(second)
            with tiny.engine(tiny.make_runner(), pages=60, shared=over(port)) as third:
                assert check(third, [11]) == 1, "what was computed since is there"


def over(port: int) -> SharedTier:
    remote = RedisServer.open(f"redis://127.0.0.1:{port}", b"tiny", "raw", life=100, timeout=0.5)
    return SharedTier(remote, b"tiny", timeout=0.5, link=Link(remote.address, 0.1))
