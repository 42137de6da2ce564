"""The one facade of the cache: match and pin, reserve pages, admit, release, audit.

One thread owns it. What a request uses it holds by a lease (nodes it reads) or a reservation (pages it
writes); what neither holds may leave, leaves of the tree first, in the policy's order. A node never leaves
before its children do (RAGCache, section 5.1): they are useless without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType

import numpy as np

from ragjax.cache.pages import AuditError, PagePool
from ragjax.cache.policy.base import Policy, Victims
from ragjax.cache.tree import KnowledgeTree, Node, Provenance
from ragjax.core import OutOfPages, Run, Tokens

EXACT = frozenset({Provenance.CAUSAL, Provenance.DEPENDENCY})
"""Provenances whose reuse is exact to some attention that a model was trained on."""


@dataclass
class Metrics:
    """Counters since the start, in tokens unless named otherwise; `pages_used` is the present state."""

    lookups: int = 0
    exact_hit_tokens: int = 0
    approximate_hit_tokens: int = 0
    missed_tokens: int = 0
    admitted_tokens: int = 0
    evicted_tokens: int = 0
    pages_used: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens found, exact or not."""
        return self.exact_hit_tokens + self.approximate_hit_tokens


@dataclass(eq=False)
class Lease:
    """Cached KV that a request is using; nothing of it leaves until `release`, which is called exactly once.

    spans: where the KV is, in order: runs, and the RoPE position each run's first K is stored rotated at.
    tokens: the tokens found, int32 [length], a prefix of the `asked` tokens that were looked for.
    node: the deepest node in use; it may end beyond `length`.
    label: who holds it, a request id for instance; audits name it.
    """

    spans: tuple[tuple[Run, int], ...]
    tokens: Tokens
    asked: int
    node: Node
    label: str
    _cache: KnowledgeCache = field(repr=False)
    released: bool = False

    @property
    def length(self) -> int:
        """Number of tokens found."""
        return len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether everything that was looked for was found."""
        return self.length == self.asked

    @property
    def tenant(self) -> str:
        """Whose KV it is."""
        return self.node.tenant

    @cached_property
    def context(self) -> bytes:
        """Digest of the tokens found, as the context of other nodes, 32 bytes."""
        return self._cache.tree.context(self.tokens)

    def release(self) -> None:
        """Let go.

        Raises:
            RuntimeError: if it was released before.
        """
        self._cache._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class KnowledgeCache:
    """KV of one model identity in the pages of one pool.

    `identity` covers all that KV depends on besides tokens: weights, tokenizer, RoPE, dtype.
    """

    def __init__(self, identity: bytes, pool: PagePool, policy: Policy):
        self.pool = pool
        self.tree = KnowledgeTree(identity, pool)
        self._policy = policy
        self._victims = Victims(policy)
        self._leases: dict[Lease, None] = {}
        self._reserved: dict[Run, str] = {}
        self._metrics = Metrics()

    @property
    def metrics(self) -> Metrics:
        """A copy of the counters."""
        return replace(self._metrics, pages_used=self.pool.capacity - self.pool.free_pages)

    # ------------------------------------------------------------------------------------------- match

    def match_prefix(self, tokens: Tokens, tenant: str = "", label: str = "") -> Lease:
        """Pin the longest prefix of `tokens` (int32 [n]) whose exact causal KV is kept; it may be empty."""
        tokens = _as_tokens(tokens)
        root = self.tree.root(tenant)
        steps = self.tree.walk(root, tokens)
        found = sum(used for _, used in steps)
        self._count_lookup(Provenance.CAUSAL, found, len(tokens) - found)
        node = steps[-1][0] if steps else root
        return self._lease(node, steps, tokens[:found], len(tokens), label)

    def match_segment(self, context: Lease, tokens: Tokens, provenance: Provenance, method: str) -> Lease | None:
        """Pin the KV of `tokens` (int32 [n], all of them) as computed by `method` on exactly the leased context.

        None if it is not kept, or if the context itself was not found whole.
        """
        self._require_context(context, provenance)
        tokens = _as_tokens(tokens)
        key = self.tree.key(context.tenant, provenance, method, context.context, tokens)
        node = self.tree.find(key) if context.complete else None
        if node is None:
            self._count_lookup(provenance, 0, len(tokens))
            return None
        self._count_lookup(provenance, len(tokens), 0)
        return self._lease(node, [(node, len(tokens))], tokens, len(tokens), context.label)

    def _lease(self, node: Node, steps: list[tuple[Node, int]], tokens: Tokens, asked: int, label: str) -> Lease:
        for step, _ in steps:
            self._policy.on_access(step)
        self._victims.discard(node)
        self.tree.pin(node)
        lease = Lease(self._spans(steps), tokens.copy(), asked, node, label, self)
        self._leases[lease] = None
        return lease

    def _spans(self, steps: list[tuple[Node, int]]) -> tuple[tuple[Run, int], ...]:
        """Runs that follow each other in the pool become one, so that splits and cuts cost a reader nothing."""
        spans: list[tuple[Run, int]] = []
        for node, used in steps:
            assert node.run is not None
            run, start = node.run.slice(0, used, self.pool.page_size), node.local_start
            joined = _join(*spans[-1], run, start, self.pool.page_size) if spans else None
            if joined is None:
                spans.append((run, start))
            else:
                spans[-1] = (joined, spans[-1][1])
        return tuple(spans)

    def _release(self, lease: Lease) -> None:
        if lease.released:
            raise RuntimeError(f"the lease of {lease.label!r} on {lease.length} tokens was released before")
        lease.released = True
        del self._leases[lease]
        self.tree.unpin(lease.node)
        self._consider(lease.node)

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
        self._make_room(need)
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

    def _make_room(self, need: int) -> None:
        """Evict until `need` pages are free; the caller has checked that it can be done.

        Nodes whose pages running requests hold anyway would free nothing: they leave last.
        """
        spared: list[Node] = []
        while self.pool.free_pages < need:
            node = self._victims.pop()
            if node is None:
                self._evict(spared.pop(0))
            elif node.run is not None and self.pool.all_pinned(node.run):
                spared.append(node)
            else:
                self._evict(node)
        for node in spared:
            self._victims.push(node)

    def _evict(self, node: Node) -> None:
        self._metrics.evicted_tokens += len(node)
        self._consider(self.tree.remove(node))

    def _consider(self, node: Node) -> None:
        """Queue a node as one that may leave, if it may."""
        if node.pins or not node.is_leaf:
            return
        if node.parent is None:
            self.tree.drop_root(node)
        else:
            self._victims.push(node)

    def clear(self) -> None:
        """Drop everything that no lease pins."""
        while (node := self._victims.pop()) is not None:
            self._evict(node)

    # ------------------------------------------------------------------------------------------- admit

    def admit_prefix(self, context: Lease, tokens: Tokens, from_: int, run: Run, cuts: Sequence[int]) -> None:
        """Keep the causal KV of `tokens[from_:]`, which lies in `run`, computed at positions equal to orders.

        What the tree holds already stays as it is, and that part of `run` is not kept. The cache takes
        references of its own: the caller still frees its reservation.

        context: lease that covers at least `tokens[:from_]`.
        tokens: the whole prefix from order 0 on, int32 [n]; run: n - from_ tokens.
        cuts: orders at which segments begin or end (all of the prompt's will do); nodes are cut there.

        Raises:
            ValueError: if the arguments do not fit each other or the lease.
        """
        tokens = _as_tokens(tokens)
        self._require_context(context)
        if not 0 <= from_ <= context.length or not np.array_equal(tokens[:from_], context.tokens[:from_]):
            raise ValueError(f"the lease of {context.length} tokens does not cover the {from_} before the new ones")
        if run.length != len(tokens) - from_:
            raise ValueError(f"the run holds {run.length} tokens, not the {len(tokens) - from_} from {from_} on")
        if any(not 0 <= cut <= len(tokens) for cut in cuts):
            raise ValueError(f"a cut lies outside the {len(tokens)} tokens")
        root = self.tree.root(context.tenant)
        steps = self.tree.walk(root, tokens)
        at = sum(used for _, used in steps)
        if at == len(tokens):
            return
        parent = self._cut_after(*steps[-1]) if steps else root
        rest = run.slice(at - from_, run.length, self.pool.page_size)
        offsets = sorted({cut - at for cut in cuts if at < cut < len(tokens)})
        self._victims.discard(parent)
        self._admitted(self.tree.extend(parent, tokens[at:], rest, tuple(offsets)))

    def admit_segment(
        self, context: Lease, tokens: Tokens, run: Run, local_start: int, provenance: Provenance, method: str
    ) -> None:
        """Keep the KV of `tokens` (int32 [n]) as computed by `method` on exactly the leased context.

        A node that is there already stays. The cache takes a reference of its own to `run` (n tokens, the
        first one's K rotated at `local_start`).

        Raises:
            ValueError: if the context was not found whole, or run and tokens do not fit.
        """
        self._require_context(context, provenance)
        if not context.complete:
            raise ValueError(f"the context was found for {context.length} of {context.asked} tokens: admit it first")
        if run.length != len(tokens) or not run.length:
            raise ValueError(f"the run holds {run.length} tokens, the segment {len(tokens)}")
        tokens = _as_tokens(tokens)
        if self.tree.find(self.tree.key(context.tenant, provenance, method, context.context, tokens)) is not None:
            return
        parent = self._end_of(context)
        self._admitted([self.tree.attach(parent, tokens, run, local_start, provenance, method)])

    def _admitted(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._metrics.admitted_tokens += len(node)
            self._policy.on_access(node)
            self._consider(node)

    def _cut_after(self, node: Node, used: int) -> Node:
        """The node that ends after the first `used` tokens of `node`."""
        return node if used == len(node) else self.tree.split(node, used)

    def _end_of(self, lease: Lease) -> Node:
        """The node that ends exactly where the lease does (its own node may lie deeper)."""
        node = next(step for step in lease.node.path() if step.start < lease.length or step.parent is None)
        return self._cut_after(node, lease.length - node.start)

    def _require_context(self, context: Lease, provenance: Provenance | None = None) -> None:
        if context.released or context not in self._leases:
            raise ValueError("the context's lease was released, or is another cache's")
        if context.node.provenance is not Provenance.CAUSAL:
            raise ValueError("the context must be a causal prefix")
        if provenance is Provenance.CAUSAL:
            raise ValueError("causal KV is matched and admitted as a prefix")

    def _count_lookup(self, provenance: Provenance, found: int, missed: int) -> None:
        self._metrics.lookups += 1
        self._metrics.missed_tokens += missed
        if provenance in EXACT:
            self._metrics.exact_hit_tokens += found
        else:
            self._metrics.approximate_hit_tokens += found

    # ------------------------------------------------------------------------------------------- audit

    def audit(self, live: Collection[str] | None = None) -> None:
        """Check every book against every other; O(everything).

        live: labels that may hold leases and reservations now (none: `()`); None accepts all labels.

        Raises:
            AuditError: naming the page, node, lease or reservation that is wrong.
        """
        self._audit_holders(live)
        self.tree.audit()
        self._audit_pins()
        nodes = [node for node in self.tree.nodes() if node.run is not None]
        self.pool.audit(
            held=[*_runs(nodes), *self._reserved],
            pinned=[*_runs(node for node in nodes if node.pins), *self._reserved],
        )
        may_leave = {node for node in nodes if node.is_leaf and not node.pins}
        if may_leave != self._victims.nodes():
            raise AuditError("the queue of victims is not the set of unpinned leaves")

    def _audit_holders(self, live: Collection[str] | None) -> None:
        if live is None:
            return
        for lease in self._leases:
            if lease.label not in live:
                raise AuditError(f"the lease of {lease.label!r} on {lease.length} tokens was never released")
        for run, label in self._reserved.items():
            if label not in live:
                raise AuditError(f"the {run.length} tokens reserved by {label!r} were never freed")

    def _audit_pins(self) -> None:
        pins = Counter(step for lease in self._leases for step in lease.node.path())
        known = set(self.tree.nodes())
        for lease in self._leases:
            if lease.node not in known:
                raise AuditError(f"the node under the lease of {lease.label!r} left the tree")
        for node in known:
            if node.pins != pins[node]:
                raise AuditError(f"node {node.key.hex()[:12]} counts {node.pins} pins, {pins[node]} leases need it")


def _join(first: Run, first_start: int, second: Run, second_start: int, page_size: int) -> Run | None:
    """The two runs as one, if the second begins in the cell (or at the top of a page) after the first."""
    cell = (first.start + first.length) % page_size
    if second.start != cell or second_start != first_start + first.length:
        return None
    if cell and first.pages[-1] != second.pages[0]:
        return None
    return Run(first.pages + second.pages[bool(cell) :], first.start, first.length + second.length)


def _runs(nodes: Iterable[Node]) -> list[Run]:
    return [node.run for node in nodes if node.run is not None]


def _as_tokens(tokens: Tokens) -> Tokens:
    return np.ascontiguousarray(tokens, np.int32)
