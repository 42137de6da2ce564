"""What a request holds of the cache: matches, and the counters of all look-ups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import NamedTuple

from ragjax.cache.keys import context_digest
from ragjax.cache.node import Node, Provenance
from ragjax.core import Run, Tokens
from ragjax.core.tiers import Tier

EXACT = frozenset({Provenance.CAUSAL, Provenance.DEPENDENCY})
"""Provenances whose reuse is exact to some attention that a model was trained on."""


class Totals(NamedTuple):
    """Tokens of a request's prompt that were reused, and that it computes (RAGCache, Algorithm 1: alpha and beta)."""

    cached: int
    new: int


class Candidate(NamedTuple):
    """One entry under which a segment's KV may be kept.

    behind: digest of the neighbours that it was computed behind, besides the context (b"": none). variant: whether it
    is one of a limited number (`Variants`). cfo: cache fixing overhead of reusing it, or what tells it by the meta that
    is kept with it.
    """

    provenance: Provenance
    method: str
    behind: bytes = b""
    variant: bool = False
    cfo: float | Callable[[bytes], float] = 1.0


@dataclass
class Metrics:
    """Counters since the start, in tokens unless named otherwise; the last three are the present state.

    tier_hit_tokens: tokens found, by the tier they came from. jobs, job_bytes, job_seconds (from order to end),
    failures: by "save", "load", "write". unwritten_tokens: left memory while too much waited to be written to disk.
    loss_max: largest relative RMS error of an encoding at rest.
    """

    lookups: int = 0
    exact_hit_tokens: int = 0
    approximate_hit_tokens: int = 0
    missed_tokens: int = 0
    admitted_tokens: int = 0
    evicted_tokens: int = 0
    unwritten_tokens: int = 0
    tier_hit_tokens: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    job_bytes: Counter[str] = field(default_factory=Counter)
    job_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: Counter[str] = field(default_factory=Counter)
    loss_max: float = 0.0
    pages_used: int = 0
    host_bytes: int = 0
    nodes: int = 0


@dataclass(eq=False)
class Progress:
    """How far a load is.

    stages: how many stages of layers, the first ones, are on the device. seconds: how long the whole of it takes, as
    loads from its tier have taken so far (None: there were none).
    """

    stages: int = 0
    seconds: float | None = None


@dataclass(eq=False)
class Match:
    """Cached KV that a request is using; nothing of it leaves until `release`, which is called exactly once.

    spans: where the KV is, in order: runs, and the RoPE position each run's first K is stored rotated at.
    tokens: the tokens found, int32 [length], a prefix of the `asked` tokens that were looked for.
    node: the deepest node in use; it may end beyond `length`.
    label: who holds it, a request id for instance; audits name it.
    origins: (tokens, tier they came from), in order.
    lossy: whether any of it lost precision at rest, or was computed on what did.
    waits: loads that must be done before the KV is there, and how far they are. broken: why it never will be.
    """

    spans: tuple[tuple[Run, int], ...]
    tokens: Tokens
    asked: int
    node: Node
    tenant: str
    label: str
    origins: tuple[tuple[int, Tier], ...]
    lossy: bool
    _release: Callable[[Match], None] = field(repr=False)
    waits: dict[int, Progress] = field(default_factory=dict)
    broken: str | None = None
    released: bool = False

    @property
    def length(self) -> int:
        """Number of tokens found."""
        return len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether everything that was looked for was found."""
        return self.length == self.asked

    @property
    def ready(self) -> bool:
        """Whether all bytes are on the device, or never will be (`broken`)."""
        return not self.waits or self.broken is not None

    @cached_property
    def context(self) -> bytes:
        """Digest of the tokens found, as the context of other nodes, 32 bytes."""
        return context_digest(self.tokens.tobytes())

    def tier(self, begin: int = 0, end: int | None = None) -> Tier | None:
        """The coldest tier that tokens [begin, end) came from (all, if None); None if there are none."""
        found, at = None, 0
        end = self.length if end is None else end
        for tokens, tier in self.origins:
            if at < end and begin < at + tokens:
                found = tier if found is None else max(found, tier)
            at += tokens
        return found

    def release(self) -> None:
        """Let go.

        Raises:
            RuntimeError: if it was released before.
        """
        self._release(self)

    def __enter__(self) -> Match:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
