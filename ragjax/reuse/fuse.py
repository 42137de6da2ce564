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
from ragjax.reuse.base import LOGITS, Allocation, Strategy, indices, owner_of, segments_of
from ragjax.reuse.exact import leading_part
from ragjax.reuse.fusion import METHOD
from ragjax.reuse.head import keep_leading
from ragjax.reuse.influence import Influence, record
from ragjax.reuse.naive import Naive
from ragjax.reuse.stitch import lay_out, missing


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
        system, last, isolated = _head(prompt), len(prompt.segments) - 1, _isolated(prompt)
        matched = context = allocation.prefix(prompt.tokens[:system])
        alone = Candidate(*_name(b""))
        matches = {i: allocation.first(context, prompt.segments[i].tokens, [alone]) for i in isolated}
        found = {i: match for i, match in matches.items() if match is not None}
        begins = dict.fromkeys(segments_of(prompt, Kind.CHUNK), system)
        stitched = lay_out(prompt, allocation, matched, found, begins)
        own = allocation.reserve(len(prompt.segments[last])) if isolated else stitched.fresh[last]
        fresh = stitched.fresh if isolated else {}

        if stitched.fresh_head.length or fresh:
            yield missing(prompt, stitched.hit, system, fresh, stitched.head)
        if stitched.fresh_head.length:
            context = keep_leading(prompt, allocation, context, stitched.hit, stitched.fresh_head, system)
        for i, piece in fresh.items():
            _keep(allocation, context, prompt.segments[i], piece, system, b"")

        place = prompt.starts[last]
        before = (span for span in stitched.chunk if span.indices[0] < place)  # its own isolated KV is kept, not read
        spans = (*stitched.head, *before, Span.consecutive(place, own))
        rows = indices(place, len(prompt))
        results = yield Pass(rows, rows, spans, self.measures if isolated else LOGITS, (len(prompt) - 1,))
        meta = b""
        if self.record and isolated:
            meta = record(prompt, last, rows, results[Measure.SEGMENT_SCORE]).encode()
        reports = stitched.account(rows)
        known = sum(part.reused for part in reports)
        totals = Totals(known, len(prompt) - known)
        _keep(allocation, context, prompt.segments[last], own, place, _behind(prompt), meta=meta, totals=totals)
        exact = last == len(segments_of(prompt, Kind.SYSTEM)) and not allocation.lossy
        return Plan(spans, stitched.tail, "full" if exact else None, reports, results[Measure.LOGITS][0])


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
