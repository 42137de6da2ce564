"""Algorithm 2 of RAGCache: what is begun, cancelled and released, on a scripted search and a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.policy.base import LRU
from ragjax.cache.pool import PagePool
from ragjax.core.options import MAX_PREFILL
from ragjax.engine.speculation import Pipeline
from ragjax.schedule.requests import Requests

Documents = tuple[int, ...]
A, B, C = (1, 3), (1, 2), (2, 1)


class Device:
    """The engine's side of one pipeline: what was offered starts when the pool has room. `log`: what happened, when."""

    def __init__(self, limit: int = 1) -> None:
        self.limit = limit
        self.log: list[tuple[float, str, Documents]] = []
        self.live: Documents | None = None
        self.waiting: list[Documents] = []
        self.clock = 0.0
        self.requests = self
        self.offered = SimpleNamespace(append=lambda state: self.waiting.append(state.documents))

    def run(self, *script: tuple[Documents, int] | tuple[Documents, int, int]) -> Device:
        """Stages of a search: documents, requests whose prompts are not computed then, and the same later on."""
        stages = [(one[0], one[1], one[-1], i == len(script) - 1) for i, one in enumerate(script)]

        def search(*_: object) -> Iterator[Any]:
            for documents, pool, later, final in stages:
                self.clock += 1
                hits = [
                    SimpleNamespace(chunk=SimpleNamespace(id=i, behind=b"", tokens=memoryview(b""))) for i in documents
                ]
                yield SimpleNamespace(hits=tuple(hits), final=final)
                self.room(pool)
                self.clock += 0.5
                self.room(later)
                self.clock -= 0.5

        composer = SimpleNamespace(search=search, check=lambda: None)
        pipeline = Scripted(
            cast(Any, self), cast(Any, SimpleNamespace(composer=composer)), cast(Any, None), print, 0.0, 4
        )
        pipeline.run()
        return self

    def room(self, pool: int) -> None:
        while self.waiting and pool < self.limit and self.live is None:
            self._start(self.waiting.pop(0))

    def post(self, work: Callable[[], object], *_: object) -> None:
        work()

    def enqueue(self, state: Any, place: object) -> None:
        self._start(state.documents)

    def refute(self, state: Any) -> None:
        if self.waiting:
            self.waiting.pop(0)
        else:
            assert self.live == state.documents
            self._note("cancel", state.documents)
            self.live = None

    def confirm(self, state: Any) -> None:
        if self.waiting:
            self._start(self.waiting.pop(0))
        assert self.live == state.documents
        self._note("release", state.documents)

    def events(self) -> list[tuple[str, Documents]]:
        """What happened, without the times."""
        return [(what, documents) for _, what, documents in self.log]

    def _start(self, documents: Documents) -> None:
        assert self.live is None, "two generations of one request at a time"
        self.live = documents
        self._note("start", documents)

    def _note(self, what: str, documents: Documents) -> None:
        self.log.append((self.clock, what, documents))


class Scripted(Pipeline):
    def _state_of(self, hits: Sequence[Any], sink: object) -> Any:
        documents = tuple(hit.chunk.id for hit in hits)
        return SimpleNamespace(documents=documents, strategy=SimpleNamespace(steady=True), times=SimpleNamespace())


def test_figure_11() -> None:
    device = Device().run((A, 0), (B, 0), (B, 0), (B, 0))
    assert device.log == [(1, "start", A), (2, "cancel", A), (2, "start", B), (4, "release", B)]


def test_case_3_the_final_documents_start_in_a_busy_pool() -> None:
    assert Device().run((A, 1), (A, 1)).log == [(2, "start", A), (2, "release", A)]
    assert Device().run((B, 0), (A, 9)).events() == [("start", B), ("cancel", B), ("start", A)]


def test_another_order_is_another_prompt_and_nothing_is_no_prompt() -> None:
    device = Device().run(((), 0), (B, 0), (C, 0), ((), 0))
    assert device.events() == [("start", B), ("cancel", B), ("start", C), ("cancel", C), ("start", ())]


def test_offered_generations_start_while_few_prompts_are_to_be_computed() -> None:
    requests = Requests(KnowledgeCache(b"", PagePool(4, 4), LRU()), max_queue=1)
    offered = [cast(Any, object()) for _ in range(MAX_PREFILL + 2)]
    requests.offered += offered
    assert requests.take_offered() == offered[:MAX_PREFILL]
    requests.max_prefill = 1
    assert requests.take_offered() == offered[MAX_PREFILL:][:1] and len(requests.offered) == 1


@given(
    script=st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 3), st.integers(0, 3)), max_size=8),
    final=st.sampled_from([A, B, C]),
    limit=st.integers(1, 3),
)
def test_random_scripts_against_algorithm_2(
    script: list[tuple[Documents, int, int]], final: Documents, limit: int
) -> None:
    """The pseudo-code, line by line, with the two cases that it leaves open."""
    device = Device(limit).run(*script, (final, 9, 9))
    expected: list[tuple[str, Documents]] = []
    latest: Documents = ()
    running: Documents | None = None
    for documents, pool, later in script:
        if documents != latest:
            if running is not None:
                expected.append(("cancel", running))
                running = None
            latest = documents
        if running is None and min(pool, later) < limit:
            running = latest
            expected.append(("start", latest))
    if running is not None and running != final:
        expected.append(("cancel", running))
    if running != final:
        expected.append(("start", final))
    if script and latest == final:
        expected.append(("release", final))
    assert device.events() == expected
    assert device.live == final and not device.waiting
