"""The cache on the device alone; `test_hierarchy.py` has random requests, also without tiers below."""

import numpy as np
import pytest

from ragjax.cache import tree
from ragjax.cache.lookahead import Causal, Outlook
from ragjax.cache.node import Node, Provenance, context_digest, raw_of
from ragjax.cache.policy.base import LRU, Access, Victims
from ragjax.core import OutOfPages
from tests.support.audit import AuditError, audit_cache
from tests.support.transfers import Bench, causal_content, match_segment, tokens


def test_cuts_and_splits_in_one_run_give_one_span():
    bench = Bench()
    bench.put(range(20), cuts=(0, 3, 4, 11, 20))
    bench.put([0, 1, 2, 3, 4, 5, 99])
    with bench.cache.matcher.match_prefix(tokens(*range(20))) as match:
        assert [(run.start, run.length, at) for run, at in match.spans] == [(0, 20, 0)]
    with bench.cache.matcher.match_prefix(tokens(0, 1, 2, 3, 4, 5, 99)) as match:
        assert [(run.length, at) for run, at in match.spans] == [(6, 0), (1, 6)]
        assert np.array_equal(bench.read(match), causal_content("", [0, 1, 2, 3, 4, 5, 99]))


def test_a_second_admission_keeps_the_first():
    bench = Bench()
    ids = tokens(*range(10))
    first, second = bench.cache.matcher.match_prefix(ids), bench.cache.matcher.match_prefix(ids)
    runs = [bench.reserve(10), bench.reserve(10)]
    for match, run in zip((first, second), runs, strict=True):
        bench.write(run, causal_content("", range(10)))
        bench.cache.admitter.admit_prefix(match, ids, 0, run, (4,))
        match.release()
    assert bench.cache.metrics.admitted_tokens == 10
    with bench.cache.matcher.match_prefix(ids) as match:
        assert match.spans == ((runs[0], 0),)
    for run in runs:
        bench.cache.free(run)
    assert bench.cache.metrics.pages_used == 3
    audit_cache(bench.cache, live=())


def test_a_lease_inside_a_node_survives_its_split():
    bench = Bench()
    bench.put(range(12))
    match = bench.cache.matcher.match_prefix(tokens(0, 1, 2, 3, 4, 99), label="a")
    bench.put([0, 1, 2, 3, 4, 5, 6, 77])
    bench.put([0, 1, 2, 66])
    bench.cache.clear()
    assert np.array_equal(bench.read(match), causal_content("", range(5)))
    audit_cache(bench.cache, live={"a"})
    match.release()
    bench.cache.clear()
    assert bench.pool.free_pages == bench.pool.capacity
    audit_cache(bench.cache, live=())


def test_exact_and_approximate_hits_are_counted_apart():
    bench = Bench()
    bench.put([1, 2, 3])
    bench.put_segment([1, 2, 3], [4, 5])
    before = bench.cache.metrics
    with bench.cache.matcher.match_prefix(tokens(1, 2, 3)) as match:
        for ids in ([4, 5], [4, 6]):
            found = match_segment(bench.cache, match, tokens(*ids), Provenance.ISOLATED, "naive")
            if found:
                found.release()
    after = bench.cache.metrics
    assert after.lookups - before.lookups == 3
    assert after.exact_hit_tokens - before.exact_hit_tokens == 3
    assert after.approximate_hit_tokens - before.approximate_hit_tokens == 2
    assert after.missed_tokens - before.missed_tokens == 2


def test_keys_look_and_match_of_a_prompt_share_one_walk(monkeypatch):
    bench, walked, real = Bench(), [], tree._walked
    bench.put(range(12))
    monkeypatch.setattr(tree, "_walked", lambda *asked: walked.append(asked) or real(*asked))
    ids = tokens(*range(12), 50, 51)
    outlook = Outlook([Causal(raw_of(ids), (12,), "", 0)])

    def look():
        outlook.keys(bench.cache.tree)
        found = bench.cache.peek(outlook).found
        with bench.cache.matcher.match_prefix(ids) as match:
            assert match.length == found
        return found

    assert look() == 12 and len(walked) == 1
    bench.put([0, 1, 2, 99])  # cuts the node
    walked.clear()
    assert look() == 12 and len(walked) == 1
    bench.cache.clear()
    walked.clear()
    assert look() == 0 and len(walked) == 1


def test_a_quiet_look_up_pins_and_counts_nothing():
    bench = Bench(policy=LRU())
    bench.put([1, 2, 3])
    before, [node] = bench.cache.metrics, bench.cache.tree.nodes()
    note, hits = node.note, node.hits
    match = bench.cache.matcher.match_prefix(tokens(1, 2, 3), quiet=True)
    assert match.length == 3 and node.pins == 1
    assert (node.note, node.hits) == (note, hits) and bench.cache.metrics == before
    match.release()
    bench.audit()


def test_least_recently_used_leaves_first_and_parents_after_children():
    bench = Bench(pages=5)
    for ids in ([1] * 4, [2] * 4, [3] * 4, [3] * 4 + [4] * 4):
        bench.put(ids)
    assert bench.length([1] * 4) == 4
    bench.cache.free(bench.cache.reserve(1))  # 2 was used longest ago
    assert [bench.length([n] * 4) for n in (1, 2)] == [4, 0]
    bench.length([3] * 4)  # a use of the parent alone does not keep its child
    bench.cache.free(bench.cache.reserve(8))
    assert bench.length([3] * 4 + [4] * 4) == 4
    assert bench.length([1] * 4) == 4
    assert bench.cache.metrics.evicted_tokens == 8
    audit_cache(bench.cache, live=())


def test_nodes_whose_pages_are_in_use_anyway_leave_last():
    bench = Bench(pages=5)
    match = bench.cache.matcher.match_prefix(tokens(*range(8)))
    run = bench.reserve(8)
    bench.write(run, causal_content("", range(8)))
    bench.cache.admitter.admit_prefix(match, tokens(*range(8)), 0, run, ())
    match.release()
    bench.put([50, 51])
    bench.put([60, 61])
    bench.cache.free(bench.cache.reserve(8))
    assert bench.length(range(8)) == 8  # older than both, but evicting it frees nothing
    audit_cache(bench.cache, live={""})
    bench.cache.free(run)
    bench.cache.free(bench.cache.reserve(16))
    assert bench.length(range(8)) == 0
    audit_cache(bench.cache, live=())


def test_a_node_that_frees_nothing_leaves_if_it_stands_before_one_that_does():
    bench = Bench(pages=3)
    bench.put([1] * 4)
    match = bench.cache.matcher.match_prefix(tokens(1, 1, 1, 1, 2))
    run = bench.reserve(1)
    bench.cache.admitter.admit_prefix(match, tokens(1, 1, 1, 1, 2), 4, run, ())
    match.release()
    bench.cache.reserve(4, "b")
    assert bench.length([1] * 4) == 0
    audit_cache(bench.cache, live={"", "b"})


def test_out_of_pages_changes_nothing_and_says_what_is_pinned():
    bench = Bench(pages=6)
    bench.put(range(8))
    bench.put(range(50, 54))
    match = bench.cache.matcher.match_prefix(tokens(*range(8)))
    run = bench.cache.reserve(1)
    before = bench.state()
    with pytest.raises(OutOfPages, match=r"9 tokens need 3 pages; 3 of 5 are pinned"):
        bench.cache.reserve(9)
    assert bench.state() == before
    other = bench.cache.reserve(8)
    assert bench.length(range(8)) == 8
    for held in (run, other):
        bench.cache.free(held)
    match.release()
    audit_cache(bench.cache, live=())


def test_leases_and_reservations_end_exactly_once():
    bench = Bench()
    with bench.cache.matcher.match_prefix(tokens(1, 2)) as match:
        pass
    with pytest.raises(RuntimeError, match="released before"):
        match.release()
    run = bench.cache.reserve(3)
    bench.cache.free(run)
    with pytest.raises(ValueError, match="freed before"):
        bench.cache.free(run)


def test_the_audit_names_what_leaked():
    bench = Bench()
    bench.put([1, 2, 3])
    match = bench.cache.matcher.match_prefix(tokens(1, 2), label="request-7")
    run = bench.cache.reserve(5, label="request-8")
    audit_cache(bench.cache)
    audit_cache(bench.cache, live={"request-7", "request-8"})
    with pytest.raises(AuditError, match=r"request-7.*never released"):
        audit_cache(bench.cache, live={"request-8"})
    match.release()
    with pytest.raises(AuditError, match=r"request-8.*never freed"):
        audit_cache(bench.cache, live=())
    bench.cache.free(run)
    audit_cache(bench.cache, live=())


def test_the_audit_sees_a_wrong_pin_and_a_lost_victim():
    bench = Bench()
    bench.put([1, 2, 3])
    node = next(n for n in bench.cache.tree.nodes() if n.run)
    victims = bench.cache._hierarchy.device
    victims.discard(node)
    with pytest.raises(AuditError, match="victims"):
        audit_cache(bench.cache)
    victims.push(node)
    audit_cache(bench.cache)
    bench.cache.tree.pin(node)
    with pytest.raises(AuditError, match="counts 1 pins, 0 matches"):
        audit_cache(bench.cache)


def test_a_lease_keeps_its_tokens_when_the_callers_array_changes():
    bench = Bench()
    bench.put([1, 2, 3])
    ids = tokens(1, 2, 3)
    with bench.cache.matcher.match_prefix(ids) as match:
        ids[:] = 0
        assert list(match.tokens) == [1, 2, 3]
        assert match.context == context_digest(tokens(1, 2, 3).tobytes())


def test_arguments_that_do_not_fit_are_refused():
    bench = Bench()
    bench.put([1, 2, 3])
    cache, ids, run = bench.cache, tokens(1, 2, 3, 4), bench.cache.reserve(2)
    match = cache.matcher.match_prefix(ids)
    before = bench.state()
    isolated = Provenance.ISOLATED
    refused = [
        (lambda: cache.admitter.admit_prefix(match, ids, 4, run, ()), "does not cover"),
        (lambda: cache.admitter.admit_prefix(match, tokens(1, 9, 3, 4), 3, run, ()), "does not cover"),
        (lambda: cache.admitter.admit_prefix(match, ids, 3, run, ()), "holds 2 tokens, not the 1"),
        (lambda: cache.admitter.admit_prefix(match, ids, 2, run, (5,)), "a cut lies outside"),
        (lambda: cache.admitter.admit_segment(match, tokens(7, 7), run, 0, isolated, "naive"), "3 of 4 tokens"),
        (lambda: match_segment(cache, match, tokens(7, 7), Provenance.DEPENDENCY, "x"), "or a path"),
        (lambda: cache.admitter.admit_segment(match, tokens(7, 7), run, 0, Provenance.DEPENDENCY, "x"), "or a path"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert bench.state() == before
    match.release()
    with pytest.raises(ValueError, match="match was released"):
        cache.admitter.admit_prefix(match, ids, 2, run, ())
    with cache.matcher.match_prefix(tokens(1, 2, 3)) as whole:
        cache.admitter.admit_segment(whole, tokens(7, 7), run, 0, isolated, "naive")
        with pytest.raises(ValueError, match="holds 2 tokens, the segment 1"):
            cache.admitter.admit_segment(whole, tokens(7), run, 0, isolated, "naive")
        with (
            match_segment(cache, whole, tokens(7, 7), isolated, "naive") as keyed,
            pytest.raises(ValueError, match="causal prefix"),
        ):
            match_segment(cache, keyed, tokens(7), isolated, "naive")


def test_the_victim_queue_forgets_stale_entries():
    policy, node = LRU(), Node("", tokens(1).tobytes(), None, 0)
    victims, other = Victims(policy), Node("", tokens(2).tobytes(), None, 0)
    victims.push(other)
    for _ in range(1000):
        policy.on_access(node, Access(True, 1, 0))
        victims.push(node)
    assert len(victims._heap) < 100
    assert [victims.pop(), victims.pop(), victims.pop()] == [other, node, None]
