"""Condensed chunks: a share of a chunk's isolated KV, chosen once, before anybody asks, and reused by every request.

Ours, after KVzip (arXiv 2505.23416, section 3): a token is worth keeping if the model looks at it when it has to repeat
the chunk, whatever will be asked about it. The prompt is the system prompt, the chunk, and a probe: a text that makes
the model read the chunk again. A token's score is the attention that it receives from the probe's tokens (KVzip: the
largest of any one of them, for each head and layer; here their sum, each layer's scaled to 1, added over layers and
heads). A chunk keeps the same tokens in all layers, so that they are tokens of the chunk like any others: what they
are kept under says which they are, requests move them to their place, and recompute some of them.

The tree keeps them as a node of these tokens alone, so every tier holds a share of the chunk's bytes.

No request can name the strategy `Condense`: `ragjax.preprocess` gives it to the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.keys import digest, raw_of
from ragjax.cache.match import Candidate
from ragjax.cache.tree import Provenance
from ragjax.core import Kind, Measure, Move, Prefill, Prompt, Results, Segment, Span, Tokens
from ragjax.reuse.base import Allocation, Strategy, indices, owner_of, segments_of
from ragjax.reuse.head import system_length
from ragjax.reuse.select import share as share_of
from ragjax.reuse.select import shares, top
from ragjax.reuse.stitch import Isolated, Source, candidate_key, prepare

METHOD = "condensed"


class Condensed:
    """A source that takes a chunk's condensed KV where it has some, and else what another source has."""

    def __init__(self, source: Source):
        self.method, self.measures = source.method, source.measures
        self._source = source

    def candidates(self, prompt: Prompt, i: int) -> Iterator[Candidate]:
        """Condensed, then the other source's."""
        if prompt.segments[i].condensed:
            yield candidate(prompt.segments[i])
        yield from self._source.candidates(prompt, i)

    def meta(self, results: Results, begin: int, end: int) -> bytes:
        """As the other source."""
        return self._source.meta(results, begin, end)


def candidate(segment: Segment) -> Candidate:
    """Where the condensed KV of a chunk is kept."""
    places = np.array(segment.condensed, np.int32)
    behind = digest(b"condensed", raw_of(segment.tokens), raw_of(places))
    return Candidate(Provenance.APPROXIMATE, METHOD, behind, raw=raw_of(segment.tokens[places]))


class Condense(Strategy):
    """Chooses a share of a prompt's one chunk by a probe, which is the query segment behind it, and keeps its KV.

    share: of the chunk's tokens, in (0, 1]. chosen: what it chose, by the chunk's tokens (`raw_of`).
    """

    name = "condense"
    measures = frozenset({Measure.LOGITS, Measure.KEY_SCORE})

    def __init__(self, share: float):
        self.share = share
        self.chosen: dict[bytes, tuple[int, ...]] = {}

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """The path of the system prompt, and as the last one what is kept, if it is known which tokens these are."""
        head, segment = prompt.tokens[: system_length(prompt)], _chunk(prompt)
        kept = candidate_key(cache, head, segment.tokens, candidate(segment), owner_of(segment, tenant))
        return (*cache.keys_of(head, (), tenant, min(prompt.public, len(head))), kept)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        """At most two passes, what is missing and then the probe, and a move of what is kept to pages of its own."""
        chunk, i = _chunk(prompt), segments_of(prompt, Kind.CHUNK)[0]
        begin, end = prompt.bounds(i)
        run = allocation.reserve(kept_of(len(chunk), self.share))
        stitched = yield from prepare(prompt, allocation, Isolated(), keep=False)
        results = yield stitched.ask(self.measures)
        places = self.choose(results[Measure.KEY_SCORE][:, begin:end], run.length)
        yield Move(begin + places, stitched.chunk, (Span(begin + places, run),), (0, stitched.stages[-1]))
        context = allocation.prefix(prompt.tokens[:begin], quiet=True)
        condensed = Segment(chunk.id, chunk.kind, chunk.tokens, condensed=tuple(places.tolist()))
        if context.complete:
            kind, method, behind, *_ = candidate(condensed)
            allocation.cache.admit_segment(
                context, chunk.tokens[places], run, begin, kind, method, behind=behind, public=chunk.public
            )
            self.chosen[raw_of(chunk.tokens)] = condensed.condensed
        return stitched.plan(stitched.spans, results[Measure.LOGITS][0])

    def choose(self, score_LN: NDArray[np.float32], count: int) -> Tokens:
        """The tokens of highest score, ascending places, int32 [count]; of equal ones the first.

        score_LN: attention that each token received from the probe; each layer counts the same.
        """
        return top(shares(np.asarray(score_LN, np.float64)).sum(0), indices(0, score_LN.shape[1]), count)


def kept_of(tokens: int, share: float) -> int:
    """Tokens that are kept of so many: the share, rounded up."""
    return max(1, share_of(share, tokens))


def _chunk(prompt: Prompt) -> Segment:
    """The prompt's chunk.

    Raises:
        ValueError: if the prompt is not a system prompt, one chunk and a probe.
    """
    kinds = [segment.kind for segment in prompt.segments]
    system = len(segments_of(prompt, Kind.SYSTEM))
    if kinds[system:] != [Kind.CHUNK, Kind.QUERY]:
        raise ValueError("to condense takes a system prompt, a chunk, and a probe at the end")
    return prompt.segments[system]
