"""The knowledge tree: prefixes, splits, keys and the content index."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.cache.pages import AuditError, PagePool
from ragjax.cache.tree import KnowledgeTree, Provenance

PAGE = 4


def tokens(*ids):
    return np.asarray(ids, np.int32)


def make(pages=64):
    pool = PagePool(pages, PAGE)
    return pool, KnowledgeTree(b"model", pool)


def grow(pool, tree, parent, ids, cuts=()):
    """Extend the tree and leave it the only holder of the pages."""
    run = pool.allocate(len(ids))
    nodes = tree.extend(parent, tokens(*ids), run, cuts)
    pool.release(run)
    return nodes


def hang(pool, tree, parent, ids, provenance=Provenance.ISOLATED, method="naive"):
    run = pool.allocate(len(ids))
    node = tree.attach(parent, tokens(*ids), run, 0, provenance, method)
    pool.release(run)
    return node


def books(pool, tree):
    tree.audit()
    nodes = [n for n in tree.nodes() if n.run is not None]
    pool.audit([n.run for n in nodes], [n.run for n in nodes if n.pins])


def test_a_walk_ends_inside_a_node():
    pool, tree = make()
    root = tree.root("")
    first, second = grow(pool, tree, root, [1, 2, 3, 4, 5, 6], cuts=(4,))
    assert tree.walk(root, tokens(1, 2, 3, 4, 5, 9)) == [(first, 4), (second, 1)]
    assert tree.walk(root, tokens(1, 2, 9)) == [(first, 2)]
    assert tree.walk(root, tokens(2)) == tree.walk(root, tokens()) == []


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 13), st.data())
def test_a_split_keeps_cells_rotation_children_and_keys_below(length, data):
    pool, tree = make()
    root = tree.root("")
    [top] = grow(pool, tree, root, [9, 9, 9])
    [node] = grow(pool, tree, top, range(length))
    [child] = grow(pool, tree, node, [7, 7])
    chunk = hang(pool, tree, node, [5, 5])
    cells = node.run.cells(PAGE)
    keys = child.key, chunk.key
    at = data.draw(st.integers(1, length - 1))
    upper = tree.split(node, at)
    assert [list(n.tokens) for n in (upper, node)] == [list(range(at)), list(range(at, length))]
    assert np.array_equal(np.concatenate([upper.run.cells(PAGE), node.run.cells(PAGE)]), cells)
    assert (upper.local_start, node.local_start) == (3, 3 + at)
    assert upper.parent is top and node.parent is upper and list(upper.children()) == [node]
    assert list(node.children()) == [child, chunk]
    assert (child.key, chunk.key) == keys
    assert tree.walk(root, tokens(9, 9, 9, *range(length), 7)) == [
        (top, 3),
        (upper, at),
        (node, length - at),
        (child, 1),
    ]
    books(pool, tree)


def test_pins_survive_splits_on_both_halves():
    pool, tree = make()
    [node] = grow(pool, tree, tree.root(""), range(10))
    tree.pin(node)
    upper = tree.split(node, 5)
    top = tree.split(upper, 2)
    assert [n.pins for n in (node, upper, top)] == [1, 1, 1]
    books(pool, tree)
    with pytest.raises(ValueError, match="pinned"):
        tree.remove(node)
    tree.unpin(node)
    assert [n.pins for n in (node, upper, top, tree.root(""))] == [0, 0, 0, 0]
    assert pool.reclaimable_pages == pool.capacity
    books(pool, tree)


def test_only_leaves_are_removed():
    pool, tree = make()
    [node] = grow(pool, tree, tree.root(""), [1, 2])
    chunk = hang(pool, tree, node, [3])
    with pytest.raises(ValueError, match="children"):
        tree.remove(node)
    assert tree.remove(chunk) is node
    assert tree.find(chunk.key) is None and tree.places(chunk.content) == ()
    assert tree.remove(node) is tree.root("")
    assert pool.free_pages == pool.capacity and len(tree) == 0
    books(pool, tree)


def test_a_key_depends_on_everything_the_kv_depends_on():
    pool, tree = make()
    [context] = grow(pool, tree, tree.root(""), [1, 2])
    [other] = grow(pool, tree, tree.root("x"), [1, 2])
    here, there = tree.context(tokens(1, 2)), tree.context(tokens(1, 3))
    naive = Provenance.ISOLATED
    keys = [
        tree.key("", naive, "naive", here, tokens(5)),
        tree.key("x", naive, "naive", here, tokens(5)),
        tree.key("", Provenance.APPROXIMATE, "naive", here, tokens(5)),
        tree.key("", naive, "craft", here, tokens(5)),
        tree.key("", naive, "naive", there, tokens(5)),
        tree.key("", naive, "naive", here, tokens(6)),
        KnowledgeTree(b"another", pool).key("", naive, "naive", here, tokens(5)),
        tree.key("n", naive, "aive", here, tokens(5)),
        context.key,
        other.key,
    ]
    assert len(set(keys)) == len(keys)
    assert hang(pool, tree, context, [5]).key == keys[0]


def test_causal_keys_do_not_depend_on_the_cuts():
    pool, tree = make()
    *_, whole = grow(pool, tree, tree.root(""), [1, 2, 3, 4], cuts=(3,))
    other_pool, other = make()
    *_, cut = grow(other_pool, other, other.root(""), [1, 2, 3, 4], cuts=(1, 2, 3))
    assert whole.key == cut.key


def test_content_is_found_in_every_place_and_only_for_its_tenant():
    pool, tree = make()
    root = tree.root("")
    first, behind = grow(pool, tree, root, [1, 2, 5, 6], cuts=(2,))
    alone = hang(pool, tree, root, [5, 6])
    grow(pool, tree, tree.root("x"), [5, 6])
    content = tree.content("", tokens(5, 6))
    assert tree.places(content) == (behind, alone)
    tree.split(behind, 1)
    assert tree.places(content) == (alone,)
    assert tree.places(first.content) == (first,)
    assert len(tree.places(tree.content("x", tokens(5, 6)))) == 1


def test_a_walk_never_meets_keyed_nodes():
    pool, tree = make()
    root = tree.root("")
    for provenance in (Provenance.ISOLATED, Provenance.DEPENDENCY, Provenance.APPROXIMATE):
        hang(pool, tree, root, [1, 2], provenance)
    assert tree.walk(root, tokens(1, 2)) == []


def test_a_node_keeps_its_tokens_when_the_callers_array_changes():
    pool, tree = make()
    mine = tokens(1, 2, 3)
    run = pool.allocate(3)
    [node] = tree.extend(tree.root(""), mine, run, ())
    mine[:] = 0
    assert list(node.tokens) == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        node.tokens[0] = 4


@pytest.mark.parametrize("at", [0, 3])
def test_a_split_outside_the_node_is_refused(at):
    pool, tree = make()
    [node] = grow(pool, tree, tree.root(""), [1, 2, 3])
    with pytest.raises(ValueError, match="cannot split"):
        tree.split(node, at)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tree, node: setattr(node, "key", b"?" * 32), "key of its path"),
        (lambda tree, node: setattr(node, "local_start", 1), "is rotated from 1"),
        (lambda tree, node: setattr(node, "start", 1), "its parent ends at 0"),
        (lambda tree, node: tree._by_content.clear(), "not found by its content"),
        (lambda tree, node: tree._roots.clear(), "no root leads to"),
    ],
)
def test_the_audit_sees_damage(damage, message):
    pool, tree = make()
    [node] = grow(pool, tree, tree.root(""), [1, 2, 3])
    damage(tree, node)
    with pytest.raises(AuditError, match=message):
        tree.audit()
