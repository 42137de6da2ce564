"""The requests of a workload through what the engine runs: the strategy `prefix` on the real cache, nothing computed.

Host memory takes and gives bytes at once. A request holds what it reads and writes until it ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.common.samples import Samples
from benchmarks.policies.cell import NAMES, Cell, Effort, figures, policy_of
from benchmarks.policies.simulator import LOOKAHEAD, Served
from benchmarks.policies.source import Request, Workload
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.hierarchy import Storage
from ragjax.cache.policy.base import Policy
from ragjax.cache.pool import PagePool
from ragjax.cache.profile import Profile
from ragjax.core import ConfigError, Kind, Measure, Plan, Prompt, Segment, StepLimits, Tokens
from ragjax.core.prompt import Keep
from ragjax.core.tiers import Done, Job, Load, Save, Write
from ragjax.reuse.base import Allocation
from ragjax.reuse.exact import Prefix

PREFIX = Prefix()

KEPT: tuple[tuple[Keep, int], ...] = (("documents", 8), ("all", 8), ("all", 32))
"""What is kept, and the tokens of each answer."""

COLUMNS = (
    "workload", "top_k", "keep", "answer_tokens", "capacity_tokens", "policy", "document_hit_rate", "token_hit_rate",
    "recomputed_tokens", "prefill_s", "decision_us",
)  # fmt: skip


def effort(quick: bool) -> Effort:
    """RAGCache's workload, the two best documents of repeated questions, at three capacities; no graphs, no traces."""
    return Effort((), (0.2,), (), (2,), repeats=300) if quick else Effort((), (0.05, 0.1, 0.2), (), (2,), repeats=3000)


class Instant:
    """A transfer engine whose jobs are done at once; counts tokens."""

    lossy = False
    backlog = 0

    def __init__(self) -> None:
        self.moved = 0
        self._done: list[Done] = []

    def size(self, tokens: int) -> int:
        return tokens

    def save(self, jobs: Sequence[Save]) -> None:
        self._finish(jobs, sum(job.run.length for job in jobs))

    def write(self, jobs: Sequence[Write]) -> None:
        self._finish(jobs, 0)

    def load(self, jobs: Sequence[Load]) -> None:
        self._finish(jobs, sum(job.run.length for job in jobs))

    def forget(self, entries: object) -> None:
        """Nothing is kept."""

    def clear(self, pages: object) -> None:
        """No page holds anything."""

    def give_up(self, number: int) -> None:
        """Every job is done already."""

    def poll(self) -> Sequence[Done]:
        done, self._done = self._done, []
        return done

    def arrived(self) -> Mapping[int, int]:
        return {}

    def _finish(self, jobs: Sequence[Job], tokens: int) -> None:
        self.moved += tokens
        self._done += [Done(job) for job in jobs]


@dataclass
class Replay:
    """Serves the requests of a workload one by one, which must be chains: documents, question and answer are nodes.

    A node's tokens are its number, so that nodes of the cache can be told apart (`Workload.kept_whole` makes questions
    and answers). page_size: tokens of a page.
    """

    work: Workload
    policy: Policy
    device: int
    host: int = 0
    keep: Keep = "documents"
    page_size: int = 1
    cache: KnowledgeCache = field(init=False)

    def __post_init__(self) -> None:
        self._transfer = Instant()
        storage = Storage(self._transfer, self.page_size, self.host) if self.host else None
        pool = PagePool(self.device // self.page_size + 1, self.page_size)
        self.cache = KnowledgeCache(b"replay", pool, self.policy, storage, keep=self.keep)

    def run(self, lookahead: int = LOOKAHEAD) -> list[Served]:
        """Serve all; at any time `lookahead` requests are known to wait."""
        prompts = [self._prompt(request) for request in self.work.requests]
        served, announced = [], 0
        for at, prompt in enumerate(prompts):
            begin = time.perf_counter()
            for ahead in range(announced, min(at + lookahead + 1, len(prompts))):
                self.cache.announce(str(ahead), PREFIX.keys(prompts[ahead], self.cache, ""))
            announced = max(announced, at + lookahead + 1)
            self.cache.withdraw(str(at))
            moved = self._transfer.moved
            hit, documents = self._serve(prompt, self._tokens(self.work.requests[at].answer))
            served.append(Served(hit, documents, self._transfer.moved - moved, time.perf_counter() - begin))
        return served

    def _prompt(self, request: Request) -> Prompt:
        *before, question = request.nodes
        if any(self.work.parents[below] != node for node, below in pairwise(request.nodes)):
            raise ConfigError("the strategy prefix serves chains: give a trace of full or prefix")
        kinds = [Kind.CHUNK if self.work.documents[n] else Kind.SYSTEM for n in before]
        pairs = zip((*before, question), (*kinds, Kind.QUERY), strict=True)
        return Prompt(tuple(Segment(str(n), kind, self._tokens(n)) for n, kind in pairs))

    def _tokens(self, node: int) -> Tokens:
        return np.full(self.work.sizes[node], node, np.int32)

    def _serve(self, prompt: Prompt, answer: Tokens) -> tuple[int, int]:
        """Tokens found, and documents found whole."""
        allocation = Allocation(
            self.cache,
            tenant="",
            label="request",
            decode_tokens=len(answer),
            forced=len(answer),
            limits=StepLimits(10**6, self.page_size),
            stages=(0, 1),
        )
        prefill = PREFIX.prefill(prompt, allocation)
        next(prefill)
        self.cache.poll()
        try:
            prefill.send({Measure.LOGITS: np.zeros((1, 0), np.float32)})
        except StopIteration as stop:
            plan: Plan = stop.value
        PREFIX.finish(prompt, plan, answer, allocation)
        allocation.close()
        self.cache.poll()
        chunks = (part for part, s in zip(plan.reports, prompt.segments, strict=True) if s.kind is Kind.CHUNK)
        return sum(part.reused for part in plan.reports), sum(part.reused == part.tokens for part in chunks)


def measure(planned: Sequence[Cell], profile: Profile, samples: Samples) -> Iterator[dict[str, Any]]:
    """Every policy of the package and its rivals, by what is kept, on the device alone in pages of one token."""
    asked = {
        f"{cell.name} keep={keep} answer={answer} policy={name}": partial(_row, cell, keep, answer, name, profile)
        for cell in planned
        if not cell.host
        for keep, answer in KEPT
        for name in NAMES
        if name != "belady"  # which knows nodes by their numbers alone
    }
    return samples.rows(asked)


def _row(cell: Cell, keep: Keep, answer: int, name: str, profile: Profile) -> dict[str, Any]:
    work = cell.work.kept_whole(answer)
    device = max(cell.capacity, max(work.totals) + answer + 1)  # the last token is computed again
    served = Replay(work, policy_of(name, work, profile), device, keep=keep).run()
    return {
        "workload": work.name, "top_k": work.top_k, "keep": keep, "answer_tokens": answer,
        "capacity_tokens": device, "policy": name, **figures(work, served, profile),
    }  # fmt: skip
