"""Cached chunks side by side: what several strategies share (full reuse; FusionRAG, section 2.2.1, eqs. 5 and 6).

A source says where a chunk's KV may be kept. A chunk that the cache does not have is computed behind the system prompt
alone, at the position right behind it, and admitted. Each chunk is moved to its place by a RoPE offset when it is read.
Recomputed tokens lie in slots of the request's own, and the stale originals are hidden from this request alone
(section 4.3), so any number of requests share a chunk.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ragjax import core
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Keyed, LookaheadPart, Outlook
from ragjax.cache.match import Candidate, Match, Totals
from ragjax.cache.tree import PUBLIC, Provenance
from ragjax.reuse.base import LOGITS, Allocation, indices, match_spans, owner_of, report, segments_of
from ragjax.reuse.exact import leading_part
from ragjax.reuse.head import (
    ChunkStrategy,
    cut_head,
    head_account,
    head_length,
    keep_leading,
    match_head,
    system_length,
)

NOTHING = core.Run((), 0, 0)


class Isolated:
    """Where the KV of chunks comes from; here they are computed behind the system prompt alone (FusionRAG, eq. 5).

    method: the name under which such chunks are kept.
    preprocessed: whether it takes preprocessed chunks where there are some.
    leads: whether leading chunks whose causal KV is kept are taken as they are, exact.
    """

    preprocessed = False
    leads = False

    def __init__(self, method: str = "naive"):
        self.method = method

    def candidates(self, prompt: core.Prompt, i: int) -> Iterable[Candidate]:
        """Where the KV of segment i, a chunk, may be kept, best first."""
        return (Candidate(Provenance.ISOLATED, self.method),)


@dataclass(frozen=True)
class Stitched:
    """Where everything of a prompt lies: its head, its chunks side by side, and the query segments behind them."""

    prompt: core.Prompt
    stages: tuple[int, ...]  # layers at which a pass may begin, and the number of layers
    page_size: int
    matched: Match  # on the head (`head.py`)
    hit: int  # tokens of the head that are reused
    matches: Mapping[int, Match]  # on the chunks that are reused, by segment
    fresh_head: core.Run  # slots of the head's other tokens
    fresh: Mapping[int, core.Run]  # slots of the other chunks, by segment
    head: tuple[core.Span, ...]
    chunk: tuple[core.Span, ...]  # chunks at their places, nothing hidden
    query: tuple[core.Span, ...]  # query segments behind the head
    tail: core.Run  # slots for generated tokens
    repaired: core.Run  # slots for tokens to recompute
    scratch: core.Run  # slots to measure with

    @property
    def spans(self) -> tuple[core.Span, ...]:
        return (*self.head, *self.chunk, *self.query)

    @cached_property
    def chunks(self) -> core.Tokens:
        parts = (indices(*self.prompt.bounds(i)) for i in segments_of(self.prompt, core.Kind.CHUNK))
        return np.concatenate([indices(0, 0), *parts])

    @cached_property
    def queries(self) -> core.Tokens:
        return asking(self.prompt)

    @cached_property
    def exact_chunk(self) -> int | None:
        """The segment of the chunk whose KV equals full attention's: right behind the system prompt, and isolated."""
        begin = system_length(self.prompt)
        for i in segments_of(self.prompt, core.Kind.CHUNK):
            match = self.matches.get(i)  # none: it was computed for this request, isolated
            isolated = match is None or (match.node.provenance is Provenance.ISOLATED and not match.lossy)
            if self.prompt.starts[i] == begin and isolated:
                return i
        return None

    @cached_property
    def unfused(self) -> int:
        """Chunks that were not found preprocessed, but for one that is exact at its place."""
        others = (i for i in segments_of(self.prompt, core.Kind.CHUNK) if i != self.exact_chunk)
        return sum(
            (match := self.matches.get(i)) is None or not match.node.behind == self.prompt.segments[i].behind != b""
            for i in others
        )

    @property
    def question(self) -> core.Tokens:
        return indices(self.prompt.starts[-2], len(self.prompt))

    def ask(
        self,
        measures: frozenset[core.Measure] = LOGITS,
        *,
        measured: tuple[int, int] | None = None,
        asking: core.Tokens | None = None,
    ) -> core.Pass:
        logits = (len(self.prompt) - 1,) if core.Measure.LOGITS in measures else ()
        return core.Pass(self.queries, self.queries, self.spans, measures, logits, measured=measured, asking=asking)

    def mended(self, chosen: core.Tokens) -> tuple[core.Span, ...]:
        """Every key of the prompt, with the chosen tokens (indexes, ascending) in the request's own slots."""
        if not len(chosen):
            return self.spans
        fresh = core.Span(chosen, self.repaired.slice(0, len(chosen), self.page_size))
        return (*self.head, *hide(self.chunk, chosen, self.page_size), fresh, *self.query)

    def repair(self, chosen: core.Tokens) -> core.Pass:
        """The chosen tokens and the query segments, computed over everything before them (FusionRAG, eq. 9)."""
        rows = np.union1d(chosen, self.queries).astype(np.int32)
        return core.Pass(rows, rows, self.mended(chosen), LOGITS, (len(self.prompt) - 1,))

    def plan(
        self, spans: tuple[core.Span, ...], logits: NDArray[np.float32], recomputed: core.Tokens | None = None
    ) -> core.Plan:
        """The account of what was carried out; `recomputed` are indexes of chunk tokens."""
        redone, kept = indices(0, 0) if recomputed is None else recomputed, self.matches.values()
        isolated = all(match.node.provenance is Provenance.ISOLATED and not match.lossy for match in kept)
        whole = len(redone) == len(self.chunks) or (alone(self.prompt) and isolated)
        exact_to: core.Exactness | None = "full" if whole and not (self.matched.lossy and self.hit) else None
        return core.Plan(spans, self.tail, exact_to, self.account(redone), logits, unfused=self.unfused)

    def account(self, recomputed: core.Tokens) -> tuple[core.SegmentReport, ...]:
        """Reports of all segments; a token that was computed in some layers counts as recomputed."""
        reused, tiers = head_account(self.prompt, self.matched, self.hit)
        computed = {}
        for i, match in self.matches.items():
            computed[i] = np.intersect1d(indices(*self.prompt.bounds(i)), recomputed)
            tiers[i] = match.tier()
        return report(self.prompt, reused, tiers, recomputed=computed)


def prepare(
    prompt: core.Prompt, allocation: Allocation, source: Isolated, *, repaired: int = 0, scratch: int = 0
) -> Generator[core.Pass, core.Results, Stitched]:
    """Match, reserve, and compute what is missing of the head and the chunks, in at most one pass.

    repaired: tokens that will be recomputed. scratch: tokens for measuring, whose slots the caller frees.
    """
    check(prompt)
    system, length = system_length(prompt), head_length(prompt)
    matched, context = match_head(prompt, allocation)
    chunks = segments_of(prompt, core.Kind.CHUNK)
    found = {i: allocation.first(context, prompt.segments[i].tokens, source.candidates(prompt, i)) for i in chunks}
    matches = {i: match for i, match in found.items() if match is not None}
    begins = dict.fromkeys(chunks, system)
    stitched = lay_out(prompt, allocation, matched, matches, begins, repaired=repaired, scratch=scratch)
    fresh, fresh_head = stitched.fresh, stitched.fresh_head
    if not fresh_head.length and not fresh:
        return stitched

    missing_tokens = fresh_head.length + sum(run.length for run in fresh.values()) + len(stitched.queries)
    # what is missing is computed, and may be recomputed behind the others as well
    totals = Totals(len(prompt) - missing_tokens, missing_tokens + repaired)
    seen = cut_head(stitched.head, system, (length, len(prompt)), allocation.page_size)
    yield missing(prompt, stitched.hit, length, fresh, seen)
    if fresh_head.length:
        context = keep_leading(prompt, allocation, matched, stitched.hit, fresh_head, length, totals)
    for i, run in fresh.items() if context.complete else ():
        segment = prompt.segments[i]
        allocation.cache.admitter.admit_segment(
            context, segment.tokens, run, system, Provenance.ISOLATED, source.method, public=segment.public,
            totals=totals,
        )  # fmt: skip
    return stitched


def lay_out(
    prompt: core.Prompt,
    allocation: Allocation,
    matched: Match,
    matches: Mapping[int, Match],
    begins: Mapping[int, int],
    *,
    repaired: int = 0,
    scratch: int = 0,
) -> Stitched:
    """Reserve what will be written, and place everything.

    matches: the chunks that are reused, by segment. begins: the position at which the first token of each other chunk
    is computed, by segment. repaired: tokens to recompute. scratch: tokens to measure with.
    """
    length, chunks, queries = head_length(prompt), segments_of(prompt, core.Kind.CHUNK), asking(prompt)
    others = len(prompt) - length + allocation.decode_tokens + repaired
    runs, hit = allocation.leading(matched, length, others=others, pieces=len(prompt.segments) + 1)
    fresh_head = reserve(allocation, length - hit)
    fresh = {i: allocation.reserve(len(prompt.segments[i])) for i in chunks if i not in matches}
    own = allocation.reserve_with_tail(len(queries))
    pieces = {i: ((run, begins[i]),) for i, run in fresh.items()} | {i: match.spans for i, match in matches.items()}
    rest = (core.Span.consecutive(hit, fresh_head),) if fresh_head.length else ()
    return Stitched(
        prompt=prompt,
        stages=allocation.stages,
        page_size=allocation.page_size,
        matched=matched,
        hit=hit,
        matches=matches,
        fresh_head=fresh_head,
        fresh=fresh,
        head=(*match_spans(matched, 0, runs=runs), *rest),
        chunk=tuple(span for i in chunks for span in _placed(prompt.starts[i], pieces[i])),
        query=query_spans(prompt, own, allocation.page_size),
        tail=own.slice(len(queries), own.length, allocation.page_size),
        repaired=reserve(allocation, repaired),
        scratch=reserve(allocation, scratch),
    )


def led(prompt: core.Prompt, cache: KnowledgeCache, tenant: str) -> core.Prompt:
    """The prompt, whose leading chunks count as its head if their causal KV is kept (FusionRAG, section 4.1)."""
    chunks = segments_of(prompt, core.Kind.CHUNK)
    first = prompt.starts.index(head_length(prompt))
    leading = [i for at, i in enumerate(chunks, first) if at == i]  # chunks that follow the head and each other
    end = prompt.starts[leading[-1] + 1] if leading else 0
    found = cache.peek(Outlook((leading_part(prompt, tenant, end),))).found
    exact = {i for i in leading if prompt.starts[i + 1] <= found}
    if not exact:
        return prompt
    segments = (replace(s, kind=core.Kind.QUERY) if i in exact else s for i, s in enumerate(prompt.segments))
    return core.Prompt(tuple(segments))


def check(prompt: core.Prompt) -> None:
    """Refuse a prompt that is not made of system segments, chunks and query segments."""
    if segments_of(prompt, core.Kind.NODE):
        raise core.RequestError(
            "the prompt has trees of paths, and this strategy reads chunks: choose dependency or full attention",
            param="rag.strategy",
        )
    last = prompt.segments[-1].kind
    if last is not core.Kind.QUERY:
        raise core.RequestError(f"the prompt ends with a {last} segment: put a query segment behind it", param="prompt")


class SourceStrategy(ChunkStrategy):
    """A strategy whose chunks' KV comes from one source, `_source`."""

    _source: Isolated

    def chunk_outlook(self, prompt: core.Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        """The head, and each chunk: kept as any of its candidates, else computed as an isolated one."""
        parts: list[LookaheadPart] = [leading_part(prompt, tenant, head_length(prompt))]
        head = prompt.tokens[: system_length(prompt)]
        for i in segments_of(prompt, core.Kind.CHUNK):
            chunk = prompt.segments[i]
            own = owner_of(chunk, tenant)
            keys = [
                candidate_key(cache, head, chunk.tokens, each, owner)
                for each in self._source.candidates(prompt, i)
                for owner in dict.fromkeys((own, tenant, PUBLIC))
            ]
            name = cache.key_of(head, chunk.tokens, Provenance.ISOLATED, self._source.method, own)
            parts.append(Keyed(keys, name, len(chunk)))
        return Outlook(parts)


def candidate_key(
    cache: KnowledgeCache, head: core.Tokens, tokens: core.Tokens, candidate: Candidate, owner: str
) -> bytes:
    kind, method, behind, *_ = candidate
    return cache.key_of(head, tokens, kind, method, owner, behind)


def hide(spans: Iterable[core.Span], chosen: core.Tokens, page_size: int) -> tuple[core.Span, ...]:
    """The spans without the chosen tokens (indexes). Hidden tokens at the ends of a span are cut off."""
    kept = []
    for span in spans:
        stale = np.isin(span.indices, chosen)
        live = np.flatnonzero(~stale)
        if not len(live):
            continue
        begin, end = int(live[0]), int(live[-1]) + 1
        seen = np.where(stale, core.NEVER, span.indices).astype(np.int32)
        kept.append(replace(span, indices=seen[begin:end], run=span.run.slice(begin, end, page_size)))
    return tuple(kept)


def reserve(allocation: Allocation, tokens: int) -> core.Run:
    return allocation.reserve(tokens) if tokens else NOTHING


def alone(prompt: core.Prompt) -> bool:
    """True if isolation changes nothing: at most one chunk, right behind the system prompt."""
    chunks = segments_of(prompt, core.Kind.CHUNK)
    return not chunks or (len(chunks) == 1 and prompt.starts[chunks[0]] == system_length(prompt))


def missing(
    prompt: core.Prompt, hit: int, length: int, fresh: Mapping[int, core.Run], head: tuple[core.Span, ...]
) -> core.Pass:
    """Tokens [hit, length) of the head, and chunks, each at the position right behind the system prompt.

    fresh: where the chunks go, by segment. head: spans of all its tokens; from chunks all but system tokens are hidden.
    """
    hidden, system = core.Visibility.isolated(prompt, rows=tuple(fresh)).hidden, system_length(prompt)
    spans, rows, positions = list(head), [indices(hit, length)], [indices(hit, length)]
    for i, run in fresh.items():
        begin, end = prompt.bounds(i)
        spans.append(core.Span.consecutive(begin, run, 0, hidden[i]))
        rows.append(indices(begin, end))
        positions.append(indices(system, system + end - begin))
    return core.Pass(np.concatenate(rows), np.concatenate(positions), tuple(spans))


def _placed(begin: int, pieces: Iterable[tuple[core.Run, int]]) -> tuple[core.Span, ...]:
    """A chunk, stored as these pieces, moved to index `begin`."""
    spans = []
    for run, local_start in pieces:
        spans.append(core.Span.consecutive(begin, run, begin - local_start))  # target position minus stored position
        begin += run.length
    return tuple(spans)


def query_spans(prompt: core.Prompt, own: core.Run, page_size: int) -> tuple[core.Span, ...]:
    """The query segments behind the head, one after the other in pages of the request's own."""
    spans, used = [], 0
    for i in _behind_head(prompt):
        n = len(prompt.segments[i])
        spans.append(core.Span.consecutive(prompt.starts[i], own.slice(used, used + n, page_size)))
        used += n
    return tuple(spans)


def asking(prompt: core.Prompt) -> core.Tokens:
    return np.concatenate([indices(0, 0), *(indices(*prompt.bounds(i)) for i in _behind_head(prompt))])


def _behind_head(prompt: core.Prompt) -> tuple[int, ...]:
    return tuple(i for i in segments_of(prompt, core.Kind.QUERY) if prompt.starts[i] >= head_length(prompt))
