"""The cache on the device alone, against a plain reference model; `carriers` has the simulated pool."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragjax.cache import tree
from ragjax.cache.lookahead import Causal, Outlook
from ragjax.cache.node import Node, Provenance, context_digest, raw_of
from ragjax.cache.policy.base import LRU, Access, Victims
from ragjax.core import OutOfPages
from tests.support.audit import AuditError, audit_cache
from tests.support.transfers import PAGE, Bench, causal_content, keyed_content, match_segment, tokens

# ------------------------------------------------------------------------------------ one case at a time


def test_prefixes_are_found_at_token_granularity():
    bench = Bench()
    bench.put([1, 2, 3, 4, 5, 6])
    bench.put([1, 2, 3, 9, 9])
    assert [bench.length(p) for p in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9], [1, 2], [2], [])] == [6, 4, 2, 0, 0]
    audit_cache(bench.cache, live=())


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


def test_a_longer_admission_adds_only_what_is_new():
    """Two requests compute overlapping prompts at once; the later one is kept from where it differs."""
    bench = Bench()
    short, long = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9]
    match = bench.cache.matcher.match_prefix(tokens(*long))
    run = bench.reserve(7)
    bench.write(run, causal_content("", long))
    bench.put(short)
    bench.cache.admitter.admit_prefix(match, tokens(*long), 0, run, ())
    match.release()
    bench.cache.free(run)
    assert bench.length(long) == 7 and bench.length(short) == 6
    assert bench.cache.metrics.admitted_tokens == 9
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


def test_a_segment_is_found_under_exactly_its_context():
    bench = Bench()
    bench.put([1, 2, 3, 4])
    bench.put([1, 2, 3, 5])
    bench.put_segment([1, 2, 3], [7, 8])

    def find(context, ids, provenance=Provenance.ISOLATED, method="naive", tenant=""):
        with bench.cache.matcher.match_prefix(tokens(*context), tenant) as match:
            found = match_segment(bench.cache, match, tokens(*ids), provenance, method)
            if found is None:
                return False
            assert [at for _, at in found.spans] == [3] and found.complete
            assert np.array_equal(bench.read(found), keyed_content(tenant, context, provenance, method, ids))
            found.release()
            return True

    assert find([1, 2, 3], [7, 8])
    assert not find([1, 2], [7, 8])
    assert not find([1, 2, 3, 4], [7, 8])
    assert not find([1, 2, 3, 6], [7, 8])  # the context is found in part only
    assert not find([1, 2, 3], [7])
    assert not find([1, 2, 3], [7, 8], method="craft")
    assert not find([1, 2, 3], [7, 8], provenance=Provenance.APPROXIMATE)
    audit_cache(bench.cache, live=())


def test_a_segment_admitted_inside_a_node_splits_it():
    bench = Bench()
    bench.put([1, 2, 3, 4, 5])
    match = bench.cache.matcher.match_prefix(tokens(1, 2, 3))
    bench.put([1, 2, 3, 4, 9])  # splits below the match
    run = bench.reserve(2)
    bench.write(run, keyed_content("", [1, 2, 3], "isolated", "naive", [7, 7]))
    bench.cache.admitter.admit_segment(match, tokens(7, 7), run, 0, Provenance.ISOLATED, "naive")
    bench.cache.admitter.admit_segment(match, tokens(7, 7), run, 0, Provenance.ISOLATED, "naive")
    bench.cache.free(run)
    match.release()
    audit_cache(bench.cache, live=())
    with bench.cache.matcher.match_prefix(tokens(1, 2, 3)) as match:
        found = match_segment(bench.cache, match, tokens(7, 7), Provenance.ISOLATED, "naive")
        assert found is not None and found.node.parent.end == 3
        found.release()


@pytest.mark.parametrize("provenance", [Provenance.ISOLATED, Provenance.DEPENDENCY, Provenance.APPROXIMATE])
def test_what_is_not_causal_is_never_a_prefix(provenance):
    bench = Bench()
    bench.put([1, 2])
    for context, ids in (([1, 2], [3, 4]), ([], [1, 2, 3])):
        if provenance is Provenance.DEPENDENCY:
            bench.put_path(context, ids)
        else:
            bench.put_segment(context, ids, provenance)
    assert bench.length([1, 2, 3, 4]) == 2
    bench.audit()


def test_tenants_share_nothing():
    bench = Bench()
    bench.put([1, 2, 3], tenant="a")
    bench.put_segment([1, 2, 3], [4, 5], tenant="a")
    bench.put_segment([], [4, 5], tenant="a")
    assert [bench.length([1, 2, 3], tenant) for tenant in ("a", "b", "")] == [3, 0, 0]
    bench.put([1, 2, 3], tenant="b")
    for context in ([1, 2, 3], []):
        with bench.cache.matcher.match_prefix(tokens(*context), "b") as match:
            assert match_segment(bench.cache, match, tokens(4, 5), Provenance.ISOLATED, "naive") is None
    assert all(n.tenant == "a" for n in bench.cache.tree.places("a", tokens(4, 5).tobytes()))
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


def test_idle_tenants_leave_nothing_behind():
    bench = Bench()
    for n in range(50):
        bench.length([1, 2], tenant=f"t{n}")
    assert not list(bench.cache.tree.nodes())


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


# --------------------------------------------------------------------------------- against the reference

TENANTS = st.sampled_from(["", "a", "b"])
WORDS = [(0,), (1, 1, 1), (0, 1, 0, 1, 2), (0, 1, 2, 2, 1, 0)]
PROMPT = st.lists(st.sampled_from(WORDS), max_size=4).map(lambda words: tuple(t for word in words for t in word)[:14])
PICK = st.integers(0, 99)
CUTS = st.lists(st.integers(0, 14), max_size=3)


class Against(RuleBasedStateMachine):
    """Random requests; the reference is the set of causal prefixes held, by owner, and a set of segments.

    A tenant sees what is its own and what is public (the tenant "").

    What leaves under pressure is the policy's choice, so after an eviction the reference is read off the
    tree's nodes, and the change is checked: only a shrinking, prefix-closed, of the size counted, and
    nothing matched.
    """

    def __init__(self):
        super().__init__()
        self.bench = Bench(pages=13)
        self.cache = self.bench.cache
        self.prefixes = set()
        self.segments = set()
        self.matches = []
        self.runs = []

    # ---- rules

    @rule(ids=PROMPT, tenant=TENANTS)
    def match(self, ids, tenant):
        match = self.cache.matcher.match_prefix(tokens(*ids), tenant, label="r")
        known = [n for n in range(len(ids) + 1) if n == 0 or self.sees(tenant, tuple(ids[:n]))]
        assert match.length == max(known) and match.complete == (match.length == len(ids))
        self.matches.append((match, tenant, tuple(ids), None))

    @rule(
        ids=PROMPT, tenant=TENANTS, back=st.integers(0, 3), extra=st.integers(0, 5), cuts=CUTS, keep=st.integers(0, 7)
    )
    def serve(self, ids, tenant, back, extra, cuts, keep):
        """A request from match to admission; its match and its pages may live on."""
        self.match(ids, tenant)
        self.start(len(self.matches) - 1, back, extra)
        self.admit(len(self.runs) - 1, cuts)
        if self.runs and keep < 6:
            self.free(len(self.runs) - 1)
        if keep:
            self.release(len(self.matches) - 1)

    @precondition(lambda self: self.matches)
    @rule(pick=PICK, back=st.integers(0, 3), extra=st.integers(0, 5))
    def start(self, pick, back, extra):
        """Compute the rest of a matched prompt, and perhaps some of what was found, into own pages."""
        match, tenant, ids, what = self.pick(self.matches, pick)
        if what is not None:
            return
        from_ = max(0, match.length - back)
        run = self.reserve(len(ids) - from_ + extra)
        if run is not None:
            self.bench.write(run, causal_content(tenant, ids)[from_:])
            self.runs.append((run, match, tenant, ids, from_))

    def reserve(self, n):
        if n == 0:
            return None
        before, evicted = self.bench.state(), self.cache.metrics.evicted_tokens
        try:
            run = self.bench.reserve(n, "r")
        except OutOfPages:
            assert self.bench.state() == before
            assert -(-n // PAGE) > self.evictable_pages()
            return None
        self.shrink(self.cache.metrics.evicted_tokens - evicted)
        return run

    @precondition(lambda self: self.runs)
    @rule(pick=PICK, cuts=CUTS)
    def admit(self, pick, cuts):
        """Late admission: meanwhile others may have admitted, or something may have been evicted."""
        open_runs = [entry for entry in self.runs if not entry[1].released and entry[4] < len(entry[3])]
        if not open_runs:
            return
        run, match, tenant, ids, from_ = self.pick(open_runs, pick)
        part = run.slice(0, len(ids) - from_, PAGE)
        self.cache.admitter.admit_prefix(match, tokens(*ids), from_, part, [c for c in cuts if c <= len(ids)])
        self.prefixes |= {(tenant, ids[:n]) for n in range(1, len(ids) + 1) if not self.sees(tenant, ids[:n])}

    @precondition(lambda self: self.complete_leases())
    @rule(pick=PICK, ids=st.lists(st.integers(0, 2), min_size=1, max_size=6), method=st.sampled_from(["x", "y"]),
          provenance=st.sampled_from([Provenance.ISOLATED, Provenance.APPROXIMATE]))  # fmt: skip
    def segment(self, pick, ids, method, provenance):
        """Look a segment up under a matched context; compute and admit it on a miss."""
        context, tenant, before, _ = self.pick(self.complete_leases(), pick)
        what = (tenant, before, provenance, method, tuple(ids))
        match = match_segment(self.cache, context, tokens(*ids), provenance, method)
        found = next((w for w in (what, ("", *what[1:])) if w in self.segments), None)
        assert (match is not None) == (found is not None)
        if match is not None:
            self.matches.append((match, tenant, tuple(ids), found))
            return
        run = self.reserve(len(ids))
        if run is None:
            return
        self.bench.write(run, keyed_content(*what))
        self.cache.admitter.admit_segment(context, tokens(*ids), run, len(before), provenance, method)
        self.segments.add(what)
        self.cache.free(run)

    @precondition(lambda self: self.matches)
    @rule(pick=PICK)
    def release(self, pick):
        self.matches.pop(pick % len(self.matches))[0].release()

    @precondition(lambda self: self.runs)
    @rule(pick=PICK)
    def free(self, pick):
        self.cache.free(self.runs.pop(pick % len(self.runs))[0])

    @precondition(lambda self: len(self.prefixes) + len(self.segments) > 20)
    @rule()
    def clear(self):
        evicted = self.cache.metrics.evicted_tokens
        self.cache.clear()
        self.shrink(self.cache.metrics.evicted_tokens - evicted)
        assert all(node.pins for node in self.cache.tree.nodes())

    # ---- checks

    @invariant()
    def books_add_up(self):
        audit_cache(self.cache, live={"r"})

    @invariant()
    def nodes_are_the_reference(self):
        assert self.held() == (self.prefixes, self.segments)

    @invariant()
    def leases_hold_their_content(self):
        for match, tenant, ids, what in self.matches:
            if what is None:
                self.check_prefix(self.bench.read(match), tenant, ids[: match.length])
            else:
                assert np.array_equal(self.bench.read(match), keyed_content(*what))
            starts = [at for _, at in match.spans]
            lengths = [run.length for run, _ in match.spans]
            first = 0 if what is None else len(what[1])
            assert starts == [first + sum(lengths[:i]) for i in range(len(lengths))]

    @invariant()
    def every_node_holds_its_content(self):
        for node in self.cache.tree.nodes():
            if node.run is None:
                continue
            above = spelled(node.parent)
            own = tuple(node.tokens.tolist())
            if node.provenance is Provenance.CAUSAL:
                expected = causal_content(node.tenant, above + own)[len(above) :]
            else:
                expected = keyed_content(node.tenant, above, node.provenance, node.method, own)
            assert np.array_equal(self.bench.slots[node.run.slots(PAGE)], expected)

    def teardown(self):
        for match, *_ in self.matches:
            match.release()
        for run, *_ in self.runs:
            self.cache.free(run)
        audit_cache(self.cache, live=())
        self.cache.clear()
        audit_cache(self.cache, live=())
        assert self.bench.pool.free_pages == self.bench.pool.capacity

    # ---- the reference

    def shrink(self, evicted):
        prefixes, segments = self.held()
        assert prefixes <= self.prefixes and segments <= self.segments
        gone = len(self.prefixes) - len(prefixes) + sum(len(what[-1]) for what in self.segments - segments)
        assert gone == evicted
        for *_, what in self.matches:
            assert what is None or what in segments
        self.prefixes, self.segments = prefixes, segments
        for match, tenant, ids, what in self.matches:
            assert match.length == 0 or what is not None or self.sees(tenant, ids[: match.length])
        assert all(len(ids) == 1 or self.sees(tenant, ids[:-1]) for tenant, ids in prefixes)
        assert all(not what[1] or self.sees(*what[:2]) for what in segments)

    def sees(self, tenant, ids):
        return (tenant, ids) in self.prefixes or ("", ids) in self.prefixes

    def check_prefix(self, slots, tenant, ids):
        """Each slot is what the tenant computed, or what is public."""
        own, public = causal_content(tenant, ids), causal_content("", ids)
        for n, slot in enumerate(slots, 1):
            assert slot == own[n - 1] or (slot == public[n - 1] and ("", ids[:n]) in self.prefixes)

    def held(self):
        prefixes, segments = set(), set()
        for node in self.cache.tree.nodes():
            if node.run is None:
                continue
            above, own = spelled(node.parent), tuple(node.tokens.tolist())
            if node.provenance is Provenance.CAUSAL:
                prefixes |= {(node.tenant, above + own[: n + 1]) for n in range(len(own))}
            else:
                segments.add((node.tenant, above, node.provenance, node.method, own))
        return prefixes, segments

    def evictable_pages(self):
        """Pages that neither a reservation nor a node on a matched path touches, counted the slow way."""
        used = {page for run, *_ in self.runs for page in run.pages}
        for match, *_ in self.matches:
            used |= {page for node in match.node.path() if node.run for page in node.run.pages}
        return self.bench.pool.capacity - len(used)

    def complete_leases(self):
        return [entry for entry in self.matches if entry[3] is None and entry[0].complete]

    @staticmethod
    def pick(options, pick):
        return options[pick % len(options)]


def spelled(node):
    return tuple(t for step in reversed(list(node.path())) for t in step.tokens.tolist())


TestAgainstReference = Against.TestCase
TestAgainstReference.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
