"""fuse: a chunk computed behind its nearest neighbours, offline (FusionRAG, section 3.1, equation 10).

The prompt is system, neighbours (most similar first), and the chunk. The neighbours' KV is always the isolated one,
computed behind the system prompt alone and moved to its place: if fused KV were used where there is some, the result
would depend on the order in which chunks are fused. The result is kept as method "fusion", under the system prompt and
the digest of the neighbours. The chunk's isolated KV is kept, too: `anchor` reads it where the chunk comes first.

No request can name this strategy: `ragjax.engine.preprocessing` gives it to the engine.
"""

from __future__ import annotations

from typing import Any

from ragjax.cache.cache import KnowledgeCache, neighbours_digest
from ragjax.cache.match import Candidate, Match, Totals
from ragjax.cache.tree import Provenance
from ragjax.core import Kind, Measure, Pass, Plan, Prefill, Prompt, Run, Segment, Span, Tokens
from ragjax.reuse.base import LOGITS, Allocation, Strategy, indices, match_spans, owner_of, report, segments_of
from ragjax.reuse.exact import leading_part
from ragjax.reuse.fusion import METHOD
from ragjax.reuse.head import head_account, keep_leading
from ragjax.reuse.influence import Influence, record
from ragjax.reuse.naive import Naive
from ragjax.reuse.stitch import missing


class Fuse(Strategy):
    """Computes the last chunk of a prompt behind the others, and keeps its KV.

    record: keep with it how much attention it gave to its neighbours, which `fusion+craft` selects by.
    """

    name = "fuse"

    def __init__(self, *, record: bool = False):
        self.record = record
        self.measures = LOGITS | {Measure.SEGMENT_SCORE} if record else LOGITS

    def noted(self, meta: bytes) -> bool:
        return not self.record or Influence.decode(meta) is not None

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """The path of the system prompt, each chunk behind it, and as the last one what will be kept."""
        context = prompt.tokens[: _head(prompt)]
        return (
            *leading_part(prompt, tenant, len(context)).keys(cache.tree),
            *(_key(cache, context, prompt.segments[i], b"", tenant) for i in _isolated(prompt)),
            self.key(prompt, cache, tenant),
        )

    def key(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> bytes:
        return _key(cache, prompt.tokens[: _head(prompt)], prompt.segments[-1], _behind(prompt), tenant)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        system, last = _head(prompt), len(prompt.segments) - 1
        matched = context = allocation.prefix(prompt.tokens[:system])
        others = len(prompt) - system + allocation.decode_tokens
        runs, system_hit = allocation.leading(context, system, others=others, pieces=len(prompt.segments))
        isolated, alone = _isolated(prompt), Candidate(*_name(b""))
        matches = {i: allocation.first(context, prompt.segments[i].tokens, [alone]) for i in isolated}
        found = {i: match for i, match in matches.items() if match is not None}
        fresh_system = allocation.reserve(system - system_hit) if system > system_hit else None
        fresh = {i: allocation.reserve(len(prompt.segments[i])) for i in isolated if i not in found}
        own = allocation.reserve(len(prompt.segments[last]))
        tail = allocation.reserve_with_tail(0)

        system_spans = match_spans(context, 0, runs=runs)
        if fresh_system is not None:
            system_spans = (*system_spans, Span.consecutive(system_hit, fresh_system))
        if fresh_system is not None or fresh:
            yield missing(prompt, system_hit, system, fresh, system_spans)
        if fresh_system is not None:
            context = keep_leading(prompt, allocation, context, system_hit, fresh_system, system)
        for i, piece in fresh.items():
            _keep(allocation, context, prompt.segments[i], piece, system, b"")

        place = prompt.starts[last]
        placed = {i: match_spans(match, prompt.starts[i]) for i, match in found.items()}
        placed |= {i: (Span.consecutive(prompt.starts[i], run, prompt.starts[i] - system),) for i, run in fresh.items()}
        placed.pop(last, None)  # the chunk's own isolated KV is kept, and not read here
        spans = (*system_spans, *(span for i in placed for span in placed[i]), Span.consecutive(place, own))
        rows = indices(place, len(prompt))
        results = yield Pass(rows, rows, spans, self.measures if isolated else LOGITS, (len(prompt) - 1,))
        meta = b""
        if self.record and isolated:
            meta = record(prompt, last, rows, results[Measure.SEGMENT_SCORE]).encode()
        known = system_hit + sum(len(prompt.segments[i]) for i in found if i != last)
        totals = Totals(known, len(prompt) - known)
        _keep(allocation, context, prompt.segments[last], own, place, _behind(prompt), meta=meta, totals=totals)

        reused, tiers = head_account(prompt, matched, system_hit)
        reused |= {i: len(prompt.segments[i]) for i in found if i != last}
        tiers |= {i: match.tier() for i, match in found.items() if i != last}
        exact = last == len(segments_of(prompt, Kind.SYSTEM)) and not allocation.lossy
        return Plan(spans, tail, "full" if exact else None, report(prompt, reused, tiers), results[Measure.LOGITS][0])


def _head(prompt: Prompt) -> int:
    system = len(segments_of(prompt, Kind.SYSTEM))
    chunks = tuple(range(system, len(prompt.segments)))
    if not system or not chunks or segments_of(prompt, Kind.CHUNK) != chunks:
        raise ValueError("to fuse takes a system prompt, neighbours, and a chunk at the end")
    return prompt.starts[system]


def _isolated(prompt: Prompt) -> tuple[int, ...]:
    chunks = segments_of(prompt, Kind.CHUNK)
    return chunks if len(chunks) > 1 else ()


def _behind(prompt: Prompt) -> bytes:
    return neighbours_digest(one.tokens for one in prompt.segments[:-1] if one.kind is Kind.CHUNK)


def _name(behind: bytes) -> tuple[Provenance, str]:
    return (Provenance.APPROXIMATE, METHOD) if behind else (Provenance.ISOLATED, Naive.name)


def _key(cache: KnowledgeCache, context: Tokens, segment: Segment, behind: bytes, tenant: str) -> bytes:
    owner = owner_of(segment, tenant)
    return cache.key_of(context, segment.tokens, *_name(behind), owner, behind=behind)


def _keep(
    allocation: Allocation, context: Match, segment: Segment, run: Run, local_start: int, behind: bytes, **more: Any
) -> None:
    if context.complete:  # else the system prompt itself could not be kept
        allocation.cache.admitter.admit_segment(
            context, segment.tokens, run, local_start, *_name(behind), behind=behind, public=segment.public, **more
        )
