"""fusion, online: chunks preprocessed behind similar ones, and query-guided selection (FusionRAG, sections 3.2, 4.1).

A chunk that was not preprocessed takes the alternative path: it is looked for behind the chunks before it in the prompt
(the last `NEIGHBOURS` of them), then without the first of these, and so on, down to the system prompt alone. Causal KV
that `prefix` left counts too: leading chunks that are kept as the prompt has them are exact, and are not mended
(`stitch.led`).

Selection: the question is computed over the reused KV; its attention at the last layer, summed over the question's
rows, heads averaged, scores the chunks' tokens, and the highest of all chunks together are recomputed. The softmax runs
over all keys; the paper does not say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ragjax.cache.cache import KnowledgeCache, neighbours_digest
from ragjax.cache.match import Candidate
from ragjax.cache.node import context_digest, raw_of
from ragjax.cache.tree import PUBLIC, Provenance
from ragjax.core import Kind, Measure, Prompt, Segment
from ragjax.reuse.base import owner_of, segments_of
from ragjax.reuse.head import system_length
from ragjax.reuse.repair import Choice, Selector, shares, top
from ragjax.reuse.stitch import Isolated, Stitched, alone, candidate_key

METHOD = "fusion"

NEIGHBOURS = 10
"""Similar chunks that a chunk is preprocessed behind (top-n of Figure 17), unless another number is asked for; and
earlier chunks of the alternative path: with all of them the work would grow with the cube of the prompt's chunks.
"""


def without_lost(prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Prompt:
    """The prompt; of its chunks only those are marked as preprocessed whose KV a tier has. Any thread may call it.

    What a shared tier has is not known before it is asked, so there all marks stay.
    """
    if cache.inquiry is not None or not any(segment.behind for segment in prompt.segments):
        return prompt
    head = prompt.tokens[: system_length(prompt)]

    def is_lost(segment: Segment) -> bool:
        candidate = Candidate(Provenance.APPROXIMATE, METHOD, segment.behind)
        owners = dict.fromkeys((owner_of(segment, tenant), PUBLIC))
        keys = (candidate_key(cache, head, segment.tokens, candidate, owner) for owner in owners)
        return all(cache.find_meta(key) is None for key in keys)

    lost = {segment for segment in prompt.segments if segment.behind and is_lost(segment)}
    if not lost:
        return prompt
    return Prompt(tuple(replace(one, behind=b"") if one in lost else one for one in prompt.segments))


class Fused(Isolated):
    """Preprocessed chunks, and the alternative path for others. A chunk that stands alone is isolated: exact."""

    preprocessed = True
    leads = True

    def candidates(self, prompt: Prompt, i: int) -> Iterator[Candidate]:
        """Behind the neighbours it was preprocessed with, behind earlier chunks of the prompt, isolated."""
        segment = prompt.segments[i]
        if not alone(prompt):
            if segment.behind:
                yield Candidate(Provenance.APPROXIMATE, METHOD, segment.behind)
            earlier = [prompt.segments[j].tokens for j in segments_of(prompt, Kind.CHUNK) if j < i][-NEIGHBOURS:]
            for begin in range(len(earlier)):
                yield Candidate(Provenance.APPROXIMATE, METHOD, neighbours_digest(earlier[begin:]))
            head = prompt.tokens[: system_length(prompt)]
            for begin in range(len(earlier) + 1) if self.leads else ():
                before = np.concatenate([head, *earlier[begin:]])
                yield Candidate(Provenance.CAUSAL, "", context_digest(raw_of(before)))
            if self.leads:
                yield Candidate(Provenance.CAUSAL, "")
        yield Candidate(Provenance.ISOLATED, self.method)


class QueryGuided(Selector):
    """Tokens that the question attends to most at the last layer."""

    measures = frozenset({Measure.KEY_SCORE})

    def choose(self, stitched: Stitched, count: int) -> Choice:
        last = (stitched.stages[-2], stitched.stages[-1])
        results = yield stitched.ask(self.measures, measured=last, asking=stitched.question)
        return top(results[Measure.KEY_SCORE][-1, stitched.chunks], stitched.chunks, count)


class Prophetic(Selector):
    """Tokens of the highest mean share of the question's attention, over all layers (ProphetKV, arXiv 2602.02579).

    The paper's abstract and figures were at hand, and not its equations: the fusion is the mean over layers, each
    layer's scores over the chunks scaled to 1, so that no layer counts for more because less of its attention goes
    elsewhere.
    """

    measures = frozenset({Measure.KEY_SCORE})

    def choose(self, stitched: Stitched, count: int) -> Choice:
        results = yield stitched.ask(self.measures, asking=stitched.question)
        score_LN = np.asarray(results[Measure.KEY_SCORE][:, stitched.chunks], np.float64)
        return top(shares(score_LN).mean(0), stitched.chunks, count)  # a layer that gives nothing counts nothing
