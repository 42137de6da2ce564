"""craft: chunks keep their KV with the attention it was computed by, which tells how much to mend elsewhere.

Source: Cache-Craft (arXiv:2502.15734), section 3; its arithmetic is in `influence.py`. A chunk that is
met for the first time is computed whole, behind all that stands before it in that prompt, and kept as a variant with
what was measured. Later its best variant is put in place and CFO * |C| tokens are recomputed, those that had looked
most at what stood before them; CFO = alpha * CCI * (1 - adjusted overlap). A request's ratio sets alpha, so that the
share of the reused chunks' tokens is that ratio exactly. All happens in one pass: mended tokens, new chunks, question.

New variants (section 3.3): a chunk in a prefix that none of its variants was computed behind, the best of which has a
CFO (before alpha) above `tau`, is computed whole, and kept. Where the request names a ratio, that alone says how much
is computed.

What the paper leaves open: a chunk that was mended is a mixture of old and new KV and is not kept; a chunk whose tokens
are all computed again is a new variant. Of variants that need equally little mending, that which was computed behind
just these segments is taken, then the oldest. Recomputation stops early (`craft-focus`) at the boundary of stages
behind the layer that tells which chunks the question looks at; from there the other chunks' tokens take their old KV.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Keyed, LookaheadPart, Outlook
from ragjax.cache.match import Candidate, Match, Totals
from ragjax.cache.tree import PUBLIC, Provenance
from ragjax.core import (
    NEVER,
    Kind,
    Measure,
    Move,
    Pass,
    Plan,
    Prefill,
    Prompt,
    RequestError,
    Results,
    Run,
    SegmentReport,
    Span,
    Tokens,
)
from ragjax.reuse.base import Allocation, indices, match_spans, owner_of, report, segments_of
from ragjax.reuse.fusion import METHOD as FUSED
from ragjax.reuse.head import (
    ChunkStrategy,
    head_account,
    head_keys,
    head_length,
    head_part,
    keep_head,
    match_head,
    system_length,
)
from ragjax.reuse.influence import (
    VARIANT,
    ChunkVariants,
    Focus,
    Influence,
    Overhead,
    before,
    find_focus,
    quotas,
    rank,
    record,
    variant_digest,
)
from ragjax.reuse.repair import share
from ragjax.reuse.stitch import alone, asking, check, query_spans

TAU = 1.0
"""Cache fixing overhead, before alpha, above which a chunk in a new prefix gets a variant of its own; 1: none does.

CCI is at least 0.5: below that no chunk is reused in a prefix that shares nothing with those of its variants.
"""


@dataclass(frozen=True)
class Reuse:
    """KV of a chunk that a request reuses. overhead: what mending it takes before alpha, CCI * (1 - overlap)."""

    match: Match
    influence: Influence
    overhead: float


@dataclass(frozen=True)
class Layout:
    """Where everything of a prompt lies while it is computed.

    hit: tokens of the head (`head.py`) that are reused. head: slots of its others, if there are any.
    whole: slots of the chunks that are computed whole. reused: the others' KV.
    picked: indexes mended, int32 [n], ascending. rows: indexes to compute, int32 [m], ascending.
    spans: every key. old: reused KV with nothing hidden. new: slots of what is mended. tail: slots for decoding.
    """

    prompt: Prompt
    hit: int
    head: Run | None
    whole: Mapping[int, Run]
    reused: Mapping[int, Reuse]
    picked: Tokens
    spans: tuple[Span, ...]
    old: tuple[Span, ...]
    new: tuple[Span, ...]
    tail: Run
    rows: Tokens

    @property
    def chunks(self) -> tuple[int, ...]:
        """Indexes of the prompt's chunks."""
        return segments_of(self.prompt, Kind.CHUNK)

    @property
    def exact(self) -> bool:
        """Whether it is full attention: what is reused was computed right behind the system prompt, as it stands."""
        start = system_length(self.prompt)
        return all(
            self.prompt.starts[i] == start and reuse.match.node.method == VARIANT and not reuse.match.node.behind
            for i, reuse in self.reused.items()
        )

    def of_chunks(self, chunks: Iterable[int]) -> Tokens:
        """The mended tokens (indexes) of some chunks, by index of the segment."""
        bounds = map(self.prompt.bounds, chunks)
        parts = [self.picked[(self.picked >= begin) & (self.picked < end)] for begin, end in bounds]
        return np.concatenate([self.picked[:0], *parts])

    def ask(self, rows: Tokens, measures: Iterable[Measure], layers: tuple[int, int] | None = None) -> Pass:
        """The pass over some rows and layers."""
        measures = frozenset(measures)
        return Pass(
            rows, rows, self.spans, measures, (len(self.prompt) - 1,) if Measure.LOGITS in measures else (), layers
        )


@dataclass(frozen=True)
class Outcome:
    """What the passes brought: logits of the last token, scores by pass, and what became of the focus."""

    logits: NDArray[np.float32]
    scores: tuple[Scores, ...]
    figures: Mapping[str, float]


Scores = tuple[Tokens, NDArray[np.float32]]
"""Rows of a pass, int32 [T], and the attention that they gave to each segment, float32 [layers, T, segments]."""

Asking = Generator[Pass | Move, Results, Outcome]


class Craft(ChunkStrategy):
    """Cache-Craft: the best variant of each chunk, mended where its context differs.

    name: as requests ask for it. alpha: scale of the Cache Fix Overhead where a request names no ratio
    (`python -m ragjax.reuse.calibrate`). focus: whether recomputation stops early for chunks out of focus.
    fused: whether preprocessed chunks are taken first; one that stands alone is not, as in `fusion`.
    tau: overhead above which a chunk gets a new variant, in [0, 1]; 1: only where every token is computed anyhow.
    overhead: of a variant, in [0, 1]; ablations leave a factor out.
    """

    measures = frozenset({Measure.LOGITS, Measure.SEGMENT_SCORE})
    selective = True
    steady = False  # it takes the best of the variants that earlier requests left

    def __init__(
        self,
        name: str = "craft",
        *,
        alpha: float = 1.0,
        focus: bool = False,
        fused: bool = False,
        tau: float = TAU,
        overhead: Overhead = Influence.mismatch,
    ):
        self.name = name
        self.alpha = alpha
        self.tau = tau
        self._overhead = overhead
        self._focus = focus
        self._fused = self.preprocessed = fused

    def chunk_keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """The path of the head, and each chunk's best variant, or the one that it would get.

        Before it, where a preprocessed chunk is taken first, that one.
        """
        head = prompt.tokens[: system_length(prompt)]
        keys = list(head_keys(prompt, cache, tenant))
        for i in segments_of(prompt, Kind.CHUNK):
            segment, prior = prompt.segments[i], before(prompt, i)
            tokens = segment.tokens
            if self._takes_fused(prompt, i):
                owner = owner_of(segment, tenant)
                keys.append(cache.key_of(head, tokens, Provenance.APPROXIMATE, FUSED, owner, segment.behind))
            ranked = rank(cache.matcher.find_variants(tokens, VARIANT, tenant, head), prior, self._overhead, self.tau)
            owner = PUBLIC if _public(prompt, i) else tenant
            new = cache.key_of(head, tokens, Provenance.APPROXIMATE, VARIANT, owner, variant_digest(prior))
            keys.append(ranked[0].key if ranked else new)
        return tuple(keys)

    def chunk_outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        """The head, and a variant of each chunk: any, unless new variants are made for new prefixes."""
        parts: list[LookaheadPart] = [head_part(prompt, tenant)]
        head = prompt.tokens[: system_length(prompt)]
        for i in segments_of(prompt, Kind.CHUNK):
            segment, prior = prompt.segments[i], before(prompt, i)
            fused: tuple[bytes, ...] = ()
            if self._takes_fused(prompt, i):
                owners, kind = dict.fromkeys((tenant, PUBLIC)), Provenance.APPROXIMATE
                fused = tuple(cache.key_of(head, segment.tokens, kind, FUSED, o, segment.behind) for o in owners)
            behind = b"" if self.tau >= 1 else variant_digest(prior)
            owner = PUBLIC if _public(prompt, i) else tenant
            name = cache.key_of(head, segment.tokens, Provenance.APPROXIMATE, VARIANT, owner, behind)
            serving = partial(self._serving, cache, segment.tokens, tenant, head, prior)
            parts.append(ChunkVariants(Keyed(fused, name, len(segment)), name, len(segment), serving))
        return Outlook(parts)

    def _serving(
        self, cache: KnowledgeCache, tokens: Tokens, tenant: str, head: Tokens, prior: Sequence[bytes]
    ) -> bool:
        """Whether memory holds a variant of the chunk that serves behind these segments."""
        kept = cache.matcher.find_variants(tokens, VARIANT, tenant, head, cold=False)
        return bool(kept) if self.tau >= 1 else bool(rank(kept, prior, self._overhead, self.tau))

    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill:
        """One pass over what is missing or mended and the query segments; with focus, one a stage until it is known.

        Raises:
            RequestError: as `check`, or if a preprocessed chunk was kept without its attention.
        """
        check(prompt)
        matched, context = match_head(prompt, allocation)
        reused = self._reused(prompt, context, allocation, 1.0 if ratio is not None else self.tau)
        counts = self._counts(prompt, reused, ratio)
        layout = lay_out(prompt, allocation, matched, reused, counts)
        focus = self._focus and len(layout.picked) and len(layout.chunks) > 2
        outcome = yield from _by_stages(layout, allocation.stages) if focus else _at_once(layout)
        _keep(layout, allocation, matched, context, outcome.scores)
        exact = layout.exact and not allocation.lossy
        account = _account(layout, matched)
        return Plan(layout.spans, layout.tail, "full" if exact else None, account, outcome.logits, outcome.figures)

    def _reused(self, prompt: Prompt, context: Match, allocation: Allocation, tau: float) -> dict[int, Reuse]:
        found = {}
        for i in segments_of(prompt, Kind.CHUNK):
            match = self._fused_chunk(prompt, i, context, allocation) if self._takes_fused(prompt, i) else None
            match = match or self._best_variant(prompt, i, context, allocation, tau)
            influence = Influence.decode(match.node.meta) if match is not None else None
            if match is not None and influence is not None:
                found[i] = Reuse(match, influence, self._overhead(influence, before(prompt, i)))
        return found

    def _fused_chunk(self, prompt: Prompt, i: int, context: Match, allocation: Allocation) -> Match | None:
        segment, prior = prompt.segments[i], before(prompt, i)

        def cfo(meta: bytes) -> float:
            influence = Influence.decode(meta)
            return 1.0 if influence is None else self._overhead(influence, prior)

        candidate = Candidate(Provenance.APPROXIMATE, FUSED, segment.behind, cfo=cfo)
        match = allocation.first(context, segment.tokens, [candidate])
        if match is not None and Influence.decode(match.node.meta) is None:
            raise RequestError(
                f"chunk {segment.id!r} was preprocessed without recording its attention, which this strategy needs: "
                "preprocess it with recording, or choose another strategy",
                param="rag.strategy",
            )
        return match

    def _best_variant(self, prompt: Prompt, i: int, context: Match, allocation: Allocation, tau: float) -> Match | None:
        tokens = prompt.segments[i].tokens
        kept = allocation.cache.matcher.find_variants(
            tokens, VARIANT, allocation.tenant, context.tokens, cold=allocation.cold
        )
        ranked = rank(kept, before(prompt, i), self._overhead, tau)
        kind = Provenance.APPROXIMATE
        candidates = [Candidate(kind, VARIANT, each.behind, True, each.overhead) for each in ranked]
        return allocation.first(context, tokens, candidates)

    def _takes_fused(self, prompt: Prompt, i: int) -> bool:
        return self._fused and bool(prompt.segments[i].behind) and not alone(prompt)

    def _counts(self, prompt: Prompt, reused: Mapping[int, Reuse], ratio: float | None) -> dict[int, int]:
        """Tokens to recompute of each reused chunk (N of eq. 14)."""
        lengths = [len(prompt.segments[i]) for i in reused]
        overheads = [reuse.overhead for reuse in reused.values()]
        if ratio is not None:
            return dict(zip(reused, quotas(overheads, lengths, share(ratio, sum(lengths))), strict=True))
        shares = (min(1.0, self.alpha * overhead) for overhead in overheads)
        return {i: share(part, n) for i, part, n in zip(reused, shares, lengths, strict=True)}


def _public(prompt: Prompt, i: int) -> bool:
    """Whether a variant of segment i is everybody's: the segment is, and all that stands before it."""
    return prompt.public >= prompt.starts[i + 1]


def lay_out(
    prompt: Prompt, allocation: Allocation, matched: Match, reused: Mapping[int, Reuse], counts: Mapping[int, int]
) -> Layout:
    """Reserve what will be written and place everything; `counts[i]` tokens of reused chunk i are computed anew.

    Raises:
        OutOfPages: if there is no room now.
    """
    starts, page_size, length = prompt.starts, allocation.page_size, head_length(prompt)
    reused = {i: reuse for i, reuse in reused.items() if counts[i] < len(prompt.segments[i])}
    picks = [starts[i] + np.sort(reuse.influence.ranking[: counts[i]]) for i, reuse in reused.items()]
    picked = np.concatenate([indices(0, 0), *picks]).astype(np.int32)
    asked = asking(prompt)
    others = len(prompt) - length + len(picked) + allocation.decode_tokens
    runs, hit = allocation.leading(matched, length, others=others, pieces=len(prompt.segments) + 1)
    head = allocation.reserve(length - hit) if length > hit else None
    whole = {i: allocation.reserve(len(prompt.segments[i])) for i in segments_of(prompt, Kind.CHUNK) if i not in reused}
    new = (Span(picked, allocation.reserve(len(picked))),) if len(picked) else ()
    run = allocation.reserve_with_tail(len(asked))

    old = tuple(span for i, reuse in reused.items() for span in match_spans(reuse.match, starts[i]))
    hidden = (replace(span, indices=np.where(np.isin(span.indices, picked), NEVER, span.indices)) for span in old)
    spans = [*match_spans(matched, 0, runs=runs), *hidden, *new]
    if head is not None:
        spans.append(Span.consecutive(hit, head))
    spans += [Span.consecutive(starts[i], piece) for i, piece in whole.items()]
    spans += query_spans(prompt, run, page_size)
    computed = [indices(*prompt.bounds(i)) for i in whole]
    rows = np.sort(np.concatenate([indices(hit, length), picked, *computed, asked]))
    tail = run.slice(len(asked), run.length, page_size)
    return Layout(prompt, hit, head, whole, reused, picked, tuple(spans), old, new, tail, rows)


def _at_once(layout: Layout) -> Asking:
    """One pass through all layers; the attention is measured if there is a new chunk to keep."""
    measures = {Measure.LOGITS, Measure.SEGMENT_SCORE} if layout.whole else {Measure.LOGITS}
    results = yield layout.ask(layout.rows, measures)
    scores = ((layout.rows, results[Measure.SEGMENT_SCORE]),) if layout.whole else ()
    return Outcome(results[Measure.LOGITS][0], scores, {})


def _by_stages(layout: Layout, stages: Sequence[int]) -> Asking:
    """Stage by stage until the focus is known; then without the tokens of other chunks, which take their old KV."""
    depth, at = stages[-1], 0
    focus: Focus | None = None
    scores: list[Scores] = []
    results: Results = {}
    for begin, at in pairwise(stages):
        measures = {Measure.SEGMENT_SCORE, Measure.LOGITS} if at == depth else {Measure.SEGMENT_SCORE}
        results = yield layout.ask(layout.rows, measures, (begin, at))
        scores.append((layout.rows, results[Measure.SEGMENT_SCORE]))
        focus = find_focus(_seen_by_question(layout, scores))
        if focus is not None:
            break
    if at < depth:
        results = yield from _rest(layout, _out_of_focus(layout, focus), (at, depth), scores)
    return Outcome(results[Measure.LOGITS][0], tuple(scores), _savings(layout, focus, at, depth))


def _rest(
    layout: Layout, dropped: Tokens, layers: tuple[int, int], scores: list[Scores]
) -> Generator[Pass | Move, Results, Results]:
    """The remaining layers without the dropped rows; what they measure of new chunks is added to `scores`."""
    if len(dropped):
        yield Move(dropped, layout.old, layout.new, layers)
    rows = layout.rows[~np.isin(layout.rows, dropped)]
    measures = {Measure.LOGITS, Measure.SEGMENT_SCORE} if layout.whole else {Measure.LOGITS}
    results = yield layout.ask(rows, measures, layers)
    if layout.whole:
        scores.append((rows, results[Measure.SEGMENT_SCORE]))
    return results


def _savings(layout: Layout, focus: Focus | None, at: int, depth: int) -> dict[str, float]:
    """Shares of the mending (tokens times layers) that the focus saves: if it ended at once, and as it did.

    at: the layer from which on it did.
    """
    dropped = len(_out_of_focus(layout, focus)) / len(layout.picked)
    layer = depth if focus is None else focus.layer
    return {
        "focus_layer": float(layer),
        "focus_ideal": dropped * (1 - layer / depth),
        "focus_realised": dropped * (1 - at / depth),
    }


def _out_of_focus(layout: Layout, focus: Focus | None) -> Tokens:
    """Mended tokens (indexes) of the chunks that the question does not look at."""
    if focus is None:
        return layout.picked[:0]
    return layout.of_chunks(i for at, i in enumerate(layout.chunks) if at not in focus.chunks)


def _seen_by_question(layout: Layout, scores: Sequence[Scores]) -> NDArray[np.float64]:
    """inter(C, U) of every layer so far and chunk, [layers, chunks]."""
    begin, chunks = layout.prompt.starts[-2], list(layout.chunks)
    return np.concatenate([score[:, rows >= begin][..., chunks].sum(1, dtype=np.float64) for rows, score in scores])


def _keep(layout: Layout, allocation: Allocation, matched: Match, context: Match, scores: Sequence[Scores]) -> None:
    """Admit the head, and the chunks that were computed whole."""
    prompt = layout.prompt
    totals = Totals(len(prompt) - len(layout.rows), len(layout.rows))
    if layout.head is not None:
        context = keep_head(prompt, allocation, matched, layout.hit, layout.head, totals)
    if not layout.whole or not context.complete:
        return
    own = np.concatenate([indices(*prompt.bounds(i)) for i in layout.whole])
    score = np.concatenate([score[:, np.isin(rows, own)] for rows, score in scores])
    for i, run in layout.whole.items():
        allocation.cache.admitter.admit_segment(
            context, prompt.segments[i].tokens, run, prompt.starts[i], Provenance.APPROXIMATE, VARIANT,
            behind=variant_digest(before(prompt, i)), meta=record(prompt, i, own, score).encode(), variant=True,
            public=_public(prompt, i), totals=totals,
        )  # fmt: skip


def _account(layout: Layout, matched: Match) -> tuple[SegmentReport, ...]:
    """What was reused. A token that was computed in some layers counts as recomputed."""
    prompt = layout.prompt
    reused, tiers = head_account(prompt, matched, layout.hit)
    tiers |= {i: reuse.match.tier() for i, reuse in layout.reused.items()}
    return report(prompt, reused, tiers, recomputed={i: layout.of_chunks([i]) for i in layout.reused})
