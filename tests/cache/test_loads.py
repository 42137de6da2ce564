"""Loads by stages: what matches know of how far they are, and how long they take."""

from __future__ import annotations

import pytest

from ragjax.cache.match import Loading, Loads
from ragjax.cache.node import Node
from ragjax.core import StepLimits
from ragjax.core.tiers import Load, Tier
from ragjax.reuse.base import Allocation
from tests.support.transfers import BYTES, PAGE, Bench, FakeDiskIndex, tokens

A, B = [1, 2, 3, 4], [5, 6, 7, 8]
STAGES = (0, 2, 4, 6)


def bench_below(ids: list[int]) -> Bench:
    """The tokens are in host memory alone."""
    bench = Bench(16, host_bytes=64 * BYTES, lag=True)
    bench.put(ids)
    bench.squeeze()
    bench.settle()
    return bench


def allocation(bench: Bench) -> Allocation:
    return Allocation(bench.cache, tenant="", label="r", decode_tokens=0, limits=StepLimits(64, PAGE), stages=STAGES)


def loads(bench: Bench) -> list[int]:
    assert bench.transfer is not None
    return [job.number for job in bench.transfer.pending if isinstance(job, Load)]


def test_stages_are_ready_once_all_loads_have_brought_them() -> None:
    bench = bench_below(A)
    held = allocation(bench)
    assert held.stages_ready == 3
    first = held.prefix(tokens(*A))
    bench.put(B)
    bench.squeeze()
    held.prefix(tokens(*B))
    one, other = loads(bench)
    assert held.stages_ready == 0 and not first.ready
    bench.transfer.stages = {one: 2}
    bench.cache.poll()
    assert held.stages_ready == 0  # the slowest counts
    bench.transfer.stages = {one: 2, other: 1}
    bench.cache.poll()
    assert held.stages_ready == 1
    bench.transfer.finish(0)
    bench.cache.poll()
    assert held.stages_ready == 1
    late = allocation(bench)
    late.prefix(tokens(*B))
    assert late.stages_ready == 1  # of a load that others began
    bench.settle()
    assert held.stages_ready == late.stages_ready == 3
    held.close()
    late.close()
    bench.audit(set())


def test_a_load_is_expected_to_take_as_long_as_those_before_it() -> None:
    bench = bench_below(A)
    with bench.cache.matcher.match_prefix(tokens(*A)) as match:
        assert [progress.seconds for progress in match.waits.values()] == [None]
        held = allocation(bench)
        held.prefix(tokens(*A))
        assert held.load_seconds is None
        held.close()
        bench.settle()
    bench.squeeze()
    bench.settle()
    held = allocation(bench)
    assert held.load_seconds == 0.0
    held.prefix(tokens(*A))
    assert held.load_seconds == pytest.approx(0.001)  # what the fake says that one took
    held.close()
    bench.settle()
    bench.audit(set())


def test_failed_loads_say_nothing_of_the_pace() -> None:
    bench = bench_below(A)
    match = bench.cache.matcher.match_prefix(tokens(*A))
    bench.transfer.finish_all("it failed")
    bench.cache.poll()
    match.release()
    bench.put(A)
    bench.squeeze()
    bench.settle()
    with bench.cache.matcher.match_prefix(tokens(*A)) as match:
        assert [progress.seconds for progress in match.waits.values()] == [None]
        bench.settle()


def test_the_last_loads_count_most() -> None:
    loads, node = Loads(), Node("", bytes(400), None, 0)

    def expected(took: float) -> float | None:
        loads.begin(1, loading := Loading([node], Tier.HOST))
        loads.end(1, took)
        return loading.seconds

    assert expected(1.0) is None
    assert [expected(1.0) for _ in range(20)][-1] == pytest.approx(1.0)
    assert [expected(4.0) for _ in range(20)][-1] == pytest.approx(4.0, rel=0.01)


def test_tiers_have_paces_of_their_own() -> None:
    disk = FakeDiskIndex()
    bench = Bench(16, host_bytes=64 * BYTES, disk_index=disk, lag=True)
    bench.put(A)
    bench.flush()
    bench.squeeze()
    bench.settle()
    with bench.match(A):
        bench.settle()
    other = Bench(16, host_bytes=64 * BYTES, disk_index=disk, lag=True)
    for expected in (None, 0.001):
        with other.cache.matcher.match_prefix(tokens(*A)) as match:
            assert [progress.seconds for progress in match.waits.values()] == [expected]
            other.settle()
        other.cache.clear()
