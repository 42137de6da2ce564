"""Nodes that a request will use, kept or not: where they end, and their keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ragjax.cache.keys import context_digest, context_hasher
from ragjax.cache.node import PUBLIC, Node, Provenance
from ragjax.cache.tree import KnowledgeTree


def stops(cuts: Iterable[int], at: int, end: int) -> list[int]:
    """Where the nodes of tokens [at, end) end that are cut at `cuts`, ascending; `end` is the last."""
    return sorted({cut for cut in (*cuts, end) if at < cut <= end})


def _public(public: int, end: Node | None) -> int:
    """How many leading tokens go to all tenants, if the last node that is kept of them does. end: that one."""
    return public if end is None or end.tenant == PUBLIC else 0


def causal_keys(
    tree: KnowledgeTree, raw: bytes, cuts: Sequence[int], tenant: str, public: int = 0
) -> tuple[bytes, ...]:
    """Keys of the nodes that a causal prompt uses: of those that are kept, then of those it would add.

    public: leading tokens that go to all tenants.
    """
    steps = tree.walk(raw, tenant)
    keys = [node.key for node, _ in steps]
    at = sum(used for _, used in steps)
    public = _public(public, steps[-1][0] if steps else None)
    hasher = context_hasher()
    hasher.update(raw[: 4 * at])
    for stop in stops((*cuts, public), at, len(raw) // 4):
        part = raw[4 * at : 4 * stop]
        owner = PUBLIC if stop <= public else tenant
        keys.append(tree.key(owner, Provenance.CAUSAL, "", hasher.digest(), part))
        hasher.update(part)
        at = stop
    return tuple(keys)


def path_keys(
    tree: KnowledgeTree, context: bytes, raw: bytes, ends: Sequence[int], method: str, tenant: str, public: int = 0
) -> tuple[bytes, ...]:
    """Keys of the nodes that a dependency path behind a causal context uses; its branches end at `ends`.

    public: its leading tokens that go to all tenants, if the context does.
    """
    keys, at, before = [], 0, context_digest(context)
    top = tree.walk(context, tenant)
    # behind a node that goes on beyond the context are the paths of another one
    whole = sum(used for _, used in top) == len(context) // 4 and (not top or top[-1][1] == len(top[-1][0]))
    steps = tree.walk(raw, tenant, top[-1][0] if top else None, method) if whole else []
    public = _public(public, (steps or top)[-1][0] if steps or top else None)
    for node, used in steps:
        keys.append(node.key)
        at += used
    for stop in stops(ends, at, len(raw) // 4):
        on = context_digest(before, raw[: 4 * at]) if at else before
        owner = PUBLIC if stop <= public else tenant
        keys.append(tree.key(owner, Provenance.DEPENDENCY, method, on, raw[4 * at : 4 * stop]))
        at = stop
    return tuple(keys)
