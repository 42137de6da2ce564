"""What a request needs of a cache, in the terms of a router: pieces by a short digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from ragjax.cache.keys import digest, raw_of
from ragjax.core import Composed, Kind, Prompt, Segment, SegmentReport, Tokens

BLOCK = 16
"""Tokens of a block of `Need.blocks`."""
DIGEST = 8
"""Bytes of a digest. Two pieces with the same one cost a hit, never an answer: a cache looks up by its own keys."""


@dataclass(frozen=True)
class Need:
    """A prompt as a router sees it.

    pieces: digests of its segments but for the question, which is computed anyway. chained: whether a piece's KV
    depends on all pieces before it; it then has another digest behind others. sizes: tokens of each. tokens: of the
    whole prompt, int32 [n].
    """

    pieces: tuple[bytes, ...]
    sizes: tuple[int, ...]
    chained: bool
    tokens: Tokens

    @staticmethod
    def of(made: Composed, exact: bool) -> Need:
        """Of a request. exact: as its strategy says (`ragjax/reuse/base.py`): chunks are tokens like any others.

        The paths of a knowledge graph are pieces by themselves under any strategy.
        """
        segments = made.prompt.segments[: -1 if made.prompt.segments[-1].kind is Kind.QUERY else None]
        chained = exact and not any(segment.kind is Kind.NODE for segment in segments)
        found: list[bytes] = []
        for segment in segments:
            before = found[-1] if chained and found else _owner(segment, made.request.tenant)
            found.append(_digest(before, segment.tokens))
        tokens = np.concatenate([segment.tokens for segment in made.prompt.segments])
        return Need(tuple(found), tuple(map(len, segments)), chained, tokens)

    @cached_property
    def total(self) -> int:
        """Tokens of the pieces."""
        return sum(self.sizes)

    @cached_property
    def blocks(self) -> Sequence[bytes]:
        """Digests of the prompt's beginnings, of `BLOCK` tokens, twice as many, and so on."""
        found = [b""]
        for end in range(BLOCK, len(self.tokens) + 1, BLOCK):
            found.append(_digest(found[-1], self.tokens[end - BLOCK : end]))
        return found[1:]


def found_of(prompt: Prompt, reports: Sequence[SegmentReport]) -> list[int]:
    """Tokens that were found of each segment.

    The branches of a graph's tree have one report together (`ragjax/reuse/dependency.py`): each has its part of it.
    """
    if len(reports) == len(prompt.segments):
        return [report.reused for report in reports]
    kinds = (i if segment.kind is not Kind.NODE else -1 for i, segment in enumerate(prompt.segments))
    groups = groupby(zip(kinds, prompt.segments, strict=True), lambda pair: (pair[0], pair[1].id))
    found = []
    for (_, group), report in zip(groups, reports, strict=True):
        found += [len(segment) * report.reused // max(1, report.tokens) for _, segment in group]
    return found


def _owner(segment: Segment, tenant: str) -> bytes:
    return b"" if segment.public else tenant.encode()


def _digest(before: bytes, tokens: Tokens) -> bytes:
    return digest(b"router", before, raw_of(tokens))[:DIGEST]
