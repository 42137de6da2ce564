"""The cache: it reserves and frees pages; its `matcher` finds and pins KV, its `admitter` keeps what was computed.

One thread owns it. What a request uses it holds by a match (nodes it reads) or a reservation (pages it
writes); what neither holds may leave, leaves of the tree first, in the policy's order. A node never leaves
before its children do (RAGCache, section 5.1): they are useless without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from ragjax.cache.admitter import Admitter
from ragjax.cache.hierarchy import Hierarchy, LeftNode, Storage
from ragjax.cache.loader import Loader
from ragjax.cache.lookahead import Look, Outlook, causal_keys, path_keys
from ragjax.cache.match import CacheMetrics, Match
from ragjax.cache.matcher import Matcher
from ragjax.cache.node import PUBLIC, Node, Provenance, context_digest, name, raw_of
from ragjax.cache.node import neighbours_digest as neighbours_digest
from ragjax.cache.policy.base import Policy
from ragjax.cache.pool import AuditError, PagePool
from ragjax.cache.tree import KnowledgeTree
from ragjax.cache.variant import Variants
from ragjax.core import OutOfPages, Run, Tokens
from ragjax.core.tiers import Inquiry, Tier

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
        self._metrics = CacheMetrics()
        self._hierarchy = Hierarchy(self.tree, pool, policy, self._metrics, storage)
        self._loader = Loader(self._hierarchy, self._metrics)
        kept = Variants(variants)
        self.matcher = Matcher(self._hierarchy, self._loader, policy, self._metrics, kept)
        self.admitter = Admitter(self.matcher, self._hierarchy, policy, self._metrics, kept)
        self._reserved: dict[Run, str] = {}

    @property
    def metrics(self) -> CacheMetrics:
        metrics = self._metrics
        return replace(
            metrics,
            tier_hit_tokens=Counter(metrics.tier_hit_tokens),
            jobs=Counter(metrics.jobs),
            job_bytes=Counter(metrics.job_bytes),
            job_seconds=dict(metrics.job_seconds),
            failures=Counter(metrics.failures),
            pages_used=self.pool.capacity - self.pool.free_pages,
            host_bytes=self._hierarchy.host_memory.used,
            nodes=len(self.tree),
        )

    def peek(self, outlook: Outlook) -> Look:
        """Tell what a request would find now; nothing is pinned, loaded or counted."""
        return outlook.look(self.tree)

    @property
    def tiered(self) -> bool:
        return self._hierarchy.storage is not None

    @property
    def inquiry(self) -> Inquiry | None:
        """Questions to the shared tier, if there is one."""
        return self._hierarchy.storage.inquiry if self._hierarchy.storage is not None else None

    @contextmanager
    def looking_ahead(self, pages: int) -> Iterator[Callable[[], int]]:
        """Within it, look-ups are for a request that still waits: nothing counts, and no policy hears of them.

        pages: that what they load may take. Yields what says, within, how many it has taken.
        """
        loader = self._loader
        with self.uncounted():
            loader.allowance = pages
            try:
                yield lambda: pages - int(loader.allowance)
            finally:
                loader.allowance = inf

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within it look-ups count for nothing, and no policy hears of them."""
        self.matcher.quiet = True
        try:
            yield
        finally:
            self.matcher.quiet = False

    @property
    def departures(self) -> Sequence[LeftNode]:
        """Nodes that left a tier lately, of all tenants, newest first."""
        return self._hierarchy.departures

    def on_disk(self, node: Node) -> bool:
        """Tell if the node's KV is on disk, or on its way there."""
        return self._hierarchy.on_disk(node)

    @property
    def used(self) -> dict[str, float]:
        """Share of the room on the device, and in host memory if there is some, that is taken."""
        found = {Tier.DEVICE.label: 1 - self.pool.free_pages / self.pool.capacity}
        storage = self._hierarchy.storage
        if storage is not None and storage.host_bytes:
            found[Tier.HOST.label] = self._hierarchy.host_memory.used / storage.host_bytes
        return found

    # ----------------------------------------------------------------------------------------- reserve

    def reserve(self, n_tokens: int, label: str = "", spare: int = 0) -> Run:
        """Pages of the caller's own for `n_tokens` new tokens, evicting what must leave; give back with `free`.

        spare: pages that must be left, free or not in use.

        Raises:
            OutOfPages: if evicting all that is not in use would not be enough; nothing changes then.
        """
        need = self.pool.pages_for(n_tokens)
        if need + spare > self.pool.reclaimable_pages:
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

    def free(self, run: Run, *, clear: bool = False) -> None:
        """Give a reservation back; pages that the tree refers to stay.

        clear: it may hold what is not finite, which must not stay in its pages.

        Raises:
            ValueError: if `run` is not an outstanding reservation.
        """
        if self._reserved.pop(run, None) is None:
            raise ValueError(f"{run} is not reserved, or was freed before")
        self.pool.unpin(run)
        self.pool.release(run)
        storage = self._hierarchy.storage
        if clear and storage is not None:
            counts = self.pool.counts
            storage.transfer.clear([page for page in run.pages if not counts[page]])

    def clear(self) -> None:
        """Drop everything that no match pins, on the device and in host memory."""
        self._hierarchy.clear()

    # --------------------------------------------------------------------------------- who waits, what moves

    def keys_of(self, tokens: Tokens, cuts: Sequence[int], tenant: str = PUBLIC, public: int = 0) -> tuple[bytes, ...]:
        """Keys of the nodes that a causal prompt uses: of those that are kept, then of those it would add.

        public: leading tokens that go to all tenants.
        """
        return causal_keys(self.tree, raw_of(tokens), cuts, tenant, public)

    def keys_of_path(
        self,
        context: Tokens,
        path: Tokens,
        stops: Sequence[int],
        method: str,
        tenant: str = PUBLIC,
        public: int = 0,
    ) -> tuple[bytes, ...]:
        """Keys of the nodes that a dependency path behind a causal context uses, kept or not, as `keys_of`.

        stops: offsets in the path at which its branches end. public: its leading tokens that go to all tenants.
        """
        return path_keys(self.tree, raw_of(context), raw_of(path), stops, method, tenant, public)

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
        return self._loader.poll()

    def replicate(self) -> bool:
        """Copy hot nodes to the tiers below while there is time; True if there were any."""
        return self._hierarchy.replicate()

    @property
    def loading(self) -> int:
        return len(self._hierarchy.loads)

    def give_up(self) -> bool:
        return self._loader.give_up()

    def flush(self, limit: int = 256) -> bool:
        """Order up to `limit` nodes to be written that are not on disk; True if there were any."""
        return self._hierarchy.flush(limit)

    def lose_device(self) -> None:
        """The device's pool is empty again: keep what host memory holds.

        Raises:
            ValueError: if a match, a reservation or a load is outstanding.
        """
        matches = self.matcher.matches
        if matches or self._reserved:
            raise ValueError(f"{len(matches)} matches and {len(self._reserved)} reservations are outstanding")
        self._hierarchy.lose_device()

    # ------------------------------------------------------------------------------------------- audit

    def audit(self, live: Collection[str] | None = None) -> None:
        """Check every book against every other; O(everything).

        live: labels that may hold matches and reservations now (none: `()`); None accepts all labels.

        Raises:
            AuditError: naming the page, node, match or reservation that is wrong.
        """
        matches = self.matcher.matches
        _audit_holders(matches, self._reserved, live)
        self.tree.audit()
        nodes = list(self.tree.nodes())
        dead = list(self._hierarchy.dead_holders())
        holders = [*(match.node for match in matches), *self._hierarchy.loads.pinned()]
        _audit_pins({*nodes, *dead, self.tree.root}, matches, holders)
        self.pool.audit(
            held=[*_runs_of((*nodes, *dead)), *self._reserved],
            pinned=[*_runs_of(node for node in (*nodes, *dead) if node.pins), *self._reserved],
        )
        self._hierarchy.audit(nodes)

    def audit_counts(self) -> None:
        """Check what can be checked after every operation: capacities, and the queues' tops."""
        self._hierarchy.audit_counts()
        if self.pool.free_pages > self.pool.reclaimable_pages or self.pool.reclaimable_pages > self.pool.capacity:
            raise AuditError(f"{self.pool.free_pages} pages are free, {self.pool.reclaimable_pages} can be had")


def _audit_holders(matches: Iterable[Match], reserved: Mapping[Run, str], live: Collection[str] | None) -> None:
    """Check that only what is live (labels; None: all) holds matches and reservations."""
    if live is None:
        return
    for match in matches:
        if match.label not in live:
            raise AuditError(f"the match of {match.label!r} on {match.length} tokens was never released")
    for run, label in reserved.items():
        if label not in live:
            raise AuditError(f"the {run.length} tokens reserved by {label!r} were never freed")


def _audit_pins(known: Collection[Node], matches: Iterable[Match], holders: Iterable[Node]) -> None:
    """Check the pins of all nodes against those that matches and loads hold on their deepest nodes."""
    pins = Counter(step for node in holders for step in node.path())
    for match in matches:
        if match.node not in known:
            raise AuditError(f"the node under the match of {match.label!r} left the tree")
    for node in known:
        if node.pins != pins[node]:
            raise AuditError(f"node {name(node)} counts {node.pins} pins, {pins[node]} matches and loads need it")


def _runs_of(nodes: Iterable[Node]) -> list[Run]:
    """Where the nodes lie on the device, of those that do."""
    return [node.run for node in nodes if node.run is not None]
