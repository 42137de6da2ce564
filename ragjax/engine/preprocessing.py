"""Preprocessing: every chunk of a knowledge base is computed behind its nearest neighbours, before anybody asks.

FusionRAG, section 3.1. `ragjax.reuse.fuse` says what is computed; here is what is computed when. Chunks go through the
engine a few at a time. What is kept already is not computed again, so a run that was stopped goes on where it was, and
when documents come or go only chunks whose neighbours changed are computed. `preprocess` does it at once; `Preparing`
does it in a server while no request runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from ragjax.cache.cache import neighbours_digest
from ragjax.core import Answer, ClosedError, Hit, Message, Preprocessed, Prompt, RequestError, Segment
from ragjax.prompting.chat import chat_prompt, chunk_segment
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.reuse.fuse import Fuse
from ragjax.reuse.fusion import NEIGHBOURS

if TYPE_CHECKING:
    from ragjax.engine.api import Engine

_GROUP = 8  # jobs in flight together; a kill can cost their marks

PERIOD = 0.5  # seconds between two looks at what has come to be prepared
TOLD = 60.0  # seconds between two lines of the log that say how far a knowledge base is
RECOUNT = 20.0  # seconds between two looks at what of the prepared KV is still there

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A chunk to be computed behind the system prompt and its neighbours, most similar first."""

    system: Segment
    chunk: Segment
    neighbours: tuple[Segment, ...]

    @property
    def prompt(self) -> Prompt:
        return Prompt((self.system, *self.neighbours, self.chunk))

    @property
    def behind(self) -> bytes:
        return neighbours_digest(segment.tokens for segment in self.neighbours)

    def fitted(self, context_length: int) -> Job:
        room = context_length - 1 - len(self.system) - len(self.chunk)
        ends = accumulate(len(segment) for segment in self.neighbours)
        return replace(self, neighbours=self.neighbours[: sum(end <= room for end in ends)])


@dataclass(frozen=True)
class PreprocessReport:
    chunks: int
    fused: int  # computed behind their neighbours now
    kept: int  # nothing had to be computed for
    lost: int  # computed or kept, but not there any more at the end, because the tiers are too small
    seconds: float  # of the whole run

    def __str__(self) -> str:
        done = f"{self.chunks} chunks: {self.fused} fused, {self.kept} kept, in {self.seconds:.1f} s"
        if not self.fused:
            return done
        rate = self.fused / self.seconds
        return f"{done} ({1 / rate:.3g} s per chunk, {rate:.3g} chunks/s)"


def fuse_all(engine: Engine, jobs: Sequence[Job], *, record: bool = False) -> list[bytes]:
    """Compute chunks behind their neighbours, most similar first, and keep their KV; returns each `Segment.behind`.

    What is kept already is not computed again. Neighbours that the engine's context has no room for are left out, the
    least similar first, and are not in the digest. record: keep with each chunk the attention it gave to its
    neighbours, which `fusion+craft` needs.
    """
    digests: list[bytes] = []
    work = _Work(engine, Fuse(record=record))
    for begin in range(0, len(jobs), _GROUP):
        group = [job.fitted(engine.context_length) for job in jobs[begin : begin + _GROUP]]
        work.do(group)
        digests += [job.behind for job in group]
    return digests


@dataclass(frozen=True)
class _Work:
    """Computes jobs of one tenant."""

    engine: Engine
    strategy: Fuse
    tenant: str = ""
    background: bool = False  # behind all other requests, in short steps

    def do(self, jobs: Sequence[Job]) -> int:
        todo = [job for job, is_held in zip(jobs, self.held(jobs), strict=True) if not is_held]
        # chunks near each other share neighbours: each is computed once by itself, not by every job that needs it
        alone = {job.system.tokens.tobytes() + segment.tokens.tobytes(): Job(job.system, segment, ())
                 for job in todo if job.neighbours for segment in (*job.neighbours, job.chunk)}  # fmt: skip
        singles = list(alone.values())
        absent = [job for job, is_held in zip(singles, self.held(singles), strict=True) if not is_held]
        for missing in (absent, todo):
            for begin in range(0, len(missing), _GROUP):  # more could have no place in the queue
                self._compute([job.prompt for job in missing[begin : begin + _GROUP]])
        if todo:  # a process that is killed loses no more than what is not written yet
            self.engine.write_soon([job.prompt for job in todo], self.strategy, self.tenant)
        return len(todo)

    def _compute(self, prompts: Iterable[Prompt]) -> None:
        asked: dict[str, Any] = {"background": self.background, "tenant": self.tenant, "max_tokens": 1}
        begun = list[Future[Answer]]()
        try:
            begun += (self.engine.begin_prompt(prompt, strategy=self.strategy, **asked) for prompt in prompts)
            for future in begun:
                future.result()
        finally:  # of effect only after an error
            for future in begun:
                future.cancel()

    def held(self, jobs: Collection[Job]) -> list[bool]:
        """True if the KV of each job is kept, with what is to be noted of those that have neighbours."""
        noted = ((job, self.engine.noted(self.key(job))) for job in jobs)
        return [meta is not None and (not job.neighbours or self.strategy.noted(meta)) for job, meta in noted]

    def key(self, job: Job) -> bytes:
        return self.engine.key_of(job.prompt, self.strategy, self.tenant)


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

    May run while the engine serves others, which it takes turns with. May be stopped at any time and run again. Without
    a disk cache the KV is lost when the engine closes. system: the system message of requests that shall find the KV
    (None: that of requests which bring none). record: as `fuse_all`.
    """
    began = time.perf_counter()
    base = engine.knowledge_base(knowledge)
    work = _Work(engine, Fuse(record=record))
    run = _Run(work, base, head_of(engine, system), engine.share_knowledge, n)
    seen: dict[int, tuple[int, ...]] = {}
    fused, cut = 0, 0
    with tqdm(total=len(base.numbers), desc="fusing", unit="chunk", disable=not progress) as bar:
        for jobs, lists in run.groups(base.numbers):
            fused += run.prepare(jobs, lists)
            bar.update(len(lists))
            seen |= lists
            cut += sum(len(job.neighbours) < len(lists[number]) for number, job in jobs.items())
    if cut:
        _log.warning("%d chunks have less than %d neighbours: the context of %d tokens holds no more of them",
                     cut, n, engine.context_length)  # fmt: skip
    rest, lost = iter(seen.items()), 0
    while some := dict(islice(rest, _GROUP)):
        lost += work.held(run.jobs(some).values()).count(False)
    if lost:
        _log.warning("the KV of %d chunks was driven out again: give the engine a disk cache, or a larger one", lost)
    return PreprocessReport(len(seen), fused, len(seen) - fused, lost, time.perf_counter() - began)


@dataclass(frozen=True)
class _Run:
    """The chunks of a knowledge base on their way."""

    work: _Work
    base: KnowledgeBase
    head: Segment  # of the requests that shall find the KV
    public: bool  # whether all tenants share it
    n: int = NEIGHBOURS

    def groups(self, numbers: Iterable[int]) -> Iterator[tuple[dict[int, Job], dict[int, tuple[int, ...]]]]:
        """Jobs by chunk, a few at a time, and each chunk's neighbours; what requests found lately comes first.

        A job has fewer neighbours where there is no room for all.
        """
        left = dict.fromkeys(numbers)
        while left := dict.fromkeys((*self.base.take_asked(), *left)):
            some = list(islice(left, _GROUP))
            for number in some:
                del left[number]
            lists = self.base.neighbours(self.n, some)
            yield self.jobs(lists), lists

    def prepare(self, jobs: Mapping[int, Job], lists: Mapping[int, tuple[int, ...]]) -> int:
        """Compute what is missing of a group, and mark what is there; returns how many chunks were computed."""
        computed = self.work.do(list(jobs.values()))
        known = self.base.chunks(jobs)
        for (own, job), is_held in zip(jobs.items(), self.work.held(jobs.values()), strict=True):
            if is_held and job.neighbours and own in known and known[own].behind != job.behind:
                self.base.mark_fused(own, lists[own][: len(job.neighbours)], job.behind)
        return computed

    def jobs(self, lists: Mapping[int, tuple[int, ...]]) -> dict[int, Job]:
        chunks = self.base.chunks({number for own, others in lists.items() for number in (own, *others)})
        segments = {number: chunk_segment(Hit(chunk, 1.0, self.public)) for number, chunk in chunks.items()}
        context = self.work.engine.context_length
        return {
            own: Job(self.head, segments[own], tuple(segments[number] for number in others)).fitted(context)
            for own, others in lists.items()
            if segments.keys() >= {own, *others}
        }


def head_of(engine: Engine, system: str | None) -> Segment:
    own = () if system is None else (Message("system", system),)
    messages = (*own, Message("user", "?"))
    return chat_prompt(engine.tokenizer, messages, (), public=engine.share_knowledge).segments[0]


class _Planned(NamedTuple):
    """The KV of a chunk: its key, the pages it takes, and the chunks whose isolated KV these include."""

    key: bytes
    pages: int
    alone: frozenset[int]


@dataclass
class _Progress:
    """Progress of a knowledge base."""

    owned: bool
    total: int = 0
    prepared: int = 0
    pages: int = 0  # all that the planned chunks take
    planned: dict[int, _Planned] = field(default_factory=dict)  # those that were asked for last at the end
    alone: set[int] = field(default_factory=set)  # chunks whose isolated KV is counted
    state: int | None = None  # `KnowledgeBase.changes` when all was done that could be; None: it is not done

    @property
    def beyond(self) -> int:
        return 0 if self.state is None else self.total - len(self.planned)

    def plan(self, number: int, key: bytes, own: int, others: Mapping[int, int], room: int, asked: bool) -> bool:
        """Plan a chunk if there is room for its KV.

        own: its pages. others: those of its neighbours, by number. room: pages that may be planned. asked: it takes the
        place of others that were asked for longer ago.
        """
        before = self.planned.pop(number, None)
        if before is not None:
            self._give_back(before)
        alone = {number: own, **others}
        new = frozenset(alone.keys() - self.alone)
        more = sum(alone[one] for one in new) + (own if others else 0)
        while asked and self.planned and self.pages + more > room:
            self._give_back(self.planned.pop(next(iter(self.planned))))
        if self.pages + more > room:
            return False
        self.planned[number] = _Planned(key, more, new)
        self.pages += more
        self.alone |= new
        return True

    def _give_back(self, gone: _Planned) -> None:
        self.pages -= gone.pages
        self.alone -= gone.alone


class Preparing:
    """Prepares the chunks of all knowledge bases while no request runs, in a thread of its own.

    What is computed has room in the tiers, so no chunk drives out another. A knowledge base is looked at again when
    documents come or go, and a chunk when a search found it: its KV may have left meanwhile.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._head = head_of(engine, None)
        self._over = threading.Event()
        bases = engine.knowledge.bases
        self._bases = {name: _Progress(owner is not None, len(bases.get(name))) for name, owner in bases.owners.items()}
        self._recounted = time.monotonic()
        engine.pending.head = self._head.tokens
        self._thread = threading.Thread(target=self._run, name="ragjax-preprocess", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def progress(self, tenants: bool) -> Preprocessed:
        found = [one for one in list(self._bases.values()) if tenants or not one.owned]
        running = not self._over.is_set() and any(one.state is None for one in found)
        total, prepared, beyond = (sum(getattr(one, name) for one in found) for name in ("total", "prepared", "beyond"))
        return Preprocessed(total, prepared, beyond, running)

    def _run(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                self._look()
            except ClosedError:
                return
            except Exception:
                _log.exception("nothing more is preprocessed")
                self._engine.pending.head = None
                return
            self._engine.pending.head = self._head.tokens if self.progress(tenants=True).running else None

    def _look(self) -> None:
        engine, bases = self._engine, self._engine.knowledge.bases
        told = engine.indexing
        if engine.starting or (told is not None and told.running):  # what all requests need comes first
            return
        owners = bases.owners
        for name in self._bases.keys() - owners.keys():
            del self._bases[name]
        for name, owner in owners.items():
            if self._over.is_set() or engine.library.reading:  # neighbours of what is read are still to come
                return
            try:
                base = bases.get(name)
                progress = self._bases.setdefault(name, _Progress(owner is not None, len(base.numbers)))
                self._prepare(name, base, owner, progress)
            except RequestError as error:
                if name in bases.owners:  # else it was deleted just now
                    _log.warning("passages of %s are not prepared until it changes: %s", name, error)
                    self._bases[name].state = base.changes
        if time.monotonic() - self._recounted > RECOUNT:
            self._recounted = time.monotonic()
            for one in self._bases.values():
                one.prepared = sum(engine.noted(chunk.key) is not None for chunk in one.planned.values())

    def _prepare(self, name: str, base: KnowledgeBase, owner: str | None, progress: _Progress) -> None:
        engine, state, asked = self._engine, base.changes, base.take_asked()
        if progress.state == state and not asked:
            return
        numbers: Sequence[int] = ()
        if progress.state != state:
            numbers = base.numbers
            self._bases[name] = progress = _Progress(owner is not None, len(numbers), progress.prepared)
        others = sum(one.pages for one in self._bases.values() if one is not progress)
        room = engine.preprocessing_room(owner or "") - others
        work = _Work(engine, Fuse(), owner or "", background=True)
        run = _Run(work, base, self._head, engine.share_knowledge and owner is None)
        began = told = time.monotonic()
        computed = 0
        for jobs, lists in run.groups((*asked, *numbers)):
            fitting: dict[int, Job] = {}
            for number, job in jobs.items():
                own, *more = (-(-len(segment) // engine.limits.page_size) for segment in (job.chunk, *job.neighbours))
                around = dict(zip(lists[number], more, strict=False))
                if progress.plan(number, work.key(job), own, around, room, asked=not numbers):
                    fitting[number] = job
            if not computed and not all(work.held(fitting.values())):
                _log.info("preparing passages of %s behind similar ones, while no request runs", name)
            computed += run.prepare(fitting, lists)
            progress.prepared = len(progress.planned)
            if numbers and len(fitting) < len(jobs):
                break
            if self._over.is_set() or base.changes != state or engine.library.reading:
                return
            if computed and time.monotonic() - told > TOLD:
                told = time.monotonic()
                _log.info("prepared %d of %d passages of %s", progress.prepared, progress.total, name)
        if computed:
            beyond = progress.total - len(progress.planned)
            told_beyond = f"; {beyond} have no room in the cache" if beyond else ""
            _log.info("prepared %d of %d passages of %s, %d of them in the last %.0f s%s", progress.prepared,
                      progress.total, name, computed, time.monotonic() - began, told_beyond)  # fmt: skip
        progress.state = state
