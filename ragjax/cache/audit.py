"""Checks of the cache's books that need no state but what they are given; each raises `AuditError`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ragjax.cache.keys import edge_of
from ragjax.cache.match import Match
from ragjax.cache.node import PUBLIC, Node, Provenance, name
from ragjax.cache.pool import AuditError
from ragjax.core import Run


def audit_node(node: Node) -> None:
    """Check that what a node says of itself fits: where it lies, where it starts, that it is in the tree."""
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


def audit_children(node: Node) -> None:
    """Check a node's edges, and its counts of children on each tier."""
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


def audit_holders(matches: Iterable[Match], reserved: Mapping[Run, str], live: Collection[str] | None) -> None:
    """Check that only what is live (labels; None: all) holds matches and reservations."""
    if live is None:
        return
    for match in matches:
        if match.label not in live:
            raise AuditError(f"the match of {match.label!r} on {match.length} tokens was never released")
    for run, label in reserved.items():
        if label not in live:
            raise AuditError(f"the {run.length} tokens reserved by {label!r} were never freed")


def audit_pins(known: Collection[Node], matches: Iterable[Match], holders: Iterable[Node]) -> None:
    """Check the pins of all nodes against those that matches and loads hold on their deepest nodes."""
    pins = Counter(step for node in holders for step in node.path())
    for match in matches:
        if match.node not in known:
            raise AuditError(f"the node under the match of {match.label!r} left the tree")
    for node in known:
        if node.pins != pins[node]:
            raise AuditError(f"node {name(node)} counts {node.pins} pins, {pins[node]} matches and loads need it")


def runs_of(nodes: Iterable[Node]) -> list[Run]:
    """Where the nodes lie on the device, of those that do."""
    return [node.run for node in nodes if node.run is not None]
