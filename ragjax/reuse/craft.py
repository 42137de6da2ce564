"""craft: chunks keep their KV with the attention it was computed by, which tells how much to mend elsewhere.

Source: Cache-Craft (arXiv:2502.15734), section 3; its arithmetic is in `influence.py`. A chunk that is met for the
first time is computed whole, behind all that stands before it in that prompt, and kept as a variant with what was
measured. Later its best variant is put in place and CFO * |C| tokens are recomputed, those that had looked most at what
stood before them; CFO = alpha * CCI * (1 - adjusted overlap). A request's ratio sets alpha, so that the share of the
reused chunks' tokens is that ratio exactly. All happens in one pass. New variants (section 3.3) come as `CraftVariants`
says.

What the paper leaves open: a chunk that was mended is a mixture of old and new KV and is not kept; a chunk whose tokens
are all computed again is a new variant. Of variants that need equally little mending, that which was computed behind
just these segments is taken, then the oldest. Recomputation stops early (`craft-focus`) at the boundary of sections
behind the layer that tells which chunks the question looks at; from there the other chunks' tokens take their old KV.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ragjax import core
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Keyed, LookaheadPart, Outlook
from ragjax.cache.match import Candidate, Match, Totals
from ragjax.cache.tree import PUBLIC, Provenance
from ragjax.core.passes import sections
from ragjax.reuse.base import LOGITS, Allocation, indices, owner_of, segments_of
from ragjax.reuse.exact import leading_part
from ragjax.reuse.fusion import METHOD as FUSED
from ragjax.reuse.head import ChunkStrategy, head_length, keep_leading, match_head, system_length
from ragjax.reuse.influence import (
    VARIANT,
    ChunkVariants,
    Focus,
    Influence,
    Variant,
    before,
    find_focus,
    quotas,
    rank,
    record,
    variant_digest,
)
from ragjax.reuse.repair import share
from ragjax.reuse.stitch import Stitched, alone, check, lay_out


@dataclass(frozen=True)
class Reuse:
    match: Match
    influence: Influence
    overhead: float


Scores = tuple[core.Tokens, NDArray[np.float32]]
"""Rows of a pass, int32 [T], and the attention that they gave to each segment, float32 [layers, T, segments]."""

Asking = Generator[core.Pass | core.Move, core.Results, tuple[NDArray[np.float32], Sequence[Scores], dict[str, float]]]
"""Returns the logits of the last token, scores by pass, and figures of the focus."""

SCORED = LOGITS | {core.Measure.SEGMENT_SCORE}


class Craft(ChunkStrategy):
    """Cache-Craft: the best variant of each chunk, mended where its context differs.

    name: as requests ask for it. alpha: scale of the Cache Fix Overhead where a request names no ratio.
    variants: when a chunk gets a new one, and whether recomputation stops early for chunks out of focus. CCI is at
    least 0.5: below that tau reuses no chunk in a prefix that shares nothing with its variants'.
    fused: whether preprocessed chunks are taken first; one that stands alone is not, as in `fusion`.
    """

    measures = SCORED
    selective = True
    steady = False  # it takes the best of the variants that earlier requests left

    def __init__(
        self,
        name: str = "craft",
        *,
        alpha: float = 1.0,
        variants: core.CraftVariants = core.NO_VARIANTS,
        fused: bool = False,
    ):
        self.name = name
        self.alpha = alpha
        self.variants = variants
        self._fused = self.preprocessed = fused

    def overhead(self, influence: Influence, prior: Sequence[bytes]) -> float:
        """Fix overhead of a variant behind segments with these digests, before alpha, in [0, 1]."""
        return influence.mismatch(prior)

    def chunk_outlook(self, prompt: core.Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        """The head, and a variant of each chunk: any, unless new variants are made for new prefixes."""
        parts: list[LookaheadPart] = [leading_part(prompt, tenant, head_length(prompt))]
        head = prompt.tokens[: system_length(prompt)]
        for i in segments_of(prompt, core.Kind.CHUNK):
            segment, prior = prompt.segments[i], before(prompt, i)
            fused: tuple[bytes, ...] = ()
            if self._takes_fused(prompt, i):
                owners, kind = dict.fromkeys((owner_of(segment, tenant), tenant, PUBLIC)), Provenance.APPROXIMATE
                fused = tuple(cache.key_of(head, segment.tokens, kind, FUSED, o, segment.behind) for o in owners)
            owner = PUBLIC if _public(prompt, i) else tenant
            key_of = partial(cache.key_of, head, segment.tokens, Provenance.APPROXIMATE, VARIANT, owner)
            new = key_of(variant_digest(prior))
            name = key_of(b"") if self._serves_to(cache) >= 1 else new
            ranked = partial(self._ranked, cache, segment.tokens, tenant, head, prior)
            parts.append(ChunkVariants(Keyed(fused, name, len(segment)), name, len(segment), new, ranked))
        return Outlook(parts)

    def _ranked(
        self,
        cache: KnowledgeCache,
        tokens: core.Tokens,
        tenant: str,
        head: core.Tokens,
        prior: Sequence[bytes],
        cold: bool,
    ) -> list[Variant]:
        kept = cache.matcher.find_variants(tokens, VARIANT, tenant, head, cold=cold)
        return rank(kept, prior, self.overhead, self._serves_to(cache))

    def _serves_to(self, cache: KnowledgeCache) -> float:
        """Overhead up to which a variant serves behind other segments than its own; below 0: behind none."""
        when = self.variants.when
        if when == "fill" and not cache.matcher.variants.full:
            return -1.0
        return self.variants.tau if when in ("above", "fill") else 1.0

    def chunk_prefill(self, prompt: core.Prompt, allocation: Allocation, ratio: float | None) -> core.Prefill:
        """One pass over what is missing or mended and the query segments; with focus, one a stage until it is known."""
        check(prompt)
        matched, context = match_head(prompt, allocation)
        reused = self._reused(prompt, context, allocation, self._serves_to(allocation.cache))
        counts = self._counts(prompt, reused, ratio)
        mending = plan_mending(prompt, allocation, matched, reused, counts)
        focus = self.variants.focus and len(mending.picked) and len(mending.chunks) > 2
        asking = _by_sections(mending, self.variants.window) if focus else _at_once(mending)
        logits, scores, figures = yield from asking
        _keep(mending, allocation, context, scores)
        exact_to: core.Exactness | None = "full" if mending.exact and not allocation.lossy else None
        account = mending.stitched.account(mending.picked)
        mean = {"cfo": float(np.mean([reuse.overhead for reuse in reused.values()]))} if reused else {}
        return core.Plan(mending.spans, mending.stitched.tail, exact_to, account, logits, figures | mean)

    def _reused(self, prompt: core.Prompt, context: Match, allocation: Allocation, tau: float) -> dict[int, Reuse]:
        found = {}
        for i in segments_of(prompt, core.Kind.CHUNK):
            match = self._fused_chunk(prompt, i, context, allocation) if self._takes_fused(prompt, i) else None
            match = match or self._best_variant(prompt, i, context, allocation, tau)
            influence = Influence.decode(match.node.meta) if match is not None else None
            if match is not None and influence is not None:
                found[i] = Reuse(match, influence, self.overhead(influence, before(prompt, i)))
        return found

    def _fused_chunk(self, prompt: core.Prompt, i: int, context: Match, allocation: Allocation) -> Match | None:
        segment, prior = prompt.segments[i], before(prompt, i)

        def cfo(meta: bytes) -> float:
            influence = Influence.decode(meta)
            return 1.0 if influence is None else self.overhead(influence, prior)

        candidate = Candidate(Provenance.APPROXIMATE, FUSED, segment.behind, cfo=cfo)
        match = allocation.first(context, segment.tokens, [candidate])
        if match is not None and Influence.decode(match.node.meta) is None:
            raise core.RequestError(
                f"chunk {segment.id!r} was preprocessed without recording its attention, which this strategy needs: "
                "preprocess it with recording, or choose another strategy",
                param="rag.strategy",
            )
        return match

    def _best_variant(
        self, prompt: core.Prompt, i: int, context: Match, allocation: Allocation, tau: float
    ) -> Match | None:
        tokens = prompt.segments[i].tokens
        find, whose = allocation.cache.matcher.find_variants, allocation.tenant
        kept = find(tokens, VARIANT, whose, context.tokens, cold=allocation.cold)
        ranked, kind = rank(kept, before(prompt, i), self.overhead, tau), Provenance.APPROXIMATE
        candidates = [Candidate(kind, VARIANT, each.behind, True, each.overhead) for each in ranked]
        return allocation.first(context, tokens, candidates)

    def _takes_fused(self, prompt: core.Prompt, i: int) -> bool:
        return self._fused and bool(prompt.segments[i].behind) and not alone(prompt)

    def _counts(self, prompt: core.Prompt, reused: Mapping[int, Reuse], ratio: float | None) -> dict[int, int]:
        lengths = [len(prompt.segments[i]) for i in reused]
        overheads = [reuse.overhead for reuse in reused.values()]
        if ratio is not None:
            return dict(zip(reused, quotas(overheads, lengths, share(ratio, sum(lengths))), strict=True))
        shares = (min(1.0, self.alpha * overhead) for overhead in overheads)
        return {i: share(part, n) for i, part, n in zip(reused, shares, lengths, strict=True)}


def _public(prompt: core.Prompt, i: int) -> bool:
    """True if a variant of segment i is public: the segment is, and all segments before it."""
    return prompt.public >= prompt.starts[i + 1]


@dataclass(frozen=True)
class Mending:
    """The tokens that a request computes, over a prompt's layout; indexes, ascending."""

    stitched: Stitched
    picked: core.Tokens  # of reused chunks, to be mended
    rows: core.Tokens  # all that is computed

    @cached_property
    def spans(self) -> tuple[core.Span, ...]:
        return self.stitched.mended(self.picked)

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        return segments_of(self.stitched.prompt, core.Kind.CHUNK)

    @property
    def exact(self) -> bool:
        """True if it is full attention: all reused KV was computed right behind the system prompt, at its place."""
        prompt = self.stitched.prompt
        start = system_length(prompt)
        return all(
            prompt.starts[i] == start and match.node.method == VARIANT and not match.node.behind
            for i, match in self.stitched.matches.items()
        )

    def ask(
        self, rows: core.Tokens, measures: Iterable[core.Measure], layers: tuple[int, int] | None = None
    ) -> core.Pass:
        measures = frozenset(measures)
        logits = (len(self.stitched.prompt) - 1,) if core.Measure.LOGITS in measures else ()
        return core.Pass(rows, rows, self.spans, measures, logits, layers)

    def out_of_focus(self, focus: Focus | None) -> core.Tokens:
        if focus is None:
            return self.picked[:0]
        unseen = (i for at, i in enumerate(self.chunks) if at not in focus.chunks)
        return np.concatenate(
            [self.picked[:0], *(np.intersect1d(self.picked, indices(*self.stitched.prompt.bounds(i))) for i in unseen)]
        )


def plan_mending(
    prompt: core.Prompt, allocation: Allocation, matched: Match, reused: Mapping[int, Reuse], counts: Mapping[int, int]
) -> Mending:
    """Reserve what will be written and place everything; `counts[i]` tokens of reused chunk i are computed anew."""
    reused = {i: reuse for i, reuse in reused.items() if counts[i] < len(prompt.segments[i])}
    picks = [prompt.starts[i] + np.sort(reuse.influence.ranking[: counts[i]]) for i, reuse in reused.items()]
    picked = np.concatenate([indices(0, 0), *picks]).astype(np.int32)
    matches = {i: reuse.match for i, reuse in reused.items()}
    begins = {i: prompt.starts[i] for i in segments_of(prompt, core.Kind.CHUNK)}
    stitched = lay_out(prompt, allocation, matched, matches, begins, repaired=len(picked))
    whole = [indices(*prompt.bounds(i)) for i in stitched.fresh]
    missing = indices(stitched.hit, head_length(prompt))
    return Mending(stitched, picked, np.sort(np.concatenate([missing, picked, *whole, stitched.queries])))


def _at_once(mending: Mending) -> Asking:
    """One pass through all layers; the attention is measured if there is a new chunk to keep."""
    whole = bool(mending.stitched.fresh)
    results = yield mending.ask(mending.rows, SCORED if whole else LOGITS)
    scores = ((mending.rows, results[core.Measure.SEGMENT_SCORE]),) if whole else ()
    return results[core.Measure.LOGITS][0], scores, {}


def _by_sections(mending: Mending, window: int) -> Asking:
    """Section by section until the focus is known; then without the tokens of other chunks, which take their old KV."""
    stages, prompt, whole = sections(mending.stitched.stages[-1]), mending.stitched.prompt, bool(mending.stitched.fresh)
    depth, at = stages[-1], 0
    focus: Focus | None = None
    scores: list[Scores] = []
    results: core.Results = {}
    for begin, at in pairwise(stages):
        results = yield mending.ask(mending.rows, SCORED if at == depth else {core.Measure.SEGMENT_SCORE}, (begin, at))
        scores.append((mending.rows, results[core.Measure.SEGMENT_SCORE]))
        # inter(C, U) of every layer so far and chunk, [layers, chunks]
        seen_LZ = [
            score[:, rows >= prompt.starts[-2]][..., list(mending.chunks)].sum(1, dtype=np.float64)
            for rows, score in scores
        ]
        focus = find_focus(np.concatenate(seen_LZ), window)
        if focus is not None:
            break
    dropped = mending.out_of_focus(focus)
    if at < depth:
        if len(dropped):
            fresh = core.Span(mending.picked, mending.stitched.repaired)
            yield core.Move(dropped, mending.stitched.chunk, (fresh,), (at, depth))
        rows = mending.rows[~np.isin(mending.rows, dropped)]
        results = yield mending.ask(rows, SCORED if whole else LOGITS, (at, depth))
        if whole:
            scores.append((rows, results[core.Measure.SEGMENT_SCORE]))
    share, layer = len(dropped) / len(mending.picked), depth if focus is None else focus.layer
    # shares of the mending (tokens times layers) that the focus saves: if it ended at once, and as it did
    figures = {
        "focus_layer": float(layer),
        "focus_ideal": share * (1 - layer / depth),
        "focus_realised": share * (1 - at / depth),
    }
    return results[core.Measure.LOGITS][0], scores, figures


def _keep(mending: Mending, allocation: Allocation, context: Match, scores: Sequence[Scores]) -> None:
    stitched, prompt = mending.stitched, mending.stitched.prompt
    totals = Totals(len(prompt) - len(mending.rows), len(mending.rows))
    if stitched.fresh_head.length:
        length, hit = head_length(prompt), stitched.hit
        context = keep_leading(prompt, allocation, stitched.matched, hit, stitched.fresh_head, length, totals)
    if not stitched.fresh or not context.complete:
        return
    own = np.concatenate([indices(*prompt.bounds(i)) for i in stitched.fresh])
    score = np.concatenate([score[:, np.isin(rows, own)] for rows, score in scores])
    for i, run in stitched.fresh.items():
        allocation.cache.admitter.admit_segment(
            context, prompt.segments[i].tokens, run, prompt.starts[i], Provenance.APPROXIMATE, VARIANT,
            behind=variant_digest(before(prompt, i)), meta=record(prompt, i, own, score).encode(), variant=True,
            public=_public(prompt, i), totals=totals,
        )  # fmt: skip
