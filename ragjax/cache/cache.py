"""The one facade of the cache: match and pin, reserve pages, admit, release, audit.

One thread owns it. What a request uses it holds by a match (nodes it reads) or a reservation (pages it
writes); what neither holds may leave, leaves of the tree first, in the policy's order. A node never leaves
before its children do (RAGCache, section 5.1): they are useless without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from ragjax.cache.hierarchy import Hierarchy, Storage
from ragjax.cache.keys import context_digest, context_hasher, context_of, raw_of
from ragjax.cache.keys import neighbours_digest as neighbours_digest
from ragjax.cache.loader import Loader
from ragjax.cache.match import EXACT, Match, Metrics, Totals
from ragjax.cache.node import PUBLIC, RADIX, Node, Provenance, Steps, name
from ragjax.cache.policy.base import Access, Policy
from ragjax.cache.pool import AuditError, PagePool
from ragjax.cache.tree import KnowledgeTree, join_runs
from ragjax.cache.variant import Variants
from ragjax.core import OutOfPages, Run, Tokens
from ragjax.core.tiers import Record

VARIANTS = 500
"""Variants in all: N = 100 chunks with M = 5 (Cache-Craft, section 5)."""


class KnowledgeCache:
    """KV of one model identity in the pages of one pool, and in the tiers below if there is a `storage`.

    `identity` covers all that KV depends on besides tokens: weights, tokenizer, RoPE, dtype.
    """

    def __init__(
        self,
        identity: bytes,
        pool: PagePool,
        policy: Policy,
        storage: Storage | None = None,
        *,
        variants: int = VARIANTS,
    ):
        self.pool = pool
        self.tree = KnowledgeTree(identity, pool)
        self._policy = policy
        self._storage = storage
        self._metrics = Metrics()
        self._hierarchy = Hierarchy(self.tree, pool, policy, self._metrics, storage)
        self._loader = Loader(self._hierarchy, self._metrics)
        self._variants = Variants(variants)
        self._matches: dict[Match, None] = {}
        self._reserved: dict[Run, str] = {}

    @property
    def metrics(self) -> Metrics:
        """A copy of the counters."""
        metrics = self._metrics
        return replace(
            metrics,
            tier_hit_tokens=Counter(metrics.tier_hit_tokens),
            jobs=Counter(metrics.jobs),
            job_bytes=Counter(metrics.job_bytes),
            job_seconds=dict(metrics.job_seconds),
            failures=Counter(metrics.failures),
            pages_used=self.pool.capacity - self.pool.free_pages,
            host_bytes=self._hierarchy.ledger.used,
            nodes=len(self.tree),
        )

    # ------------------------------------------------------------------------------------------- match

    def match_prefix(
        self, tokens: Tokens, tenant: str = PUBLIC, label: str = "", *, cold: bool = True, quiet: bool = False
    ) -> Match:
        """Pin the longest prefix of `tokens` (int32 [n]) whose causal KV is kept; it may be empty.

        cold: look below the device too. What lies there is ordered; the match is `ready` when it has arrived.
        quiet: pin alone. A request that looks up again what it has computed counts as one request: no counter rises
        and no policy hears of it.
        """
        raw = raw_of(tokens)
        steps = self.tree.walk(raw, tenant)
        steps = self._loader.load(self.tree.root, steps, raw, tenant) if cold else _present(steps)
        found = sum(used for _, used in steps)
        return self._pinned(steps, tokens[:found], len(tokens), tenant, label, cfo=1.0, quiet=quiet)

    def match_segment(
        self,
        context: Match,
        tokens: Tokens,
        provenance: Provenance,
        method: str,
        *,
        behind: bytes = b"",
        cold: bool = True,
        variant: bool = False,
        cfo: float = 1.0,
    ) -> Match | None:
        """Pin the KV of `tokens` (int32 [n], all of them) as computed by `method` on exactly the matched context.

        behind: digest of the neighbours it was computed behind, besides. variant: whether it is one of a limited number
        (`admit_segment`); cfo: cache fixing overhead of reusing it then.
        None if it is not kept, or if the context itself was not found whole.
        """
        self._require_context(context, provenance)
        match = self._match(context, tokens, provenance, method, behind, cold, variant, cfo)
        if match is None:
            self._count_miss(tokens)
        return match

    def match_variant(
        self, context: Match, tokens: Tokens, method: str, tries: Iterable[tuple[bytes, float]], *, cold: bool = True
    ) -> Match | None:
        """Pin the first of a chunk's variants on exactly the matched context that is kept, if there is one.

        tries: what it was computed behind (`neighbours_digest`), and the overhead of mending it, best first.
        """
        self._require_context(context)
        kind = Provenance.APPROXIMATE
        matches = (self._match(context, tokens, kind, method, behind, cold, True, cfo) for behind, cfo in tries)
        return self._first(matches, tokens)

    def match_first(
        self, context: Match, tokens: Tokens, places: Iterable[tuple[Provenance, str, bytes]], *, cold: bool = True
    ) -> Match | None:
        """As `match_segment` with the first (provenance, method, behind) that is kept; at most one miss is counted."""
        self._require_context(context)
        matches = (self._match(context, tokens, *place, cold, False, 1.0) for place in places)
        return self._first(matches, tokens)

    def _first(self, matches: Iterable[Match | None], tokens: Tokens) -> Match | None:
        found = next((match for match in matches if match is not None), None)
        if found is None:
            self._count_miss(tokens)
        return found

    def _match(
        self,
        context: Match,
        tokens: Tokens,
        provenance: Provenance,
        method: str,
        behind: bytes,
        cold: bool,
        variant: bool,
        cfo: float,
    ) -> Match | None:
        node = self._find(context, raw_of(tokens), provenance, method, behind, cold) if _usable(context) else None
        if node is None:
            return None
        if variant:
            self._variants.use(node, cfo)
        return self._pinned([(node, len(node))], tokens, len(tokens), context.tenant, context.label, cfo)

    def _find(
        self, context: Match, raw: bytes, provenance: Provenance, method: str, behind: bytes, cold: bool
    ) -> Node | None:
        """The keyed node, on the device or on its way there: the tenant's own, or a public one."""
        storage = self._storage if cold else None
        parent = next(step for step in context.node.path() if step.start < context.length or step.parent is None)
        for tenant in dict.fromkeys((context.tenant, PUBLIC)):
            key = self.tree.key(tenant, provenance, method, context.context, raw, behind)
            node = self.tree.find(key)
            if node is not None and node.run is not None and (cold or not node.loading):
                return node
            if node is not None and storage is not None:
                return self._load_node(node, tenant)
            record = storage.shelf.find(key) if node is None and storage is not None and storage.shelf else None
            if record is not None and tenant in (parent.tenant, context.tenant):
                return self._loader.load_record(self._end_of(context), record, tenant, behind)
        return None

    def _load_node(self, node: Node, tenant: str) -> Node | None:
        """A node of host memory, on its way to the device with its whole path, which need not be the context's own."""
        steps = [(step, len(step)) for step in node.path() if step.parent is not None][::-1]
        loaded = self._loader.load(self.tree.root, steps, b"", tenant)
        return node if loaded and loaded[-1][0] is node else None

    def match_dependency(
        self,
        context: Match,
        tokens: Tokens,
        method: str,
        *,
        seen: int = 0,
        exact: bool = True,
        cold: bool = True,
    ) -> Match:
        """Pin the longest prefix of a dependency path (int32 [n]) that is kept behind exactly the matched context.

        Siblings share what their paths share (DepCache, section 4.2.1): the first `seen` tokens are those that another
        path of the request asked for before, and count once. exact: whether what is found counts as exact to
        dependency attention; it is under `path` positions.
        """
        self._require_context(context)
        raw = raw_of(tokens)
        steps: Steps = []
        if _usable(context):
            end = self._end_of(context)
            steps = self.tree.walk(raw, context.tenant, end, method)
            steps = self._loader.load(end, steps, raw, context.tenant, method) if cold else _present(steps)
        found = sum(used for _, used in steps)
        return self._pinned(
            steps, tokens[:found], len(tokens), context.tenant, context.label, 1.0, context.node, seen, exact
        )

    def variants(
        self, tokens: Tokens, method: str, tenant: str = PUBLIC, context: Tokens | None = None, *, cold: bool = True
    ) -> tuple[Node | Record, ...]:
        """Every place where a method keeps exactly these tokens (Cache-Craft's variants of a chunk), oldest first.

        context: causal tokens that they must have been computed on (None: any; then what lies on disk alone is left
        out). cold: look below the device too. Entries that lie on disk alone come last.
        """
        raw, tenants = raw_of(tokens), tuple(dict.fromkeys((tenant, PUBLIC)))
        found = [node for t in tenants for node in self.tree.places(t, raw)]
        found = [node for node in found if node.method == method]
        if context is None:
            return tuple(found)
        on = context_digest(raw_of(context))
        nodes = [n for n in found if n.key == self.tree.key(n.tenant, n.provenance, method, on, raw, n.behind)]
        shelf = self._storage.shelf if cold and self._storage is not None else None
        shelved = [r for t in tenants for r in shelf.chunks(self.tree.chunk_place(t, method, on, raw))] if shelf else []
        return (*nodes, *(record for record in shelved if self.tree.find(record.key) is None))

    def _pinned(
        self,
        steps: Steps,
        tokens: Tokens,
        asked: int,
        tenant: str,
        label: str,
        cfo: float,
        anchor: Node | None = None,
        seen: int = 0,
        exact: bool = True,
        quiet: bool = False,
    ) -> Match:
        found = len(tokens)
        lossy, at = False, 0
        access = Access(True, found, asked - found, cfo)
        for node, used in steps:
            at += used
            lossy = lossy or node.lossy
            if at > seen and not quiet:
                self._policy.on_access(node, access)
                self._hierarchy.accessed(node)
        node = steps[-1][0] if steps else anchor or self.tree.root
        self._hierarchy.device.discard(node)
        self.tree.pin(node)
        match = Match(self._spans(steps), tokens.copy(), asked, node, tenant, label, (), lossy, self._release)
        match.origins = self._hierarchy.loads.wait(match, steps)
        self._matches[match] = None
        if not quiet:
            self._count_lookup(steps, match, seen, exact)
            self._touch(steps)
        return match

    def _touch(self, steps: Steps) -> None:
        shelf = self._storage.shelf if self._storage is not None else None
        if shelf is not None and (keys := [node.key for node, _ in reversed(steps) if node.shelved]):
            shelf.touch(keys)

    def _spans(self, steps: Steps) -> tuple[tuple[Run, int], ...]:
        """Runs that follow each other in the pool become one, so that splits and cuts cost a reader nothing."""
        spans: list[tuple[Run, int]] = []
        page_size = self.pool.page_size
        for node, used in steps:
            assert node.run is not None
            run = node.run if used == node.run.length else node.run.slice(0, used, page_size)
            if spans and node.local_start == spans[-1][1] + spans[-1][0].length:
                joined = join_runs(spans[-1][0], run, page_size)
                if joined is not None:
                    spans[-1] = (joined, spans[-1][1])
                    continue
            spans.append((run, node.local_start))
        return tuple(spans)

    def _release(self, match: Match) -> None:
        if match.released:
            raise RuntimeError(f"the match of {match.label!r} on {match.length} tokens was released before")
        match.released = True
        del self._matches[match]
        self._hierarchy.let_go(match.node)
        for tenant in {match.tenant, PUBLIC}:
            self._hierarchy.enforce(tenant)

    # ----------------------------------------------------------------------------------------- reserve

    def reserve(self, n_tokens: int, label: str = "") -> Run:
        """Pages of the caller's own for `n_tokens` new tokens, evicting what must leave; give back with `free`.

        Raises:
            OutOfPages: if evicting all that is not in use would not be enough; nothing changes then.
        """
        need = self.pool.pages_for(n_tokens)
        if need > self.pool.reclaimable_pages:
            pinned = self.pool.capacity - self.pool.reclaimable_pages
            raise OutOfPages(
                f"{n_tokens} tokens need {need} pages; {pinned} of {self.pool.capacity} are pinned by running "
                "requests: wait for them, ask for less, or give the device cache more memory"
            )
        self._hierarchy.make_room(need)
        run = self.pool.allocate(n_tokens)
        self.pool.pin(run)
        self._reserved[run] = label
        return run

    def free(self, run: Run) -> None:
        """Give a reservation back; pages that the tree refers to stay.

        Raises:
            ValueError: if `run` is not an outstanding reservation.
        """
        if self._reserved.pop(run, None) is None:
            raise ValueError(f"{run} is not reserved, or was freed before")
        self.pool.unpin(run)
        self.pool.release(run)

    def clear(self) -> None:
        """Drop everything that no match pins, on the device and in host memory."""
        self._hierarchy.clear()

    # ------------------------------------------------------------------------------------------- admit

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
        """Keep the causal KV of `tokens[from_:]`, which lies in `run`, computed at positions equal to orders.

        What the tree holds already stays as it is, and that part of `run` is not kept. The cache takes
        references of its own: the caller still frees its reservation.

        context: match that covers at least `tokens[:from_]`.
        tokens: the whole prefix from order 0 on, int32 [n]; run: n - from_ tokens.
        cuts: orders at which segments begin or end (all of the prompt's will do); nodes are cut there.
        public: leading tokens that every tenant may read (None: all of a request without a tenant, else none).
        totals: of the request, from which policies learn costs (None: it computed these tokens alone).

        Raises:
            ValueError: if the arguments do not fit each other or the match.
        """
        self._require_context(context)
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
        start = self._resume(context)
        steps = self.tree.walk(raw[4 * start.end :], tenant, start)
        at = start.end + sum(used for _, used in steps)
        lossy = context.lossy and from_ > 0
        parent = self._cut_after(*steps[-1]) if steps else start
        self._land(parent, run, from_, lossy)
        if at >= len(tokens) or (parent.run is None and parent.parent is not None):
            return
        rest = run.slice(at - from_, run.length, self.pool.page_size)
        self._hierarchy.device.discard(parent)
        self._extend(parent, raw, at, rest, cuts, public, tenant, lossy, Access(False, *totals))

    def _resume(self, context: Match) -> Node:
        """Where to walk on from: there is one path of public nodes alone, and the match's node is on it."""
        node = context.node
        return node if context.tenant == PUBLIC and node.end == context.length and not node.dead else self.tree.root

    def _land(self, node: Node, run: Run, from_: int, lossy: bool) -> None:
        """Nodes of a path that are in host memory alone come back with the KV that a request has computed anew."""
        cold = [step for step in node.path() if step.run is None and step.parent is not None]
        if self._storage is None or not cold or cold[-1].start < from_:
            return  # the match lies on another path, of the same tokens
        for step in reversed(cold):
            assert step.parent is not None
            self.tree.land(step, run.slice(step.start - from_, step.end - from_, self.pool.page_size))
            step.lossy = lossy or (step.lossy and not self._storage.carrier.lossy)  # its host copy is what it was
            self._hierarchy.device.discard(step.parent)
            self._hierarchy.consider(step)
        for owner in {step.tenant for step in cold}:
            self._hierarchy.enforce(owner)

    def _extend(
        self,
        parent: Node,
        raw: bytes,
        at: int,
        run: Run,
        cuts: Sequence[int],
        public: int,
        tenant: str,
        lossy: bool,
        access: Access,
    ) -> None:
        """Hang tokens [at, n) as a chain of causal nodes below `parent`, cut at `cuts` and behind the public ones."""
        end, page_size, first = len(raw) // 4, self.pool.page_size, at
        hasher = context_hasher()
        hasher.update(raw[: 4 * at])
        nodes = []
        for stop in _stops((*cuts, public), at, end):
            owner = PUBLIC if stop <= public and parent.tenant == PUBLIC else tenant
            node = Node(owner, raw[4 * at : 4 * stop], parent, at, lossy=lossy)
            self.tree.attach(node, hasher.digest(), run.slice(at - first, stop - first, page_size))
            hasher.update(node.raw)
            nodes.append(node)
            parent, at = node, stop
        self._admitted(nodes, access)

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

        A node that is there already stays, and takes over `meta` if it has none. The cache takes a reference of its
        own to `run` (n tokens, the first one's K rotated at `local_start`).

        behind: digest of neighbours it was computed behind (`neighbours_digest`). meta: the strategy's own, kept with
        it. variant: whether it is one of the variants whose number is limited, of all chunks and tenants together.
        public: whether every tenant may read it (None: if the request has no tenant). totals: as in `admit_prefix`.

        Raises:
            ValueError: if the context was not found whole, or run and tokens do not fit.
        """
        self._require_context(context, provenance)
        if not context.complete:
            raise ValueError(f"the context was found for {context.length} of {context.asked} tokens: admit it first")
        if context.broken is not None:
            raise ValueError(f"the context never arrived: {context.broken}")
        if run.length != len(tokens) or not run.length:
            raise ValueError(f"the run holds {run.length} tokens, the segment {len(tokens)}")
        raw, parent = raw_of(tokens), self._end_of(context)
        public = not context.tenant if public is None else public
        tenant = PUBLIC if public and parent.tenant == PUBLIC else context.tenant
        key = self.tree.key(tenant, provenance, method, context.context, raw, behind)
        kept = self.tree.find(key)
        if kept is not None and meta and not kept.meta:
            kept.meta, kept.shelved = meta, False  # the KV is the same, and now there is something to say of it
        if kept is not None or (parent.run is None and parent.parent is not None):
            return
        if variant and not self._room_for_variant():
            return
        node = Node(tenant, raw, parent, local_start, provenance, method, behind=behind, meta=meta, lossy=context.lossy)
        self.tree.attach(node, context.context, run)
        self._admitted([node], Access(False, *(totals or Totals(context.length, len(tokens)))))
        if variant:
            self._variants.add(node)

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

        Every token was computed on the context and its ancestors on the path alone. What the tree holds already stays
        as it is; if the path's first tokens have left meanwhile, nothing can hang below them, and nothing is kept.

        context: match of exactly the tokens before the path. tokens: the path, int32 [n]; run: n - from_ tokens.
        cuts: offsets in the path at which the tree is to branch, though it could branch anywhere.
        local_start: RoPE position of token `from_` (None: the one that follows its ancestors, `path` positions).
        meta, public, totals: as in `admit_segment`.

        Raises:
            ValueError: if the context was not found whole, or the run does not fit.
        """
        self._require_context(context)
        if not context.complete or run.length != len(tokens) - from_:
            raise ValueError(
                f"a run of {run.length} tokens, or its context, does not fit tokens [{from_}, {len(tokens)})"
            )
        if context.broken is not None:
            raise ValueError(f"the context never arrived: {context.broken}")
        raw, top, page_size = raw_of(tokens), self._end_of(context), self.pool.page_size
        steps = self.tree.walk(raw, context.tenant, top, method)
        at = sum(used for _, used in steps)
        parent = self._cut_after(*steps[-1]) if steps else top
        if not from_ <= at < len(tokens) or (parent.run is None and parent.parent is not None):
            return
        self._hierarchy.device.discard(parent)
        public = not context.tenant if public is None else public
        tenant = PUBLIC if public and parent.tenant == PUBLIC else context.tenant
        nodes, lossy = [], context.lossy or any(node.lossy for node, _ in steps)
        for stop in _stops(cuts, at, len(tokens)):
            start = parent.end if local_start is None else local_start + at - from_
            node = Node(tenant, raw[4 * at : 4 * stop], parent, start, Provenance.DEPENDENCY, method, meta=meta,
                        lossy=lossy)  # fmt: skip
            self.tree.attach(node, context_of(parent), run.slice(at - from_, stop - from_, page_size))
            nodes.append(node)
            parent, at = node, stop
        totals = totals or Totals(context.length + from_, len(tokens) - from_)
        self._admitted(nodes, Access(False, *totals))

    def _admitted(self, nodes: list[Node], access: Access) -> None:
        owners = {nodes[0].tenant, nodes[-1].tenant}
        for owner in owners:
            self._hierarchy.own(owner)
        for node in nodes:
            self._metrics.admitted_tokens += len(node)
            self._policy.on_access(node, access)
            self._hierarchy.consider(node)
        for owner in owners:
            self._hierarchy.enforce(owner)

    def _room_for_variant(self) -> bool:
        """Let the least reused variants leave for a new one; whether there is room (none is if all are in use)."""
        while (node := self._variants.victim()) is not None:
            self._hierarchy.remove(node)
        return not self._variants.full

    def _cut_after(self, node: Node, used: int) -> Node:
        """The node that ends after the first `used` tokens of `node`."""
        return node if used == len(node) else self._hierarchy.split(node, used)

    def _end_of(self, match: Match) -> Node:
        """The node that ends exactly where the match does (its own node may lie deeper)."""
        node = next(step for step in match.node.path() if step.start < match.length or step.parent is None)
        return node if node.parent is None else self._cut_after(node, match.length - node.start)

    def _require_context(self, context: Match, provenance: Provenance | None = None) -> None:
        if context.released or context not in self._matches:
            raise ValueError("the context's match was released, or is another cache's")
        if context.node.provenance is not Provenance.CAUSAL:
            raise ValueError("the context must be a causal prefix")
        if provenance in RADIX:
            raise ValueError(f"{provenance} KV is matched and admitted as a prefix or a path, not as a segment")

    def _count_miss(self, tokens: Tokens) -> None:
        self._metrics.lookups += 1
        self._metrics.missed_tokens += len(tokens)

    def _count_lookup(self, steps: Steps, match: Match, seen: int, exact: bool) -> None:
        metrics, hit = self._metrics, max(match.length - seen, 0)
        metrics.lookups += 1
        metrics.missed_tokens += match.asked - max(match.length, seen)
        if match.lossy or not exact or (steps and steps[-1][0].provenance not in EXACT):
            metrics.approximate_hit_tokens += hit
        else:
            metrics.exact_hit_tokens += hit
        at = 0
        for tokens, tier in match.origins:
            metrics.tier_hit_tokens[tier.label] += max(at + tokens - max(at, seen), 0)
            at += tokens

    # --------------------------------------------------------------------------------- who waits, what moves

    def keys_of(self, tokens: Tokens, cuts: Sequence[int], tenant: str = PUBLIC) -> tuple[bytes, ...]:
        """Keys of the nodes that a causal prompt uses: of those that are kept, then of those it would add."""
        raw = raw_of(tokens)
        steps = self.tree.walk(raw, tenant)
        keys = [node.key for node, _ in steps]
        at = sum(used for _, used in steps)
        hasher = context_hasher()
        hasher.update(raw[: 4 * at])
        for stop in _stops(cuts, at, len(tokens)):
            part = raw[4 * at : 4 * stop]
            keys.append(self.tree.key(tenant, Provenance.CAUSAL, "", hasher.digest(), part))
            hasher.update(part)
            at = stop
        return tuple(keys)

    def keys_of_path(
        self, context: Tokens, path: Tokens, stops: Sequence[int], method: str, tenant: str = PUBLIC
    ) -> tuple[bytes, ...]:
        """Keys of the nodes that a dependency path behind a causal context uses, kept or not, as `keys_of`.

        stops: offsets in the path at which its branches end.
        """
        raw, keys, at, before = raw_of(path), [], 0, context_digest(raw_of(context))
        top = self.tree.walk(raw_of(context), tenant)
        whole = sum(used for _, used in top) == len(context)
        steps = self.tree.walk(raw, tenant, top[-1][0] if top else None, method) if whole else []
        for node, used in steps:
            keys.append(node.key)
            at += used
        for stop in _stops(stops, at, len(path)):
            on = context_digest(before, raw[: 4 * at]) if at else before
            keys.append(self.tree.key(tenant, Provenance.DEPENDENCY, method, on, raw[4 * at : 4 * stop]))
            at = stop
        return tuple(keys)

    def key_of(
        self,
        context: Tokens,
        tokens: Tokens,
        provenance: Provenance,
        method: str,
        tenant: str = PUBLIC,
        behind: bytes = b"",
    ) -> bytes:
        """Key of the node of `tokens` as computed by `method` on the causal `context`, and behind neighbours."""
        return self.tree.key(tenant, provenance, method, context_digest(raw_of(context)), raw_of(tokens), behind)

    def announce(self, request: str, keys: Collection[bytes]) -> None:
        """A request waits that will use the nodes with these keys (`keys_of`), whether they are kept or not."""
        self._refresh(self._policy.on_queue(request, keys))

    def withdraw(self, request: str) -> None:
        """The request waits no more: it starts, or was cancelled."""
        self._refresh(self._policy.on_start(request))

    def _refresh(self, fallen: Iterable[bytes]) -> None:
        for key in fallen:
            node = self.tree.find(key)
            if node is not None:
                self._hierarchy.device.refresh(node)
                self._hierarchy.host.refresh(node)

    def vacate(self) -> None:
        """Move everything that nobody uses off the device, so that what comes back lies together."""
        self._hierarchy.make_room(self.pool.reclaimable_pages)

    def poll(self) -> bool:
        """Take note of bytes that have arrived, or never will; whether there was anything."""
        return self._loader.poll()

    def replicate(self) -> bool:
        """Copy hot nodes to the tiers below while there is time; whether there were any."""
        return self._hierarchy.replicate()

    @property
    def loading(self) -> int:
        """Loads under way."""
        return len(self._hierarchy.loads)

    def give_up(self) -> bool:
        """Have back the pages of loads that nobody waits for any more; whether there were any."""
        return self._loader.give_up()

    def flush(self, limit: int = 256) -> bool:
        """Order up to `limit` nodes that no disk has to be written; whether there were any."""
        return self._hierarchy.flush(limit)

    def lose_device(self) -> None:
        """The device's pool is empty again: keep what host memory holds.

        Raises:
            ValueError: if a match, a reservation or a load is outstanding.
        """
        if self._matches or self._reserved:
            raise ValueError(f"{len(self._matches)} matches and {len(self._reserved)} reservations are outstanding")
        self._hierarchy.lose_device()

    # ------------------------------------------------------------------------------------------- audit

    def audit(self, live: Collection[str] | None = None) -> None:
        """Check every book against every other; O(everything).

        live: labels that may hold matches and reservations now (none: `()`); None accepts all labels.

        Raises:
            AuditError: naming the page, node, match or reservation that is wrong.
        """
        self._audit_holders(live)
        self.tree.audit()
        nodes = list(self.tree.nodes())
        dead = list(self._hierarchy.held_runs())
        self._audit_pins({*nodes, *dead, self.tree.root})
        self.pool.audit(
            held=[*_runs((*nodes, *dead)), *self._reserved],
            pinned=[*_runs(node for node in (*nodes, *dead) if node.pins), *self._reserved],
        )
        self._hierarchy.audit(nodes)

    def audit_counts(self) -> None:
        """Check what can be checked after every operation: capacities, and the queues' tops."""
        self._hierarchy.audit_counts()
        if self.pool.free_pages > self.pool.reclaimable_pages or self.pool.reclaimable_pages > self.pool.capacity:
            raise AuditError(f"{self.pool.free_pages} pages are free, {self.pool.reclaimable_pages} can be had")

    def _audit_holders(self, live: Collection[str] | None) -> None:
        if live is None:
            return
        for match in self._matches:
            if match.label not in live:
                raise AuditError(f"the match of {match.label!r} on {match.length} tokens was never released")
        for run, label in self._reserved.items():
            if label not in live:
                raise AuditError(f"the {run.length} tokens reserved by {label!r} were never freed")

    def _audit_pins(self, known: Collection[Node]) -> None:
        holders = [match.node for match in self._matches] + list(self._hierarchy.loads.pinned())
        pins = Counter(step for node in holders for step in node.path())
        for match in self._matches:
            if match.node not in known:
                raise AuditError(f"the node under the match of {match.label!r} left the tree")
        for node in known:
            if node.pins != pins[node]:
                raise AuditError(f"node {name(node)} counts {node.pins} pins, {pins[node]} matches and loads need it")


def _present(steps: Steps) -> Steps:
    """The part of a path whose bytes are on the device now."""
    return list(takewhile(lambda step: step[0].run is not None and not step[0].loading, steps))


def _stops(cuts: Iterable[int], at: int, end: int) -> list[int]:
    """Where the nodes of tokens [at, end) end that are cut at `cuts`, ascending; `end` is the last."""
    return sorted({cut for cut in (*cuts, end) if at < cut <= end})


def _usable(context: Match) -> bool:
    """Whether other nodes may be looked for behind it."""
    return context.complete and context.broken is None


def _runs(nodes: Iterable[Node]) -> list[Run]:
    return [node.run for node in nodes if node.run is not None]
