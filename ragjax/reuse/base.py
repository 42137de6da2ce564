"""What every reuse strategy is and gets: a conversation of passes, and a holding in the cache.

To add a method: one file with a class that has all of `Strategy`, or a `Selector` (`reuse/repair.py`), its source in
the docstring, and one line in `reuse/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from typing import NamedTuple, Protocol

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.match import Lease
from ragjax.cache.tree import Provenance
from ragjax.core import Conversation, Kind, Plan, Prompt, Run, SegmentReport, Span, Tokens, Want
from ragjax.core.tiers import Tier


class Strategy(Protocol):
    """A way to make a prompt's KV from what the cache holds.

    name: how requests ask for it.
    wants: every want its passes may have, so that the programs behind them are compiled at start-up.
    selective: whether it recomputes a share of the tokens that a request may name.
    """

    name: str
    wants: frozenset[Want]
    selective: bool

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """Keys of the nodes that the prompt will use, kept or not, for policies that look at who waits."""
        ...

    def carry_out(self, prompt: Prompt, holding: Holding, ratio: float | None = None) -> Conversation:
        """Yield passes until the prompt's KV and last logits exist; return the plan carried out.

        ratio: share of the chunks' tokens to recompute, if the strategy is selective; None: its own choice.

        Matching and reserving come before the first pass: `OutOfPages` there means the request waits. What was
        matched below the device has arrived when the first pass runs.
        """
        ...

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, holding: Holding) -> None:
        """Decoding has ended; `generated` are the tokens whose KV lies in the plan's tail, in order."""
        ...


class Place(NamedTuple):
    """Where a segment's KV may be kept: how it was computed on its context, and behind which neighbours."""

    provenance: Provenance
    method: str
    behind: bytes = b""


class Holding:
    """What one request holds in the cache: leases on nodes it reads, runs of its own that it writes.

    tenant: whose requests may use what it keeps. label: under which name the cache's books have it.
    decode_tokens: cells needed behind the prompt for generated tokens.
    slots: most slots that the spans of a pass may take.
    stages: layers at which a pass may begin, ascending, and the number of layers as a last entry.
    cold: whether it may use KV from below the device, which has to be waited for.
    """

    def __init__(
        self,
        cache: KnowledgeCache,
        *,
        tenant: str,
        label: str,
        decode_tokens: int,
        slots: int,
        stages: tuple[int, ...],
        cold: bool = True,
    ):
        self.cache = cache
        self.tenant = tenant
        self.slots = slots
        self.stages = stages
        self.decode_tokens = decode_tokens
        self.cold = cold
        self.label = label
        self._leases: list[Lease] = []
        self._runs: list[Run] = []

    @property
    def page_size(self) -> int:
        """Cells of a page."""
        return self.cache.pool.page_size

    @property
    def ready(self) -> bool:
        """Whether the KV of every lease is on the device, or `broken` says why it never will be."""
        return all(lease.ready for lease in self._leases)

    @property
    def broken(self) -> str | None:
        """Why KV that was leased could not be had; the request must start anew. None if all is well."""
        return next((lease.broken for lease in self._leases if lease.broken is not None), None)

    @property
    def lossy(self) -> bool:
        """Whether any leased KV lost precision at rest, so that nothing built on it is exact."""
        return any(lease.lossy for lease in self._leases)

    @property
    def own_pages(self) -> frozenset[int]:
        """Pages this request may write."""
        return frozenset(page for run in self._runs for page in run.pages)

    def prefix(self, tokens: Tokens) -> Lease:
        """The longest exact prefix of the tokens in the cache."""
        lease = self.cache.match_prefix(tokens, self.tenant, self.label, cold=self.cold)
        self._leases.append(lease)
        return lease

    def segment(
        self,
        context: Lease,
        tokens: Tokens,
        provenance: Provenance,
        method: str,
        *,
        behind: bytes = b"",
        variant: bool = False,
        cfo: float = 1.0,
    ) -> Lease | None:
        """The node of these tokens computed behind exactly this context (and neighbours), if the cache has it."""
        lease = self.cache.match_segment(
            context, tokens, provenance, method, behind=behind, cold=self.cold, variant=variant, cfo=cfo
        )
        if lease is not None:
            self._leases.append(lease)
        return lease

    def variant(
        self, context: Lease, tokens: Tokens, method: str, tries: Iterable[tuple[bytes, float]]
    ) -> Lease | None:
        """The first of a chunk's variants that is kept; `tries` as in `KnowledgeCache.match_variant`."""
        lease = self.cache.match_variant(context, tokens, method, tries, cold=self.cold)
        if lease is not None:
            self._leases.append(lease)
        return lease

    def first(self, context: Lease, tokens: Tokens, places: Iterable[Place]) -> Lease | None:
        """The segment at the first of the places, best first, where the cache has it."""
        lease = self.cache.match_first(context, tokens, places, cold=self.cold)
        if lease is not None:
            self._leases.append(lease)
        return lease

    def path(self, context: Lease, tokens: Tokens, method: str, *, seen: int = 0, exact: bool = True) -> Lease:
        """The longest part of a dependency path that is kept behind exactly this context (`match_dependency`)."""
        lease = self.cache.match_dependency(context, tokens, method, seen=seen, exact=exact, cold=self.cold)
        self._leases.append(lease)
        return lease

    def reserve(self, tokens: int) -> Run:
        """Cells of the request's own.

        Raises:
            OutOfPages: if they cannot be had without evicting what is in use.
        """
        run = self.cache.reserve(tokens, self.label)
        self._runs.append(run)
        return run

    def free(self, run: Run) -> None:
        """Give cells of its own back before the end.

        Raises:
            ValueError: if they are not its own.
        """
        self._runs.remove(run)
        self.cache.free(run)

    def hand_over(self) -> Holding:
        """All that it holds, in a holding that outlives the request; it holds nothing any more."""
        other = copy(self)
        self._leases, self._runs = [], []
        return other

    def close(self) -> None:
        """Give everything back; admitted parts stay in the cache."""
        while self._runs:
            self.cache.free(self._runs.pop())
        while self._leases:
            self._leases.pop().release()


def lease_spans(
    lease: Lease, begin: int, hidden: tuple[int, int] = (0, 0), runs: int | None = None
) -> tuple[Span, ...]:
    """The leased tokens placed from position (and order) `begin` on; of the first `runs` runs, if not all."""
    spans, order = [], begin
    for run, local_start in lease.spans[:runs]:
        spans.append(Span.consecutive(order, run, order - local_start, hidden))
        order += run.length
    return tuple(spans)


def most_slots(tokens: int, segments: int, page_size: int) -> int:
    """Slots that a request of so many tokens and segments may use; what the scheduler counts on."""
    return -(-tokens // page_size) + 2 * segments


def usable(lease: Lease, tokens: int, slots: int, page_size: int) -> tuple[int, int]:
    """(runs, tokens) of the lease, from its first on, behind which `tokens` in all take no more than `slots`.

    A prefix that many requests made piece by piece lies scattered: each piece takes a page, and a slot.
    """
    used, found, best = 0, 0, (0, 0)
    for i, (run, _) in enumerate(lease.spans, 1):
        used, found = used + len(run.pages), found + run.length
        if used + -(-(tokens - found) // page_size) < slots:  # one is left for a page that two spans share
            best = i, found
    return best


def orders(begin: int, end: int) -> Tokens:
    """Orders [begin, end), int32."""
    return np.arange(begin, end, dtype=np.int32)


def report(
    prompt: Prompt, reused: Mapping[int, int], tiers: Mapping[int, Tier | None] | None = None
) -> tuple[SegmentReport, ...]:
    """The account of a prompt: `reused[i]` tokens of segment i came from `tiers[i]`, the rest was computed."""
    return tuple(
        SegmentReport(
            id=segment.id,
            title=segment.title,
            tokens=len(segment),
            reused=reused.get(i, 0),
            recomputed=len(segment) - reused.get(i, 0),
            tier=tier.label if reused.get(i) and (tier := (tiers or {}).get(i)) is not None else None,
            score=segment.score,
        )
        for i, segment in enumerate(prompt.segments)
    )


def segments_of(prompt: Prompt, kind: Kind) -> tuple[int, ...]:
    """Indexes of the segments of a kind."""
    return tuple(i for i, segment in enumerate(prompt.segments) if segment.kind is kind)
