"""Nodes that a request will use, kept or not: where they end, and their keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ragjax.cache.keys import context_digest, context_hasher
from ragjax.cache.node import Provenance
from ragjax.cache.tree import KnowledgeTree


def stops(cuts: Iterable[int], at: int, end: int) -> list[int]:
    """Where the nodes of tokens [at, end) end that are cut at `cuts`, ascending; `end` is the last."""
    return sorted({cut for cut in (*cuts, end) if at < cut <= end})


def causal_keys(tree: KnowledgeTree, raw: bytes, cuts: Sequence[int], tenant: str) -> tuple[bytes, ...]:
    """Keys of the nodes that a causal prompt uses: of those that are kept, then of those it would add."""
    steps = tree.walk(raw, tenant)
    keys = [node.key for node, _ in steps]
    at = sum(used for _, used in steps)
    hasher = context_hasher()
    hasher.update(raw[: 4 * at])
    for stop in stops(cuts, at, len(raw) // 4):
        part = raw[4 * at : 4 * stop]
        keys.append(tree.key(tenant, Provenance.CAUSAL, "", hasher.digest(), part))
        hasher.update(part)
        at = stop
    return tuple(keys)


def path_keys(
    tree: KnowledgeTree, context: bytes, raw: bytes, ends: Sequence[int], method: str, tenant: str
) -> tuple[bytes, ...]:
    """Keys of the nodes that a dependency path behind a causal context uses; its branches end at `ends`."""
    keys, at, before = [], 0, context_digest(context)
    top = tree.walk(context, tenant)
    whole = sum(used for _, used in top) == len(context) // 4
    steps = tree.walk(raw, tenant, top[-1][0] if top else None, method) if whole else []
    for node, used in steps:
        keys.append(node.key)
        at += used
    for stop in stops(ends, at, len(raw) // 4):
        on = context_digest(before, raw[: 4 * at]) if at else before
        keys.append(tree.key(tenant, Provenance.DEPENDENCY, method, on, raw[4 * at : 4 * stop]))
        at = stop
    return tuple(keys)
