"""Replacement policies against slow references that scan lists, and what their papers say of them."""

import itertools
import random
from math import inf

import pytest

from benchmarks.baseline.policy.belady import Belady
from benchmarks.baseline.policy.fifo import FIFO
from benchmarks.baseline.policy.lfu import LFU, PerfectLFU
from ragjax.cache.policy import POLICIES
from ragjax.cache.policy.base import FEWEST, GHOSTS_PER_NODE, LRU, Access, Victims
from ragjax.cache.policy.craft import CraftPolicy
from ragjax.cache.policy.gdsf import GDSF, PGDSF
from ragjax.cache.policy.lacr import LACR
from ragjax.cache.profile import Profile
from ragjax.core.tiers import Tier
from tests.support.transfers import Bench, tokens

DEVICE, HOST = Tier.DEVICE, Tier.HOST
HIT, MISS = Access(True, 0, 0), Access(False, 0, 1)
PROFILE = Profile((0, 100), (100, 200), ((1.0, 2.0), (1.5, 3.0)))


class Node:
    """What policies may see of a node of the tree."""

    def __init__(self, key, length=1, start=0):
        self.key, self.length, self.start = key, length, start
        self.parent, self.tenant, self.note, self.queued, self.kept = None, "", None, [0, 0], 0.0

    def __len__(self):
        return self.length


class Cache:
    """One tier of flat nodes under a policy; a node that leaves is forgotten."""

    def __init__(self, policy, capacity, tier=DEVICE):
        self.policy, self.capacity, self.tier = policy, capacity, tier
        self.victims, self.nodes = Victims(policy, tier), {}

    def used(self):
        return sum(map(len, self.nodes.values()))

    def access(self, key, length=1, **more):
        """Returns the keys that left for it, in order."""
        node, left = self.nodes.get(key), []
        if hit := node is not None:
            self.victims.discard(node)
        else:
            node = Node(key, length)
            while self.used() + length > self.capacity:
                gone = self.victims.pop()
                self.policy.on_evict(gone, self.tier)
                left.append(gone.key)
                self.policy.on_forget(gone)
                del self.nodes[gone.key]
            self.nodes[key] = node
        self.policy.on_access(node, Access(hit, **{"cached": 0, "new": 0 if hit else length, **more}))
        self.victims.push(node)
        return left


class Lowest:
    """A reference: `worth[key]`, kept up by a subclass, orders; of equals the one that was pushed first leaves."""

    def __init__(self, capacity):
        self.capacity, self.size, self.worth, self.pushed = capacity, {}, {}, itertools.count()
        self.turn = {}

    def access(self, key, length=1, **more):
        left = []
        while key not in self.size and sum(self.size.values()) + length > self.capacity:
            gone = min(self.size, key=lambda k: (self.worth[k], self.turn[k]))
            self.leaves(gone)
            left.append(gone)
            del self.size[gone], self.worth[gone]
        hit = key in self.size
        self.size[key] = length
        self.turn[key] = next(self.pushed)
        self.use(key, hit, length, **more)
        return left

    def leaves(self, key):
        pass


class Oldest(Lowest):
    def use(self, key, hit, length):
        self.worth[key] = self.turn[key]


class Arrived(Lowest):
    def use(self, key, hit, length):
        self.worth.setdefault(key, self.turn[key])


class Rarest(Lowest):
    def use(self, key, hit, length):
        self.worth[key] = self.worth.get(key, 0) + 1


class RarestEver(Lowest):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.log = []

    def use(self, key, hit, length):
        self.log.append(key)
        self.worth[key] = self.log.count(key)


class Fixed(Lowest):
    def use(self, key, hit, length, cfo):
        self.worth[key] = self.worth.get(key, 0) + (100 if cfo < 0.01 else 1 / cfo)


class Dual(Lowest):
    """RAGCache's formulas 1 to 3, from a log of all accesses."""

    def __init__(self, capacity, window, rate):
        super().__init__(capacity)
        self.window, self.rate, self.log, self.clock, self.misses = window, rate, [], 0.0, {}

    def use(self, key, hit, length, **request):
        self.log.append(key)
        now = len(self.log) - 1
        if not hit:
            self.misses.setdefault(key, []).append(self.rate(**request))
        frequency = self.log[now - now % self.window :].count(key)
        self.worth[key] = self.clock + frequency * sum(self.misses[key]) / len(self.misses[key])

    def leaves(self, key):
        self.clock = max(self.clock, self.worth[key])


def requests(seed, count=4000, keys=60):
    """A skewed stream whose favourites drift."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 5) for _ in range(keys)]
    for at in range(count):
        number = (int(rng.paretovariate(0.8)) + at // 500) % keys
        yield b"%d" % number, lengths[number], rng


def per_token(cached, new, **_):
    return PROFILE.cost(cached, new) / new


PAIRS = {
    "none": (FIFO, Arrived),
    "lru": (LRU, Oldest),
    "lfu": (LFU, Rarest),
    "lfu-perfect": (PerfectLFU, RarestEver),
    "gdsf": (lambda: GDSF(window=700), lambda size: Dual(size, 700, lambda **_: 1.0)),
    "pgdsf": (lambda: PGDSF(PROFILE, window=700), lambda size: Dual(size, 700, per_token)),
    "craft": (CraftPolicy, Fixed),
}


def details(name, rng):
    if name == "craft":
        return {"cfo": rng.choice([0.0, 0.005, 0.01, 0.25, 0.5, 1.0])}
    if name in ("gdsf", "pgdsf"):
        return {"cached": rng.randrange(300), "new": rng.randint(1, 300)}
    return {}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("capacity", [6, 30, 60])
def test_each_policy_evicts_what_its_slow_reference_does(name, capacity):
    make, reference = PAIRS[name]
    cache, slow = Cache(make(), capacity), reference(capacity)
    evicted = 0
    for key, length, rng in requests(capacity):
        more = details(name, rng)
        left = cache.access(key, length, **more)
        assert left == slow.access(key, length, **more)
        evicted += len(left)
    assert evicted > 300


@pytest.mark.parametrize("make", [LRU, LFU])
def test_accesses_count_and_not_the_order_in_which_nodes_are_let_go(make):
    policy = make()
    victims, nodes = Victims(policy), [Node(b"1"), Node(b"2"), Node(b"3")]
    for node in nodes:
        policy.on_access(node, HIT)
    for node in reversed(nodes):
        victims.push(node)
    assert [victims.pop() for _ in nodes] == nodes


# ------------------------------------------------------------------------- what the queue relies on


@pytest.mark.parametrize("name", POLICIES)
def test_a_score_falls_only_where_the_queue_is_told(name):
    rng, policy = random.Random(5), POLICIES[name].for_device(PROFILE)
    nodes = [Node(b"%d" % i, rng.randint(1, 9)) for i in range(30)]
    for node in nodes:
        policy.on_access(node, Access(False, 0, len(node)))
    waiting = []
    for at in range(1500):
        before = {node: policy.score(node, DEVICE) for node in nodes}
        told = set()
        node, action = rng.choice(nodes), rng.randrange(4)
        if action == 0:
            policy.on_access(node, Access(rng.random() < 0.5, 10, 20, 0.3))
            told = {node.key}
        elif action == 1:
            policy.on_evict(node, DEVICE)
            told = {node.key}
        elif action == 2:
            told = set(policy.on_queue(f"r{at}", [n.key for n in rng.sample(nodes, 5)]))
            waiting.append(f"r{at}")
        elif waiting:
            told = set(policy.on_start(waiting.pop(rng.randrange(min(40, len(waiting))))))
        fell = {n.key for n in nodes if policy.score(n, DEVICE) < before[n]}
        assert fell <= told


@pytest.mark.parametrize("name", POLICIES)
def test_a_node_nobody_accessed_has_a_score_and_may_leave_or_be_cut(name):
    policy, node, upper = POLICIES[name].for_device(PROFILE), Node(b"a", 4), Node(b"b", 2)
    assert policy.score(node, HOST) <= policy.score(node, HOST)
    policy.on_evict(node, DEVICE)
    upper.note = node.note
    policy.on_split(upper, node, b"whole")
    assert policy.score(upper, DEVICE) is not None


@pytest.mark.parametrize("name", POLICIES)
def test_halves_are_worth_what_the_whole_was_and_go_their_own_ways(name):
    policy, node = POLICIES[name].for_device(PROFILE), Node(b"whole", 8)
    Victims(policy, DEVICE).push(node)
    for access in (MISS, HIT, HIT):
        policy.on_access(node, access)
    was = policy.score(node, DEVICE)
    upper = Node(b"upper", 3)
    upper.note, node.key, node.length = node.note, b"lower", 5
    policy.on_split(upper, node, b"whole")
    assert policy.score(upper, DEVICE) == policy.score(node, DEVICE) == was
    policy.on_access(upper, HIT)
    assert policy.score(node, DEVICE) == was
    policy.on_evict(node, DEVICE)


# ------------------------------------------------------------------------------------------- papers


def test_pgdsf_counts_as_algorithm_1_does():
    policy, node = PGDSF(PROFILE), Node(b"d2")
    # T(50, 150): behind 100 new 1 + ½·(1.5 - 1) = 1.25, 200 new 2 + ½·(3 - 2) = 2.5, between them 1.875 seconds
    policy.on_access(node, Access(False, 50, 150))
    assert policy.score(node, DEVICE) == pytest.approx(1 * 1.875 / 150)
    # a hit changes frequency alone
    policy.on_access(node, Access(True, 200, 20))
    assert policy.score(node, DEVICE) == pytest.approx(2 * 1.875 / 150)
    # T(0, 100) = 1: the mean of 0.0125 and 0.01 seconds a token
    policy.on_access(node, Access(False, 0, 100))
    assert policy.score(node, DEVICE) == pytest.approx(3 * 0.01125)


@pytest.mark.parametrize("make", [PerfectLFU, lambda: GDSF(window=10**6), lambda: PGDSF(PROFILE)])
def test_what_is_known_of_a_node_survives_its_eviction_until_the_cache_is_cleared(make):
    policy, known = make(), make()
    node, back = Node(b"d"), Node(b"d")
    for _ in range(3):
        policy.on_access(node, MISS)
        known.on_access(back, MISS)
    policy.on_forget(node)
    assert node.note is None
    node = Node(b"d")
    for p, n in ((policy, node), (known, back)):
        p.on_access(n, MISS)
    assert policy.score(node, DEVICE) == known.score(back, DEVICE)
    policy.on_forget(node)
    policy.on_clear()
    fresh, other = Node(b"d"), Node(b"other")
    policy.on_access(fresh, MISS)
    policy.on_access(other, MISS)
    assert policy.score(fresh, DEVICE) <= policy.score(other, DEVICE)


def test_ghosts_are_bounded_and_the_oldest_leave():
    policy = GDSF()
    kept = [Node(b"kept%d" % i) for i in range(FEWEST // GHOSTS_PER_NODE + 5)]
    for node in kept:
        policy.on_access(node, MISS)
    gone = [Node(b"%d" % i) for i in range(FEWEST + 100)]
    for node in gone:
        policy.on_access(node, MISS)
        policy.on_forget(node)
    assert list(policy._ghosts) == [node.key for node in gone[-GHOSTS_PER_NODE * len(kept) :]]
    for node in kept:
        policy.on_forget(node)
    assert len(policy._ghosts) == FEWEST


def test_splits_and_merges_count_the_nodes_that_ghosts_are_bounded_by():
    policy, node, upper = GDSF(), Node(b"lower", 2), Node(b"upper", 2)
    policy.on_access(node, MISS)
    upper.note = node.note
    policy.on_split(upper, node, b"whole")
    assert policy._kept == 2
    policy.on_merge(upper, node, b"lower")
    assert policy._kept == 1
    policy.on_forget(node)
    assert policy._kept == 0


def test_each_tier_has_a_clock_that_never_goes_back():
    policy = PGDSF(PROFILE)
    first, second, third = Node(b"1"), Node(b"2"), Node(b"3")
    for node in (first, first, second):
        policy.on_access(node, Access(False, 0, 100))  # 0.01 a token
    policy.on_evict(first, DEVICE)
    policy.on_evict(second, DEVICE)
    policy.on_access(third, Access(False, 0, 100))
    assert policy.score(third, DEVICE) == pytest.approx(0.02 + 0.01)
    assert policy.score(third, HOST) == pytest.approx(0.01)
    policy.on_evict(second, HOST)
    policy.on_access(third, HIT)
    assert policy.score(third, HOST) == pytest.approx(0.01 + 2 * 0.01)
    policy.on_clear()
    policy.on_access(second, HIT)
    assert policy.score(second, DEVICE) == pytest.approx(2 * 0.01), "the clocks are back at zero"


def test_a_document_from_disk_costs_what_computing_it_behind_its_context_would():
    policy, node = PGDSF(PROFILE), Node(b"d", 150, start=50)
    policy.on_access(node, Access(True, 200, 10))
    assert policy.score(node, DEVICE) == pytest.approx(1.875 / 150)


def test_what_needs_little_fixing_stays():
    policy, cheap, dear = CraftPolicy(), Node(b"a"), Node(b"b")
    policy.on_access(cheap, Access(True, 0, 0, cfo=0.0))
    for _ in range(99):
        policy.on_access(dear, HIT)
    assert policy.score(dear, DEVICE) == 99 < policy.score(cheap, DEVICE) == 100


# --------------------------------------------------------------------------------------------- LACR


def future(queue, wanted):
    """Share of the queue's weight: `wanted` says whether a request wants the node."""
    weights = [max(len(queue), 1) - rank for rank in range(max(len(queue), 1))]
    return sum(w for w, request in zip(weights, queue, strict=False) if wanted(request)) / sum(weights)


class Priorities:
    """Equation 6 from a full log."""

    def __init__(self, alpha, half_life):
        self.alpha, self.half_life = alpha, half_life
        self.started, self.queue, self.measures, self.uses = 0, [], {}, {}

    def discount(self, age):
        return 0.5 ** (age / self.half_life)

    def of(self, key):
        everything = sum(self.discount(age) for age in range(self.started + 1))
        history = sum(self.discount(self.started - at) for at in self.uses.get(key, ())) / everything
        ahead = future(self.queue, lambda request: key in self.measures[request])
        return self.alpha * history + (1 - self.alpha) * ahead


@pytest.mark.parametrize("half_life", [inf, 20.0])
@pytest.mark.parametrize("seed", [5, 32])
def test_lacr_orders_nodes_by_equation_6(seed, half_life):
    rng = random.Random(seed)
    policy, slow = LACR(0.2, half_life), Priorities(0.2, half_life)
    nodes = {b"%d" % i: Node(b"%d" % i, 16) for i in range(25)}
    for at in range(600):
        action = rng.random()
        if action < 0.4 and len(slow.queue) < 60:
            keys = [key for key in nodes if rng.random() < 0.2] + [b"not kept yet"]
            policy.on_queue(f"r{at}", keys)
            slow.queue.append(f"r{at}")
            slow.measures[f"r{at}"] = set(keys)
        elif action < 0.9 and slow.queue:
            name = slow.queue.pop(rng.choice([0, 0, 0, rng.randrange(len(slow.queue))]))
            told = set(policy.on_start(name))
            slow.started += 1
            assert slow.measures[name] <= told
            for key in slow.measures[name] & nodes.keys():
                policy.on_access(nodes[key], HIT)
                slow.uses.setdefault(key, []).append(slow.started)
        elif action > 0.97:
            whole = rng.choice(list(nodes))
            cut(policy, slow, nodes, whole, at)
        worth = [slow.of(key) for key in sorted(nodes, key=lambda key: policy.score(nodes[key], DEVICE))]
        assert all(low <= high + 1e-9 for low, high in itertools.pairwise(worth))
    while slow.queue:
        policy.on_start(slow.queue.pop())
    assert not policy._demands and not policy._waiting and not policy._queue


def cut(policy, slow, nodes, whole, at):
    lower = nodes.pop(whole)
    upper = Node(whole + b"u%d" % at, 1)
    lower.key, upper.note = whole + b"l%d" % at, lower.note
    policy.on_split(upper, lower, whole)
    for half in (upper, lower):
        nodes[half.key] = half
        slow.uses[half.key] = list(slow.uses.get(whole, ()))
        for wanted in slow.measures.values():
            if whole in wanted:
                wanted.add(half.key)


def refresh(cache, fallen):
    for key in fallen:
        if key in cache.nodes:
            cache.victims.refresh(cache.nodes[key])


@pytest.mark.parametrize("capacity", [10, 20])
def test_the_queue_finds_the_node_of_lowest_priority_though_priorities_rise_unnoticed(capacity):
    rng = random.Random(1)
    policy, slow = LACR(half_life=30.0), Priorities(0.2, 30.0)
    cache = Cache(policy, capacity)
    stream = [key for key, _, _ in requests(7, 400, 40)]
    for at in range(len(stream)):
        while len(slow.queue) < min(rng.choice([0, 5, 40]), len(stream) - at):
            number = at + len(slow.queue)
            slow.queue.append(str(number))
            slow.measures[str(number)] = {stream[number]}
            refresh(cache, policy.on_queue(str(number), [stream[number]]))
        slow.started += 1
        slow.queue = slow.queue[1:]
        refresh(cache, policy.on_start(str(at)))
        worth = {key: slow.of(key) for key in cache.nodes}
        for gone in cache.access(stream[at]):
            assert worth.pop(gone) <= min(worth.values()) + 1e-9
            del slow.uses[gone]
        slow.uses.setdefault(stream[at], []).append(slow.started)


def test_history_alone_takes_nodes_that_the_next_jobs_need_and_the_queue_saves_them():
    """DepCache, Figure 9: 8 and 9 are ranked lowest, but job 6 wants them; nobody waits for 16 and 17."""
    done = [(16, 17, 1, 2, 3, 7), (10, 11, 12, 1, 2, 8, 9), (10, 11, 12, 1, 2, 3, 7, 16, 17)]
    left = {}
    for policy in (LFU(), LACR()):
        nodes, victims = {i: Node(b"%d" % i) for i in {i for job in done for i in job}}, Victims(policy)
        for job in done:
            policy.on_start("")
            for i in job:
                policy.on_access(nodes[i], HIT)
        policy.on_queue("4", [b"1", b"2", b"3", b"5", b"6"])
        policy.on_queue("5", [b"1", b"2", b"3", b"10", b"11", b"12"])
        policy.on_queue("6", [b"7", b"8", b"9"])
        policy.on_start("4")
        for i in set(nodes) - {1, 2, 3}:  # job 4 uses these
            victims.push(nodes[i])
        left[type(policy)] = {victims.pop().key, victims.pop().key}
    assert left == {LFU: {b"8", b"9"}, LACR: {b"16", b"17"}}


def test_all_who_wait_count_and_the_sooner_the_more():
    """DepCache, section 5: the window is the number of pending requests, whatever it is."""
    policy, last, first, other = LACR(), Node(b"100"), Node(b"50"), Node(b"unasked")
    for at in range(101):
        policy.on_queue(str(at), [b"%d" % at])
    scores = [policy.score(node, DEVICE) for node in (first, last, other)]
    assert scores[0] > scores[1] > scores[2] == -inf


def test_lacr_says_what_is_wrong():
    for wrong in ({"alpha": 0}, {"alpha": 1.5}, {"half_life": 0.0}, {"half_life": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LACR(**wrong)
    with pytest.raises(ValueError, match="window"):
        GDSF(window=0)
    policy = LACR()
    policy.on_queue("r", [b"a", b"a"])
    with pytest.raises(ValueError, match="'r' waits already"):
        policy.on_queue("r", [])
    assert list(policy.on_start("r")) == [b"a"]
    assert list(policy.on_start("never queued")) == []


def test_lacr_outlives_a_million_requests():
    policy, old, new = LACR(half_life=1.0), Node(b"old"), Node(b"new")
    policy.on_access(old, HIT)
    for _ in range(100_000):
        policy.on_start("")
    policy.on_queue("r", [b"old"])
    policy.on_access(new, HIT)
    assert 0 < policy.score(old, DEVICE) < inf
    policy.on_start("r")
    assert policy.score(old, DEVICE) < policy.score(new, DEVICE) < inf


# ------------------------------------------------------------------------------------------- Belady


def fewest_misses(stream, capacity):
    """Over all ways to choose victims."""
    states = {frozenset(): 0}
    for key in stream:
        following = {}
        for kept, misses in states.items():
            if key in kept:
                options = [(kept, misses)]
            elif len(kept) < capacity:
                options = [(kept | {key}, misses + 1)]
            else:
                options = [(kept - {gone} | {key}, misses + 1) for gone in kept]
            for state, cost in options:
                following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


def test_belady_misses_as_little_as_any_choice_of_victims_could():
    rng = random.Random(3)
    gains = 0
    for _ in range(60):
        capacity = rng.randint(1, 4)
        stream = [b"%d" % rng.randrange(6) for _ in range(25)]
        misses = {}
        for policy in (Belady([[key] for key in stream]), LRU()):
            cache = Cache(policy, capacity)
            misses[type(policy)] = 0
            for at, key in enumerate(stream):
                for fallen in policy.on_start(str(at)):
                    if fallen in cache.nodes:
                        cache.victims.refresh(cache.nodes[fallen])
                misses[type(policy)] += key not in cache.nodes
                cache.access(key)
        assert misses[Belady] == fewest_misses(stream, capacity)
        gains += misses[LRU] - misses[Belady]
    assert gains > 60


def test_belady_refuses_a_request_that_it_did_not_foresee():
    policy = Belady([[b"a"]])
    assert set(policy.on_start("0")) == {b"a"}
    with pytest.raises(ValueError, match="'1'"):
        policy.on_start("1")


def test_the_real_cache_reports_what_left_it_and_its_clearance():
    """Documents that fill the cache in turn: the statistics of each survive every eviction."""
    bench = Bench(pages=3, policy=PGDSF(PROFILE))
    for ids in ([1] * 8, [2] * 8, [1] * 8):
        bench.put(ids)
    kept = next(node for node in bench.cache.tree.nodes() if node.raw[:4] == tokens(1).tobytes())
    assert (kept.note.frequency, kept.note.misses) == (2, 2)
    bench.cache.clear()
    bench.put([1] * 8)
    [kept] = bench.cache.tree.nodes()
    assert (kept.note.frequency, kept.note.misses) == (1, 1)
