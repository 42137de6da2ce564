"""Variants of a chunk: so many in all, the least reused leaves; and the paths on which they are found again."""

import pytest

from ragjax.cache.cache import neighbours_digest
from ragjax.cache.match import Candidate
from ragjax.cache.policy.craft import LOWEST_CFO
from ragjax.cache.tree import Node, Provenance
from ragjax.cache.variant import Variants
from tests.support.transfers import BYTES, Bench, FakeDiskIndex, match_segment, tokens

APPROXIMATE = Provenance.APPROXIMATE
SYSTEM = [1] * 4
CHUNK = [6, 7]


def put(bench, behind, ids=CHUNK, **options):
    bench.put_segment(SYSTEM, ids, APPROXIMATE, "craft", behind=behind, variant=True, **options)


def has(bench, behind, ids=CHUNK, **options):
    return bench.has_segment(SYSTEM, ids, APPROXIMATE, "craft", behind=behind, variant=True, **options)


def kept(bench, ids=CHUNK):
    """The chunk's variants, by what they were computed behind, in the order of their making; no look-up of them."""
    digests = {neighbours_digest([tokens(n)]): n for n in range(100)}
    return [digests[node.behind] for node in bench.cache.matcher.find_variants(tokens(*ids), "craft")]


def make(limit=3, **options):
    bench = Bench(64, variants=limit, **options)
    bench.put(SYSTEM)
    return bench


# ------------------------------------------------------------------------------------------ the counting


def node():
    return Node("", tokens(1).tobytes(), None, 0)


def test_reuse_is_the_sum_of_one_over_the_overhead():
    variants, one = Variants(5), node()
    variants.add(one)
    assert variants.reuse(one) == 0
    for cfo in (0.5, 1.0, 0.0):
        variants.use(one, cfo)
    assert variants.reuse(one) == pytest.approx(2 + 1 + 1 / LOWEST_CFO)
    other = node()
    variants.use(other, 0.5)  # it came from disk
    assert len(variants) == 2 and variants.reuse(other) == 2


def test_the_least_reused_leaves_and_of_equals_the_oldest():
    variants, nodes = Variants(2), [node() for _ in range(5)]
    for one in nodes:
        variants.add(one)
    for one, cfo in ((nodes[0], 0.1), (nodes[3], 1.0)):
        variants.use(one, cfo)
    assert [variants.victim() for _ in range(5)] == [nodes[1], nodes[2], nodes[4], nodes[3], None]
    assert len(variants) == 1 and not variants.full


def test_a_new_variant_begins_above_the_last_that_left():
    variants, old, new = Variants(1), node(), node()
    variants.add(old)
    variants.use(old, 0.5)
    assert variants.victim() is old
    variants.add(new)
    assert variants.reuse(new) == 2 + 1


@pytest.mark.parametrize("why", ["pins", "loading"])
def test_what_is_in_use_does_not_leave_and_may_later(why):
    variants, nodes = Variants(1), [node() for _ in range(3)]
    for one in nodes:
        variants.add(one)
        setattr(one, why, 1)
    setattr(nodes[2], why, 0)
    assert variants.victim() is nodes[2] and variants.victim() is None
    setattr(nodes[0], why, 0)
    assert variants.victim() is nodes[0] and variants.victim() is None and variants.full


def test_what_has_left_by_itself_counts_no_more():
    variants, nodes = Variants(2), [node() for _ in range(4)]
    for one in nodes:
        variants.add(one)
    variants.use(nodes[0], 0.01)
    variants.use(nodes[1], 0.01)
    nodes[0].dead = nodes[1].dead = True
    assert variants.victim() is nodes[2] and variants.victim() is None and len(variants) == 1


# ---------------------------------------------------------------------------------------- in the cache


def test_a_chunk_gets_a_variant_for_each_prefix_it_is_met_behind():
    bench = make()
    for first in (10, 11):
        assert not has(bench, [[first]])
        put(bench, [[first]])
        assert has(bench, [[first]])
    assert kept(bench) == [10, 11]
    put(bench, [[10]])  # is there
    assert kept(bench) == [10, 11]
    assert not has(bench, [[10], [11]]) and not has(bench, [[11], [10]])
    bench.audit()


def test_the_variant_that_was_reused_least_leaves():
    bench = make(limit=3)
    for first, times, cfo in ((10, 1, 0.1), (11, 3, 1.0), (12, 2, 1.0)):
        put(bench, [[first]])
        for _ in range(times):
            assert has(bench, [[first]], cfo=cfo)
    put(bench, [[13]])
    assert kept(bench) == [10, 11, 13]  # f_r 10, 3 and, from the 2 of the one that left, 3
    put(bench, [[14]])
    assert kept(bench) == [10, 13, 14]  # of two that were reused 3 times the older left
    bench.audit()


def test_variants_in_use_do_not_leave():
    bench = make(limit=2)
    for first in (10, 11):
        put(bench, [[first]])
    with bench.match(SYSTEM) as context:
        matches = [
            match_segment(
                bench.cache, context, tokens(*CHUNK), APPROXIMATE, "craft", behind=neighbours_digest([tokens(n)])
            )
            for n in (10, 11)
        ]
        put(bench, [[12]])
        assert kept(bench) == [10, 11]
        for match in matches:
            match.release()
    bench.audit()


def test_isolated_chunks_are_not_limited():
    bench = make(limit=1)
    for first in range(10, 15):
        bench.put_segment(SYSTEM, [first])
    assert all(bench.has_segment(SYSTEM, [first]) for first in range(10, 15))


def test_other_kv_behind_neighbours_is_not_limited():
    bench = make(limit=1)
    for first in range(10, 15):
        bench.put_segment(SYSTEM, CHUNK, APPROXIMATE, "fusion", behind=[[first]])
    assert all(bench.has_segment(SYSTEM, CHUNK, APPROXIMATE, "fusion", behind=[[n]]) for n in range(10, 15))
    put(bench, [])  # behind the system prompt alone: a variant like the others
    put(bench, [[10]])
    assert kept(bench) == [10]


def test_the_first_variant_that_is_kept_is_matched():
    bench = make(limit=9)
    for first in (10, 11):
        put(bench, [[first]])
    tried = [Candidate(APPROXIMATE, "craft", neighbours_digest([tokens(n)]), True, 0.25) for n in (12, 11, 10)]
    with bench.match(SYSTEM) as context:
        missed = bench.cache.metrics.missed_tokens
        match = bench.cache.matcher.match_first(context, tokens(*CHUNK), tried)
        assert match.node.behind == neighbours_digest([tokens(11)])
        assert bench.cache.matcher.variants.reuse(match.node) == 4
        match.release()
        assert bench.cache.metrics.missed_tokens == missed
        assert bench.cache.matcher.match_first(context, tokens(*CHUNK), tried[:1]) is None
        assert bench.cache.metrics.missed_tokens == missed + len(CHUNK)
    bench.audit()


def test_variants_are_listed_for_what_they_were_computed_on():
    bench = make()
    put(bench, [[10]])
    bench.put([2, 2])
    bench.put_segment([2, 2], CHUNK, APPROXIMATE, "craft", behind=[[11]], variant=True)
    assert len(bench.cache.matcher.find_variants(tokens(*CHUNK), "craft")) == 2
    for context, behind in ((SYSTEM, [10]), ([2, 2], [11]), ([3], None)):
        listed = bench.cache.matcher.find_variants(tokens(*CHUNK), "craft", context=tokens(*context))
        assert [node.behind for node in listed] == ([neighbours_digest([tokens(*behind)])] if behind else [])


def test_a_variant_that_left_is_not_put_on_disk_and_one_that_comes_from_there_counts():
    disk_index = FakeDiskIndex()
    bench = make(limit=2, host_bytes=200 * BYTES, disk_index=disk_index)
    for first in (10, 11, 12):
        put(bench, [[first]])
    bench.flush()
    assert kept(bench) == [11, 12] and len(disk_index.entries) == 3
    bench = make(limit=2, host_bytes=200 * BYTES, disk_index=disk_index)
    assert not has(bench, [[10]])
    for first in (11, 12):
        assert has(bench, [[first]], cfo=0.5)
    put(bench, [[13]])
    assert kept(bench) == [12, 13]
    bench.audit()


def test_variants_that_lie_on_disk_alone_are_listed_too():
    disk_index = FakeDiskIndex()
    bench = make(host_bytes=200 * BYTES, disk_index=disk_index)
    for first in (10, 11):
        put(bench, [[first]])
    bench.put_segment(SYSTEM, [6, 8], APPROXIMATE, "craft", behind=[[10]], variant=True)
    bench.put_segment(SYSTEM, CHUNK, APPROXIMATE, "fusion", behind=[[10]])
    bench.flush()
    before = {node.key for node in bench.cache.matcher.find_variants(tokens(*CHUNK), "craft")}
    bench = make(host_bytes=200 * BYTES, disk_index=disk_index)
    put(bench, [[12]])
    for cold in (False, True):
        listed = bench.cache.matcher.find_variants(tokens(*CHUNK), "craft", context=tokens(*SYSTEM), cold=cold)
        assert isinstance(listed[0], Node) and {each.key for each in listed[1:]} == (before if cold else set())
    assert [each.key for each in bench.cache.matcher.find_variants(tokens(*CHUNK), "craft", context=tokens(9))] == []
    assert has(bench, [[11]])
    listed = bench.cache.matcher.find_variants(tokens(*CHUNK), "craft", context=tokens(*SYSTEM))
    assert len({each.key for each in listed}) == len(listed), "what came to memory is listed once"
    assert [isinstance(each, Node) for each in listed] == [True, True, False]


def test_variants_are_listed_for_their_tenant_and_the_public():
    bench = make()
    put(bench, [[10]])
    put(bench, [[11]], tenant="a")
    put(bench, [[12]], tenant="b")
    bench.put_segment(SYSTEM, CHUNK)
    for tenant, count in (("", 1), ("a", 2), ("b", 2), ("c", 1)):
        assert len(bench.cache.matcher.find_variants(tokens(*CHUNK), "craft", tenant)) == count
    assert bench.cache.matcher.find_variants(tokens(9, 9), "craft") == ()


def test_meta_is_kept_with_a_variant_through_the_disk():
    disk_index = FakeDiskIndex()
    bench = make(disk_index=disk_index)
    put(bench, [[10]], meta=b"scores")
    bench.flush()
    bench = make(disk_index=disk_index)
    assert has(bench, [[10]])
    [variant] = bench.cache.matcher.find_variants(tokens(*CHUNK), "craft")
    assert variant.meta == b"scores" and variant.behind == neighbours_digest([tokens(10)])


def test_neighbours_are_told_apart_by_their_cuts_and_their_order():
    digests = [
        neighbours_digest([tokens(1, 2), tokens(3)]),
        neighbours_digest([tokens(1), tokens(2, 3)]),
        neighbours_digest([tokens(3), tokens(1, 2)]),
        neighbours_digest([tokens(1, 2, 3)]),
        neighbours_digest([]),
    ]
    assert len(set(digests)) == 5 and digests[-1] == b""
