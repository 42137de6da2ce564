"""Look-ups: KV that is found is pinned by a match, counted, and told to the policy."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from ragjax.cache.hierarchy import Hierarchy
from ragjax.cache.loader import Loader
from ragjax.cache.match import EXACT, Candidate, Match
from ragjax.cache.node import PUBLIC, RADIX, Node, Provenance, Steps, context_digest, raw_of
from ragjax.cache.policy.base import Access
from ragjax.cache.stretches import Stretch
from ragjax.cache.tree import join_runs
from ragjax.cache.variant import Variants
from ragjax.core import Run, Tokens
from ragjax.core.tiers import Record


class Matcher:
    """Finds and pins. `matches` are those that are not released yet. While it is `quiet`, nothing counts."""

    def __init__(self, hierarchy: Hierarchy, loader: Loader, variants: Variants):
        self.matches: dict[Match, None] = {}
        self.quiet = False
        self.variants = variants
        self.hierarchy = hierarchy
        self._loader = loader
        self._tree = hierarchy.tree
        self._page_size = hierarchy.pool.page_size

    def match_prefix(
        self, tokens: Tokens, tenant: str = PUBLIC, label: str = "", *, cold: bool = True, quiet: bool = False
    ) -> Match:
        """Pin the longest prefix of `tokens` (int32 [n]) whose causal KV is kept; it may be empty.

        tenant: whose nodes may be read besides the public ones. label: who holds the match, for audits. cold: look
        below the device too; the match is `ready` when what was found there has arrived. quiet: no counter rises and no
        policy hears of it.
        """
        raw = raw_of(tokens)
        steps = self._tree.walk(raw, tenant)
        steps = self._loader.load(self._tree.root, steps, raw, tenant) if cold else _present(steps)
        found = sum(used for _, used in steps)
        return self._pinned(steps, tokens[:found], len(tokens), tenant, label, cfo=1.0, quiet=quiet)

    def match_first(
        self, context: Match, tokens: Tokens, candidates: Iterable[Candidate], *, cold: bool = True
    ) -> Match | None:
        """Pin the KV of `tokens` (int32 [n], all of them) on exactly the matched context: the first candidate kept.

        None if none is kept, or if the context itself was not found whole; that counts as one miss.
        """
        self.require(context)
        for candidate in candidates:
            match = self._match(context, tokens, candidate, cold)
            if match is not None:
                return match
        if not self.quiet:
            self.hierarchy.metrics.lookups += 1
            self.hierarchy.metrics.missed_tokens += len(tokens)
        return None

    def match_dependency(
        self, context: Match, tokens: Tokens, method: str, *, seen: int = 0, exact: bool = True, cold: bool = True
    ) -> Match:
        """Pin the longest prefix of a dependency path (int32 [n]) that is kept behind exactly the matched causal
        context.

        seen: leading tokens that another path of the request asked for before, which count once (DepCache, section
        4.2.1). exact: whether KV found here counts as exact to dependency attention; it is under `path` positions.
        """
        self.require(context)
        raw = raw_of(tokens)
        steps: Steps = []
        if _usable(context):
            end = self.end_of(context)
            steps = self._tree.walk(raw, context.tenant, end, method)
            steps = self._loader.load(end, steps, raw, context.tenant, method) if cold else _present(steps)
        found = sum(used for _, used in steps)
        return self._pinned(
            steps, tokens[:found], len(tokens), context.tenant, context.label, 1.0, context.node, seen, exact
        )

    def match_stretch(self, found: Stretch, tenant: str, label: str, *, cold: bool = True) -> Match | None:
        """Pin a stretch with what its node holds before it; None if it cannot be brought to the device."""
        node, end = self._brought(found.node, tenant, cold), found.at + found.length
        if node is None or node.dead:
            return None
        steps, tokens = [(node, end)], node.tokens[:end]
        return self._pinned(steps, tokens, end, tenant, label, 1.0, seen=found.at, exact=False)

    def find_variants(
        self, tokens: Tokens, method: str, tenant: str = PUBLIC, context: Tokens | None = None, *, cold: bool = True
    ) -> tuple[Node | Record, ...]:
        """Every place where a method keeps exactly these tokens (Cache-Craft's variants of a chunk), oldest first.

        context: causal tokens that they must have been computed on (None: any; entries that lie on disk alone are left
        out then). cold: look below the device too.
        """
        raw, tenants = raw_of(tokens), tuple(dict.fromkeys((tenant, PUBLIC)))
        found = [node for t in tenants for node in self._tree.places(t, raw)]
        found = [node for node in found if node.method == method]
        if context is None:
            return tuple(found)
        on = context_digest(raw_of(context))
        nodes = [n for n in found if n.key == self._tree.key(n.tenant, n.provenance, method, on, raw, n.behind)]
        disk_index = self.hierarchy.disk_index if cold else None
        places = [self._tree.chunk_place(t, method, on, raw) for t in tenants]
        shelved = [record for place in places for record in disk_index.chunks(place)] if disk_index else []
        return (*nodes, *(record for record in shelved if self._tree.find(record.key) is None))

    def require(self, context: Match, provenance: Provenance | None = None) -> None:
        """Raise ValueError unless a match of this cache holds a causal context behind which such KV can be kept."""
        if context.released or context not in self.matches:
            raise ValueError("the context's match was released, or is another cache's")
        if context.node.provenance is not Provenance.CAUSAL:
            raise ValueError("the context must be a causal prefix")
        if provenance in RADIX:
            raise ValueError(f"{provenance} KV is matched and admitted as a prefix or a path, not as a segment")

    def cut_after(self, node: Node, used: int) -> Node:
        return node if used == len(node) else self.hierarchy.split(node, used)

    def end_of(self, match: Match) -> Node:
        node = _last(match)
        return node if node.parent is None else self.cut_after(node, match.length - node.start)

    def _match(self, context: Match, tokens: Tokens, candidate: Candidate, cold: bool) -> Match | None:
        causal = candidate.provenance is Provenance.CAUSAL
        self.require(context, None if causal else candidate.provenance)
        find = self._find_causal if causal else self._find
        node = find(context, raw_of(tokens), candidate, cold) if _usable(context) else None
        if node is None:
            return None
        cfo = candidate.cfo(node.meta) if callable(candidate.cfo) else candidate.cfo
        if candidate.variant and not self.quiet:
            self.variants.use(node, cfo)
        steps = [(node, len(node))]
        return self._pinned(steps, tokens, len(tokens), context.tenant, context.label, cfo, exact=not causal)

    def _find_causal(self, context: Match, raw: bytes, candidate: Candidate, cold: bool) -> Node | None:
        """A node of exactly these tokens below the context: behind the tokens of a digest, or else behind any."""
        for tenant in dict.fromkeys((context.tenant, PUBLIC)):
            named = self._tree.find(self._tree.key(tenant, Provenance.CAUSAL, "", candidate.behind, raw))
            places = self._tree.places(tenant, raw) if not candidate.behind else (named,) if named is not None else ()
            for node in places:
                below = node.provenance is Provenance.CAUSAL and _last(context) in node.path()
                if below and (there := self._brought(node, tenant, cold)) is not None:
                    return there
        return None

    def _brought(self, node: Node, tenant: str, cold: bool) -> Node | None:
        if node.run is not None:
            return node if cold or not node.loading else None
        if not cold:
            return None
        # with its whole path, which need not be the context's own
        steps = [(step, len(step)) for step in node.path() if step.parent is not None][::-1]
        loaded = self._loader.load(self._tree.root, steps, b"", tenant)
        return node if loaded and loaded[-1][0] is node else None

    def _find(self, context: Match, raw: bytes, candidate: Candidate, cold: bool) -> Node | None:
        provenance, method, behind, *_ = candidate
        disk_index = self.hierarchy.disk_index if cold else None
        parent = _last(context)
        for tenant in dict.fromkeys((context.tenant, PUBLIC)):
            key = self._tree.key(tenant, provenance, method, context.context, raw, behind)
            node = self._tree.find(key)
            if node is not None and (node.run is not None or cold):
                there = self._brought(node, tenant, cold)
                if there is not None or cold:
                    return there
            if node is not None or disk_index is None:
                continue
            record = disk_index.find(key)
            if record is not None and tenant in (parent.tenant, context.tenant):
                return self._loader.load_record(self.end_of(context), record, tenant, behind)
        return None

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
        found, quiet = len(tokens), quiet or self.quiet
        lossy, at = False, 0
        access = Access(True, found, asked - found, cfo)
        for node, used in steps:
            at += used
            lossy = lossy or node.lossy
            if at > seen and not quiet:
                self.hierarchy.policy.on_access(node, access)
                self.hierarchy.accessed(node)
        node = steps[-1][0] if steps else anchor or self._tree.root
        self.hierarchy.hold(node)
        match = Match(self._spans(steps), tokens.copy(), asked, node, tenant, label, (), lossy, self._release)
        match.origins = self.hierarchy.loads.wait(match, steps)
        self.matches[match] = None
        if quiet:
            return match
        metrics, hit, at = self.hierarchy.metrics, max(match.length - seen, 0), 0
        metrics.lookups += 1
        metrics.missed_tokens += match.asked - max(match.length, seen)
        if match.lossy or not exact or (steps and steps[-1][0].provenance not in EXACT):
            metrics.approximate_hit_tokens += hit
        else:
            metrics.exact_hit_tokens += hit
        for number, tier in match.origins:
            metrics.tier_hit_tokens[tier.label] += max(at + number - max(at, seen), 0)
            at += number
        disk_index = self.hierarchy.disk_index
        if disk_index is not None and (keys := [node.key for node, _ in reversed(steps) if node.shelved]):
            disk_index.touch(keys)
        return match

    def _spans(self, steps: Steps) -> tuple[tuple[Run, int], ...]:
        """Runs that follow each other in the pool become one, so that splits and cuts cost a reader nothing."""
        spans: list[tuple[Run, int]] = []
        page_size = self._page_size
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
        del self.matches[match]
        self.hierarchy.let_go(match.node)
        for tenant in {match.tenant, PUBLIC}:
            self.hierarchy.enforce(tenant)


def _present(steps: Steps) -> Steps:
    return list(takewhile(lambda step: step[0].run is not None and not step[0].loading, steps))


def _usable(context: Match) -> bool:
    return context.complete and context.broken is None


def _last(match: Match) -> Node:
    """The node that has the match's last token; its own node may lie deeper."""
    return next(step for step in match.node.path() if step.start < match.length or step.parent is None)
