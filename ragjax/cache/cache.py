"""The cache: it reserves and frees pages; its `matcher` finds and pins KV, its `admitter` keeps what was computed.

One thread owns it. What a request uses it holds by a match (nodes it reads) or a reservation (pages it
writes); what neither holds may leave, leaves of the tree first, in the policy's order. A node never leaves
before its children do (RAGCache, section 5.1): they are useless without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from ragjax.cache.admitter import Admitter
from ragjax.cache.hierarchy import Hierarchy, LeftNode, Storage
from ragjax.cache.loader import Loader
from ragjax.cache.lookahead import Look, Outlook
from ragjax.cache.match import CacheMetrics
from ragjax.cache.matcher import Matcher
from ragjax.cache.node import PUBLIC, Provenance, context_digest, raw_of
from ragjax.cache.node import neighbours_digest as neighbours_digest
from ragjax.cache.policy.base import Policy
from ragjax.cache.pool import PagePool
from ragjax.cache.tree import KnowledgeTree
from ragjax.cache.variant import Variants
from ragjax.core import OutOfPages, Run, StorageOptions, Tokens
from ragjax.core.prompt import Keep
from ragjax.core.tiers import Inquiry, Tier


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
        variants: int = StorageOptions.variants,
        keep: Keep = "all",
    ):
        self.pool = pool
        self.keep = keep  # of a prompt served by `prefix`
        self.tree = KnowledgeTree(identity, pool)
        self._metrics = CacheMetrics()
        self._hierarchy = tiers = Hierarchy(self.tree, pool, policy, self._metrics, storage)
        self._loader = Loader(tiers)
        self.matcher = Matcher(tiers, self._loader, Variants(variants))
        self.admitter = Admitter(self.matcher)
        self.poll, self.give_up = self._loader.poll, self._loader.give_up
        self.clear, self.replicate, self.flush, self.on_disk = tiers.clear, tiers.replicate, tiers.flush, tiers.on_disk
        self.departures: Sequence[LeftNode] = tiers.departures
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
        return outlook.look(self.tree)

    @property
    def tiered(self) -> bool:
        return self._hierarchy.storage is not None

    @property
    def inquiry(self) -> Inquiry | None:
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
        self.matcher.quiet = True
        try:
            yield
        finally:
            self.matcher.quiet = False

    def find_meta(self, key: bytes) -> bytes | None:
        """The strategy's bytes with the KV of this key; None: no tier has it. Any thread may call it."""
        node = self.tree.find(key)
        if node is not None:
            return node.meta
        index = self._hierarchy.disk_index
        record = None if index is None else index.find(key)
        return None if record is None else record.meta

    def write_soon(self, keys: Iterable[bytes]) -> None:
        """Write the nodes with these keys to disk in idle time, before they leave memory."""
        self._hierarchy.write_soon([node for key in keys if (node := self.tree.find(key)) is not None])

    def keep_longer(self, tenant: str, tokens: Tokens, seconds: float) -> bool:
        """Make what is cached of these tokens, on exactly their context, leave last; False: beyond a tenant's share."""
        steps = self.tree.walk(raw_of(tokens), tenant)
        if steps:
            steps[-1] = self.matcher.cut_after(*steps[-1]), steps[-1][1]
        return self._hierarchy.keep([node for node, _ in steps], tenant, seconds)

    def room(self, tenant: str) -> int:
        """Pages of KV of a tenant that may be computed ahead: most of the largest tier, the rest is for requests."""
        capacity, storage = self.pool.capacity, self._hierarchy.storage
        if storage is None:
            return capacity // 2
        quota = storage.quota(tenant)
        pages = capacity if quota is None else min(capacity, quota // storage.page_bytes)
        host = storage.host_bytes if quota is None else min(storage.host_bytes, quota)
        below = max(host, storage.disk_bytes) // storage.transfer.size(self.pool.page_size)
        return max(pages // 2, below * 3 // 4)

    @property
    def used(self) -> dict[str, float]:
        found = {Tier.DEVICE.label: 1 - self.pool.free_pages / self.pool.capacity}
        storage = self._hierarchy.storage
        if storage is not None and storage.host_bytes:
            found[Tier.HOST.label] = self._hierarchy.host_memory.used / storage.host_bytes
        return found

    def reserve(self, n_tokens: int, label: str = "", spare: int = 0) -> Run:
        """Pages for `n_tokens` new tokens, evicting what must leave. spare: pages that must be left for others."""
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
        """Give a reservation back; pages that the tree refers to stay. clear: what is in them may not be finite."""
        if self._reserved.pop(run, None) is None:
            raise ValueError(f"{run} is not reserved, or was freed before")
        self.pool.unpin(run)
        self.pool.release(run)
        storage = self._hierarchy.storage
        if clear and storage is not None:
            counts = self.pool.counts
            storage.transfer.clear([page for page in run.pages if not counts[page]])

    def key_of(
        self,
        context: Tokens,
        tokens: Tokens,
        provenance: Provenance,
        method: str,
        tenant: str = PUBLIC,
        behind: bytes = b"",
    ) -> bytes:
        return self.tree.key(tenant, provenance, method, context_digest(raw_of(context)), raw_of(tokens), behind)

    def announce(self, request: str, keys: Collection[bytes]) -> None:
        self._refresh(self._hierarchy.policy.on_queue(request, keys))

    def withdraw(self, request: str) -> None:
        self._refresh(self._hierarchy.policy.on_start(request))

    def _refresh(self, fallen: Iterable[bytes]) -> None:
        for key in fallen:
            node = self.tree.find(key)
            if node is not None:
                self._hierarchy.device.refresh(node)
                self._hierarchy.host.refresh(node)

    def vacate(self) -> None:
        """Move everything that nobody uses off the device, so that what comes back lies together."""
        self._hierarchy.make_room(self.pool.reclaimable_pages)

    @property
    def loading(self) -> int:
        return len(self._hierarchy.loads)

    def lose_device(self) -> None:
        matches = self.matcher.matches
        if matches or self._reserved:
            raise ValueError(f"{len(matches)} matches and {len(self._reserved)} reservations are outstanding")
        self._hierarchy.lose_device()
