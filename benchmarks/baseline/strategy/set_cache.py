"""set-cache: the longest exact prefix among the orders of the prompt's chunks (Set-Cache of Cache-Craft, section 5).

"Set-Cache, which modifies RPE to reorder chunk-caches and finds the longest exact prefix match with the query." We
read it so: causal KV is kept as `prefix` keeps it. If the cache has the first k chunks of the prompt as one path behind
the system prompt, in any order, the largest such k is taken, each chunk is moved from its place there to its place in
the prompt, and the rest is computed over them. These chunks were computed with the right set of chunks in another
order, so what is computed on them is approximate and not kept. If no other order gives more tokens than the prompt's
own, the strategy does what `prefix` does, and is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Causal, Look, Outlook
from ragjax.cache.node import context_digest, raw_of
from ragjax.cache.tree import KnowledgeTree
from ragjax.core import Kind, Measure, Pass, Plan, Prefill, Prompt, Run, Span, Tokens
from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.base import LOGITS, Allocation, Strategy, indices, report, segments_of
from ragjax.reuse.exact import Prefix


class SetCache(Strategy):
    """Exact prefixes, but for the order of their chunks."""

    name = "set-cache"
    steady = False  # it takes what earlier requests left in another order

    def outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        """The prompt in the order that serves it best: where that is another one, nothing will be kept."""
        return Outlook((_Reordered(prompt, tenant),))

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        """One pass over what no order of the first chunks holds."""
        order = best_order(prompt, allocation.cache.tree, allocation.tenant)
        if not order:
            return (yield from Prefix().prefill(prompt, allocation))
        n, page_size = len(prompt), allocation.page_size
        system = prompt.starts[min(order)]
        match = allocation.prefix(_path(prompt, order))
        # a page that two chunks share is read as two
        _, readable = allocation.leading(match, n + allocation.decode_tokens, pieces=len(order))
        if not match.complete or readable < match.length:
            return (yield from Prefix().prefill(prompt, allocation))
        hit = match.length
        run = allocation.reserve_with_tail(n - hit)
        spans = list(_pieces(match.spans, 0, system, 0, page_size))
        at, tiers = system, {i: match.tier(*prompt.bounds(i)) for i in segments_of(prompt, Kind.SYSTEM)}
        for i in order:
            end = at + len(prompt.segments[i])
            spans += _pieces(match.spans, at, end, prompt.starts[i] - at, page_size)
            tiers[i], at = match.tier(at, end), end
        fresh = Span.consecutive(hit, run.slice(0, n - hit, page_size))
        results = yield Pass(indices(hit, n), indices(hit, n), (*spans, fresh), LOGITS, (n - 1,))
        reused = {i: len(prompt.segments[i]) for i in tiers}
        tail = run.slice(n - hit, run.length, page_size)
        return Plan((*spans, fresh), tail, None, report(prompt, reused, tiers), results[Measure.LOGITS][0])

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, allocation: Allocation) -> None:
        """Keep the finished turn, if the prompt itself was kept."""
        if plan.exact_to is not None:
            Prefix().finish(prompt, plan, generated, allocation)


class _Reordered:
    """A part of an outlook: the whole prompt, its chunks in the best order."""

    def __init__(self, prompt: Prompt, tenant: str):
        self._prompt, self._tenant = prompt, tenant
        self._causal = Causal(raw_of(prompt.tokens), prompt.starts, tenant, prompt.public)

    def look(self, tree: KnowledgeTree) -> Look:
        """Entries of the prompt's own order, or all that is found in another."""
        order = best_order(self._prompt, tree, self._tenant)
        if not order:
            return self._causal.look(tree)
        path = raw_of(_path(self._prompt, order))
        return Look({context_digest(path): len(path) // 4})

    def keys(self, tree: KnowledgeTree) -> list[bytes]:
        """Of the prompt in its own order."""
        return self._causal.keys(tree)


def best_order(prompt: Prompt, tree: KnowledgeTree, tenant: str) -> tuple[int, ...]:
    """The first k chunks in the order of a path in the tree, for the largest k; () if `prefix` finds as many.

    Only the tree is searched (device and host memory); entries on disk are found in the prompt's own order only.
    """
    chunks = _leading_chunks(prompt)
    most = _kept(prompt, chunks, tree, tenant)
    best: tuple[int, ...] = ()
    for order in _paths(prompt, chunks, (), tree, tenant):
        if len(order) > max(most, len(best)) and set(order) == set(chunks[: len(order)]):
            best = order
    return best


def _leading_chunks(prompt: Prompt) -> tuple[int, ...]:
    """The chunks that stand together right behind the system prompt."""
    first = len(segments_of(prompt, Kind.SYSTEM))
    chunk = takewhile(lambda i: prompt.segments[i].kind is Kind.CHUNK, range(first, len(prompt.segments)))
    return tuple(chunk)


def _kept(prompt: Prompt, chunks: tuple[int, ...], tree: KnowledgeTree, tenant: str) -> int:
    """Number of leading chunks that are kept whole in this order."""
    whole = (k for k in range(len(chunks), 0, -1) if _holds(prompt, chunks[:k], tree, tenant))
    return next(whole, 0)


def _paths(
    prompt: Prompt, chunks: tuple[int, ...], begun: tuple[int, ...], tree: KnowledgeTree, tenant: str
) -> Iterator[tuple[int, ...]]:
    """Every order of some of the chunks that is kept as one path, walking the tree from `begun` on.

    Of chunks of equal tokens the first goes first: all their orders are one path.
    """
    tried: set[bytes] = set()
    for i in chunks:
        order, tokens = (*begun, i), prompt.segments[i].tokens.tobytes()
        if i in begun or tokens in tried:
            continue
        tried.add(tokens)
        if not _holds(prompt, order, tree, tenant):
            continue
        yield order
        yield from _paths(prompt, chunks, order, tree, tenant)


def _holds(prompt: Prompt, order: tuple[int, ...], tree: KnowledgeTree, tenant: str) -> bool:
    path = _path(prompt, order)
    steps = tree.walk(raw_of(path), tenant)
    return sum(used for _, used in steps) == len(path)


def _path(prompt: Prompt, order: tuple[int, ...]) -> Tokens:
    head = prompt.tokens[: prompt.starts[len(segments_of(prompt, Kind.SYSTEM))]]
    return np.concatenate([head, *(prompt.segments[i].tokens for i in order)])


def _pieces(runs: tuple[tuple[Run, int], ...], begin: int, end: int, offset: int, page_size: int) -> Iterator[Span]:
    """Tokens [begin, end) of a causal path, which lies in `runs`, moved by `offset`."""
    at = 0
    for run, local_start in runs:
        first, last = max(begin, at), min(end, at + run.length)
        if first < last:
            piece = run.slice(first - at, last - at, page_size)
            yield Span.consecutive(first + offset, piece, first + offset - (local_start + first - at))
        at += run.length


@STRATEGIES.register("set-cache")
def set_cache(model: ModelTraits) -> SetCache:
    return SetCache()
