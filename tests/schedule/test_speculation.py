"""Algorithm 2 of RAGCache: what is begun, cancelled and released, on a scripted search and a fake clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from ragjax.schedule.speculation import MAX_PREFILL, Decision, Reserve, Speculation

Documents = tuple[int, ...]
A, B, C = (1, 3), (1, 2), (2, 1)


@dataclass
class Device:
    """The engine's side: what was offered starts when the pool has room. `log` is what happened, and when."""

    limit: int = 1
    log: list[tuple[float, str, Documents]] = field(default_factory=list)
    live: Documents | None = None
    clock: float = 0.0

    def __post_init__(self) -> None:
        self.speculation, self.reserve = Speculation(), Reserve[Documents](self.limit)

    def stage(self, documents: Documents, pool: int = 0, *, final: bool = False) -> None:
        """A stage ends; `pool`: other requests whose prompts are not computed."""
        self.clock += 1
        decide = self.speculation.final if final else self.speculation.stage
        decision = decide(documents)
        assert not (decision.release and decision.start) and not (decision.offer and final)
        if decision.cancel:
            self._cancel()
        if decision.offer:
            self.reserve.add(documents)
        if decision.start:
            self._start(documents)
        if decision.release:
            for waited in list(self.reserve.waiting):
                self.reserve.remove(waited)
                self._start(waited)
            assert self.live == documents
            self._note("release", documents)
        self.room(pool)

    def room(self, pool: int) -> None:
        """The pool has another size."""
        for documents in self.reserve.take(pool):
            self._start(documents)

    def events(self) -> list[tuple[str, Documents]]:
        """What happened, without the times."""
        return [(what, documents) for _, what, documents in self.log]

    def _start(self, documents: Documents) -> None:
        assert self.live is None, "two generations of one request at a time"
        self.live = documents
        self._note("start", documents)

    def _cancel(self) -> None:
        if self.reserve.waiting:
            self.reserve.remove(self.reserve.waiting[0])
            return
        assert self.live is not None
        self._note("cancel", self.live)
        self.live = None

    def _note(self, what: str, documents: Documents) -> None:
        self.log.append((self.clock, what, documents))


def test_figure_11() -> None:
    device = Device()
    for documents in (A, B, B):
        device.stage(documents)
    device.stage(B, final=True)
    assert device.log == [(1, "start", A), (2, "cancel", A), (2, "start", B), (4, "release", B)]


def test_case_1_an_empty_pool_and_the_final_documents_start_at_once() -> None:
    device = Device()
    device.stage(A)
    device.stage(A, final=True)
    assert device.log == [(1, "start", A), (2, "release", A)]


def test_case_2_a_busy_pool_is_not_bothered_with_a_guess() -> None:
    device = Device()
    device.stage(A, pool=1)
    device.stage(B, pool=1)
    device.stage(C, final=True)
    assert device.log == [(3, "start", C)], "neither guess started"


def test_case_3_the_final_documents_start_in_a_busy_pool() -> None:
    device = Device()
    device.stage(A, pool=1)
    device.stage(A, pool=1, final=True)
    assert device.log == [(2, "start", A), (2, "release", A)]
    other = Device()
    other.stage(B, pool=0)
    other.stage(A, pool=9, final=True)
    assert other.events() == [("start", B), ("cancel", B), ("start", A)]


def test_case_4_an_empty_pool_takes_a_wrong_guess_and_loses_nothing() -> None:
    device = Device()
    device.stage(A)
    device.stage(B, final=True)
    assert device.log == [(1, "start", A), (2, "cancel", A), (2, "start", B)]


def test_documents_without_room_start_when_there_is_some_if_they_are_still_the_latest() -> None:
    device = Device(limit=2)
    device.stage(A, pool=2)
    device.stage(B, pool=2)
    device.clock = 2.5
    device.room(1)
    device.stage(B, pool=1)
    device.stage(B, final=True)
    assert device.log == [(2.5, "start", B), (4.5, "release", B)]


def test_a_full_pool_throughout_is_a_search_without_speculation() -> None:
    device = Device()
    for documents in (A, B, C, A):
        device.stage(documents, pool=5)
    device.stage(A, pool=5, final=True)
    assert device.log == [(5, "start", A), (5, "release", A)]


def test_another_order_is_another_prompt_and_nothing_is_no_prompt() -> None:
    device = Device()
    for documents in ((), B, C):
        device.stage(documents)
    device.stage((), final=True)
    assert device.events() == [("start", B), ("cancel", B), ("start", C), ("cancel", C), ("start", ())]


def test_what_failed_is_begun_anew_at_the_end_and_not_before() -> None:
    speculation = Speculation()
    assert speculation.stage(A) == Decision(offer=True)
    speculation.forget()
    assert speculation.stage(A) == Decision()
    assert speculation.final(A) == Decision(start=True)


def test_what_was_declined_may_be_offered_after_the_next_stage() -> None:
    speculation = Speculation()
    assert speculation.stage((1, 2)).offer
    speculation.decline()
    again = speculation.stage((1, 2))
    assert again.offer and not again.cancel
    speculation.decline()
    end = speculation.final((1, 2))
    assert end.start and not end.cancel and not end.release


def test_the_reserve_starts_the_oldest_while_the_pool_is_small() -> None:
    reserve: Reserve[int] = Reserve()
    for number in range(6):
        reserve.add(number)
    assert reserve.take(MAX_PREFILL) == reserve.take(MAX_PREFILL + 3) == []
    assert reserve.take(MAX_PREFILL - 2) == [0, 1]
    assert reserve.remove(2) and not reserve.remove(2) and not reserve.remove(0)
    assert reserve.take(0) == [3, 4, 5] and reserve.waiting == []


@given(
    script=st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 3), st.integers(0, 3)), max_size=8),
    final=st.sampled_from([A, B, C]),
    limit=st.integers(1, 3),
)
def test_random_scripts_against_algorithm_2(
    script: list[tuple[Documents, int, int]], final: Documents, limit: int
) -> None:
    """The pseudo-code, line by line, with the two cases that it leaves open."""
    device = Device(limit)
    expected: list[tuple[str, Documents]] = []
    latest: Documents = ()
    running: Documents | None = None
    for documents, pool, later in script:
        device.stage(documents, pool)
        device.room(later)
        if documents != latest:
            if running is not None:
                expected.append(("cancel", running))
                running = None
            latest = documents
        if running is None and min(pool, later) < limit:
            running = latest
            expected.append(("start", latest))
    device.stage(final, final=True, pool=9)
    if running is not None and running != final:
        expected.append(("cancel", running))
    if running != final:
        expected.append(("start", final))
    if script and latest == final:
        expected.append(("release", final))
    assert device.events() == expected
    assert device.live == final and not device.reserve.waiting
