"""Tenants and the public corpus: who reads what, on the device, in host memory, on disk and after a restart.

The tests of the tests drop the salt at one seam after the other; each time a check here must fail.
"""

import numpy as np
import pytest

from ragjax.cache import node as node_module
from ragjax.cache import tree as tree_module
from ragjax.cache.admitter import Admitter
from ragjax.cache.tree import PUBLIC, KnowledgeTree, Provenance, common_prefix
from ragjax.core.tiers import Tier
from tests.support.audit import AuditError
from tests.support.transfers import BYTES, Bench, FakeDiskIndex, causal_content, keyed_content, match_segment, tokens

SYSTEM = [1] * 4
SECRET = [*SYSTEM, 2, 3, 4]
CHUNK = [6, 7]


def make(disk_index=None, host=100, pages=40):
    return Bench(pages, host_bytes=host * BYTES, disk_index=disk_index)


def fill(bench):
    """Tenant a's own, behind a public prompt, and public things."""
    bench.put(SYSTEM)
    bench.put(SECRET, tenant="a")
    bench.put([9, 9, 9], tenant="a")
    for context in (SYSTEM, SECRET, []):
        bench.put_segment(context, CHUNK, tenant="a")
        bench.put_path(context, [8, 8], tenant="a")


def finds(bench, tenant):
    """All that a tenant finds of what tenant a keeps; what is found must be a's own bytes, or public ones."""
    found = []
    for ids in (SECRET, [9, 9, 9]):
        with bench.match(ids, tenant) as match:
            own, public = causal_content("a", ids), causal_content("", ids)
            assert all(slot in (own[i], public[i]) for i, slot in enumerate(bench.read(match)))
            found.append(match.length)
    for context in (SYSTEM, SECRET, []):
        with bench.match(context, tenant) as match:
            segment = match_segment(bench.cache, match, tokens(*CHUNK), Provenance.ISOLATED, "naive")
            bench.settle()
            found.append(0 if segment is None else segment.length)
            if segment is not None:
                expected = keyed_content("a", context, Provenance.ISOLATED, "naive", CHUNK)
                assert np.array_equal(bench.read(segment), expected)
                segment.release()
            with bench.cache.matcher.match_dependency(match, tokens(8, 8), "dep") as path:
                bench.settle()
                found.append(path.length)
        found.append(
            len(bench.cache.matcher.find_variants(tokens(*CHUNK), "naive", tenant)) if context == SYSTEM else 0
        )
    return found


NOTHING = [4, 0, *[0] * 9]
"""The public prompt alone."""


def check_memory():
    bench = make()
    fill(bench)
    bench.audit()
    for tenant in ("b", PUBLIC):
        assert finds(bench, tenant) == NOTHING
    assert finds(bench, "a") == [7, 3, 2, 2, 3, 2, 2, 0, 2, 2, 0]
    for tenant in ("b", PUBLIC):
        assert finds(bench, tenant) == NOTHING
    bench.audit()


def check_host_memory():
    bench = make()
    fill(bench)
    bench.squeeze()
    assert bench.cache.tree.held[Tier.DEVICE].total() == 0
    for tenant in ("b", PUBLIC):
        assert finds(bench, tenant) == NOTHING
    assert finds(bench, "a")[:2] == [7, 3]
    bench.audit()


def check_restart():
    disk_index = FakeDiskIndex()
    bench = make(disk_index)
    fill(bench)
    bench.flush()
    for tenant in ("b", PUBLIC):
        bench = make(disk_index)
        assert finds(bench, tenant) == NOTHING
        bench.audit()
    bench = make(disk_index)
    assert [finds(bench, "a")[i] for i in (0, 1, 2, 5, 8)] == [7, 3, 2, 2, 2]
    bench.audit()


def check_two_tenants_keep_the_same_words_apart():
    bench = make()
    for tenant in ("a", "b"):
        bench.put(SECRET, tenant=tenant)
        bench.put_segment(SECRET, CHUNK, tenant=tenant)
    for tenant in ("a", "b"):
        assert bench.length(SECRET, tenant) == 7  # checks that the bytes are its own
        assert bench.has_segment(SECRET, CHUNK, tenant=tenant)
        assert [n.tenant for n in bench.cache.tree.places(tenant, tokens(*CHUNK).tobytes())] == [tenant]
        assert [n.tenant for n in bench.cache.matcher.find_variants(tokens(*CHUNK), "naive", tenant)] == [tenant]
    bench.audit()


CHECKS = [check_memory, check_host_memory, check_restart, check_two_tenants_keep_the_same_words_apart]


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_a_tenants_is_nobody_elses(check):
    check()


# ------------------------------------------------------------------------------------------ tests of the tests


def unsalted_key(monkeypatch):
    real = KnowledgeTree.key
    monkeypatch.setattr(KnowledgeTree, "key", lambda self, tenant, *rest: real(self, "", *rest))


def unsalted_place(monkeypatch):
    real = KnowledgeTree.place
    monkeypatch.setattr(KnowledgeTree, "place", lambda self, tenant, context: real(self, "", context))


def unsalted_content(monkeypatch):
    real = KnowledgeTree.content
    monkeypatch.setattr(KnowledgeTree, "content", lambda self, tenant, raw: real(self, "", raw))


def unsalted_edge(monkeypatch):
    real = node_module.radix_tag
    for module in (node_module, tree_module):
        monkeypatch.setattr(module, "radix_tag", lambda tenant, method: real("", method))


def one_tenant_for_all(monkeypatch):
    """Look-ups forget who asks."""
    real = KnowledgeTree.walk
    monkeypatch.setattr(KnowledgeTree, "walk", lambda self, raw, tenant="", *rest: real(self, raw, "a", *rest))


def all_is_public(monkeypatch):
    """Admissions forget whose it is."""
    real = Admitter.admit_prefix
    monkeypatch.setattr(
        Admitter,
        "admit_prefix",
        lambda self, context, ids, from_, run, cuts, public=None: real(self, context, ids, from_, run, cuts, len(ids)),
    )


def fails(check):
    try:
        check()
    except (AssertionError, AuditError, KeyError, ValueError, TypeError):
        return True
    return False


@pytest.mark.parametrize(
    ("drop", "seen"),
    [
        (unsalted_key, CHECKS),
        (unsalted_place, [check_restart]),
        (unsalted_content, [check_memory, check_two_tenants_keep_the_same_words_apart]),
        (unsalted_edge, [check_memory, check_host_memory, check_two_tenants_keep_the_same_words_apart]),
        (one_tenant_for_all, [check_memory, check_host_memory]),
        (all_is_public, [check_memory, check_host_memory, check_restart]),
    ],
)
def test_a_dropped_salt_is_seen(monkeypatch, drop, seen):
    drop(monkeypatch)
    assert all(fails(check) for check in seen)


# ---------------------------------------------------------------------------------------- the public corpus


def test_a_public_prefix_is_shared_and_what_follows_is_not():
    bench = make()
    for tenant in ("a", "b"):
        bench.put(SECRET, tenant=tenant, public=4)
    nodes = [(n.tenant, n.tokens.tolist()) for n in bench.cache.tree.nodes()]
    assert sorted(nodes) == [("", SYSTEM), ("a", [2, 3, 4]), ("b", [2, 3, 4])]
    assert bench.cache.metrics.admitted_tokens == 4 + 3 + 3
    for tenant, length in (("a", 7), ("b", 7), ("c", 4), ("", 4)):
        with bench.match(SECRET, tenant) as match:
            assert match.length == length
    bench.audit()


def test_a_public_chunk_is_found_by_everybody_behind_the_same_context():
    bench = make()
    bench.put(SYSTEM)
    bench.put_segment(SYSTEM, CHUNK, tenant="a", public=True)
    bench.put(SECRET, tenant="b")
    assert bench.has_segment(SYSTEM, CHUNK, tenant="b", origin="a")
    assert not bench.has_segment(SECRET, CHUNK, tenant="b", origin="a")
    bench.squeeze()
    assert bench.has_segment(SYSTEM, CHUNK, tenant="b", origin="a")
    bench.audit()


def test_nothing_is_public_below_what_is_a_tenants():
    bench = make()
    bench.put(SECRET, tenant="a")
    bench.put([*SECRET, 5], tenant="a", public=8)
    bench.put_segment(SECRET, CHUNK, tenant="a", public=True)
    assert {node.tenant for node in bench.cache.tree.nodes()} == {"a"}
    for tenant in ("b", ""):
        with bench.match([*SECRET, 5], tenant) as match:
            assert match.length == 0
    bench.audit()


def test_a_public_entry_of_the_disk_serves_behind_a_public_context_alone():
    disk_index = FakeDiskIndex()
    bench = make(disk_index)
    bench.put(SYSTEM)
    bench.put_segment(SYSTEM, CHUNK)
    bench.flush()
    bench = make(disk_index)
    assert bench.has_segment(SYSTEM, CHUNK, tenant="b", origin="")
    bench.audit()
    bench = make(FakeDiskIndex())
    bench.put(SYSTEM, tenant="b")  # its own, so no public node may hang below
    bench.disk_index.entries = disk_index.entries
    assert not bench.has_segment(SYSTEM, CHUNK, tenant="b", origin="")
    bench.audit()


def test_idle_tenants_leave_nothing_behind():
    bench = make()
    for n in range(50):
        bench.length([1, 2], f"t{n}")
    assert not list(bench.cache.tree.nodes()) and not bench.cache.tree.held[Tier.DEVICE]


def test_names_of_tenants_and_methods_do_not_run_into_each_other():
    tags = {node_module.radix_tag(t, m) for t in ("", "a", "ab") for m in (None, "", "b", "bb")}
    assert len(tags) == 12
    assert common_prefix(b"", b"") == 0
