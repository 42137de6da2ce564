"""Checks every book of the cache against every other: pages, pins, keys, victims, copies; O(everything)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.hierarchy import Hierarchy
from ragjax.cache.host_memory import HostMemory
from ragjax.cache.node import PUBLIC, Node, Provenance, edge_of, name
from ragjax.cache.pool import PagePool
from ragjax.cache.stretches import BLOCK, _digests
from ragjax.cache.tree import KnowledgeTree
from ragjax.core import Run
from ragjax.core.tiers import Tier
from ragjax.engine import Engine


class AuditError(Exception):
    """The cache's books do not add up; the message names the page, node or match."""


def audit_engine(engine: Engine) -> None:
    """Audit in the engine's thread, leaks included."""
    engine._loop.call(lambda: audit_cache(engine._cache, holders(engine)))


def holders(engine: Engine) -> set[str]:
    """Labels of all that may hold pages now."""
    return {state.id for state in engine._loop.requests.running} | set(engine._loop.kept)


def audit_cache(cache: KnowledgeCache, live: Collection[str] | None = None) -> None:
    """live: labels that may hold something now (None: all)."""
    matches, hierarchy = cache.matcher.matches, cache._hierarchy
    for match in matches:
        if live is not None and match.label not in live:
            raise AuditError(f"the match of {match.label!r} on {match.length} tokens was never released")
    for run, label in cache._reserved.items():
        if live is not None and label not in live:
            raise AuditError(f"the {run.length} tokens reserved by {label!r} were never freed")
    audit_tree(cache.tree)
    nodes = list(cache.tree.nodes())
    known = {*nodes, *(node for node in hierarchy.dead if node.run is not None), cache.tree.root}
    deepest = [*(match.node for match in matches), *(load.nodes[-1] for load in hierarchy.loads.under_way.values())]
    pins = Counter(step for node in deepest for step in node.path())
    for match in matches:
        if match.node not in known:
            raise AuditError(f"the node under the match of {match.label!r} left the tree")
    for node in known:
        if node.pins != pins[node]:
            raise AuditError(f"node {name(node)} counts {node.pins} pins, {pins[node]} matches and loads need it")
    runs = [(node.run, node.pins) for node in known if node.run is not None]
    audit_pool(
        cache.pool,
        held=[*(run for run, _ in runs), *cache._reserved],
        pinned=[*(run for run, pins in runs if pins), *cache._reserved],
    )
    _audit_hierarchy(hierarchy, nodes)


def audit_counts(cache: KnowledgeCache) -> None:
    """Check what can be checked after every operation: capacities, and bytes of host memory."""
    hierarchy, pool = cache._hierarchy, cache.pool
    _audit_bytes(hierarchy.host_memory)
    used = hierarchy.host_memory.used
    if hierarchy.storage is not None and used > hierarchy.storage.host_bytes:
        raise AuditError(f"{used} bytes are in host memory, which has {hierarchy.storage.host_bytes}")
    if pool.free_pages > pool.reclaimable_pages or pool.reclaimable_pages > pool.capacity:
        raise AuditError(f"{pool.free_pages} pages are free, {pool.reclaimable_pages} can be had")


def audit_pool(pool: PagePool, held: Iterable[Run], pinned: Iterable[Run]) -> None:
    references, pins = (Counter(page for run in runs for page in run.pages) for runs in (held, pinned))
    free = set(pool._free)
    if len(free) != len(pool._free):
        raise AuditError("a page is in the free list twice")
    for page in range(pool.num_pages):
        if pool._counts[page] != references[page]:
            raise AuditError(f"page {page} counts {pool._counts[page]} references, {references[page]} runs hold it")
        if pool._pinned[page] != pins[page]:
            raise AuditError(f"page {page} counts {pool._pinned[page]} pins, {pins[page]} pinned runs hold it")
        if (page in free) != (references[page] == 0 and page != 0):
            raise AuditError(f"page {page} is {'free and held' if page in free else 'neither free nor held'}")
    if pool.reclaimable_pages != sum(p == 0 for p in pool._pinned[1:]):
        raise AuditError(f"reclaimable pages are counted as {pool.reclaimable_pages}")


def audit_tree(tree: KnowledgeTree) -> None:
    _audit_children(tree.root)
    nodes = list(tree.nodes())
    for node in nodes:
        _audit_node(node)
        _audit_children(node)
        if node.key != tree.key_of(node):
            raise AuditError(f"node {name(node)} does not have the key of its path")
        if tree.find(node.key) is not node:
            raise AuditError(f"node {name(node)} is not found by its key")
        if node not in tree.places(node.tenant, node.raw):
            raise AuditError(f"node {name(node)} is not found by its content")
    for tier, place in ((Tier.DEVICE, "run"), (Tier.HOST, "host")):
        tokens = Counter[str]()
        for node in nodes:
            tokens[node.tenant] += len(node) if getattr(node, place) is not None else 0
        if any(tokens[t] > tree.held[tier][t] for t in tokens):  # dead nodes are held besides
            raise AuditError(f"{dict(tree.held[tier])} tokens are counted on tier {tier.label}: {dict(tokens)}")
    touched: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for node in nodes:
        touched[node.tenant].update(() if node.run is None else node.run.pages)
    if not all(pages <= tree.pages[tenant] for tenant, pages in touched.items()):
        raise AuditError("a node's pages are not counted as its tenant's")
    contents = sum(len(n) if isinstance(n, dict) else 1 for n in tree._by_content.values())
    if len(nodes) != len(tree) or len(nodes) != contents:
        raise AuditError("an index holds a node that the root does not lead to")
    for tenant, blocks in tree.stretches._blocks.items():
        for digest, (node, at) in blocks.items():
            if tree.find(node.key) is not node or node.tenant != tenant:
                raise AuditError(f"a block of {name(node)} is found, which left the tree")
            held = node.behind[len(node.behind) + 4 * min(at, 0) :] if at < 0 else b""
            held += node.raw[4 * max(at, 0) :]
            if _digests(held[: 4 * BLOCK]) != [digest]:
                raise AuditError(f"a block of {name(node)} is not the {BLOCK} tokens from {at} on")


def _audit_node(node: Node) -> None:
    if node.run is None and node.host is None:
        raise AuditError(f"node {name(node)} is kept nowhere")
    if node.run is not None and node.run.length != len(node):
        raise AuditError(f"node {name(node)} of {len(node)} tokens has the run {node.run}")
    if node.host is not None and node.host.length != len(node):
        raise AuditError(f"node {name(node)} of {len(node)} tokens has the copy {node.host}")
    if node.parent is not None and node.start != node.parent.end:
        raise AuditError(f"node {name(node)} starts at {node.start}, its parent ends at {node.parent.end}")
    if node.provenance is Provenance.CAUSAL and node.local_start != node.start:
        raise AuditError(f"causal node {name(node)} is rotated from {node.local_start} on, not {node.start}")
    if node.dead:
        raise AuditError(f"node {name(node)} is in the tree and dead")


def _audit_children(node: Node) -> None:
    for edge, child in (node.edges or {}).items():
        if child.parent is not node or not len(child) or edge != edge_of(child):
            raise AuditError(f"node {name(child)} is on a wrong edge below {name(node)}")
        if node.tenant not in (PUBLIC, child.tenant):
            raise AuditError(f"node {name(child)} hangs under another tenant's {name(node)}")
        if child.run is not None and node.run is None and node.parent is not None:
            raise AuditError(f"node {name(child)} is on the device, its parent {name(node)} is not")
    if node.on_device != sum(child.run is not None for child in node.children()):
        raise AuditError(f"node {name(node)} counts {node.on_device} children on the device")
    if node.on_host != sum(child.host is not None for child in node.children()):
        raise AuditError(f"node {name(node)} counts {node.on_host} children in host memory")


def _audit_hierarchy(hierarchy: Hierarchy, nodes: Sequence[Node]) -> None:
    may = {n for n in nodes if n.run is not None and not (n.on_device or n.pins or n.loading)}
    if may != hierarchy.device.nodes():
        raise AuditError("the device's queue of victims is not the set of unpinned leaves")
    may = {n for n in nodes if n.host is not None and not (n.on_host or n.loading)}
    if may != hierarchy.host.nodes():
        raise AuditError("the host's queue of victims is not the set of its leaves")
    copies = Counter(node.host.entry for node in nodes if node.host is not None)
    if copies != {number: entry.nodes for number, entry in hierarchy.host_memory.entries.items()}:
        raise AuditError("host entries are not those that nodes lie in")
    _audit_bytes(hierarchy.host_memory)
    for node in nodes:
        if node.loading and node not in hierarchy.loads.under_way[node.loading].nodes:
            raise AuditError(f"node {name(node)} waits for a load that does not bring it")


def _audit_bytes(memory: HostMemory) -> None:
    held = Counter[str]()
    for entry in memory.entries.values():
        held[entry.tenant] += entry.size
    if memory.used != held.total() or memory.held != held:
        raise AuditError(f"{memory.used} bytes of host memory are counted, and by tenant {dict(memory.held)}")
