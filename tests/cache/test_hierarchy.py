"""The tiers: what leaves, what comes back, what fails, and what a request is told of it."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import benchmarks.baseline  # noqa: F401 (registers its names)
from ragjax.cache.cache import neighbours_digest
from ragjax.cache.hierarchy import BACKLOG
from ragjax.cache.lookahead import Causal, Outlook, Paths
from ragjax.cache.match import Match
from ragjax.cache.node import raw_of
from ragjax.cache.policy import POLICIES
from ragjax.cache.policy.base import LRU
from ragjax.cache.policy.lacr import LACR
from ragjax.cache.profile import Profile
from ragjax.cache.stretches import MOVED
from ragjax.cache.tree import Provenance, common_prefix
from ragjax.core import OutOfPages
from ragjax.core.tiers import Load, Tier
from tests.support.audit import AuditError, audit_cache, audit_counts
from tests.support.transfers import (
    BYTES,
    GARBAGE,
    PAGE,
    Bench,
    FakeDiskIndex,
    causal_content,
    keyed_content,
    match_segment,
    tokens,
)

A, B, C = [1] * 4, [2] * 4, [3] * 4


def tiers(pages=5, *, host=100, **options):
    return Bench(pages, host_bytes=host * BYTES, **options)


def where(bench, ids, tenant=""):
    """The tiers of memory that hold the node which ends a path."""
    node = bench.node(ids, tenant)
    return "" if node is None else "D" * (node.run is not None) + "H" * (node.host is not None)


def label(bench, ids, tenant="", **options):
    """The coldest tier that a look-up finds the tokens in."""
    with bench.match(ids, tenant, **options) as match:
        return match.tier().label if match.length else None


# ------------------------------------------------------------------------------------ leaving, coming back


def test_what_leaves_the_device_comes_back_from_host_memory():
    bench = tiers()
    bench.put(A)
    bench.squeeze()
    assert where(bench, A) == "H"
    bench.audit()
    match = bench.cache.matcher.match_prefix(tokens(*A))
    assert not match.ready and match.complete and match.tier() is Tier.HOST and bench.cache.loading == 1
    bench.settle()
    assert match.ready and match.broken is None and where(bench, A) == "DH"
    match.release()
    assert bench.length(A) == 4
    assert bench.cache.metrics.tier_hit_tokens == {"device": 4, "host": 4}
    assert bench.cache.metrics.jobs == {"save": 1, "load": 1}
    assert bench.cache.metrics.job_bytes == {"save": 4 * BYTES, "load": 4 * BYTES}
    bench.audit()


def test_a_node_is_swapped_out_once():
    """Its second eviction copies nothing (RAGCache, section 5.1)."""
    bench = tiers()
    bench.put(A)
    for _ in range(3):
        bench.squeeze()
        assert where(bench, A) == "H" and bench.length(A) == 4
    assert bench.transfer.calls == {"save": 1, "load": 3}


@pytest.mark.parametrize("policy", [LRU, LACR])
def test_what_is_kept_outlives_a_flood_until_its_time_is_over(policy, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("ragjax.cache.hierarchy.time.monotonic", lambda: now[0])
    bench = tiers(9, host=16, policy=policy())
    path = [*A, *B]
    bench.put(path, cuts=(4,))
    assert bench.cache.keep_longer("", tokens(*path), 60.0)

    def flood():
        for i in range(500):
            bench.put([10 + i] * 4)

    flood()
    bench.audit()
    assert [where(bench, path[:n])[:1] for n in (4, 8)] == ["D", "D"]
    bench.put([*A, 7, 7, 7, 7])
    assert bench.length(path) == 8, "also where it is cut"
    now[0] += 61
    flood()
    bench.audit()
    assert not bench.cache._hierarchy._kept and (policy is not LRU or bench.node(path) is None)


def test_a_tenant_has_a_share_of_the_device_for_what_is_kept():
    bench = tiers(9, host=64)  # 8 pages of 4 tokens: a quarter is 8
    for one in (A, B, C):
        bench.put(one, tenant="acme")
    bench.put(C, tenant="umbra")
    assert [bench.cache.keep_longer("acme", tokens(*one), 60.0) for one in (A, B, C, A)] == [True, True, False, True]
    assert bench.cache.keep_longer("umbra", tokens(*C), 60.0), "each tenant has its own"


def test_only_leaves_leave_and_no_parent_is_colder_than_its_child():
    bench = tiers(8, host=8)
    path = [*A, *B, *C]
    bench.put(path, cuts=(4, 8))
    assert [where(bench, path[:n]) for n in (4, 8, 12)] == ["D", "D", "D"]
    bench.cache.free(bench.reserve(20))
    assert [where(bench, path[:n]) for n in (4, 8, 12)] == ["D", "D", "H"]
    bench.cache.free(bench.reserve(24))
    assert [where(bench, path[:n]) for n in (4, 8, 12)] == ["D", "H", "H"]
    bench.audit()
    bench.squeeze()  # host memory is full: the deepest leaves it for the first
    assert [where(bench, path[:n]) for n in (4, 8, 12)] == ["H", "H", ""]
    bench.audit()
    assert bench.length(path) == 8


def test_a_node_that_finds_no_room_in_host_memory_takes_along_what_hangs_below_it():
    bench = tiers(host=4)
    bench.put([*A, *B, 5], cuts=(8,))
    bench.squeeze()
    assert len(bench.cache.tree) == 0 and bench.cache.metrics.host_bytes == 0
    bench.audit()


def test_what_leaves_host_memory_goes_to_disk_and_comes_back():
    bench = tiers(host=4, disk_index=FakeDiskIndex())
    for ids in (A, B):
        bench.put(ids)
        bench.squeeze()
    assert [where(bench, ids) for ids in (A, B)] == ["", "H"]
    bench.settle()
    assert len(bench.disk_index.entries) == 1
    assert [label(bench, ids) for ids in (A, B)] == ["disk", "host"]
    assert bench.length(A) == 4
    assert bench.disk_index.touched == [bench.node(A).key] * 2
    bench.audit()


def test_what_came_from_disk_is_not_written_again():
    bench = tiers(host=4, disk_index=FakeDiskIndex())
    bench.put(A)
    bench.flush()
    for _ in range(2):
        bench.squeeze()
        bench.cache.clear()
        assert label(bench, A) == "disk"
    bench.settle()
    assert bench.transfer.calls["write"] == 1


def test_what_stood_behind_moved_stretches_is_not_written_since_nobody_could_find_it():
    bench = tiers(12, disk_index=FakeDiskIndex())
    bench.put(A)
    bench.put_segment([], [6, 7], Provenance.APPROXIMATE, MOVED, behind=[[1]])
    bench.flush()
    assert len(bench.disk_index.entries) == 1
    bench.squeeze()
    bench.settle()
    assert bench.transfer.calls["write"] == 1
    bench.audit()


def test_cold_look_ups_can_be_left_out():
    bench = tiers()
    bench.put([*A, 7, 8])
    bench.squeeze()
    with bench.cache.matcher.match_prefix(tokens(*A), cold=False) as match:
        assert match.length == 0 and match.ready and bench.cache.loading == 0
    bench.put_segment([], B)
    bench.squeeze()
    with bench.cache.matcher.match_prefix(tokens(), cold=False) as match:
        assert match_segment(bench.cache, match, tokens(*B), Provenance.ISOLATED, "naive", cold=False) is None
    assert bench.cache.loading == 0 and not bench.transfer.calls["load"]
    bench.audit()


def test_a_path_is_shortened_to_what_there_is_room_for():
    bench = tiers(6)
    path = [*A, *B, *C]
    bench.put(path, cuts=(4, 8))
    bench.squeeze()
    run = bench.reserve(12)
    with bench.match(path) as match:
        assert match.length == 8
    bench.audit({""})
    bench.cache.free(run)
    assert bench.length(path) == 12


def test_a_partial_match_of_a_node_in_host_memory_loads_that_part():
    bench = tiers()
    bench.put(range(8))
    bench.squeeze()
    assert bench.length([0, 1, 2, 99]) == 3
    assert [where(bench, range(n)) for n in (3, 8)] == ["DH", "H"]
    bench.audit()
    assert bench.length(range(8)) == 8


def test_kv_that_was_computed_anew_lands_where_its_node_is_cold():
    bench = tiers()
    bench.put([*A, *B], cuts=(4,))
    bench.squeeze()
    bench.put([*A, *B, 5], cuts=(4, 8), cold=False)
    bench.audit()
    assert [where(bench, ids) for ids in (A, [*A, *B], [*A, *B, 5])] == ["DH", "DH", "D"]
    assert label(bench, [*A, *B, 5]) == "device"
    assert bench.transfer.calls["save"] == 2 and not bench.transfer.calls["load"]


# ------------------------------------------------------------------------------------------- the disk


def test_the_disk_continues_what_memory_holds():
    bench = tiers(8, disk_index=FakeDiskIndex())
    path = [*A, *B, *C]
    bench.put(path, cuts=(4, 8))
    bench.flush()
    bench.cache.clear()
    assert len(bench.cache.tree) == 0 and len(bench.disk_index.entries) == 3
    assert label(bench, A) == "disk"
    with bench.match(path) as match:
        assert match.length == 12 and match.origins == ((4, Tier.DEVICE), (8, Tier.DISK))
        assert [match.tier(0, 4), match.tier(3, 5), match.tier(12, 12)] == [Tier.DEVICE, Tier.DISK, None]
        assert np.array_equal(bench.read(match), causal_content("", path))
        assert bench.transfer.calls["load"] == 2  # one for both of the rest
    bench.audit()


def test_host_memory_and_the_disk_continue_each_other():
    bench = tiers(8, disk_index=FakeDiskIndex(), host=4)
    path = [*A, *B]
    bench.put(path, cuts=(4,))
    bench.squeeze()
    bench.settle()
    assert where(bench, A) == "H" and where(bench, path) == ""
    with bench.match(path) as match:
        assert match.origins == ((4, Tier.HOST), (4, Tier.DISK)) and len(match.waits) == 0
        assert np.array_equal(bench.read(match), causal_content("", path))
    bench.audit()


def test_part_of_an_entry_is_taken_and_others_continue_behind_it():
    disk_index = FakeDiskIndex()
    bench = tiers(12, disk_index=disk_index)
    bench.put(range(6))
    bench.flush()
    bench.put([0, 1, 2, 3, 70, 71], cuts=(4,))
    bench.flush()
    bench.cache.clear()
    bench = tiers(12, disk_index=disk_index)
    with bench.match([0, 1, 2, 3, 70, 71]) as match:
        assert match.origins == ((6, Tier.DISK),)
        assert np.array_equal(bench.read(match), causal_content("", [0, 1, 2, 3, 70, 71]))
    assert where(bench, range(4)) == "D" and where(bench, range(6)) == ""
    assert bench.length(range(6)) == 6
    bench.audit()
    bench = tiers(12, disk_index=disk_index)
    assert bench.length([0, 1, 2, 9]) == 3
    bench.put(range(6))  # behind the part, what is missing is computed
    bench.flush()
    bench = tiers(12, disk_index=disk_index)
    assert bench.length(range(6)) == 6


def test_a_device_node_in_the_middle_of_which_the_disk_goes_on_is_split():
    disk_index = FakeDiskIndex()
    other = tiers(8, disk_index=disk_index)
    other.put([1, 2, 3, 9, 9], cuts=(3,))
    other.flush()
    bench = tiers(8, disk_index=disk_index)
    bench.put([1, 2, 3, 4, 5])
    with bench.match([1, 2, 3, 9, 9]) as match:
        assert match.origins == ((3, Tier.DEVICE), (2, Tier.DISK))
    assert bench.length([1, 2, 3, 4, 5]) == 5
    bench.audit()


def test_an_entry_is_found_though_its_first_part_was_brought_for_others():
    """Prompts that begin alike: after a restart one brings what it shares with another's entry, piece by piece."""
    disk_index = FakeDiskIndex()
    bench = tiers(40, disk_index=disk_index)
    whole = [*A, 5, 6, 7, 8, 9]
    bench.put(whole, cuts=(4,))
    bench.put([*A, *B], tenant="a")
    bench.flush()
    bench = tiers(40, disk_index=disk_index)
    assert [bench.length([*A, 5, x]) for x in (1, 2)] == [5, 5]
    assert bench.length([*A, 5, 6, 1]) == 6 and bench.length([*A, 5, 6, 7, 1]) == 7
    bench.put([*A, 5, 6, 1, 1])
    assert bench.length(whole) == 9 and bench.length([*A, 5, 6, 1, 1]) == 8
    assert bench.length([*A, *B]) == 4
    bench.audit()


@pytest.mark.parametrize("host", [0, 100])
def test_a_restart_serves_everything_from_disk(host):
    disk_index = FakeDiskIndex()
    bench = tiers(24, host=host, disk_index=disk_index)
    bench.put([*A, *B], cuts=(4,))
    bench.put([*A, 9, 8])
    bench.put([*A, *B, 5], tenant="a")
    bench.put_segment(A, [6, 7])
    bench.put_segment(A, [6, 7], Provenance.APPROXIMATE, "fusion", behind=[[1], [2]])
    bench.flush()
    bench.audit()
    bench = tiers(24, host=host, disk_index=disk_index)
    assert [bench.length(ids) for ids in ([*A, *B], [*A, 9, 8])] == [8, 6]
    with bench.match([*A, *B, 5], "a") as match:
        assert match.length == 9
    assert bench.has_segment(A, [6, 7])
    assert bench.has_segment(A, [6, 7], Provenance.APPROXIMATE, "fusion", behind=[[1], [2]])
    assert not bench.has_segment(A, [6, 7], Provenance.APPROXIMATE, "fusion", behind=[[2], [1]])
    assert not bench.has_segment(A, [6, 7], Provenance.APPROXIMATE, "fusion")
    bench.audit()
    other = tiers(24, host=host, disk_index=disk_index, identity=b"another model")
    assert [other.length(ids) for ids in ([*A, *B], [*A, 9, 8])] == [0, 0]
    other.put(A)
    assert not other.has_segment(A, [6, 7])


def test_a_keyed_entry_from_disk_is_found_in_memory_from_then_on():
    disk_index = FakeDiskIndex()
    bench = tiers(12, disk_index=disk_index)
    bench.put(A)
    bench.put_segment(A, [6, 7], Provenance.APPROXIMATE, "fusion", behind=[[1]])
    bench.flush()
    bench = tiers(12, disk_index=disk_index)
    for _ in range(3):
        assert bench.has_segment(A, [6, 7], Provenance.APPROXIMATE, "fusion", behind=[[1]])
    assert bench.transfer.calls["load"] == 2  # the context's, and its own
    bench.audit()


def test_a_public_segment_comes_back_though_the_tenant_holds_the_same_context_itself():
    bench = tiers(8)
    bench.put(A, tenant="a")
    bench.put(A)
    bench.put_segment(A, [6, 7])
    bench.squeeze()
    with bench.match(A, "a") as match:
        assert match.node.tenant == "a"
        found = match_segment(bench.cache, match, tokens(6, 7), Provenance.ISOLATED, "naive")
        bench.settle()
        assert np.array_equal(bench.read(found), keyed_content("", A, "isolated", "naive", [6, 7]))
        bench.audit({""})
        found.release()
    bench.audit()


def test_flushing_ends_though_nothing_can_be_written():
    bench = tiers(disk_index=FakeDiskIndex())
    for ids in (A, B, [7]):
        bench.put(ids)
    bench.transfer.fail("write", 100)
    rounds = 0
    while bench.cache.flush(2):
        bench.settle()
        rounds += 1
    assert rounds == 2 and bench.cache.metrics.failures["write"] == 3
    bench.transfer.refuse.clear()
    bench.flush()  # another time it may
    assert len(bench.disk_index.entries) == 3
    bench.audit()


# --------------------------------------------------------------------------------- while bytes are under way


def test_many_leases_wait_for_one_load():
    bench = tiers(lag=True)
    bench.put([*A, *B], cuts=(4,))
    bench.squeeze()
    matches = [bench.cache.matcher.match_prefix(tokens(*ids)) for ids in ([*A, *B], A, [1, 1, 7], [*A, *B, 9])]
    assert bench.transfer.calls["load"] == 1 and [match.length for match in matches] == [8, 4, 2, 8]
    assert not any(match.ready for match in matches)
    bench.audit({""})
    bench.settle()
    assert all(match.ready and match.broken is None for match in matches)
    for match in matches:
        assert np.array_equal(bench.read(match), causal_content("", match.tokens))
        match.release()
    bench.audit()


def test_a_node_is_split_while_it_is_loaded():
    bench = tiers(8, lag=True)
    bench.put(range(8))
    bench.squeeze()
    match = bench.cache.matcher.match_prefix(tokens(*range(8)))
    with bench.cache.matcher.match_prefix(tokens(0, 1, 2)) as short:
        run = bench.reserve(2)
        bench.write(run, keyed_content("", [0, 1, 2], "isolated", "naive", [7, 7]))
        bench.cache.admitter.admit_segment(short, tokens(7, 7), run, 3, Provenance.ISOLATED, "naive")
        bench.cache.free(run)
        bench.audit({""})
    assert len(bench.cache.tree) == 3
    bench.settle()
    assert match.ready and np.array_equal(bench.read(match), causal_content("", range(8)))
    match.release()
    assert [where(bench, range(n)) for n in (3, 8)] == ["DH", "DH"]
    bench.squeeze()
    assert [where(bench, range(n)) for n in (3, 8)] == ["H", "H"]
    bench.audit()


def test_a_cancelled_request_leaves_its_load_to_others():
    bench = tiers(lag=True)
    bench.put(A)
    bench.squeeze()
    bench.cache.matcher.match_prefix(tokens(*A)).release()
    bench.audit()
    assert bench.pool.reclaimable_pages == bench.pool.capacity - 1  # pinned until the bytes are there
    with pytest.raises(OutOfPages):
        bench.reserve(16)
    bench.settle()
    assert where(bench, A) == "DH" and bench.length(A) == 4
    bench.squeeze()
    bench.audit()


def test_pages_of_a_failed_load_are_given_back_when_nobody_needs_them():
    bench = tiers(lag=True)
    bench.put([*A, *B], cuts=(4,))
    bench.squeeze()
    bench.settle()
    first, second = (bench.cache.matcher.match_prefix(tokens(*ids)) for ids in ([*A, *B], A))
    bench.transfer.finish(0, "the bus caught fire")
    bench.cache.poll()
    assert [match.broken for match in (first, second)] == ["the bus caught fire"] * 2 and first.ready
    assert len(bench.cache.tree) == 0 and bench.cache.loading == 0
    assert bench.pool.free_pages == bench.pool.capacity - 2
    bench.audit({""})
    first.release()
    assert bench.pool.free_pages == bench.pool.capacity - 1
    bench.audit({""})
    second.release()
    assert bench.pool.free_pages == bench.pool.capacity
    assert bench.cache.metrics.failures["load"] == 1 and not bench.transfer.entries
    bench.audit()


def test_what_host_memory_has_stays_there_when_its_load_is_given_up():
    bench = tiers(lag=True)
    bench.put([*A, *B], cuts=(4,))
    bench.squeeze()
    bench.settle()
    bench.cache.matcher.match_prefix(tokens(*A)).release()
    bench.cache.matcher.match_prefix(tokens(*A, *B)).release()  # another load, behind the first one
    assert bench.cache.loading == 2 and bench.cache.give_up()
    assert bench.cache.loading == 0 and bench.pool.free_pages == bench.pool.capacity
    assert [where(bench, ids) for ids in (A, [*A, *B])] == ["H", "H"]
    bench.audit()
    match = bench.cache.matcher.match_prefix(tokens(*A, *B))
    bench.settle()
    assert match.ready and match.broken is None and match.length == 8
    match.release()
    bench.audit()


def test_leases_on_what_hangs_below_a_failed_load_are_broken_at_once():
    bench = tiers(12, lag=True)
    bench.put(A)
    bench.put_segment(A, [6, 7])
    bench.squeeze()
    context = bench.cache.matcher.match_prefix(tokens(*A))
    segment = match_segment(bench.cache, context, tokens(6, 7), Provenance.ISOLATED, "naive")
    assert context.waits and segment.waits and not context.waits.keys() & segment.waits.keys()
    load = next(i for i, job in enumerate(bench.transfer.pending) if isinstance(job, Load))
    bench.transfer.finish(load, "it failed")
    bench.cache.poll()
    assert context.broken == segment.broken == "it failed"
    bench.audit({""})
    bench.settle()
    for match in (context, segment):
        match.release()
    assert bench.pool.free_pages == bench.pool.capacity
    bench.audit()


def test_behind_a_broken_lease_nothing_is_found_and_nothing_kept():
    bench = tiers(12, lag=True)
    bench.put(A)
    bench.squeeze()
    broken = bench.cache.matcher.match_prefix(tokens(*A))
    bench.transfer.finish_all("it failed")
    bench.cache.poll()
    cache, run, isolated = bench.cache, bench.reserve(2), Provenance.ISOLATED
    assert match_segment(cache, broken, tokens(6, 7), isolated, "naive") is None
    with cache.matcher.match_dependency(broken, tokens(6, 7), "dep") as path:
        assert path.length == 0
    for refused in (
        lambda: cache.admitter.admit_segment(broken, tokens(6, 7), run, 4, isolated, "naive"),
        lambda: cache.admitter.admit_dependency(broken, tokens(6, 7), 0, run, (), "dep"),
        lambda: cache.admitter.admit_prefix(broken, tokens(*A, 6, 7), 4, run, ()),
    ):
        with pytest.raises(ValueError, match="never arrived: it failed"):
            refused()
    bench.audit({""})
    whole = bench.reserve(4)
    bench.write(whole, causal_content("", A))
    cache.admitter.admit_prefix(broken, tokens(*A), 0, whole, ())  # what was computed without it may stay
    for held in (run, whole):
        cache.free(held)
    broken.release()
    assert bench.length(A) == 4
    bench.audit()


def test_a_failed_save_of_an_evicted_node_loses_it_with_all_below():
    bench = tiers(lag=True)
    bench.put([*A, *B], cuts=(4,))
    bench.squeeze()
    assert len(bench.transfer.pending) == 2
    bench.transfer.finish(1, "out of memory")  # that of A, which left last
    bench.cache.poll()
    assert len(bench.cache.tree) == 0 and bench.cache.metrics.failures["save"] == 1
    bench.settle()
    assert not bench.transfer.entries and bench.cache.metrics.host_bytes == 0
    bench.audit()


def test_a_failed_save_of_a_node_on_the_device_costs_nothing():
    bench = tiers(lag=True)
    bench.put(A)
    for _ in range(2):
        bench.length(A)
    assert bench.cache.replicate()
    bench.transfer.finish(0, "out of memory")
    bench.cache.poll()
    assert where(bench, A) == "D" and not bench.transfer.entries
    bench.audit()
    bench.squeeze()
    bench.settle()
    assert where(bench, A) == "H"
    bench.transfer.lag = False
    assert bench.length(A) == 4


def test_a_load_that_waits_for_a_failed_save_fails():
    bench = tiers(lag=True)
    bench.put(A)
    bench.squeeze()
    match = bench.cache.matcher.match_prefix(tokens(*A))
    bench.transfer.finish(0, "out of memory")
    bench.settle()
    assert match.broken and bench.cache.metrics.failures == {"save": 1, "load": 1}
    match.release()
    assert not bench.transfer.entries and bench.pool.free_pages == bench.pool.capacity
    bench.audit()


def test_a_failed_write_is_tried_again_at_the_next_occasion():
    bench = tiers(disk_index=FakeDiskIndex())
    bench.put(A)
    bench.transfer.fail("write")
    bench.cache.flush()
    bench.settle()
    assert bench.cache.metrics.failures["write"] == 1 and not bench.disk_index.entries
    bench.cache.flush()
    bench.flush()
    assert len(bench.disk_index.entries) == 1
    bench.audit()


def test_what_has_left_the_disk_is_not_said_to_be_there_and_is_written_again():
    bench = tiers(host=0, disk_index=FakeDiskIndex(), lag=True)
    bench.put(A)
    bench.cache.flush()
    assert bench.cache.on_disk(bench.node(A)), "it is on its way"
    bench.settle()
    [key] = bench.disk_index.entries
    assert bench.node(A).shelved and bench.transfer.calls["write"] == 1
    bench.disk_index.entries.clear()  # the disk made room
    assert not bench.cache.on_disk(bench.node(A)) and not bench.node(A).shelved
    bench.node(A).shelved = True
    bench.squeeze()
    assert bench.cache.departures[0].kept is Tier.DISK
    bench.settle()
    assert list(bench.disk_index.entries) == [key] and bench.transfer.calls["write"] == 2
    bench.audit()


@pytest.mark.parametrize("how", ["vanished", "damaged"])
def test_an_entry_that_cannot_be_read_is_computed_anew(how):
    bench = tiers(disk_index=FakeDiskIndex(), lag=True)
    bench.put(A)
    bench.flush()
    bench.cache.clear()
    bench.settle()
    [key] = bench.disk_index.entries
    match = bench.cache.matcher.match_prefix(tokens(*A))
    assert match.complete and not match.ready
    if how == "vanished":
        del bench.disk_index.entries[key]
    else:
        bench.disk_index.bad.add(key)
    bench.settle()
    assert "load failed" in match.broken
    match.release()
    assert bench.length(A) == 0
    bench.disk_index.bad.clear()
    bench.put(A)
    bench.flush()
    assert list(bench.disk_index.entries) == [key]
    bench.audit()


# ----------------------------------------------------------------------------------- replication and loss


def test_hot_nodes_are_copied_before_they_must_leave():
    bench = tiers(8, disk_index=FakeDiskIndex())
    bench.put([*A, *B], cuts=(4,))
    bench.length([*A, *B])
    bench.length(A)
    assert bench.cache.replicate() and not bench.cache.replicate()
    assert [where(bench, ids) for ids in (A, [*A, *B])] == ["DH", "D"]
    bench.settle()
    assert len(bench.disk_index.entries) == 1 and bench.transfer.calls == {"save": 1, "write": 1}
    bench.audit()
    bench.squeeze()
    assert bench.transfer.calls["save"] == 2  # the other one's alone
    bench.audit()


def test_both_halves_of_a_hot_node_are_copied():
    bench = tiers(8)
    bench.put(range(8))
    for _ in range(2):
        bench.length(range(8))
    bench.put([0, 1, 2, 77])
    assert bench.cache.replicate()
    assert [where(bench, range(n)) for n in (3, 8)] == ["DH", "DH"]
    bench.audit()


def test_copies_ahead_of_need_wait_while_too_much_is_to_be_written():
    bench = tiers(8, host=0, disk_index=FakeDiskIndex())
    bench.put(A)
    for _ in range(2):
        bench.length(A)
    bench.transfer.backlog = BACKLOG + 1
    assert not bench.cache.replicate() and bench.cache.metrics.unwritten_tokens == 0
    bench.transfer.backlog = 0
    assert bench.cache.replicate() and bench.transfer.calls["write"] == 1
    bench.put(B)
    bench.transfer.backlog = BACKLOG + 1
    bench.squeeze()  # A is written, B is not
    assert bench.cache.metrics.unwritten_tokens == 4
    bench.audit()


def test_a_copy_that_leaves_host_memory_while_its_node_stays_is_kept_on_the_device():
    bench = tiers(8, host=4)
    for ids in (A, B):
        bench.put(ids)
        for _ in range(2):
            bench.length(ids)
        bench.cache.replicate()
    assert [where(bench, ids) for ids in (A, B)] == ["D", "DH"]
    [left] = bench.cache.departures
    assert (left.tier, left.kept) == (Tier.HOST, Tier.DEVICE)
    bench.audit()


def test_replication_goes_to_disk_where_there_is_no_host_memory():
    bench = tiers(8, host=0, disk_index=FakeDiskIndex())
    bench.put(A)
    for _ in range(3):
        bench.length(A)
    bench.cache.replicate()
    bench.settle()
    assert where(bench, A) == "D" and len(bench.disk_index.entries) == 1 and not bench.transfer.entries
    bench.audit()


def test_after_the_loss_of_the_device_host_memory_serves():
    bench = tiers(12, host=12)
    bench.put([*A, *B], cuts=(4,))
    bench.squeeze()
    bench.put([*A, *C], cuts=(4,))
    bench.put([9, 9])
    match = bench.match(A)
    with pytest.raises(ValueError, match="1 matches and 0 reservations are outstanding"):
        bench.cache.lose_device()
    match.release()
    bench.slots[:] = GARBAGE
    bench.cache.lose_device()
    bench.audit()
    assert bench.pool.free_pages == bench.pool.capacity
    assert [bench.length(ids) for ids in ([*A, *B], [*A, *C], [9, 9])] == [8, 4, 0]
    bench.audit()


def test_the_device_cannot_be_lost_while_bytes_come():
    bench = tiers(lag=True)
    bench.put(A)
    bench.squeeze()
    bench.cache.matcher.match_prefix(tokens(*A)).release()
    with pytest.raises(ValueError, match="a load is under way"):
        bench.cache.lose_device()


# -------------------------------------------------------------------------------------------- lossy storage


@pytest.mark.parametrize("place", ["host", "disk"])
def test_what_came_back_from_lossy_storage_is_flagged_and_all_that_is_computed_on_it(place):
    bench = tiers(16, host=100 if place == "host" else 0, disk_index=FakeDiskIndex(), lossy=True)
    bench.put(A)
    with bench.match(A) as match:
        assert not match.lossy
    bench.squeeze()
    bench.settle()
    before = bench.cache.metrics
    with bench.match(A) as match:
        assert match.lossy and match.tier().label == place
    after = bench.cache.metrics
    assert after.approximate_hit_tokens - before.approximate_hit_tokens == 4
    assert after.exact_hit_tokens == before.exact_hit_tokens and after.loss_max == 0.01
    bench.put([*A, *B])  # computed on it
    bench.put_segment(A, [6, 7])
    bench.put_path(A, [8, 9, 7], cuts=(1,))
    bench.put_path(A, [8, 9, 5])
    nodes = list(bench.cache.tree.nodes())
    assert len(nodes) == 7 and all(node.lossy for node in nodes)
    with bench.match(A) as match, bench.cache.matcher.match_dependency(match, tokens(8, 9), "dep") as path:
        assert path.lossy and path.length == 2
    bench.put([50])
    assert not bench.node([50]).lossy
    with bench.match([50]) as match:
        assert not match.lossy
    bench.audit()


def test_an_entry_of_the_disk_says_itself_whether_it_is_lossy():
    disk_index = FakeDiskIndex()
    bench = tiers(8, disk_index=disk_index)
    bench.put(A)
    bench.flush()
    bench = tiers(8, disk_index=disk_index, lossy=True)
    with bench.match(A) as match:
        assert match.tier() is Tier.DISK and not match.lossy
    bench.put([*A, *B])
    assert not bench.node([*A, *B]).lossy
    bench.put([50])
    bench.flush()
    bench = tiers(8, disk_index=disk_index)
    for ids, lossy in ((A, False), ([*A, *B], True), ([50], True)):
        with bench.match(ids) as match:
            assert match.complete and match.lossy == lossy
    bench.put([50, 51])  # computed on what is lossy, and stored without loss
    bench.flush()
    bench = tiers(8, disk_index=disk_index)
    assert bench.length([50, 51]) == 2 and bench.node([50, 51]).lossy
    bench.audit()


def test_kv_that_was_computed_anew_is_exact_but_the_copy_below_it_is_what_it_was():
    disk_index = FakeDiskIndex()
    bench = tiers(8, disk_index=disk_index, lossy=True)
    bench.put(A)
    bench.flush()
    bench = tiers(8, disk_index=disk_index)  # lossless from here on: the copy in host memory is a copy of lossy bytes
    assert bench.length(A) == 4
    bench.squeeze()
    bench.put(A, cold=False)
    bench.squeeze()
    assert bench.length(A) == 4  # checks that the match says so
    bench.audit()


# ------------------------------------------------------------------------------------------- dependency paths


def test_paths_share_what_they_share_and_siblings_are_exact():
    bench = tiers(24)
    bench.put(A)
    bench.put_path(A, [1, 2, 3, 4, 5], cuts=(2, 4))
    bench.put_path(A, [1, 2, 3, 8, 9], cuts=(2, 4))
    assert bench.path_length(A, [1, 2, 3, 8, 9, 9]) == 5 and bench.path_length(A, [1, 2, 7]) == 2
    tokens_of = sorted(n.tokens.tolist() for n in bench.cache.tree.nodes() if n.method == "dep")
    assert tokens_of == [[1, 2], [3], [4], [5], [8], [9]]
    with bench.match(A) as match, bench.cache.matcher.match_dependency(match, tokens(1, 2, 3, 8), "dep") as path:
        assert path.complete and [at for _, at in path.spans] == [4, 7]
    assert bench.path_length([], [1, 2]) == 0 and bench.path_length(A, [1, 2], method="other") == 0
    before = bench.cache.metrics
    bench.path_length(A, [1, 2, 3])
    assert bench.cache.metrics.exact_hit_tokens - before.exact_hit_tokens == 7
    assert bench.length([*A, 1, 2]) == 4
    bench.audit()


def test_where_a_path_begins_makes_a_difference():
    bench = tiers(24)
    bench.put([*A, 1])
    bench.put_path(A, [1, 2], cuts=(1,))
    bench.put_path([*A, 1], [2])
    bench.put_path([], [*A, 1, 2], cuts=(4, 5))
    assert len([n for n in bench.cache.tree.nodes() if n.method]) == 6
    assert [bench.path_length(c, ids) for c, ids in ((A, [1, 2]), ([*A, 1], [2]), ([], [*A, 1, 2]))] == [2, 1, 6]
    bench.audit()
    bench.squeeze()
    bench.audit()


def test_a_path_is_merged_when_it_no_longer_branches():
    bench = tiers(24, host=0, disk_index=FakeDiskIndex())
    bench.put_path([], [1, 2, 3, 4, 5, 6])
    bench.put_path([], [1, 2, 3, 7])
    assert len(bench.cache.tree) == 3
    bench.path_length([], [1, 2, 3, 4, 5, 6])
    bench.cache.free(bench.reserve(21 * PAGE))  # the branch that was used longer ago leaves
    assert [n.tokens.tolist() for n in bench.cache.tree.nodes()] == [[1, 2, 3, 4, 5, 6]]
    bench.audit()
    assert bench.path_length([], [1, 2, 3, 4, 5, 6]) == 6


def test_a_node_that_grows_while_room_is_made_for_its_copy_is_kept_whole_or_not_at_all():
    """Its sibling leaves host memory for it, so it takes in their parent."""
    for host, kept in ((2, 0), (5, 5)):
        bench = tiers(5, host=host)
        bench.put_path([], [1, 2, 3, 4, 5])
        bench.put_path([], [1, 2, 3, 7, 8])
        bench.path_length([], [1, 2, 3, 4, 5])
        bench.cache.free(bench.reserve(2 * PAGE))
        assert [n.tokens.tolist() for n in bench.cache.tree.nodes() if n.host] == [[7, 8]]
        bench.squeeze()
        bench.audit()
        assert bench.cache.metrics.host_bytes == kept * BYTES


def test_a_path_admitted_late_hangs_below_one_that_came_meanwhile():
    bench = tiers(12)
    with bench.match([]) as context:
        run = bench.reserve(3)
        bench.write(run, keyed_content("", [], Provenance.DEPENDENCY, "dep", [1, 2, 3]))
        bench.put_path([], [1, 2])
        bench.cache.admitter.admit_dependency(context, tokens(1, 2, 3), 0, run, (), "dep")
        bench.cache.free(run)
    bench.audit()
    assert bench.path_length([], [1, 2, 3]) == 3 and bench.cache.metrics.admitted_tokens == 3


def test_a_path_whose_runs_are_apart_is_not_merged():
    bench = tiers(24, host=0, disk_index=FakeDiskIndex())
    bench.put_path([], [1, 2, 3])
    bench.put_path([], [1, 2, 3, 7])
    bench.put_path([], [1, 2, 3, 4, 5, 6])  # in a run of its own, which begins in another page
    bench.cache.free(bench.reserve(21 * PAGE))
    assert sorted(n.tokens.tolist() for n in bench.cache.tree.nodes()) == [[1, 2, 3], [4, 5, 6]]
    bench.audit()
    assert bench.path_length([], [1, 2, 3, 4, 5, 6]) == 6


def test_paths_come_back_from_host_memory_after_splits_and_merges():
    bench = tiers(24)
    bench.put(A)
    bench.put_path(A, [1, 2, 3, 4, 5, 6])
    bench.squeeze()
    bench.put_path(A, [1, 2, 3, 7])
    bench.squeeze()
    bench.audit()
    assert bench.path_length(A, [1, 2, 3, 7]) == 4 and bench.path_length(A, [1, 2, 3, 4, 5, 6]) == 6
    bench.audit()


@pytest.mark.parametrize("host", [0, 100])
def test_paths_come_back_from_disk_after_a_restart(host):
    """Behind their own context, under their own method and for their own tenant, and causal KV is none of them."""
    disk_index = FakeDiskIndex()
    bench = tiers(40, host=host, disk_index=disk_index)
    for tenant in ("", "a"):
        bench.put(A, tenant=tenant)
    bench.put_path(A, [1, 2, 3, 4, 5, 6], cuts=(2, 4))
    bench.put_path(A, [8, 2, 3, 7], tenant="a")
    bench.put([*A, 1, 9])
    bench.flush()
    bench = tiers(40, host=host, disk_index=disk_index)
    assert bench.path_length(A, [1, 2, 3, 4, 9]) == 4
    bench.audit()
    assert bench.path_length(A, [1, 2, 3, 4, 5, 6]) == 6 and bench.path_length(A, [8, 2, 3, 7], tenant="a") == 4
    assert bench.path_length(A, [8, 2, 3, 7]) == 0 and bench.path_length(A, [1, 2], method="other") == 0
    assert bench.path_length(A[:3], [A[3], 1]) == 0 and bench.path_length([*A, 1], [2, 3]) == 0
    assert bench.length([*A, 1, 2]) == 5 and bench.length([*A, 1, 9]) == 6
    bench.audit()


# ------------------------------------------------------------------------------------------------- quotas


def quota(**tenants):
    return {tenant: tokens_ * BYTES for tenant, tokens_ in tenants.items()}.get


def test_a_tenant_keeps_to_its_quota_on_the_device_and_in_host_memory():
    bench = tiers(24, quota=quota(a=8))
    for first in range(5):
        bench.put([first] * 4, tenant="a")
        bench.put([first] * 4, tenant="b")
        held = bench.cache.tree.held
        assert held[Tier.DEVICE]["a"] <= 8 and held[Tier.HOST]["a"] <= 8
        bench.audit()
    assert held[Tier.DEVICE]["b"] == 20
    assert [where(bench, [n] * 4, "a") for n in range(5)] == ["", "H", "H", "D", "D"]
    assert [bench.length([n] * 4, "b") for n in range(5)] == [4] * 5
    bench.audit()


def test_a_quota_binds_what_is_loaded_too_after_a_restart():
    disk_index = FakeDiskIndex()
    bench = tiers(24, disk_index=disk_index)
    for first in range(5):
        bench.put([first] * 4, tenant="a")
    bench.flush()
    bench = tiers(24, disk_index=disk_index, quota=quota(a=8))
    for first in range(5):
        assert bench.length([first] * 4, "a") == 4
        assert bench.cache.tree.held[Tier.DEVICE]["a"] <= 8
    bench.audit()


def test_a_load_makes_room_in_the_quota_when_it_begins_and_when_it_was_for_nobody():
    bench = tiers(24, quota=quota(a=8), lag=True)
    for ids in (A, B, C):
        bench.put(ids, tenant="a")
    bench.settle()
    held = bench.cache.tree.held[Tier.DEVICE]
    assert where(bench, A, "a") == "H" and held["a"] == 8
    match = bench.cache.matcher.match_prefix(tokens(*A), "a")
    assert held["a"] == 8 and not match.ready
    matches = [match, bench.cache.matcher.match_prefix(tokens(*C), "a")]
    bench.cache.matcher.match_prefix(tokens(*B), "a").release()  # cancelled; all else is in use
    assert held["a"] == 12
    bench.settle()
    assert held["a"] == 8
    for match in matches:
        match.release()
    bench.audit()


def test_what_is_in_use_may_exceed_the_quota_until_it_is_released():
    bench = tiers(24, quota=quota(a=4))
    bench.put(A, tenant="a")
    first = bench.match(A, "a")
    bench.put(B, tenant="a")
    bench.squeeze()
    second = bench.match(B, "a")
    assert bench.cache.tree.held[Tier.DEVICE]["a"] == 8
    first.release()
    second.release()
    assert bench.cache.tree.held[Tier.DEVICE]["a"] == 4
    bench.audit()


def test_a_quota_counts_the_pages_of_the_device_and_not_what_kv_takes_at_rest():
    """Short chunks have a page each, and two halves of a node that was split share one."""
    bench = tiers(64, quota=quota(a=16))
    with bench.match([90], "a") as head:
        for first in range(8):
            bench.put([first], tenant="a")
            assert len(bench.cache.tree.pages["a"]) <= 4
        assert not head.complete
    bench.put([*A, 1, 2, 3], cuts=(1, 2, 5, 6), tenant="a")
    assert len(bench.cache.tree.pages["a"]) == 4 and bench.length([*A, 1, 2, 3], "a") == 7
    bench.audit()


def test_a_quota_counts_the_entries_of_host_memory_with_what_each_has_besides_tokens():
    bench = tiers(64, quota=quota(a=10), overhead=BYTES)
    for first in range(8):
        bench.put([first], tenant="a")
        assert bench.cache._hierarchy.host_memory.held["a"] <= 10 * BYTES
    assert [where(bench, [n], "a") for n in range(8)].count("H") == 5
    bench.audit()


def test_what_exceeds_the_quota_alone_is_not_kept_in_host_memory():
    bench = tiers(24, quota=quota(a=4))
    bench.put(range(8), tenant="a")
    assert bench.length(range(8), "a") == 0 and not bench.transfer.entries
    bench.audit()


# ------------------------------------------------------------------------------------------------- audits


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda h, node: h.host.discard(node), "host's queue"),
        (lambda h, node: setattr(h.host_memory, "used", 7), "7 bytes of host memory are counted"),
        (lambda h, node: setattr(next(iter(h.host_memory.entries.values())), "nodes", 5), "host entries"),
        (lambda h, node: h.host_memory.entries.clear(), "host entries"),
    ],
)
def test_the_audit_sees_what_is_wrong_below_the_device(damage, message):
    bench = tiers()
    bench.put(A)
    bench.squeeze()
    bench.audit()
    damage(bench.cache._hierarchy, bench.node(A))
    with pytest.raises(AuditError, match=message):
        audit_cache(bench.cache)


def test_the_audit_sees_host_memory_that_is_too_full_and_a_load_that_does_not_bring_its_nodes():
    bench = tiers(lag=True)
    bench.put(A)
    bench.squeeze()
    with bench.cache.matcher.match_prefix(tokens(*A)):
        [load] = bench.cache._hierarchy.loads.under_way.values()
        nodes, load.nodes = load.nodes, [*load.nodes[:-1], bench.cache.tree.root]
        bench.cache.tree.unpin(nodes[-1])
        bench.cache.tree.pin(bench.cache.tree.root)
        with pytest.raises(AuditError, match="a load that does not bring it"):
            audit_cache(bench.cache)
    object.__setattr__(bench.cache._hierarchy.storage, "host_bytes", 1)
    with pytest.raises(AuditError, match="which has 1"):
        audit_counts(bench.cache)


# --------------------------------------------------------------------------------------- who waits for what


class Recorder(LRU):
    """Calls, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_queue(self, request, keys):
        self.calls.append(("queue", request, tuple(keys)))
        return ()

    def on_start(self, request):
        self.calls.append(("start", request))
        return ()

    def on_evict(self, node, tier):
        self.calls.append(("evict", node.tokens.tolist(), tier))

    def on_split(self, upper, lower, key):
        self.calls.append(("split", upper.tokens.tolist(), lower.tokens.tolist()))

    def on_merge(self, upper, lower, key):
        self.calls.append(("merge", upper.tokens.tolist(), lower.tokens.tolist()))


def keys_of(bench, ids, cuts, tenant="", public=0):
    return Outlook([Causal(raw_of(ids), cuts, tenant, public)]).keys(bench.cache.tree)


def keys_of_path(bench, context, path, ends, method):
    return Outlook([Paths(raw_of(context), [(raw_of(path), ends, 0)], method, "")]).keys(bench.cache.tree)


def test_waiting_requests_are_announced_by_the_keys_they_will_use():
    policy = Recorder()
    bench = tiers(12, policy=policy)
    bench.put(A)
    keys = keys_of(bench, tokens(*A, *B, *C), (2, 4, 8))
    bench.cache.announce("r1", keys)
    assert policy.calls == [("queue", "r1", keys)]
    bench.put([*A, *B, *C], cuts=(2, 4, 8))
    assert [n.key for n in bench.cache.tree.nodes()] == list(keys) == list(keys_of(bench, tokens(*A, *B, *C), ()))
    bench.cache.withdraw("r1")
    assert policy.calls[-1] == ("start", "r1")


def test_what_is_to_be_public_is_named_as_the_publics():
    bench = tiers(12)
    keys = keys_of(bench, tokens(*A, *B, *C), (4, 8), "a", 6)
    bench.put([*A, *B, *C], cuts=(4, 8), tenant="a", public=6)
    found = [(node.tenant, len(node)) for node in bench.cache.tree.nodes()]
    assert found == [("", 4), ("", 2), ("a", 2), ("a", 4)] and [n.key for n in bench.cache.tree.nodes()] == list(keys)
    assert (
        keys_of(bench, tokens(*A, *B, *C, 9), (), "a", 13)[-1] != keys_of(bench, tokens(*A, *B, *C, 9), (), "", 13)[-1]
    ), "behind a tenant's own nothing is public"


def test_paths_of_another_context_are_not_named():
    bench = tiers(12)
    bench.put([1, 2, 3])
    bench.put_path([1, 2, 3], [7, 8])
    (key,) = keys_of_path(bench, tokens(1, 2), tokens(7, 8), (2,), "dep")
    assert key == bench.cache.key_of(tokens(1, 2), tokens(7, 8), Provenance.DEPENDENCY, "dep")


@pytest.mark.parametrize("first", [True, False], ids=["named before the cut", "named after it"])
def test_who_waits_for_a_path_wants_it_though_it_is_merged(first):
    policy = LACR()
    bench = Bench(12, policy)
    bench.put_path([], [1, 2, 3, 4])
    path = (tokens(), tokens(1, 2, 3, 4), (4,), "dep")
    if first:
        bench.cache.announce("r", keys_of_path(bench, *path))
    bench.put_path([], [1, 2, 3, 9])
    if not first:
        bench.cache.announce("r", keys_of_path(bench, *path))
    (other,) = (node for node in bench.cache.tree.nodes() if node.tokens.tolist() == [9])
    bench.cache._hierarchy.device.discard(other)
    bench.cache._hierarchy.remove(other)
    (node,) = bench.cache.tree.nodes()
    wanted = policy.score(node, Tier.DEVICE)
    bench.audit()
    bench.cache.withdraw("r")
    assert node.tokens.tolist() == [1, 2, 3, 4] and policy.score(node, Tier.DEVICE) < wanted and not policy._demands


def test_a_node_whose_worth_falls_leaves_earlier():
    class Wanted(LRU):
        def __init__(self):
            super().__init__()
            self.wanted = set()

        def on_queue(self, request, keys):
            self.wanted |= set(keys)
            return ()

        def on_start(self, request):
            fallen, self.wanted = self.wanted, set()
            return fallen

        def score(self, node, tier):
            return 100 if node.key in self.wanted else super().score(node, tier)

    bench = Bench(4, Wanted())
    bench.put(A)
    bench.cache.announce("r", keys_of(bench, tokens(*A), ()))
    bench.put(B)
    bench.put(C)
    bench.cache.free(bench.reserve(4))
    assert [bench.length(ids) for ids in (A, B)] == [4, 0]
    bench.put(B)
    bench.length(C)
    bench.cache.withdraw("r")
    bench.cache.free(bench.reserve(4))
    assert [bench.length(ids) for ids in (A, B, C)] == [0, 4, 4]


def test_a_policy_hears_of_everything_that_leaves_splits_and_merges():
    policy = Recorder()
    bench = tiers(12, policy=policy, host=4)
    bench.put_path([], [1, 2, 3, 4])
    bench.put_path([], [1, 2, 3, 9])
    assert policy.calls == [("split", [1, 2, 3], [4])]
    bench.path_length([], [1, 2, 3, 4])
    policy.calls.clear()
    bench.squeeze()
    assert policy.calls == [
        ("evict", [9], Tier.DEVICE),
        ("evict", [4], Tier.DEVICE),
        ("evict", [1, 2, 3], Tier.DEVICE),
        ("evict", [9], Tier.HOST),  # makes room for the parent's copy
    ]
    bench = Bench(4, policy)
    bench.put_path([], [1, 2, 3, 4])
    bench.put_path([], [1, 2, 3, 9])
    bench.path_length([], [1, 2, 3, 4])
    policy.calls.clear()
    bench.cache.free(bench.reserve(2 * PAGE))
    assert policy.calls == [("evict", [9], Tier.DEVICE), ("merge", [1, 2, 3], [1, 2, 3, 4])]
    bench = tiers(12, policy=policy)
    for clear in (bench.cache.clear, bench.cache.lose_device):
        bench.put(A)
        policy.calls.clear()
        clear()
        assert policy.calls == [], "nobody chose it: clocks stand still"


# --------------------------------------------------------------------------- everything at once, at random

TENANTS = st.sampled_from(["", "a", "b"])
WORDS = [(0,), (1, 1, 1), (0, 1, 0, 1, 2), (0, 1, 2, 2, 1, 0)]
PROMPT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(
    lambda words: tuple(t for word in words for t in word)[:14]
)
CHUNK = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
PICK = st.integers(0, 99)
CUTS = st.lists(st.integers(0, 14), max_size=3)
SHARE = st.sampled_from([None, None, 0, 3, 14])
FEW = st.integers(0, 9)
KEYED = st.sampled_from([Provenance.ISOLATED, Provenance.APPROXIMATE])
PROFILE = Profile((0, 8), (1, 8), ((1.0, 4.0), (2.0, 9.0)))
QUOTA = {"a": 20 * BYTES}
AUDIT = 20
"""Operations from one full audit to the next."""


@dataclass(eq=False)
class Held:
    """A match with what it was asked for. context: of a segment or path (None: a prefix)."""

    match: Match
    tenant: str
    ids: tuple
    context: tuple | None = None
    what: tuple = ()


class Tiers(RuleBasedStateMachine):
    """Random requests of several tenants over device, host memory and disk, with every kind of failure.

    The reference is a dictionary: which simulated KV was ever admitted, and who may read it. What a ready match's
    slots hold must be in it, at exactly the tokens asked for.
    """

    operations = 0
    seen: ClassVar[Counter] = Counter()

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        host=st.sampled_from([0, 12, 30, 80]),
        disk=st.sampled_from([True, True, False]),
        lossy=st.booleans(),
        quota=st.booleans(),
        overhead=st.sampled_from([0, 5]),
    )
    def begin(self, policy, host, disk, lossy, quota, overhead):
        self.options = {"host_bytes": host * BYTES, "quota": QUOTA.get if quota else None, "overhead": overhead}
        self.policy, self.quota = policy, quota
        self.disk_index = FakeDiskIndex() if disk else None
        self.readers = {}
        self.ever_lossy = lossy
        self.requests = self.steps = 0
        self.start(lossy)

    def end(self):
        self.drain()
        metrics = self.cache.metrics
        self.seen.update(metrics.jobs)
        self.seen.update({f"{kind} failed": n for kind, n in metrics.failures.items()})
        self.seen.update(f"{self.policy} {label}" for label in metrics.tier_hit_tokens)

    def start(self, lossy):
        self.bench = Bench(
            12,
            POLICIES[self.policy].for_device(PROFILE),
            disk_index=self.disk_index,
            lossy=lossy,
            lag=True,
            variants=3,
            **self.options,
        )
        self.cache, self.transfer = self.bench.cache, self.bench.transfer
        self.held, self.runs, self.waiting = [], [], []

    # ---- requests

    @rule(ids=PROMPT, tenant=TENANTS, cold=FEW, storm=FEW, wait=FEW)
    def look_up(self, ids, tenant, cold, storm, wait):
        self.match(ids, tenant, cold, storm)
        if wait > 5:
            self.bench.settle()

    def match(self, ids, tenant, cold, storm):
        """A look-up; before it, others may have needed all the room there was."""
        if storm > 5:
            self.bench.squeeze()
        before, room = self.longest(ids, tenant), self.bench.pool.reclaimable_pages
        match = self.cache.matcher.match_prefix(tokens(*ids), tenant, "r", cold=cold > 0)
        if cold and self.bench.pool.pages_for(before) + 1 < room:
            assert match.length >= before
            assert match.length == before or self.disk_index is not None
        assert cold or match.ready
        return self.hold(Held(match, tenant, ids))

    @rule(ids=PROMPT, tenant=TENANTS, public=SHARE, cuts=CUTS, back=st.integers(0, 2), keep=FEW, storm=FEW, wait=FEW)
    def serve(self, ids, tenant, public, cuts, back, keep, storm, wait):
        """A request from match to admission; its match and its pages may live on."""
        held = self.match(ids, tenant, 1, storm)
        if wait > 2:
            self.bench.settle()
        if held.match.ready:
            self.compute(held, public, cuts, back, keep)
        if keep:
            self.let_go(held)

    @precondition(lambda self: self.ready_prefixes())
    @rule(pick=PICK, public=SHARE, cuts=CUTS, back=st.integers(0, 2), keep=FEW)
    def late(self, pick, public, cuts, back, keep):
        """What a match waited for is there; meanwhile others have admitted, and things have left."""
        self.compute(self.pick(self.ready_prefixes(), pick), public, cuts, back, keep)

    def compute(self, held, public, cuts, back, keep):
        match, ids = held.match, held.ids
        from_ = 0 if match.broken is not None else max(0, match.length - back)
        run = self.reserve(len(ids) - from_)
        if run is None:
            return
        lossy = from_ > 0 and bool((self.bench.read(match)[:from_] & 1).any())
        content = causal_content(held.tenant, ids)
        self.bench.write(run, content[from_:], lossy)
        for at, slot in enumerate(content):
            self.may_read(slot, held.tenant, (public is not None and at < public) or self.is_public(ids[: at + 1]))
        cuts = [cut for cut in cuts if cut <= len(ids)]
        share = None if public is None else min(public, len(ids))
        self.cache.admitter.admit_prefix(match, tokens(*ids), from_, run, cuts, share)
        self.keep_run(run, keep)

    @precondition(lambda self: self.contexts())
    @rule(pick=PICK, ids=CHUNK, provenance=KEYED, behind=st.lists(CHUNK, max_size=2), public=st.booleans(), keep=FEW,
          cfo=st.sampled_from([0.0, 0.5, 1.0]))  # fmt: skip
    def segment(self, pick, ids, provenance, behind, public, keep, cfo):
        """Look a segment up under a matched context; compute and admit it on a miss."""
        context = self.pick(self.contexts(), pick)
        what = (provenance, "fusion", ids, tuple(behind))
        digest = neighbours_digest([tokens(*chunk) for chunk in behind])
        match = match_segment(
            self.cache, context.match, tokens(*ids), provenance, "fusion", behind=digest, variant=bool(digest), cfo=cfo
        )
        if match is not None:
            self.hold(Held(match, context.tenant, ids, context.ids, what))
            return
        run = self.reserve(len(ids)) if context.match.ready and context.match.broken is None else None
        if run is None:
            return
        content = keyed_content(context.tenant, context.ids, *what)
        self.bench.write(run, content, bool((self.bench.read(context.match) & 1).any()))
        for slot in content:
            self.may_read(slot, context.tenant, public)
        self.cache.admitter.admit_segment(
            context.match,
            tokens(*ids),
            run,
            len(context.ids),
            provenance,
            "fusion",
            behind=digest,
            public=public,
            variant=bool(digest),
        )
        self.keep_run(run, keep)

    @precondition(lambda self: self.contexts())
    @rule(pick=PICK, ids=CHUNK, cuts=CUTS, keep=FEW, method=st.sampled_from(["x", "y"]))
    def path(self, pick, ids, cuts, keep, method):
        """Look a dependency path up; compute and admit what is missing."""
        context = self.pick(self.contexts(), pick)
        match = self.cache.matcher.match_dependency(context.match, tokens(*ids), method)
        what = (Provenance.DEPENDENCY, method, ids)
        self.hold(Held(match, context.tenant, ids, context.ids, what))
        if context not in self.held or not (match.ready and context.match.ready) or context.match.broken is not None:
            return
        run = self.reserve(len(ids) - match.length)
        if run is None:
            return
        content = keyed_content(context.tenant, context.ids, *what)
        lossy = any((self.bench.read(each) & 1).any() for each in (context.match, match))
        self.bench.write(run, content[match.length :], bool(lossy))
        for slot in content:
            self.may_read(slot, context.tenant, False)
        self.cache.admitter.admit_dependency(context.match, tokens(*ids), match.length, run, cuts, method)
        self.keep_run(run, keep)

    @rule(ids=PROMPT, tenant=TENANTS, seconds=st.sampled_from([0.0, 1e-3, 1e9]))
    def keep_longer(self, ids, tenant, seconds):
        self.cache.keep_longer(tenant, tokens(*ids), seconds)

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def release(self, pick):
        """Perhaps while its bytes are still on their way: the request was cancelled."""
        self.let_go(self.pick(self.held, pick))

    @precondition(lambda self: self.runs)
    @rule(pick=PICK)
    def free(self, pick):
        self.cache.free(self.runs.pop(pick % len(self.runs))[0])

    @rule(pages=st.integers(1, 11))
    def pressure(self, pages):
        pages = min(pages, self.bench.pool.reclaimable_pages)
        run = self.reserve(pages * PAGE)
        if run is not None:
            self.cache.free(run)

    # ---- what happens below, and between requests

    @rule(pick=PICK, fails=st.sampled_from([False, False, True]), poll=FEW)
    def finish(self, pick, fails, poll):
        """A job is done, or has failed; in any order."""
        if self.transfer is not None and self.transfer.pending:
            self.transfer.finish(pick, "it failed" if fails else None)
        if poll > 2:
            self.poll()

    @rule()
    def poll(self):
        self.cache.poll()

    @rule()
    def finish_all(self):
        self.bench.settle()

    @precondition(lambda self: self.disk_index is not None and self.disk_index.entries)
    @rule(pick=PICK, vanish=st.booleans())
    def spoil(self, pick, vanish):
        """An entry of the disk is damaged, or another process deletes it."""
        key = self.pick(sorted(self.disk_index.entries), pick)
        if vanish:
            del self.disk_index.entries[key]
        else:
            self.disk_index.bad.add(key)

    @rule()
    def replicate(self):
        self.cache.replicate()

    @rule(limit=st.integers(1, 20))
    def flush(self, limit):
        self.cache.flush(limit)

    @rule(ids=PROMPT, tenant=TENANTS, cuts=CUTS)
    def announce(self, ids, tenant, cuts):
        self.requests += 1
        self.waiting.append(str(self.requests))
        self.cache.announce(self.waiting[-1], keys_of(self, tokens(*ids), cuts, tenant))

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK)
    def withdraw(self, pick):
        self.cache.withdraw(self.waiting.pop(pick % len(self.waiting)))

    @precondition(lambda self: len(self.cache.tree) > 12)
    @rule(rarely=FEW)
    def clear(self, rarely):
        if rarely == 0:
            self.cache.clear()
            assert all(node.pins for node in self.cache.tree.nodes())

    @precondition(lambda self: len(self.cache.tree) > 8)
    @rule(rarely=FEW)
    def lose_device(self, rarely):
        if rarely > 1:
            return
        self.drain()
        self.cache.poll()
        while self.cache.loading:
            self.transfer.finish()
            self.cache.poll()
        kept = self.in_host_memory()
        self.bench.slots[:] = GARBAGE
        self.cache.lose_device()
        assert self.in_host_memory() == kept
        assert self.bench.pool.free_pages == self.bench.pool.capacity

    @rule(rarely=FEW)
    def give_up(self, rarely):
        """Loads that nobody waits for end without their bytes."""
        if rarely > 2:
            return
        idle = sum(
            all(match.released for match in load.matches) for load in self.cache._hierarchy.loads.under_way.values()
        )
        under_way = self.cache.loading
        assert self.cache.give_up() == (idle > 0)
        assert self.cache.loading == under_way - idle

    @precondition(lambda self: self.disk_index is not None and len(self.cache.tree) > 8)
    @rule(rarely=FEW, in_order=st.booleans(), lossy=st.booleans())
    def restart(self, rarely, in_order, lossy):
        """In order: what memory holds goes to disk first. Otherwise it is gone, and so is what was on its way."""
        if rarely > 1:
            return
        self.end()
        if in_order:
            self.bench.settle()
            self.bench.flush()
        self.ever_lossy |= lossy
        self.start(lossy)

    # ---- checks

    @invariant()
    def all_is_well(self):
        if not hasattr(self, "bench"):
            return
        type(self).operations += 1
        self.steps += 1
        audit_counts(self.cache)
        if self.transfer is not None:
            self.transfer.check()
        for held in self.held:
            if held.match.ready and held.match.broken is None:
                self.check_content(held)
        for run, content in self.runs:
            assert np.array_equal(self.bench.slots[run.slots(PAGE)], content)
        if self.steps % AUDIT == 0:
            self.check_everything()

    def check_everything(self):
        audit_cache(self.cache, live={"r"})
        nodes = list(self.cache.tree.nodes())
        assert self.cache._hierarchy._kept.keys() <= {*nodes}
        for node in nodes:
            if node.run is not None and not node.loading:
                slots = self.bench.slots[node.run.slots(PAGE)]
                assert all(self.readers[int(slot) & ~1] & {node.tenant, ""} for slot in slots)
                assert node.lossy or not (slots & 1).any()
        if self.quota and self.transfer is not None:
            over = len(self.cache.tree.pages["a"]) * PAGE * BYTES > QUOTA["a"]
            assert not over or not any(node.tenant == "a" for node in self.cache._hierarchy.device.nodes())

    def check_content(self, held):
        slots = self.bench.read(held.match)
        ids = held.ids[: held.match.length]
        assert len(slots) == len(ids) == held.match.length
        assert np.array_equal(held.match.tokens, tokens(*ids))
        self.seen["lossy" if (slots & 1).any() else "exact"] += 1
        assert held.match.lossy or not (slots & 1).any()
        assert self.ever_lossy or not held.match.lossy
        contents = [
            causal_content(owner, ids) if held.context is None else keyed_content(owner, held.context, *held.what)
            for owner in ("", "a", "b")
        ]
        for at, slot in enumerate(slots):
            assert slot & ~1 in {content[at] for content in contents}, "bytes of something else"
            assert self.readers[int(slot) & ~1] & {held.tenant, ""}, "bytes of another tenant"

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.bench.settle()
        self.end()
        audit_cache(self.cache, live=())
        assert not any(node.pins for node in self.cache.tree.nodes())
        self.cache.clear()
        self.bench.settle()
        audit_cache(self.cache, live=())
        assert self.bench.pool.free_pages == self.bench.pool.capacity
        assert self.cache.metrics.host_bytes == 0 and not len(self.cache.tree)
        assert self.transfer is None or not self.transfer.entries

    # ---- helpers

    def hold(self, held):
        self.held.append(held)
        if len(self.held) > 8:
            self.let_go(self.held[0])
        return held

    def let_go(self, held):
        if held in self.held:
            self.held.remove(held)
            held.match.release()

    def drain(self):
        while self.held:
            self.let_go(self.held[0])
        while self.runs:
            self.cache.free(self.runs.pop()[0])
        while self.waiting:
            self.cache.withdraw(self.waiting.pop())

    def reserve(self, n):
        if n == 0:
            return None
        before, possible = self.bench.state(), self.bench.pool.reclaimable_pages
        try:
            run = self.bench.reserve(n, "r")
        except OutOfPages:
            assert self.bench.state() == before and -(-n // PAGE) > possible
            return None
        return run

    def keep_run(self, run, keep):
        if keep == 0 and len(self.runs) < 3:
            self.runs.append((run, self.bench.slots[run.slots(PAGE)].copy()))
        else:
            self.cache.free(run)

    def may_read(self, slot, tenant, public):
        self.readers.setdefault(int(slot), set()).update({tenant, ""} if public else {tenant})

    def in_host_memory(self):
        """Every token of which host memory holds the whole path."""
        return {
            (node.tenant, node.provenance, node.method, node.behind, spelled(node)[: 4 * (node.start + i + 1)])
            for node in self.cache.tree.nodes()
            for i in range(len(node) if all(step.host for step in [*node.path()][:-1]) else 0)
        }

    def is_public(self, ids):
        """What is public already stays so, whoever computes it anew."""
        return any("" in self.readers.get(int(causal_content(o, ids)[-1]), ()) for o in ("", "a", "b"))

    def longest(self, ids, tenant):
        """The longest prefix in memory that the tenant may read."""
        nodes = [n for n in self.cache.tree.nodes() if n.provenance is Provenance.CAUSAL and n.tenant in ("", tenant)]
        asked = tokens(*ids).tobytes()
        return max([0, *(common_prefix(spelled(node), asked) for node in nodes)])

    def ready_prefixes(self):
        return [held for held in self.held if held.context is None and held.match.ready and not held.match.complete]

    def contexts(self):
        return [held for held in self.held if held.context is None and held.match.complete]

    @staticmethod
    def pick(options, pick):
        return options[pick % len(options)]


def spelled(node):
    return b"".join(step.raw for step in [*node.path()][::-1])


def run_machine(examples, steps):
    Tiers.operations, Tiers.seen = 0, Counter()
    run_state_machine_as_test(Tiers, settings=settings(max_examples=examples, stateful_step_count=steps))
    assert Tiers.operations >= 8 * examples


def all_kinds_were_seen(examples, policies):
    """Operations of all kinds, and so many policies have evicted below the device. Which ones a few examples reach
    changes with any constant of the code: Hypothesis draws from those.
    """
    assert min(Tiers.seen[what] for what in ("save", "write", "load", "lossy", "exact")) > examples / 4
    assert min(Tiers.seen[f"{what} failed"] for what in ("save", "write", "load")) > 0
    assert sum(Tiers.seen[f"{policy} host"] + Tiers.seen[f"{policy} disk"] > 0 for policy in POLICIES) >= policies


def test_random_operations():
    run_machine(50, 60)


@pytest.mark.slow
def test_two_thousand_random_operations():
    run_machine(300, 60)
    all_kinds_were_seen(300, len(POLICIES) // 2)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_thousand_random_operations():
    run_machine(5000, 100)
    all_kinds_were_seen(5000, len(POLICIES))
    assert Tiers.operations >= 200_000
