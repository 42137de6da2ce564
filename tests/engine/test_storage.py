"""The engine over three tiers, on the miniature model: the same answers from everywhere, and nothing from nowhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.baseline  # noqa: F401 (registers its names)
from ragjax.cache import hierarchy
from ragjax.cache.node import Node
from ragjax.cache.policy import POLICIES
from ragjax.cache.policy.base import Access
from ragjax.cache.policy.gdsf import PGDSF
from ragjax.core import Answer, Document, Kind, Prefill, Prompt, Segment
from ragjax.core.depprompt import DepPrompt, LinearNode, TreeNode
from ragjax.core.tiers import Record
from ragjax.engine import Engine
from ragjax.reuse.base import Allocation
from ragjax.reuse.exact import Full
from ragjax.store.disk import DiskStore
from ragjax.store.transfer import KVTransfer
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.disks import Faults, open_store, paced, read_entry
from tests.support.matrix import few
from tests.support.pace import until

PAGES = 40  # two prompts of about 160 tokens fit, and no third
GIGA = 2**30


def ask(engine: Engine, seed: int, strategy: str = "prefix", tenant: str = "") -> Answer:
    prompt = tiny.prompt(seed)
    return engine.answer_prompt(prompt, strategy=strategy, max_tokens=6, want_logits=True, tenant=tenant)


def tiers(answer: Answer) -> set[str | None]:
    return {report.tier for report in answer.segments if report.reused}


@pytest.fixture(scope="module")
def reference() -> dict[int, Answer]:
    """What `full` answers, cold."""
    with tiny.engine() as engine:
        return {seed: ask(engine, seed, "full") for seed in range(8)}


def assert_exact(answer: Answer, reference: Answer) -> None:
    assert answer.exact_to == "full" and answer.notices == ()
    assert answer.tokens == reference.tokens
    assert np.abs(answer.logits - reference.logits).max() < 1e-4


# ------------------------------------------------------------------------------------------- exactness


@pytest.mark.slow
@pytest.mark.parametrize("policy", few(POLICIES, ["lru", "lacr", "pgdsf", "craft"]))
def test_eviction_storms_change_no_answer(policy: str, reference: dict[int, Answer], tmp_path: Path) -> None:
    """Every prompt drives the others out; they come back from host memory and disk as they went."""
    with tiny.engine(pages=PAGES, policy=policy, host_bytes=300 * 1000, disk=open_store(tmp_path)) as engine:
        seen = set()
        for seed in (0, 1, 2, 3, 0, 1, 4, 5, 6, 0, 2, 7, 1, 0, 3):
            answer = ask(engine, seed)
            assert_exact(answer, reference[seed])
            seen |= tiers(answer)
            audit_engine(engine)
        assert "host" in seen or "disk" in seen


@pytest.mark.parametrize("strategy", ["fusion", "blend", "craft"])
def test_a_policy_that_counts_costs_serves_who_repairs_what_is_missing(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed for the first time and again as repaired is computed twice, and reused never."""
    seen = list[Access]()
    count = PGDSF.on_access

    def on_access(policy: PGDSF, node: Node, access: Access) -> None:
        seen.append(access)
        count(policy, node, access)

    monkeypatch.setattr(PGDSF, "on_access", on_access)
    repaired = 0 if strategy == "craft" else 78  # of 130 tokens; craft computes a chunk that it meets first whole
    prompts = [tiny.prompt(1, chunks=chunks) for chunks in ((40, 33, 57), (40, 33, 30))]
    with tiny.engine(policy="pgdsf") as engine:
        for prompt in prompts:
            engine.answer_prompt(prompt, strategy=strategy, recompute_ratio=0.6, max_tokens=1)
            audit_engine(engine)
    assert seen[0] == Access(hit=False, cached=0, new=len(prompts[0]) + repaired)


def test_from_device_host_and_disk(reference: dict[int, Answer], tmp_path: Path) -> None:
    with tiny.engine(pages=PAGES, host_bytes=GIGA, disk=open_store(tmp_path)) as engine:
        assert tiers(ask(engine, 0)) == set()
        warm = ask(engine, 0)
        assert tiers(warm) == {"device"} and warm.cached_tokens == warm.prompt_tokens - 1
        for seed in (1, 2, 3):
            ask(engine, seed)
        cold = ask(engine, 0)
        assert "host" in tiers(cold) and cold.cached_tokens == cold.prompt_tokens - 1
        assert_exact(cold, reference[0])
        assert engine.stats()["tier_hit_tokens_total"]["host"] > 0
    with tiny.engine(pages=PAGES, host_bytes=GIGA, disk=open_store(tmp_path)) as again:
        first = ask(again, 0)
        assert tiers(first) == {"disk"} and first.cached_tokens == first.prompt_tokens - 1
        assert first.timings.load > 0
        assert_exact(first, reference[0])
        assert tiers(ask(again, 0)) == {"device"}


@pytest.mark.parametrize("host_bytes", [0, GIGA])
def test_isolated_chunks_survive_a_restart_too(host_bytes: int, tmp_path: Path) -> None:
    with tiny.engine(pages=PAGES, host_bytes=host_bytes, disk=open_store(tmp_path)) as engine:
        cold = ask(engine, 0, "naive")
    with tiny.engine(pages=PAGES, host_bytes=host_bytes, disk=open_store(tmp_path)) as engine:
        warm = ask(engine, 0, "naive")
    assert [report.reused for report in warm.segments] == [20, 40, 33, 57, 0] and tiers(warm) == {"disk"}
    assert warm.tokens == cold.tokens and warm.exact_to is None
    assert np.array_equal(warm.logits, cold.logits)


def test_a_later_prompt_takes_the_part_that_it_shares(reference: dict[int, Answer], tmp_path: Path) -> None:
    """Half an entry of the disk is used, and the rest of the path is computed and hung under it."""
    whole = tiny.prompt(0)
    with tiny.engine(disk=open_store(tmp_path)) as engine:
        engine.answer_prompt(whole, max_tokens=1)
    cut = Prompt((*whole.segments[:2], *tiny.prompt(1).segments[2:]))
    with tiny.engine() as engine:
        expected = engine.answer_prompt(cut, strategy="full", max_tokens=6, want_logits=True)
    with tiny.engine(disk=open_store(tmp_path)) as engine:
        answer = engine.answer_prompt(cut, max_tokens=6, want_logits=True)
        assert [report.reused for report in answer.segments][:2] == [20, 40]
        assert_exact(answer, expected)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_lossy_storage_is_labelled_and_so_is_what_is_built_on_it(kind: str, tmp_path: Path) -> None:
    with tiny.engine(disk=open_store(tmp_path), at_rest=kind) as engine:
        exact = ask(engine, 0)
        assert exact.exact_to == ask(engine, 0).exact_to == "full"
    with tiny.engine(disk=open_store(tmp_path), at_rest=kind) as engine:
        first = ask(engine, 0)
        assert tiers(first) == {"disk"} and first.exact_to is None
        assert not np.array_equal(first.logits, exact.logits)
        longer = Prompt((*tiny.prompt(0).segments, tiny.prompt(1).segments[-1]))
        built = engine.answer_prompt(longer, max_tokens=1)
        assert built.cached_tokens > len(tiny.prompt(0)) - 2 and built.exact_to is None
        assert engine.answer_prompt(longer, max_tokens=1).exact_to is None
        stats = engine.stats()
        assert stats["exact_hit_tokens_total"] == 0 and stats["approximate_hit_tokens_total"] > 0
    with tiny.engine(disk=open_store(tmp_path)) as engine:  # no longer lossy here, but what lies there was written so
        assert ask(engine, 0).exact_to is None


# ------------------------------------------------------------------------------------------- isolation


def test_tenants_share_nothing_in_memory_on_disk_and_after_a_restart(tmp_path: Path) -> None:
    with tiny.engine(pages=PAGES, host_bytes=GIGA, disk=open_store(tmp_path)) as engine:
        for tenant in ("a", "b", ""):
            assert ask(engine, 0, tenant=tenant).cached_tokens == 0
        for seed in (1, 2):
            ask(engine, seed, tenant="a")
    with tiny.engine(pages=PAGES, host_bytes=GIGA, disk=open_store(tmp_path)) as engine:
        assert ask(engine, 1, tenant="b").cached_tokens == ask(engine, 1).cached_tokens == 0
        assert ask(engine, 1, tenant="a").cached_tokens == len(tiny.prompt(1)) - 1


def test_shared_knowledge_is_computed_once_and_what_a_request_brings_is_not_shared(tmp_path: Path) -> None:
    documents = [Document("tower", "The tower on the hill was built by Ida Quell.", "Tower")]
    own = Document("mine", "The tower of mine is a secret.", "Mine")
    with tiny.engine(share_knowledge=True, disk=open_store(tmp_path)) as engine:
        engine.add_documents(documents)
        first = engine.answer("Who built it?", max_tokens=1, tenant="a")
        other = engine.answer("Who built it?", max_tokens=1, tenant="b")
        knowledge = sum(report.tokens for report in first.segments[:-1])
        assert (first.cached_tokens, other.cached_tokens) == (0, knowledge)
        engine.answer("What is mine?", documents=[own], max_tokens=1, tenant="a")
        stranger = engine.answer("What is mine?", documents=[own], max_tokens=1, tenant="b")
        assert stranger.cached_tokens == stranger.segments[0].tokens
    with tiny.engine(share_knowledge=True, disk=open_store(tmp_path)) as engine:
        engine.add_documents(documents)
        third = engine.answer("Who built it?", max_tokens=1, tenant="c")
        assert third.cached_tokens == knowledge and third.segments[0].tier == "disk"


def test_a_quota_binds_its_tenant_alone() -> None:
    size = KVTransfer(tiny.runner()).size
    limit = size(200)
    with tiny.engine(quota={"small": limit}.get) as engine:
        for seed in range(4):
            ask(engine, seed, tenant="small")
            ask(engine, seed, tenant="large")
        held = engine._cache.tree.held[0]
        assert 0 < held["small"] <= 200 < 4 * 160 < held["large"]


# -------------------------------------------------------------------------------------------- failures


@pytest.fixture
def unwilling(tmp_path: Path) -> tuple[DiskStore, Faults]:
    """A store in which prompt 0 lies, and what happens when it is read."""
    with tiny.engine(disk=open_store(tmp_path)) as engine:
        ask(engine, 0)
    faults = Faults()
    return paced(open_store(tmp_path), faults), faults


@pytest.mark.parametrize("failing", [2, 10**9])
def test_a_failed_load_is_computed_anew_and_said_once(
    failing: int, unwilling: tuple[DiskStore, Faults], reference: dict[int, Answer]
) -> None:
    store, faults = unwilling
    faults.failing = failing
    with tiny.engine(disk=store) as engine:
        answer = ask(engine, 0)
        assert answer.tokens == reference[0].tokens and answer.exact_to == "full"
        assert len(answer.notices) == 1 and "on fire" in answer.notices[0]
        assert engine.stats()["load_fallbacks_total"] == {"failed": 1}
        audit_engine(engine)
        assert_exact(ask(engine, 0), reference[0])


def test_a_slow_load_is_not_waited_for(unwilling: tuple[DiskStore, Faults], reference: dict[int, Answer]) -> None:
    store, faults = unwilling
    faults.gate.clear()
    with tiny.engine(disk=store, load_timeout=0.05) as engine:
        answer = ask(engine, 0)
        assert answer.tokens == reference[0].tokens and answer.cached_tokens == 0
        assert "0.05 s" in answer.notices[0]
        assert engine.stats()["load_fallbacks_total"] == {"slow": 1}
        faults.gate.set()
        until(lambda: engine.stats()["transfers_total"].get("load"))
        assert_exact(ask(engine, 0), reference[0])


def test_a_disk_that_hangs_ends_nobodys_service(tmp_path: Path) -> None:
    """Loads that nobody waits for any more pin pages; in the end these are all there are."""
    with tiny.engine(disk=open_store(tmp_path)) as engine:
        expected = [ask(engine, seed) for seed in range(8)]
    faults = Faults()
    store = paced(open_store(tmp_path), faults)
    faults.gate.clear()
    with tiny.engine(pages=60, disk=store, load_timeout=0.05) as engine:
        for seed in range(8):
            assert ask(engine, seed).tokens == expected[seed].tokens
        assert engine.stats()["load_fallbacks_total"]["slow"] >= 5
        faults.gate.set()
        assert ask(engine, 7).tokens == expected[7].tokens
        until(lambda: not engine._cache.loading)


def test_an_entry_that_another_process_replaced_meanwhile_is_not_taken_for_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `preorder` positions the same key may be rotated otherwise."""
    system, task = (LinearNode(name, tiny.prompt(0, n, (), 1).tokens[:n]) for name, n in (("s", 10), ("t", 8)))
    trees = [TreeNode(str(n), (tiny.prompt(n, n, (), 1).tokens[:n],)) for n in (30, 50)]
    one, other = (DepPrompt((system, *order, task)).prompt() for order in (trees, trees[::-1]))
    for folder, prompt in (("a", one), ("b", other)):
        with tiny.engine(disk=open_store(tmp_path / folder)) as engine:
            engine.answer_prompt(prompt, strategy="dependency-preorder", max_tokens=1)
    theirs, store = open_store(tmp_path / "b"), open_store(tmp_path / "a")

    read_shares = store.read_shares

    def racing(key: bytes, count: int, expected: Record | None = None) -> Iterator[Any]:
        record = theirs.find(key)
        if record is not None and record != expected:
            open_store(tmp_path / "a").write(record, read_entry(theirs, key))
        return read_shares(key, count, expected)

    monkeypatch.setattr(store, "read_shares", racing)
    with tiny.engine() as engine:
        right = engine.answer_prompt(one, strategy="dependency-preorder", max_tokens=1, want_logits=True)
    with tiny.engine(disk=store) as engine:
        answer = engine.answer_prompt(one, strategy="dependency-preorder", max_tokens=1, want_logits=True)
        assert "replaced" in answer.notices[0] and answer.exact_to == "dependency"
        assert np.abs(answer.logits - right.logits).max() < 1e-4


def test_what_cannot_be_written_in_time_is_not_kept_in_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, most = open_store(tmp_path), 200_000
    monkeypatch.setattr(hierarchy, "BACKLOG", most)
    gate, write = threading.Event(), store.write

    def slow(record: Record, arrays: Any) -> int:
        gate.wait(30)
        return write(record, arrays)

    monkeypatch.setattr(store, "write", slow)
    with tiny.engine(pages=60, host_bytes=300_000, disk=store) as engine:
        for seed in range(12):
            ask(engine, seed)
        backlog, unwritten = engine._transfer.backlog, engine.stats()["unwritten_tokens_total"]
        gate.set()
    assert most < backlog < 2 * most and unwritten > 0
    with tiny.engine(pages=60, disk=open_store(tmp_path)) as engine:  # what memory held at the end was written
        assert ask(engine, 11).cached_tokens == len(tiny.prompt(11)) - 1


def test_the_beginning_that_all_prompts_share_outlives_them_on_disk(tmp_path: Path) -> None:
    """One segment, as a chat without knowledge is: the tree is cut where prompts part, entries are not."""
    shared = tiny.prompt(99, 96, (), 1).tokens[:96]

    def chat(seed: int) -> Prompt:
        own = tiny.prompt(seed, 40, (), 1).tokens[:40].copy()
        own[0] = seed
        return Prompt((Segment("question", Kind.QUERY, np.concatenate([shared, own])),))

    def opened() -> Engine:
        return tiny.engine(pages=PAGES, disk=open_store(tmp_path, 1_000_000))

    with opened() as engine:
        engine.answer_prompt(chat(0), max_tokens=1)
    with opened() as engine:
        for seed in range(1, 60):
            engine.answer_prompt(chat(seed), max_tokens=1)
        engine._transfer.flush()
        assert engine.stats()["disk_evicted_total"] > 0
    with opened() as engine:
        assert engine.answer_prompt(chat(58), max_tokens=1).cached_tokens >= len(shared)


class Late(Full):
    """Looks below the device once its first pass is done, and goes on when the KV is there."""

    name = "late"

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        conversation = super().prefill(prompt, allocation)
        first = next(conversation)
        yield first
        allocation.prefix(tiny.prompt(0).tokens)
        results = yield first
        try:
            conversation.send(results)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("full has one pass")


@pytest.mark.parametrize(("failing", "reason"), [(2, "failed"), (0, "slow")])
def test_loads_between_passes_are_watched_too(unwilling: tuple[DiskStore, Faults], failing: int, reason: str) -> None:
    store, faults = unwilling
    faults.failing = failing
    patience = 0.05 if reason == "slow" else 60.0
    with tiny.engine(disk=store, extra=[Late()], load_timeout=patience) as engine:
        if reason == "slow":
            faults.gate.clear()
        expected = ask(engine, 1, "full")
        answer = ask(engine, 1, "late")
        assert answer.tokens == expected.tokens and len(answer.notices) == 1
        assert engine.stats()["load_fallbacks_total"] == {reason: 1}
        faults.gate.set()


def test_others_are_served_while_one_waits_for_its_load(unwilling: tuple[DiskStore, Faults]) -> None:
    store, faults = unwilling
    faults.gate.clear()
    with tiny.engine(disk=store, load_timeout=30.0) as engine:
        waiting = threading.Thread(target=ask, args=(engine, 0))
        waiting.start()
        assert ask(engine, 1).cached_tokens == 0  # would hang if the engine waited
        assert waiting.is_alive()
        faults.gate.set()
        waiting.join()


def test_damaged_entries_are_misses(tmp_path: Path, reference: dict[int, Answer]) -> None:
    with tiny.engine(disk=open_store(tmp_path)) as engine:
        ask(engine, 0)
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    with tiny.engine(disk=open_store(tmp_path)) as engine:
        answer = ask(engine, 0)
        assert answer.tokens == reference[0].tokens and answer.notices
        assert engine.stats()["disk_set_aside_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3])
def test_a_lost_device_costs_time_and_no_answer(
    after: int, reference: dict[int, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hot nodes come back from host memory; a request goes on behind the tokens that it had sent."""
    runner = tiny.make_runner()
    with tiny.engine(runner, pages=60, host_bytes=GIGA) as engine:
        for _ in range(3):
            ask(engine, 0)  # hot: it is copied to host memory when there is time
        until(lambda: "save" in engine.stats()["transfers_total"])
        step, left = runner.step, [after]

        def dying(one: object) -> object:
            left[0] -= 1
            if left[0] == -1:
                for pool in runner._pools:
                    pool.k_LPKCD.delete()
                    pool.v_LPKCD.delete()
                raise RuntimeError("the device fell off the bus")
            return step(one)

        monkeypatch.setattr(runner, "step", dying)
        answer = ask(engine, 0)
        assert answer.tokens == reference[0].tokens and "lost" in answer.notices[0]
        # the account is of the start that computed the prompt: the first one, if the device was lost behind it
        assert tiers(answer) == ({"device"} if after else {"host"})
        assert len(answer.segments) == len(tiny.prompt(0).segments)
        assert answer.timings.prefill >= 0
        assert np.abs(answer.logits - reference[0].logits).max() < 1e-4
        assert engine.stats()["device_losses_total"] == 1
        audit_engine(engine)
        assert_exact(ask(engine, 1), reference[1])
