"""The interface of reuse strategies: a program of passes, and the allocation in the cache that it works with.

To add a method: one file with a class that has all of `Strategy`, or a `Selector` (`reuse/repair.py`), its source in
the docstring, and a function registered in `STRATEGIES`; in any module that is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass

import numpy as np

from ragjax import core
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Outlook
from ragjax.cache.match import Candidate, Match
from ragjax.cache.stretches import Stretch
from ragjax.cache.tree import PUBLIC
from ragjax.core.registry import Registry
from ragjax.core.step import StepLimits
from ragjax.core.tiers import Tier

LOGITS = frozenset({core.Measure.LOGITS})


class Strategy(ABC):
    """A way to make a prompt's KV from what the cache holds.

    name: how requests ask for it.
    measures: all that its passes may measure. early_end: layer after which those that measure end (0: the last). The
    programs behind both are compiled ahead.
    selective: whether it recomputes a share of the tokens that a request may name.
    preprocessed: whether it takes preprocessed chunks where there are some.
    steady: whether an answer is the same whatever requests ran before; only then may a request be begun on a guess.
    exact: whether chunks are to it tokens like any others, so that cutting a prompt into more of them gains nothing.
    reads_logits: whether it looks at the values of logits that a pass hands back. Otherwise they stay on the device
    unless the request wants them, and it gets an array [n, 0] for its plan.
    """

    name: str
    measures: frozenset[core.Measure] = LOGITS
    early_end: int = 0
    selective: bool = False
    preprocessed: bool = False
    steady: bool = True
    exact: bool = False
    reads_logits: bool = False

    def keys(self, prompt: core.Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """Keys of the nodes that the prompt will use, kept or not, for policies that look at who waits."""
        return self.outlook(prompt, cache, tenant).keys(cache.tree)

    def dress(self, prompt: core.Prompt) -> core.Prompt:
        """The prompt as this strategy has the model read it: as it is, by default."""
        return prompt

    def outlook(self, prompt: core.Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        """The entries that the prompt looks for, and those that it computes and keeps; nothing by default.

        Whoever waits for a piece that another request computes relies on it: name only what `prefill` admits.
        """
        return Outlook()

    def work(self, prompt: core.Prompt, cache: KnowledgeCache, tenant: str, ratio: float | None = None) -> int:
        return sum(cache.peek(self.outlook(prompt, cache, tenant)).missing.values())

    @abstractmethod
    def prefill(self, prompt: core.Prompt, allocation: Allocation, ratio: float | None = None) -> core.Prefill:
        """Yield passes until the prompt's KV and last logits exist; return the plan carried out.

        ratio: share of the chunks' tokens to recompute, if the strategy is selective; None: its own choice.

        Matching and reserving come before the first pass: `OutOfPages` there means the request waits. A pass runs when
        the layers that it reads of all matches have arrived, be they matched below the device.
        """

    def finish(self, prompt: core.Prompt, plan: core.Plan, generated: core.Tokens, allocation: Allocation) -> None:
        """Decoding has ended: keep what is worth it, nothing by default.

        generated: the tokens whose KV lies in the plan's tail, in order, int32 [n].
        """
        return


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model that strategies depend on."""

    wrapper: core.Wrapper | None = None  # of the model's packets, if it has some
    blocks: bool = False  # trained for chunks that see the system prompt and themselves alone
    craft: core.CraftVariants = core.NO_VARIANTS


STRATEGIES: Registry[Callable[[ModelTraits], Strategy | None]] = Registry("strategy")
"""Functions that make a strategy for a model, by name; None if the model lacks what the strategy needs."""


class Allocation:
    """The part of the cache that one request holds: matches on nodes it reads, and runs of its own that it writes.

    label: the request's name in the cache's books. decode_tokens: most slots needed behind the prompt, `forced` of them
    at once. stages: layers at which a pass may begin, ascending, and the number of layers. cold: use KV from below the
    device too, which takes time to load. spare: pages that the request leaves to others when it starts. alone: no other
    request runs.
    """

    def __init__(
        self,
        cache: KnowledgeCache,
        *,
        tenant: str,
        label: str,
        decode_tokens: int,
        limits: StepLimits,
        stages: tuple[int, ...],
        cold: bool = True,
        forced: int = 0,
        spare: int = 0,
        alone: bool = False,
    ):
        self.cache = cache
        self.tenant = tenant
        self.limits = limits
        self.stages = stages
        self.decode_tokens = decode_tokens
        self.forced = forced
        self.spare = spare
        self.alone = alone
        self.cold = cold
        self.label = label
        self.gave_back = False  # slots were given back before the end: a request that waits may fit now
        self._matches: list[Match] = []
        self._runs: list[core.Run] = []
        self._later = 0  # pages that the tail may need beyond those it has

    @property
    def page_size(self) -> int:
        return self.limits.page_size

    @property
    def ready(self) -> bool:
        return all(match.ready for match in self._matches)

    @property
    def stages_ready(self) -> int:
        waits = (progress for match in self._matches for progress in match.waits.values())
        return min((progress.stages for progress in waits), default=len(self.stages) - 1)

    @property
    def unchecked(self) -> bool:
        """True if the request may have computed KV on matched KV that is not checked yet, or is damaged."""
        begun = any(progress.stages for match in self._matches for progress in match.waits.values())
        return begun or self.broken is not None

    @property
    def load_seconds(self) -> float | None:
        found = [progress.seconds for match in self._matches for progress in match.waits.values()]
        known = [seconds for seconds in found if seconds is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    @property
    def broken(self) -> str | None:
        """Why KV that was matched could not be had; the request must be started again. None if all is well."""
        return next((match.broken for match in self._matches if match.broken is not None), None)

    @property
    def lossy(self) -> bool:
        return any(match.lossy for match in self._matches)

    @property
    def own_pages(self) -> frozenset[int]:
        return frozenset(page for run in self._runs for page in run.pages)

    def prefix(self, tokens: core.Tokens, *, quiet: bool = False) -> Match:
        match = self.cache.matcher.match_prefix(tokens, self.tenant, self.label, cold=self.cold, quiet=quiet)
        self._matches.append(match)
        return match

    def first(self, context: Match, tokens: core.Tokens, candidates: Iterable[Candidate]) -> Match | None:
        match = self.cache.matcher.match_first(context, tokens, candidates, cold=self.cold)
        if match is not None:
            self._matches.append(match)
        return match

    def stretch(self, found: Stretch) -> Match | None:
        """The KV of a stretch, and of what its node holds before it; None if it is gone."""
        match = self.cache.matcher.match_stretch(found, self.tenant, self.label, cold=self.cold)
        if match is not None:
            self._matches.append(match)
        return match

    def path(self, context: Match, tokens: core.Tokens, method: str, *, seen: int = 0, exact: bool = True) -> Match:
        match = self.cache.matcher.match_dependency(context, tokens, method, seen=seen, exact=exact, cold=self.cold)
        self._matches.append(match)
        return match

    def leading(self, match: Match, tokens: int, *, others: int = 0, pieces: int = 0) -> tuple[int, int]:
        """The number of runs of a match to read, and their tokens, so that one step can read the prompt.

        tokens: of the prefix that was asked for; those not read are computed. others, pieces: tokens that are read or
        computed beside it, and the runs that they lie in.
        """
        room = self.limits.room_beside(others, pieces)
        return self.limits.leading((run for run, _ in match.spans), tokens, room)

    def reserve(self, tokens: int, spare: int = 0) -> core.Run:
        run = self.cache.reserve(tokens, self.label, spare)
        self._runs.append(run)
        return run

    def reserve_with_tail(self, tokens: int, *, instead: bool = False) -> core.Run:
        """Slots of the request's own for tokens of the prompt, and behind them the beginning of the tail.

        The tail goes to the end of a page and has at least one slot, or those that are `forced`; `extend` gives more.
        instead: of everything else that the request holds, which it gives back before this tail grows.
        """
        pages = self.cache.pool.pages_for(tokens + max(1, self.forced))
        most = tokens + self.decode_tokens
        run = self.reserve(min(pages * self.page_size, most), self.spare)
        later = self.cache.pool.pages_for(most) - len(run.pages)
        others = len(self.own_pages) - len(run.pages)
        self._later = max(0, later - others) if instead else self._later + later
        return run

    def extend(self, tail: core.Run, tokens: int) -> core.Run:
        """The tail with whole pages behind it, so that it holds at least `tokens` tokens; else OutOfPages."""
        if (tail.start + tail.length) % self.page_size:
            raise ValueError(f"{tail} does not end with a page: it cannot go on in the next one")
        more = self.cache.pool.pages_for(tokens - tail.length) * self.page_size
        run = self.reserve(more)
        return core.Run((*tail.pages, *run.pages), tail.start, tail.length + more)

    def check_growth(self) -> None:
        """Raise OutOfPages where the tail could not grow to its end even if nobody else ran.

        KV that was matched may lie on many pages. What still holds pages though nobody runs will not give them back.
        """
        nodes = {node for match in self._matches for node in match.node.path()}
        read = {page for node in nodes if node.run is not None for page in node.run.pages}
        pool, held = self.cache.pool, len(read | self.own_pages)
        room = min(pool.capacity - held, pool.reclaimable_pages if self.alone else pool.capacity)
        if self._later > room:
            raise core.OutOfPages(
                f"the request holds {held} pages and may need {self._later} more; of the device cache's "
                f"{pool.capacity} it can have {room}: lower max_tokens, or give the device cache more memory"
            )

    def free(self, run: core.Run) -> None:
        self._runs.remove(run)
        self.cache.free(run, clear=self.unchecked)
        self.gave_back = True

    def keep_only(self, *runs: core.Run) -> None:
        """Give everything back but some runs of its own; admitted parts stay in the cache."""
        for run in runs:
            self._runs.remove(run)
        self.close()
        self._runs += runs
        self.gave_back = True

    def hand_over(self) -> Allocation:
        other = copy(self)
        self._matches, self._runs = [], []
        return other

    def close(self) -> None:
        unchecked = self.unchecked
        while self._runs:
            self.cache.free(self._runs.pop(), clear=unchecked)
        while self._matches:
            self._matches.pop().release()


def match_spans(match: Match, begin: int, runs: int | None = None) -> tuple[core.Span, ...]:
    """The matched tokens placed from position (and index) `begin` on; of the first `runs` runs, if not all."""
    spans, index = [], begin
    for run, local_start in match.spans[:runs]:
        spans.append(core.Span.consecutive(index, run, index - local_start))
        index += run.length
    return tuple(spans)


def owner_of(segment: core.Segment, tenant: str) -> str:
    """The owner of a segment's KV: `PUBLIC` if the segment is public, else the tenant."""
    return PUBLIC if segment.public else tenant


def indices(begin: int, end: int) -> core.Tokens:
    return np.arange(begin, end, dtype=np.int32)


def report(
    prompt: core.Prompt,
    reused: Mapping[int, int],
    tiers: Mapping[int, Tier | None] | None = None,
    *,
    recomputed: Mapping[int, core.Tokens] | None = None,
) -> tuple[core.SegmentReport, ...]:
    """The account of a prompt: of segment i the tokens `recomputed[i]` (indexes) were computed, and the rest came from
    `tiers[i]`. Where `recomputed` is silent, the first `reused[i]` tokens did.
    """
    computed, known = recomputed or {}, tiers or {}
    found = []
    for i, segment in enumerate(prompt.segments):
        begin, end = prompt.bounds(i)
        places = computed[i] if i in computed else indices(begin + reused.get(i, 0), end)
        used = len(segment) - len(places)
        tier = known.get(i) if used else None
        found.append(
            core.SegmentReport(
                id=segment.id,
                title=segment.title,
                tokens=len(segment),
                reused=used,
                recomputed=len(places),
                tier=None if tier is None else tier.label,
                score=segment.score,
                recomputed_at=core.intervals(places - begin),
            )
        )
    return tuple(found)


def segments_of(prompt: core.Prompt, kind: core.Kind) -> tuple[int, ...]:
    return tuple(i for i, segment in enumerate(prompt.segments) if segment.kind is kind)
