"""A request inside the engine, and the engine's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Event, FactReport, Kind, Prompt, Request, Segment
from ragjax.quality.report import Setting
from ragjax.reuse.base import Strategy
from ragjax.schedule.sampling import Generation
from ragjax.schedule.scheduler import Task

Sink = Callable[[Event | BaseException], None]
"""Where a request's events go: deltas, then one answer or one error."""

RESTARTS = 3
"""Times that a request begins anew before it fails: KV that could not be loaded, a lost device."""


@dataclass
class Ticket:
    """One request inside the engine. Times are `time.perf_counter()` seconds, or milliseconds where named so.

    waits_since: when it began to match KV and to wait for its load. cold: whether it still may wait for KV from below
    the device. logits: of the prompt's last token, float32 [V]. scores: logits that predict each token of the request's
    continuation, float32 [n, V]. ratio: share of chunk tokens to recompute. shadowed: logits [V] of its first steps, if
    it is to be replayed. notices: what did not go as it should. facts: relation paths of the prompt.
    """

    id: str
    prompt: Prompt
    strategy: Strategy
    ratio: float | None
    request: Request
    sink: Sink
    arrival: float
    retrieve_ms: float
    generation: Generation
    task: Task | None = None
    cancelled: bool = False
    admitted: float = 0.0
    first_token: float = 0.0
    load_ms: float = 0.0
    compute_ms: float = 0.0
    waits_since: float | None = None
    cold: bool = True
    restarts: int = 0
    logits: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    shadowed: list[NDArray[np.float32]] | None = None
    notices: list[str] = field(default_factory=list)
    facts: tuple[FactReport, ...] = ()

    def begin_anew(self, notice: str) -> None:
        """Give back what it holds, to be admitted once more; tokens that went out already stay as they are.

        notice: why; empty if it only makes room for others, which may happen any number of times.
        """
        if self.task is not None:
            self.task.close()
        self.task = None
        self.waits_since = None
        if notice:
            self.restarts += 1
            self.notices.append(notice)

    @property
    def setting(self) -> Setting:
        """What serves it."""
        return Setting(self.strategy.name, self.ratio)

    @property
    def chunks(self) -> int:
        """Chunks of its prompt."""
        return sum(segment.kind is Kind.CHUNK for segment in self.prompt.segments)

    @property
    def by_default(self) -> bool:
        """Whether it left the strategy to the engine."""
        return self.request.rag is None or self.request.rag.strategy is None

    @property
    def has_graph(self) -> bool:
        """Whether it asked for facts of a graph."""
        return self.request.rag is not None and self.request.rag.graph is not None

    @property
    def decode_tokens(self) -> int:
        """Slots needed behind the prompt."""
        forced = 0 if self.request.continuation is None else len(self.request.continuation)
        return max(forced, self.generation.limit)

    @property
    def wants_scores(self) -> bool:
        """Whether its continuation is to be computed before anything is generated."""
        return self.request.continuation is not None and len(self.request.continuation) > 0 and self.scores is None

    def force(self) -> bool:
        """Have the continuation computed, now that the prompt is; False if there is none or nothing to compute."""
        if not self.wants_scores:
            return False
        assert self.task is not None and self.request.continuation is not None
        if len(self.request.continuation) == 1:
            self.take_scores()
            return False
        self.task.force(self.request.continuation[:-1])
        return True

    def take_scores(self) -> None:
        """Keep the logits that predict the continuation; what was computed for them is generated over."""
        assert self.task is not None and self.task.plan is not None
        rows = [] if self.task.work is None else [self.task.work.logits[i] for i in range(len(self.task.work.logits))]
        self.scores = np.stack([self.task.plan.logits, *rows])
        self.task.work = None

    def stop_waiting(self, now: float) -> None:
        """What it waited for is there. Behind the first token, when a device was lost, it counts for nothing."""
        if self.waits_since is not None and not self.first_token:
            self.load_ms += (now - self.waits_since) * 1e3
        self.waits_since = None

    @property
    def whole_prompt(self) -> Prompt:
        """The prompt, and behind it what was generated before the request had to begin anew."""
        if not self.generation.tokens:
            return self.prompt
        said = Segment("continued", Kind.QUERY, np.array(self.generation.tokens, np.int32))
        return Prompt((*self.prompt.segments, said))


@dataclass
class Counters:
    """What has happened since the start; only ever grows.

    load_fallbacks: requests that recomputed KV because its load "failed" or was "slow".
    device_losses: times that the device's pool was lost and made anew.
    """

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    errors: int = 0
    steps: int = 0
    overhead_ms_last: float = 0.0
    load_fallbacks: Counter[str] = field(default_factory=Counter)
    device_losses: int = 0
