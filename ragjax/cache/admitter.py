"""KV that a request has computed becomes nodes of the tree: prefixes, segments on a context, dependency paths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragjax.cache.lookahead import stops
from ragjax.cache.match import Match, Totals
from ragjax.cache.matcher import Matcher
from ragjax.cache.node import PUBLIC, Node, Provenance, context_hasher, context_of, raw_of
from ragjax.cache.policy.base import Access
from ragjax.core import Run, Tokens


class Admitter:
    def __init__(self, matcher: Matcher):
        self._matcher = matcher
        self._hierarchy = hierarchy = matcher.hierarchy
        self._tree, self._storage = hierarchy.tree, hierarchy.storage
        self._page_size = hierarchy.pool.page_size

    def admit_prefix(
        self,
        context: Match,
        tokens: Tokens,
        from_: int,
        run: Run,
        cuts: Sequence[int],
        public: int | None = None,
        totals: Totals | None = None,
    ) -> None:
        """Keep the causal KV of `tokens[from_:]`, which lies in `run`, computed at positions equal to token indexes.

        The cache takes references of its own: the caller still frees its reservation. context: match that covers at
        least `tokens[:from_]`. tokens: the whole prefix from token 0 on, int32 [n]. cuts: token indexes at which
        segments begin or end; nodes are cut there. public: leading tokens that every tenant may read (None: all of a
        request without a tenant, else none). totals: of the request, from which policies learn costs (None: it computed
        these tokens alone).
        """
        self._matcher.require(context)
        if not 0 <= from_ <= context.length or not np.array_equal(tokens[:from_], context.tokens[:from_]):
            raise ValueError(f"the match of {context.length} tokens does not cover the {from_} before the new ones")
        if from_ and context.broken is not None:
            raise ValueError(f"the {from_} tokens before the new ones never arrived: {context.broken}")
        if run.length != len(tokens) - from_:
            raise ValueError(f"the run holds {run.length} tokens, not the {len(tokens) - from_} from {from_} on")
        if any(not 0 <= cut <= len(tokens) for cut in cuts):
            raise ValueError(f"a cut lies outside the {len(tokens)} tokens")
        totals = totals or Totals(from_, len(tokens) - from_)
        raw, tenant = raw_of(tokens), context.tenant
        if public is None:
            public = 0 if tenant else len(tokens)
        # there is one path of public nodes alone, and the match's node is on it
        resumes = tenant == PUBLIC and context.node.end == context.length and not context.node.dead
        start = context.node if resumes else self._tree.root
        steps = self._tree.walk(raw[4 * start.end :], tenant, start)
        at = start.end + sum(used for _, used in steps)
        lossy = context.lossy and from_ > 0
        parent = self._matcher.cut_after(*steps[-1]) if steps else start
        self._land(parent, run, from_, lossy)
        if at >= len(tokens) or (parent.run is None and parent.parent is not None):
            return
        self._hierarchy.device.discard(parent)
        hasher = context_hasher(raw[: 4 * at])
        nodes = []
        for stop in stops((*cuts, public), at, len(tokens)):  # cut at `cuts` and behind the public ones
            owner = PUBLIC if stop <= public and parent.tenant == PUBLIC else tenant
            node = Node(owner, raw[4 * at : 4 * stop], parent, at, lossy=lossy)
            self._tree.attach(node, hasher.digest(), run.slice(at - from_, stop - from_, self._page_size))
            hasher.update(node.raw)
            nodes.append(node)
            parent, at = node, stop
        self._admitted(nodes, Access(False, *totals))

    def admit_segment(
        self,
        context: Match,
        tokens: Tokens,
        run: Run,
        local_start: int,
        provenance: Provenance,
        method: str,
        *,
        behind: bytes = b"",
        meta: bytes = b"",
        variant: bool = False,
        public: bool | None = None,
        totals: Totals | None = None,
    ) -> None:
        """Keep the KV of `tokens` (int32 [n]) as computed by `method` on exactly the matched context.

        A node that is there already stays, and takes over `meta`, the strategy's own, if that is longer. The cache
        takes a reference of its own to `run`. local_start: RoPE position at which the first token's K is rotated.
        provenance: isolated or approximate. behind: digest of neighbours it was computed behind (`neighbours_digest`).
        variant: whether it is one of the variants whose number is limited, of all chunks and tenants together. public:
        whether every tenant may read it (None: if the request has no tenant). totals: as in `admit_prefix`.
        """
        self._matcher.require(context, provenance)
        _check_whole(context, run, len(tokens))
        raw, parent = raw_of(tokens), self._matcher.end_of(context)
        tenant = _owner(context, parent, public)
        key = self._tree.key(tenant, provenance, method, context.context, raw, behind)
        kept = self._tree.find(key)
        if kept is not None and len(meta) > len(kept.meta):
            kept.meta, kept.shelved = meta, False  # the KV is the same, and now there is more to say of it
        if kept is not None or (parent.run is None and parent.parent is not None):
            return
        variants = self._matcher.variants
        while variant and (least_reused := variants.victim()) is not None:
            self._hierarchy.remove(least_reused)
        if variant and variants.full:  # all are in use
            return
        node = Node(tenant, raw, parent, local_start, provenance, method,
                    behind=behind, meta=meta, lossy=context.lossy)  # fmt: skip
        self._tree.attach(node, context.context, run)
        self._admitted([node], Access(False, *(totals or Totals(context.length, len(tokens)))))
        if variant:
            variants.add(node)

    def admit_dependency(
        self,
        context: Match,
        tokens: Tokens,
        from_: int,
        run: Run,
        cuts: Sequence[int],
        method: str,
        *,
        local_start: int | None = None,
        meta: bytes = b"",
        public: bool | None = None,
        totals: Totals | None = None,
    ) -> None:
        """Keep the KV of a dependency path behind a context: `tokens[from_:]`, which lies in `run`.

        Every token was computed on the context (a match of exactly the tokens before the path) and its ancestors on the
        path alone. If the path's first tokens have left meanwhile, nothing is kept. cuts: offsets in the path at which
        the tree is to branch. local_start: RoPE position of token `from_` (None: `path` positions). All else is as in
        `admit_prefix` and `admit_segment`.
        """
        self._matcher.require(context)
        _check_whole(context, run, len(tokens) - from_)
        raw, top, page_size = raw_of(tokens), self._matcher.end_of(context), self._page_size
        steps = self._tree.walk(raw, context.tenant, top, method)
        at = sum(used for _, used in steps)
        parent = self._matcher.cut_after(*steps[-1]) if steps else top
        if not from_ <= at < len(tokens) or (parent.run is None and parent.parent is not None):
            return
        self._hierarchy.device.discard(parent)
        tenant = _owner(context, parent, public)
        nodes, lossy = [], context.lossy or any(node.lossy for node, _ in steps)
        for stop in stops(cuts, at, len(tokens)):
            start = parent.end if local_start is None else local_start + at - from_
            part, kind = raw[4 * at : 4 * stop], Provenance.DEPENDENCY
            node = Node(tenant, part, parent, start, kind, method, meta=meta, lossy=lossy)
            self._tree.attach(node, context_of(parent), run.slice(at - from_, stop - from_, page_size))
            nodes.append(node)
            parent, at = node, stop
        totals = totals or Totals(context.length + from_, len(tokens) - from_)
        self._admitted(nodes, Access(False, *totals))

    def _land(self, node: Node, run: Run, from_: int, lossy: bool) -> None:
        """Nodes of a path that are in host memory alone come back with the KV that a request has recomputed."""
        cold = [step for step in node.path() if step.run is None and step.parent is not None]
        if self._storage is None or not cold or cold[-1].start < from_:
            return  # the match lies on another path, of the same tokens
        for step in reversed(cold):
            assert step.parent is not None
            self._tree.land(step, run.slice(step.start - from_, step.end - from_, self._page_size))
            step.lossy = lossy or (step.lossy and not self._storage.transfer.lossy)  # its host copy is what it was
            self._hierarchy.device.discard(step.parent)
            self._hierarchy.consider(step)
        for owner in {step.tenant for step in cold}:
            self._hierarchy.enforce(owner)

    def _admitted(self, nodes: list[Node], access: Access) -> None:
        owners = {nodes[0].tenant, nodes[-1].tenant}
        for owner in owners:
            self._hierarchy.own(owner)
        for node in nodes:
            self._hierarchy.metrics.admitted_tokens += len(node)
            self._hierarchy.policy.on_access(node, access)
            self._hierarchy.consider(node)
        self._hierarchy.admitted(nodes)
        for owner in owners:
            self._hierarchy.enforce(owner)


def _check_whole(context: Match, run: Run, length: int) -> None:
    if not context.complete:
        raise ValueError(f"the context was found for {context.length} of {context.asked} tokens: admit it first")
    if context.broken is not None:
        raise ValueError(f"the context never arrived: {context.broken}")
    if run.length != length or not length:
        raise ValueError(f"the run holds {run.length} tokens, the segment {length}")


def _owner(context: Match, parent: Node, public: bool | None) -> str:
    """Whose a new node is: everybody's only if its parent is. None: public if the context is nobody's own."""
    public = not context.tenant if public is None else public
    return PUBLIC if public and parent.tenant == PUBLIC else context.tenant
