"""Matches, which pin KV for a request; the loads that they wait for; and the counters of all look-ups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ragjax.cache.node import Node, Provenance, Steps, context_digest
from ragjax.core import Run, Tokens
from ragjax.core.tiers import Done, Tier

EXACT = frozenset({Provenance.CAUSAL, Provenance.DEPENDENCY})
"""Provenances whose reuse is exact to some attention that a model was trained on."""


class Totals(NamedTuple):
    """Prompt tokens of a request that were reused, and that it computes (RAGCache, Algorithm 1: alpha and beta)."""

    cached: int
    new: int


class Candidate(NamedTuple):
    provenance: Provenance
    method: str
    # digest of the neighbours that it was computed behind, besides the context (b"": none); of causal KV that is to be
    # moved, of all tokens before it (b"": whatever stands between it and the context)
    behind: bytes = b""
    variant: bool = False  # one of a limited number (`Variants`)
    cfo: float | Callable[[bytes], float] = 1.0  # cache fixing overhead, or a function of the meta kept with it


@dataclass
class CacheMetrics:
    lookups: int = 0
    exact_hit_tokens: int = 0
    approximate_hit_tokens: int = 0
    missed_tokens: int = 0
    admitted_tokens: int = 0
    evicted_tokens: int = 0
    unwritten_tokens: int = 0  # left memory while too much waited to be written to disk
    tier_hit_tokens: Counter[str] = field(default_factory=Counter)  # found, by the tier they came from
    jobs: Counter[str] = field(default_factory=Counter)  # here and below by "save", "load", "write"
    job_bytes: Counter[str] = field(default_factory=Counter)
    job_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # from order to end
    failures: Counter[str] = field(default_factory=Counter)
    loss_max: float = 0.0  # largest relative RMS error of an encoding at rest
    pages_used: int = 0
    host_bytes: int = 0
    nodes: int = 0

    def count_job(self, done: Done) -> None:
        kind = type(done.job).__name__.lower()
        self.jobs[kind] += 1
        self.job_bytes[kind] += done.bytes
        self.job_seconds[kind] += done.seconds
        self.failures[kind] += done.error is not None
        self.loss_max = max(self.loss_max, done.loss)


@dataclass(eq=False)
class Match:
    """Cached KV that a request is using; nothing of it leaves until `release`, which is called exactly once."""

    spans: tuple[tuple[Run, int], ...]  # runs in order, and the RoPE position each run's first K is stored rotated at
    tokens: Tokens  # found, int32 [length], a prefix of the `asked` tokens
    asked: int  # number of tokens that were looked for
    node: Node  # the deepest node in use; it may end beyond `length`
    tenant: str
    label: str  # who holds it, for audits: a request id for instance
    origins: tuple[tuple[int, Tier], ...]  # tokens, and the tier they came from, in order
    lossy: bool  # some of it lost precision at rest, or was computed on KV that did
    _release: Callable[[Match], None] = field(repr=False)
    waits: dict[int, Loading] = field(default_factory=dict)  # loads that must be done before the KV is there
    broken: str | None = None  # why the KV will never be there
    released: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def complete(self) -> bool:
        return self.length == self.asked

    @property
    def ready(self) -> bool:
        """True if all bytes are on the device, or never will be (`broken`)."""
        return not self.waits or self.broken is not None

    @cached_property
    def context(self) -> bytes:
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
        self._release(self)

    def __enter__(self) -> Match:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False)
class Loading:
    nodes: list[Node]
    tier: Tier
    stages: int = 0  # stages of layers that are on the device, the first ones
    seconds: float | None = None  # duration of the whole, at the pace of its tier so far (None: not known)
    matches: list[Match] = field(default_factory=list)


FADES = 0.7
"""What the past counts for a tier's pace after each load."""


class Loads:
    """Loads under way by number, from 1 on: what `Node.loading` and `Match.waits` name."""

    def __init__(self) -> None:
        self.under_way: dict[int, Loading] = {}
        self._number = 0
        self._pace: dict[Tier, tuple[float, float]] = {}  # tokens, and seconds from order to end, as moving averages

    def __len__(self) -> int:
        return len(self.under_way)

    def number(self) -> int:
        self._number += 1
        return self._number

    def begin(self, number: int, loading: Loading) -> None:
        tokens, seconds = self._pace.get(loading.tier, (0.0, 0.0))
        loading.seconds = sum(map(len, loading.nodes)) * seconds / tokens if tokens else None
        self.under_way[number] = loading

    def end(self, number: int, seconds: float | None) -> Loading:
        loading = self.under_way.pop(number)
        if seconds is not None:
            tokens, spent = self._pace.get(loading.tier, (0.0, 0.0))
            self._pace[loading.tier] = FADES * tokens + sum(map(len, loading.nodes)), FADES * spent + seconds
        return loading

    def note(self, arrived: Mapping[int, int]) -> None:
        for number, stages in arrived.items():
            if number in self.under_way:
                self.under_way[number].stages = stages

    def wait(self, match: Match, steps: Steps) -> tuple[tuple[int, Tier], ...]:
        """Let the match wait for what of its path is under way; returns where each part comes from."""
        origins: list[tuple[int, Tier]] = []
        for node, used in steps:
            tier = Tier.DEVICE
            if node.loading:
                loading = self.under_way[node.loading]
                tier = loading.tier
                if node.loading not in match.waits:
                    match.waits[node.loading] = loading
                    loading.matches.append(match)
            if origins and origins[-1][1] is tier:
                used += origins.pop()[0]
            origins.append((used, tier))
        return tuple(origins)

    def split(self, upper: Node, lower: Node) -> None:
        nodes = self.under_way[lower.loading].nodes
        nodes.insert(nodes.index(lower), upper)

    def break_dead(self, error: str) -> None:
        for loading in self.under_way.values():
            if loading.nodes[0].dead or loading.nodes[-1].dead:
                for match in loading.matches:
                    match.broken = error

    def idle(self) -> list[int]:
        return [number for number, load in self.under_way.items() if all(match.released for match in load.matches)]
