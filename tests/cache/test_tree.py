"""The knowledge tree: prefixes, splits, merges, keys, the content index, and whose nodes they are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.cache.node import Node, Provenance, context_digest, context_of
from ragjax.cache.pool import PagePool
from ragjax.cache.tree import KnowledgeTree, common_prefix, join_runs
from ragjax.core import Run
from ragjax.core.tiers import Copy, Tier
from tests.support.audit import AuditError, audit_pool, audit_tree

PAGE = 4
CAUSAL, DEPENDENCY = Provenance.CAUSAL, Provenance.DEPENDENCY


def tokens(*ids):
    return np.asarray(ids, np.int32)


def raw(*ids):
    return tokens(*ids).tobytes()


def make(pages=64):
    pool = PagePool(pages, PAGE)
    return pool, KnowledgeTree(b"model", pool)


def hang(pool, tree, parent, ids, provenance=Provenance.ISOLATED, method="naive", tenant="", **fields):
    """One node, and the tree as the only holder of its pages."""
    run = pool.allocate(len(ids))
    node = tree.attach(Node(tenant, raw(*ids), parent, 0, provenance, method, **fields), context_of(parent), run)
    pool.release(run)
    return node


def grow(pool, tree, parent, ids, cuts=(), tenant="", provenance=CAUSAL, method=""):
    """A chain of nodes in one run, and the tree as the only holder of its pages."""
    run = pool.allocate(len(ids))
    nodes, at = [], 0
    for stop in (*cuts, len(ids)):
        node = Node(tenant, raw(*ids[at:stop]), parent, parent.end, provenance, method)
        nodes.append(tree.attach(node, context_of(parent), run.slice(at, stop, PAGE)))
        parent, at = node, stop
    pool.release(run)
    return nodes


def books(pool, tree):
    audit_tree(tree)
    nodes = [n for n in tree.nodes() if n.run is not None]
    audit_pool(pool, [n.run for n in nodes], [n.run for n in nodes if n.pins])


# ------------------------------------------------------------------------------------------ walks


def test_a_walk_never_meets_keyed_nodes():
    pool, tree = make()
    for provenance in (Provenance.ISOLATED, Provenance.APPROXIMATE):
        hang(pool, tree, tree.root, [1, 2], provenance)
    grow(pool, tree, tree.root, [1, 2], provenance=DEPENDENCY, method="x")
    assert tree.walk(raw(1, 2)) == []
    assert tree.walk(raw(1, 2), method="y") == []
    assert len(tree.walk(raw(1, 2), method="x")) == 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_walk_is_the_longest_path_that_there_is(data):
    """Against all paths, read off one by one; nodes are kept as the cache keeps them, behind the longest walk."""
    pool, tree = make(200)
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    for _ in range(data.draw(st.integers(1, 8))):
        ids, tenant = data.draw(prompts), data.draw(st.sampled_from(["", "a", "b"]))
        steps = tree.walk(raw(*ids), tenant)
        at = sum(used for _, used in steps)
        parent = steps[-1][0] if steps else tree.root
        if steps and steps[-1][1] < len(parent):
            parent = tree.split(parent, steps[-1][1])
        if at < len(ids):
            cut = data.draw(st.integers(at, len(ids) - 1))
            owner = tenant if parent.tenant == "" else parent.tenant
            grow(pool, tree, parent, ids[at:], (cut - at,) if cut > at else (), tenant=owner)
    books(pool, tree)
    ids, tenant = data.draw(prompts), data.draw(st.sampled_from(["", "a", "b"]))
    paths = [spelled(node) for node in tree.nodes() if node.tenant in ("", tenant)]
    longest = max([0, *(common_prefix(path, raw(*ids)) for path in paths)])
    steps = tree.walk(raw(*ids), tenant)
    assert sum(used for _, used in steps) == longest
    assert all(node.parent is (steps[i - 1][0] if i else tree.root) for i, (node, _) in enumerate(steps))
    assert all(node.tenant in ("", tenant) for node, _ in steps)


def test_what_hangs_below_a_node_does_not_follow_a_part_of_it():
    pool, tree = make()
    [shared] = grow(pool, tree, tree.root, [1, 2, 3])
    grow(pool, tree, shared, [9], tenant="a")
    assert tree.walk(raw(1, 2, 9), "a") == [(shared, 2)]


def spelled(node):
    return b"".join(step.raw for step in reversed(list(node.path())))


# ---------------------------------------------------------------------------------- splits and merges


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 13), st.data())
def test_a_split_keeps_slots_rotation_children_and_keys_below(length, data):
    pool, tree = make()
    [top] = grow(pool, tree, tree.root, [9, 9, 9])
    [node] = grow(pool, tree, top, range(length))
    [child] = grow(pool, tree, node, [7, 7])
    chunk = hang(pool, tree, node, [5, 5])
    if data.draw(st.booleans()):
        tree.store(node, Copy(4, 2, length))
    slots = node.run.slots(PAGE)
    keys = child.key, chunk.key
    at = data.draw(st.integers(1, length - 1))
    upper = tree.split(node, at)
    assert [list(n.tokens) for n in (upper, node)] == [list(range(at)), list(range(at, length))]
    assert np.array_equal(np.concatenate([upper.run.slots(PAGE), node.run.slots(PAGE)]), slots)
    assert (upper.local_start, node.local_start) == (3, 3 + at)
    assert upper.parent is top and node.parent is upper and list(upper.children()) == [node]
    assert list(node.children()) == [child, chunk]
    assert (child.key, chunk.key) == keys
    if node.host is not None:
        assert (upper.host, node.host) == (Copy(4, 2, at), Copy(4, 2 + at, length - at))
    steps = [(top, 3), (upper, at), (node, length - at), (child, 1)]
    assert tree.walk(raw(9, 9, 9, *range(length), 7)) == steps
    books(pool, tree)


def test_a_split_hands_down_what_a_node_is():
    pool, tree = make()
    fields = {"behind": b"b", "meta": b"m", "lossy": True}
    node = hang(pool, tree, tree.root, [1, 2, 3], DEPENDENCY, "dep", "a", **fields)
    node.hits, node.note, node.shelved, node.loading = 3, "policy's", True, 7
    upper = tree.split(node, 1)
    same = ("tenant", "provenance", "method", "behind", "meta", "lossy", "hits", "note", "loading")
    assert [getattr(upper, field) for field in same] == [getattr(node, field) for field in same]
    assert not upper.shelved and not node.shelved  # the disk has the whole, under another key than theirs
    books(pool, tree)


def test_pins_survive_splits_on_both_halves():
    pool, tree = make()
    [node] = grow(pool, tree, tree.root, range(10))
    tree.pin(node)
    upper = tree.split(node, 5)
    top = tree.split(upper, 2)
    assert [n.pins for n in (node, upper, top)] == [1, 1, 1]
    books(pool, tree)
    with pytest.raises(ValueError, match="pinned"):
        pool.release(node.run)
    tree.unpin(node)
    assert [n.pins for n in (node, upper, top, tree.root)] == [0, 0, 0, 0]
    assert pool.reclaimable_pages == pool.capacity
    books(pool, tree)


@pytest.mark.parametrize(("provenance", "at"), [(CAUSAL, 0), (CAUSAL, 3), (Provenance.ISOLATED, 1)])
def test_a_split_outside_the_node_or_of_a_keyed_one_is_refused(provenance, at):
    pool, tree = make()
    node = hang(pool, tree, tree.root, [1, 2, 3], provenance)
    with pytest.raises(ValueError, match="cannot split"):
        tree.split(node, at)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 13), st.data())
def test_a_merge_undoes_a_split(length, data):
    pool, tree = make()
    [node] = grow(pool, tree, tree.root, range(length), provenance=DEPENDENCY, method="x")
    [child] = grow(pool, tree, node, [7], provenance=DEPENDENCY, method="x")
    if data.draw(st.booleans()):
        tree.store(node, Copy(4, 2, length))
    before = (node.key, node.run, node.host, node.start, node.local_start, node.raw)
    upper = tree.split(node, data.draw(st.integers(1, length - 1)))
    lossy = data.draw(st.sampled_from([upper, node, None]))
    if lossy is not None:
        lossy.lossy = True
    assert tree.merge(node) and upper.dead and node.lossy == (lossy is not None)
    assert (node.key, node.run, node.host, node.start, node.local_start, node.raw) == before
    assert child.parent is node and tree.walk(raw(*range(length), 7), method="x") == [(node, length), (child, 1)]
    books(pool, tree)


@pytest.mark.parametrize(
    "why",
    ["branches", "pinned", "loading", "another tenant", "another method", "another meta", "runs apart", "slots apart",
     "one has no host copy", "host copies apart", "other entries", "rotation", "is causal over dependency"],
)  # fmt: skip
def test_what_does_not_belong_together_is_not_merged(why):
    pool, tree = make()
    other = {"another tenant": {"tenant": "a"}, "another method": {"method": "y"}}.get(why, {})
    if why in ("runs apart", "another tenant", "another method", "slots apart"):
        length = 6 if why == "slots apart" else 4
        [upper] = grow(pool, tree, tree.root, range(length), provenance=DEPENDENCY, method="x")
        [lower] = grow(pool, tree, upper, [6, 7], **{"provenance": DEPENDENCY, "method": "x"} | other)
        merged = why == "runs apart"  # a page's end and another page's top do follow each other in a run
    else:
        upper, lower = grow(pool, tree, tree.root, range(6), (4,), provenance=DEPENDENCY, method="x")
        merged = False
    for node, copy in ((upper, Copy(1, 0, len(upper))), (lower, Copy(1, len(upper), len(lower)))):
        if why in ("host copies apart", "other entries", "one has no host copy"):
            tree.store(node, copy)
    match why:
        case "branches":
            hang(pool, tree, upper, [9])
        case "pinned":
            tree.pin(lower)
        case "loading":
            lower.loading = 1
        case "another meta":
            lower.meta = b"m"
        case "one has no host copy":
            tree.store(lower, None)
        case "host copies apart":
            lower.host = Copy(1, 5, 2)
        case "other entries":
            lower.host = Copy(2, 4, 2)
        case "rotation":
            lower.local_start = 0
        case "is causal over dependency":
            [upper] = grow(pool, tree, tree.root, [50])
            [lower] = grow(pool, tree, upper, [51], provenance=DEPENDENCY, method="x")
    assert tree.merge(lower) == merged
    assert upper.dead == merged
    books(pool, tree)


def test_runs_that_do_not_follow_each_other_are_not_joined():
    run = Run((3, 7, 5), 0, 10)
    assert join_runs(run.slice(0, 6, 4), run.slice(6, 10, 4), 4) == run
    assert join_runs(run.slice(0, 4, 4), run.slice(4, 10, 4), 4) == run
    assert join_runs(run.slice(0, 6, 4), run.slice(7, 10, 4), 4) is None
    assert join_runs(run.slice(0, 6, 4), Run((8,), 2, 2), 4) is None
    assert join_runs(run.slice(0, 6, 4), Run((8,), 0, 2), 4) is None


# ------------------------------------------------------------------------------------- what leaves


def test_what_is_detached_is_found_no_more_and_keeps_its_pages_until_it_is_lifted():
    pool, tree = make()
    [top] = grow(pool, tree, tree.root, [1, 2])
    [node] = grow(pool, tree, top, [3])
    chunk = hang(pool, tree, node, [3])
    tree.store(chunk, Copy(1, 0, 1))
    assert tree.detach(node) is top
    assert node.dead and chunk.dead and not top.dead
    assert tree.find(chunk.key) is None and tree.find(node.key) is None
    assert tree.places("", raw(3)) == () and tree.walk(raw(1, 2, 3)) == [(top, 2)]
    assert (top.on_device, top.on_host, top.edges) == (0, 0, None)
    assert pool.free_pages == pool.capacity - 3
    for dead in (chunk, node):
        tree.store(dead, None)
        tree.lift(dead)
    audit_tree(tree)
    tree.lift(top)
    assert tree.held[Tier.DEVICE].total() == tree.held[Tier.HOST].total() == 0
    assert tree.detach(top) is tree.root
    assert pool.free_pages == pool.capacity and len(tree) == 0
    books(pool, tree)


# -------------------------------------------------------------------------------- keys, places, content


def test_a_key_depends_on_everything_the_kv_depends_on():
    pool, tree = make()
    [context] = grow(pool, tree, tree.root, [1, 2])
    [other] = grow(pool, tree, tree.root, [1, 2], tenant="x")
    here, there = context_digest(raw(1, 2)), context_digest(raw(1, 3))
    naive = Provenance.ISOLATED
    keys = [
        tree.key("", naive, "naive", here, raw(5)),
        tree.key("x", naive, "naive", here, raw(5)),
        tree.key("", Provenance.APPROXIMATE, "naive", here, raw(5)),
        tree.key("", naive, "craft", here, raw(5)),
        tree.key("", naive, "naive", there, raw(5)),
        tree.key("", naive, "naive", here, raw(6)),
        tree.key("", naive, "naive", here, raw(5), b"neighbours"),
        KnowledgeTree(b"another", pool).key("", naive, "naive", here, raw(5)),
        tree.key("n", naive, "aive", here, raw(5)),
        context.key,
        other.key,
    ]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {32}
    assert hang(pool, tree, context, [5]).key == keys[0]


def test_a_place_depends_on_identity_tenant_and_context():
    pool, tree = make()
    here = context_digest(raw(1))
    places = [
        tree.place("", here),
        tree.place("a", here),
        tree.place("", context_digest(raw(2))),
        KnowledgeTree(b"another", pool).place("", here),
    ]
    assert len(set(places)) == 4


def test_causal_keys_do_not_depend_on_the_cuts():
    pool, tree = make()
    *_, whole = grow(pool, tree, tree.root, [1, 2, 3, 4], cuts=(3,))
    other_pool, other = make()
    *_, cut = grow(other_pool, other, other.root, [1, 2, 3, 4], cuts=(1, 2, 3))
    assert whole.key == cut.key


def test_content_is_found_in_every_place_and_only_for_its_tenant():
    pool, tree = make()
    first, behind = grow(pool, tree, tree.root, [1, 2, 5, 6], cuts=(2,))
    alone = hang(pool, tree, tree.root, [5, 6])
    [other] = grow(pool, tree, tree.root, [5, 6], tenant="x")
    assert tree.places("", raw(5, 6)) == (behind, alone)
    tree.split(behind, 1)
    assert tree.places("", raw(5, 6)) == (alone,)
    assert tree.places("", raw(1, 2)) == (first,)
    assert tree.places("x", raw(5, 6)) == (other,)
    assert tree.places("y", raw(5, 6)) == ()


# --------------------------------------------------------------------------------------------- audit


def swap_edges(tree, node):
    tree.root.edges = dict(zip(reversed(list(tree.root.edges)), tree.root.edges.values(), strict=True))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tree, node: setattr(node, "key", b"?" * 32), "key of its path"),
        (lambda tree, node: setattr(node, "local_start", 1), "is rotated from 1"),
        (lambda tree, node: setattr(node, "start", 1), "its parent ends at 0"),
        (lambda tree, node: setattr(node, "dead", True), "in the tree and dead"),
        (lambda tree, node: setattr(node, "run", node.run.slice(0, 2, PAGE)), "has the run"),
        (lambda tree, node: (tree.store(node, Copy(1, 0, 3)), setattr(node, "host", Copy(1, 0, 2))), "has the copy"),
        (lambda tree, node: setattr(tree.root, "on_device", 5), "counts 5 children on the device"),
        (lambda tree, node: setattr(tree.root, "on_host", 1), "counts 1 children in host memory"),
        (lambda tree, node: tree.held[Tier.DEVICE].clear(), "tokens are counted on tier device"),
        (lambda tree, node: tree._by_content.clear(), "not found by its content"),
        (lambda tree, node: tree._by_key.pop(node.key), "not found by its key"),
        (lambda tree, node: tree.root.edges.pop(next(iter(tree.root.edges))), "counts 2 children"),
        (lambda tree, node: tree._by_content.update({b"?": node}), "the root does not lead to"),
        (lambda tree, node: swap_edges(tree, node), "on a wrong edge"),
        (lambda tree, node: setattr(node, "tenant", "x"), "on a wrong edge"),
        (lambda tree, node: setattr(tree.root, "tenant", "x"), "under another tenant's"),
    ],
)
def test_the_audit_sees_damage(damage, message):
    pool, tree = make()
    [node] = grow(pool, tree, tree.root, [1, 2, 3])
    grow(pool, tree, tree.root, [4, 5])
    audit_tree(tree)
    damage(tree, node)
    with pytest.raises(AuditError, match=message):
        audit_tree(tree)


def test_the_audit_sees_a_child_that_is_warmer_than_its_parent_and_a_node_that_is_nowhere():
    pool, tree = make()
    upper, lower = grow(pool, tree, tree.root, [1, 2, 3], cuts=(1,))
    tree.store(upper, Copy(1, 0, 1))
    tree.lift(upper)
    with pytest.raises(AuditError, match=r"its parent .* is not"):
        audit_tree(tree)
    tree.lift(lower)
    with pytest.raises(AuditError, match="kept nowhere"):
        audit_tree(tree)


def test_places_of_many_are_in_order_of_arrival_when_some_are_gone():
    pool, tree = make()
    nodes = [grow(pool, tree, tree.root, [i, 1, 5, 6], cuts=(2,))[-1] for i in range(7, 14)]
    assert tree.places("", raw(5, 6)) == tuple(nodes)
    for gone in (3, 0, 6):
        tree.detach(nodes[gone])
    assert tree.places("", raw(5, 6)) == tuple(nodes[i] for i in (1, 2, 4, 5))
    audit_tree(tree)
