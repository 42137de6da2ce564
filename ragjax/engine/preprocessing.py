"""Preprocessing: every chunk of a knowledge base is computed behind its nearest neighbours, before anybody asks.

FusionRAG, section 3.1: passages that are retrieved together are alike, so what a chunk would see beside others can be
put into its KV offline. `ragjax.reuse.fuse` says what is computed; here is what is computed when. Chunks go
through the engine a few at a time, behind all other requests. What is kept already is not computed again, so a run that
was stopped goes on where it was, and when documents come or go only chunks whose neighbours changed are computed.

    with Engine.load("smollm2-135m-instruct", knowledge="docs/") as engine:
        print(preprocess(engine))
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from tqdm import tqdm

from ragjax.cache.cache import neighbours_digest
from ragjax.core import Answer, Chunk, Hit, Message, Prompt, Segment
from ragjax.engine import Engine
from ragjax.prompting.chat import chat_prompt, chunk_segment
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.reuse.base import Strategy
from ragjax.reuse.fuse import Fuse
from ragjax.reuse.fusion import NEIGHBOURS

_GROUP = 8  # jobs in flight together, as many as the engine runs in background; a kill can cost their marks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A chunk to be computed behind the system prompt and its neighbours, most similar first."""

    system: Segment
    chunk: Segment
    neighbours: tuple[Segment, ...]

    @property
    def prompt(self) -> Prompt:
        """The prompt that it is computed from."""
        return Prompt((self.system, *self.neighbours, self.chunk))

    @property
    def behind(self) -> bytes:
        """Digest that names its KV, as `Segment.behind` (empty without neighbours)."""
        return neighbours_digest(segment.tokens for segment in self.neighbours)

    def fitted(self, context_length: int) -> Job:
        """The same with as many of the first neighbours as the context holds."""
        room = context_length - 1 - len(self.system) - len(self.chunk)
        kept = 0
        for segment in self.neighbours:
            room -= len(segment)
            if room < 0:
                break
            kept += 1
        return replace(self, neighbours=self.neighbours[:kept])


@dataclass(frozen=True)
class PreprocessReport:
    """Outcome for the chunks. seconds: of the whole run.

    fused: computed behind their neighbours now. kept: nothing had to be computed for. lost: computed or kept, but not
    there any more at the end, because the tiers are too small.
    """

    chunks: int
    fused: int
    kept: int
    lost: int
    seconds: float

    def __str__(self) -> str:
        done = f"{self.chunks} chunks: {self.fused} fused, {self.kept} kept, in {self.seconds:.1f} s"
        if not self.fused:
            return done
        rate = self.fused / self.seconds
        return f"{done} ({1 / rate:.3g} s per chunk, {rate:.3g} chunks/s)"


# ------------------------------------------------------------------------------------ given segments


def fuse(engine: Engine, system: Segment, chunk: Segment, neighbours: Sequence[Segment]) -> bytes:
    """Compute a chunk behind its neighbours (most similar first), and keep its KV; returns its `Segment.behind`."""
    return fuse_all(engine, [Job(system, chunk, tuple(neighbours))], progress=False)[0]


def fuse_all(engine: Engine, jobs: Sequence[Job], *, record: bool = False, progress: bool = True) -> list[bytes]:
    """Compute chunks behind their neighbours, and keep their KV; returns the `Segment.behind` of each.

    What is kept already is not computed again. Neighbours that the engine's context has no room for are left out, the
    least similar first, and are not in the digest.

    record: keep with each chunk the attention it gave to its neighbours, which `fusion+craft` needs.

    Raises:
        RequestError: if a chunk alone does not fit the context.
    """
    digests: list[bytes] = []
    with tqdm(total=len(jobs), desc="fusing", unit="chunk", disable=not progress) as bar:
        for begin in range(0, len(jobs), _GROUP):
            group = [job.fitted(engine.context_length) for job in jobs[begin : begin + _GROUP]]
            _fuse_group(engine, group, Fuse(record=record), bar.update)
            digests += [job.behind for job in group]
    return digests


def _fuse_group(engine: Engine, jobs: Sequence[Job], strategy: Fuse, step: Callable[[], object]) -> int:
    """Compute what is missing of the jobs' KV; returns how many were computed."""
    held = _held(engine, jobs, strategy)
    todo = [job for job, is_held in zip(jobs, held, strict=True) if not is_held]
    for _ in range(len(jobs) - len(todo)):
        step()
    # chunks near each other share neighbours: each of these is computed once by itself, not by every job that needs it
    alone = {job.system.tokens.tobytes() + segment.tokens.tobytes(): Job(job.system, segment, ())
             for job in todo if job.neighbours for segment in (*job.neighbours, job.chunk)}  # fmt: skip
    prompts = [job.prompt for job in alone.values()]
    kept = engine.holds(prompts, strategy)
    absent = [prompt for prompt, is_kept in zip(prompts, kept, strict=True) if not is_kept]
    for _ in answers_of(engine, absent, strategy):
        pass
    for _ in answers_of(engine, [job.prompt for job in todo], strategy):
        step()
    return len(todo)


def _held(engine: Engine, jobs: Collection[Job], strategy: Fuse) -> list[bool]:
    """True if the KV of each job is kept, with what is to be noted of those that have neighbours."""
    prompts = [job.prompt for job in jobs]
    there, noted = engine.holds(prompts, strategy), engine.holds(prompts, strategy, strategy.noted)
    return [a if not job.neighbours else b for job, a, b in zip(jobs, there, noted, strict=True)]


def answers_of(engine: Engine, prompts: Sequence[Prompt], strategy: Strategy) -> Iterator[Answer]:
    """Answer a few prompts side by side; yields as they end. An error cancels what is left."""
    futures: set[Future[Answer]] = set()
    try:
        for prompt in prompts:
            futures.add(engine.begin_prompt(prompt, strategy=strategy, background=True, max_tokens=1))
            if len(futures) >= _GROUP:
                yield from _ended(futures)
        while futures:
            yield from _ended(futures)
    finally:
        for future in futures:
            future.cancel()


def _ended(futures: set[Future[Answer]]) -> Iterator[Answer]:
    done, _ = wait(futures, return_when=FIRST_COMPLETED)
    futures -= done
    for future in done:
        yield future.result()


# ----------------------------------------------------------------------------------- a knowledge base


def preprocess(
    engine: Engine,
    knowledge: str | None = None,
    *,
    n: int = NEIGHBOURS,
    system: str | None = None,
    record: bool = False,
    progress: bool = True,
) -> PreprocessReport:
    """Compute every chunk of a knowledge base behind its n most similar chunks; requests find them from then on.

    May run while the engine serves others, which go first. May be stopped at any time and run again.

    Args:
        engine: where the KV is kept. Without a disk cache it is lost when the engine closes.
        knowledge: name of the knowledge base (None: the default one).
        n: neighbours of a chunk.
        system: the system message of requests that shall find the KV (None: that of requests which bring none).
        record: as `fuse_all`.
        progress: show a progress bar.

    Raises:
        RequestError: if there is no such knowledge base.
    """
    began = time.perf_counter()
    run = _Run(engine, engine.knowledge_base(knowledge), head_of(engine, system), Fuse(record=record))
    nearest = run.base.neighbours(n)
    fused, cut = 0, 0
    with tqdm(total=len(nearest), desc="fusing", unit="chunk", disable=not progress) as bar:
        for lists in _groups(nearest):
            jobs = run.jobs(lists)
            fused += _fuse_group(engine, list(jobs.values()), run.strategy, bar.update)
            bar.update(len(lists) - len(jobs))
            run.mark(jobs, lists)
            cut += sum(len(job.neighbours) < len(lists[number]) for number, job in jobs.items())
    if cut:
        _log.warning("%d chunks have less than %d neighbours: the context of %d tokens holds no more of them",
                     cut, n, engine.context_length)  # fmt: skip
    lost = sum(run.lost(lists) for lists in _groups(nearest))
    if lost:
        _log.warning("the KV of %d chunks was driven out again: give the engine a disk cache, or a larger one", lost)
    return PreprocessReport(len(nearest), fused, len(nearest) - fused, lost, time.perf_counter() - began)


Lists = Mapping[int, tuple[int, ...]]
"""Neighbours by chunk, as numbers of the knowledge base."""


@dataclass(frozen=True)
class _Run:
    """State that the groups of a run share. head: system segment of the requests that shall find the KV."""

    engine: Engine
    base: KnowledgeBase
    head: Segment
    strategy: Fuse

    def jobs(self, lists: Lists) -> dict[int, Job]:
        """A job for each chunk that is still there with all its neighbours."""
        chunks = self.base.chunks({number for own, others in lists.items() for number in (own, *others)})
        return {
            own: self._job(chunks[own], [chunks[number] for number in others])
            for own, others in lists.items()
            if chunks.keys() >= {own, *others}
        }

    def mark(self, jobs: Mapping[int, Job], lists: Lists) -> None:
        """Note in the knowledge base which chunks' KV is there now."""
        known = self.base.chunks(jobs)
        held = _held(self.engine, jobs.values(), self.strategy)
        for (own, job), is_held in zip(jobs.items(), held, strict=True):
            if is_held and job.neighbours and own in known and known[own].behind != job.behind:
                self.base.mark_fused(own, lists[own][: len(job.neighbours)], job.behind)

    def lost(self, lists: Lists) -> int:
        """Number of chunks whose KV is not there."""
        jobs = self.jobs(lists).values()
        return len(jobs) - sum(_held(self.engine, jobs, self.strategy))

    def _job(self, chunk: Chunk, others: Sequence[Chunk]) -> Job:
        job = Job(self.head, self._segment(chunk), tuple(self._segment(other) for other in others))
        return job.fitted(self.engine.context_length)

    def _segment(self, chunk: Chunk) -> Segment:
        return chunk_segment(Hit(chunk, 1.0, self.engine.share_knowledge))


def _groups(nearest: Lists) -> Iterator[Lists]:
    numbers = list(nearest)
    for begin in range(0, len(numbers), _GROUP):
        yield {number: nearest[number] for number in numbers[begin : begin + _GROUP]}


def head_of(engine: Engine, system: str | None) -> Segment:
    """The system segment of a request with knowledge, as the engine makes it."""
    own = () if system is None else (Message("system", system),)
    messages = (*own, Message("user", "?"))
    return chat_prompt(engine.tokenizer, messages, (), public=engine.share_knowledge).segments[0]
