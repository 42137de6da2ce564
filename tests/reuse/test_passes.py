"""Layer ranges, measurements, moves and given tokens on real pages, against a literal executor that knows no runner.

Requests run side by side, in shared steps and in several; each must get what it gets alone in the executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import ragjax.runner.weights
from ragjax.core import NEVER, Grid, Measure, Move, Pass, Plan, Prefill, Prompt, Results, Run, Span, Visibility
from ragjax.reuse.base import Allocation, Strategy, indices
from ragjax.runner.runner import Runner
from ragjax.runner.stages import OUTSIDE
from ragjax.schedule.batch import Batch
from tests.support import tiny
from tests.support.executor import Executor, model
from tests.support.pace import Hold

pytestmark = pytest.mark.slow

Int = NDArray[np.int32]

PAGE, PAGES = tiny.PAGE, 80
GRID = Grid(rows=((4, 1), (64, 16)), entries=(64,), logits=(2,))
ALL, FINE, COARSE = (0, 3), (0, 1, 2, 3), (0, 3)
LOGITS = frozenset({Measure.LOGITS})
KV = {Measure.KEY_SCORE, Measure.VALUED_SCORE}


@cache
def runner(layers: int = 1, *, scanned: bool = False, dtype: str = "float32") -> Runner:
    """The tiny decoder in stages of so many layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragjax.runner.weights, "STAGE_LAYERS", layers)
        return tiny.make_runner(tiny.decoder(dtype), pages=PAGES, grid=GRID, scanned=scanned)


def prompts() -> tuple[Prompt, ...]:
    """Two that go hand in hand, of different numbers of segments, and one of more rows than a step takes."""
    return (
        tiny.prompt(1, system=8, chunks=(11, 9), question=12),
        tiny.prompt(2, system=7, chunks=(5, 10, 6), question=7),
        tiny.prompt(3, chunks=(21, 17, 30), question=12),
    )


# ----------------------------------------------------------------------------------------- scripted passes


@dataclass(frozen=True)
class Ground:
    """What passes of a script stand on: chunks computed alone behind the system prompt, moved to their places."""

    prompt: Prompt
    kept: tuple[Span, ...]
    own: Run
    page_size: int

    @property
    def system(self) -> int:
        return self.prompt.starts[1]

    @property
    def joined(self) -> int:
        return self.prompt.starts[-2]

    @property
    def question(self) -> Int:
        return indices(self.joined, len(self.prompt))

    @property
    def chunks(self) -> Int:
        return indices(self.system, self.joined)

    def new(self, *parts: Int) -> tuple[Span, ...]:
        """Slots of the request's own for these orders: order i lies in slot i of the run."""
        runs = (part for whole in parts for part in np.split(whole, np.flatnonzero(np.diff(whole) != 1) + 1))
        return tuple(
            Span.consecutive(int(part[0]), self.own.slice(int(part[0]), int(part[-1]) + 1, self.page_size))
            for part in runs
            if len(part)
        )

    def without(self, hidden: Int) -> tuple[Span, ...]:
        """What was kept, less some orders."""
        return tuple(replace(s, indices=np.where(np.isin(s.indices, hidden), NEVER, s.indices)) for s in self.kept)


class Script(Strategy):
    """A strategy that computes the chunks alone and then does as told."""

    name = "script"
    reads_logits = True

    def __init__(self, acts: Callable[[Ground], Iterator[Pass | Move]]):
        self.acts = acts
        self.results: list[Results] = []

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        system, joined, size = prompt.starts[1], prompt.starts[-2], len(prompt)
        run = allocation.reserve(joined)
        own = allocation.reserve(size + allocation.decode_tokens)
        hidden = Visibility.isolated(prompt).hidden
        alone, kept, positions = [], [], []
        for i, segment in enumerate(prompt.segments[:-1]):
            begin, end = prompt.starts[i], prompt.starts[i + 1]
            slots, offset = run.slice(begin, end, allocation.page_size), begin - system if i else 0
            alone.append(Span.consecutive(begin, slots, 0, hidden[i]))
            kept.append(Span.consecutive(begin, slots, offset))
            positions.append(indices(begin, end) - offset)
            assert len(segment)
        yield Pass(indices(0, joined), np.concatenate(positions), tuple(alone))
        ground = Ground(prompt, tuple(kept), own, allocation.page_size)
        for last in self.acts(ground):
            self.results.append((yield last))
        tail = own.slice(size, own.length, allocation.page_size)
        return Plan(last.spans, tail, None, (), self.results[-1][Measure.LOGITS][-1])


def measuring(measures: set[Measure], measured: tuple[int, int] | None = None) -> Callable[[Ground], Iterator[Pass]]:
    """The question over what is kept, half of it asking; then most chunk tokens and the question anew."""

    def acts(ground: Ground) -> Iterator[Pass]:
        question = ground.question
        asked = frozenset(measures)
        spans = (*ground.kept, *ground.new(question))
        yield Pass(question, question, spans, asked, measured=measured, asking=question[::2])
        chosen = np.setdiff1d(ground.chunks, ground.chunks[::9]).astype(np.int32)
        rows = np.concatenate([chosen, question])
        spans = (*ground.without(chosen), *ground.new(chosen, question))
        yield Pass(rows, rows, spans, asked | LOGITS, (len(ground.prompt) - 1,), measured=measured, stale=ground.kept)

    return acts


def narrowing(
    measures: set[Measure], cuts: tuple[int, ...], *, drop: bool
) -> Callable[[Ground], Iterator[Pass | Move]]:
    """Everything behind the system prompt anew; at each cut a third of the chunk tokens goes on as it was kept."""

    def acts(ground: Ground) -> Iterator[Pass | Move]:
        rows = indices(ground.system, len(ground.prompt))
        spans = (ground.kept[0], *ground.new(rows))
        for begin, end in zip((0, *cuts), (*cuts, 3), strict=True):
            if begin and drop:
                dropped = rows[:-12:3]
                rows = np.setdiff1d(rows, dropped).astype(np.int32)
                yield Move(dropped, ground.kept, spans, (begin, 3))
            last = end == 3
            logits = (len(ground.prompt) - 1,) if last else ()
            asked = frozenset(measures) | (LOGITS if last else frozenset())
            yield Pass(rows, rows, spans, asked, logits, layers=(begin, end), stale=ground.kept)

    return acts


# --------------------------------------------------------------------------------------------- both sides


def serve(made: Runner, scripts: Sequence[Script], prompts: Sequence[Prompt]) -> list[Batch]:
    """Carry scripts out side by side; returns the steps."""
    batches: list[Batch] = []
    with tiny.engine(made, pages=PAGES) as engine:
        launch = engine._loop._execution.launch
        engine._loop._execution.launch = lambda batch: (batches.append(batch), launch(batch))[1]
        with Hold(engine):
            futures = [
                engine.begin_prompt(prompt, strategy=script, max_tokens=1)
                for script, prompt in zip(scripts, prompts, strict=True)
            ]
        for future in futures:
            future.result(60)
    return batches


def both(
    made: Runner, acts: Callable[[Ground], Iterator[Pass | Move]], stages: tuple[int, ...]
) -> Iterator[tuple[Results, Results]]:
    """Results of every act: of the prompts side by side on the runner, and of each alone in the executor."""
    assert made.stages == stages
    scripts = [Script(acts) for _ in prompts()]
    batches = serve(made, scripts, prompts())
    measures = any(set(result) - LOGITS for script in scripts for result in script.results)
    alike = [batch for batch in batches if (batch.step.measure is not None) == measures]
    assert any(len(batch.parts) > 1 for batch in alike), "requests shared steps"
    assert any(part.begin for batch in alike for part in batch.parts), "and passes took several"
    for script, prompt in zip(scripts, prompts(), strict=True):
        done = Executor(model(), pages=PAGES, entries=64, stages=stages).run(Script(acts), prompt)
        yield from zip(script.results, done.results[1:], strict=True)


def assert_near(found: Results, what: Results) -> None:
    assert set(found) == set(what)
    for name in what:
        assert found[name].dtype == np.float32 and found[name].shape == what[name].shape, name
        scale = np.abs(what[name]).max()
        np.testing.assert_allclose(found[name], what[name], atol=1e-4 * scale, err_msg=name)
        assert scale > 0


# ------------------------------------------------------------------------------------------- measurements


@pytest.mark.parametrize(
    "measures",
    [{Measure.KEY_SCORE}, {Measure.VALUED_SCORE}, KV, {Measure.SEGMENT_SCORE}],
    ids=lambda measures: "+".join(sorted(measures)),
)
def test_scores_are_those_of_literal_attention(measures: set[Measure]) -> None:
    for found, what in both(runner(), measuring(measures, (1, 3)), FINE):
        assert_near(found, what)


def test_deviation_is_at_equal_rotation() -> None:
    pairs = list(both(runner(), measuring({Measure.DEVIATION}, (0, 2)), FINE))
    for found, what in pairs[1::2]:  # the first pass has nothing stale
        assert_near(found, what)
        key = found[Measure.DEVIATION]
        assert (key[0, :-12] < 1e-8).all()  # the first layer looks at the token alone
        assert (key[1, :-12].max() > 0.1) and not key[:, -7:].any()  # the question has no stale KV
    assert not any(found[Measure.DEVIATION].any() for found, _ in pairs[::2])


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("what", [Measure.SEGMENT_SCORE, Measure.DEVIATION])
def test_a_layer_within_a_stage_is_measured_by_itself(scanned: bool, what: Measure) -> None:
    made = runner(3, scanned=scanned)
    some, whole = (alone(made, measuring({what}, cut)) for cut in ((1, 2), None))
    for one, three in zip(some, whole, strict=True):
        np.testing.assert_allclose(one[what], three[what][1:2], rtol=1e-6)
    assert whole[1][what].any()


def alone(made: Runner, acts: Callable[[Ground], Iterator[Pass | Move]]) -> list[Results]:
    """Results on the runner, one request by itself."""
    script = Script(acts)
    serve(made, [script], prompts()[2:])
    return script.results


@pytest.mark.parametrize("scanned", [False, True])
def test_measuring_copies_no_pool(scanned: bool) -> None:
    """Nor is one copied for the layers that are not measured."""
    grid = Grid(rows=((16, 16),), entries=(8,), logits=(2,))

    def temporary(pages: int) -> int:
        made = Runner(tiny.decoder(), pages=pages, page_size=PAGE, grid=grid, scanned=scanned)
        plan = made._programs.get(
            "stage", 16, 8, 3, Measure.DEVIATION if scanned else Measure.KEY_SCORE, 0
        ).memory_analysis()
        return int(plan.temp_size_in_bytes)

    assert temporary(800) == temporary(200)


# ------------------------------------------------------------------------------------------- layer ranges


@pytest.mark.parametrize("cuts", [(1,), (1, 2)])
@pytest.mark.parametrize("drop", [False, True])
def test_passes_over_some_layers_go_on_where_the_last_one_ended(cuts: tuple[int, ...], drop: bool) -> None:
    for found, what in both(runner(), narrowing(set(), cuts, drop=drop), FINE):
        if what:
            assert_near(found, what)


def test_layers_in_turn_are_all_layers_at_once() -> None:
    whole, parts = (alone(runner(), narrowing(set(), cuts, drop=False))[-1][Measure.LOGITS] for cuts in ((), (1, 2)))
    np.testing.assert_array_equal(whole, parts)


def test_every_pass_of_a_narrowing_measures() -> None:
    pairs = [pair for pair in both(runner(), narrowing({Measure.DEVIATION}, (1, 2), drop=True), FINE) if pair[1]]
    assert len(pairs) == 9
    for i, (found, what) in enumerate(pairs):
        if i % 3:
            assert_near(found, what)
        else:  # the first layer's KV depends on the token alone
            assert found[Measure.DEVIATION].max() < 1e-8


@pytest.mark.parametrize("scanned", [False, True])
def test_a_pass_may_end_within_a_stage(scanned: bool) -> None:
    def acts(ground: Ground) -> Iterator[Pass]:
        rows = indices(ground.system, len(ground.prompt))
        spans = (ground.kept[0], *ground.new(rows))
        yield Pass(rows, rows, spans, frozenset({Measure.DEVIATION}), layers=(0, 2), stale=ground.kept)
        yield Pass(rows, rows, spans, LOGITS, (len(ground.prompt) - 1,))

    for found, what in both(runner(3, scanned=scanned), acts, COARSE):
        assert_near(found, what)


# -------------------------------------------------------------------------------------------------- moves


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 16, 200])
def test_a_move_is_a_turned_copy(dtype: str, count: int) -> None:
    made = runner(dtype=dtype)
    random = np.random.default_rng(count)
    k, v = (random.standard_normal((3, PAGES, 2, PAGE, 16)) for _ in "kv")
    fill(made, k, v)
    slots = random.permutation(np.arange(PAGE, PAGES * PAGE)).astype(np.int32)
    source, target, others = slots[:count], slots[count : 2 * count], slots[2 * count :]
    offset = random.integers(-50, 50, count).astype(np.int32)
    offset[0] = 0
    before = [made.read(part) for part in (source, target, others)]
    where = made._pools[1].k_LPKCD.unsafe_buffer_pointer()
    made.move(source, target, offset, (1, 3))
    assert made._pools[1].k_LPKCD.unsafe_buffer_pointer() == where
    after = [made.read(part) for part in (source, target, others)]
    for i in (0, 2):
        np.testing.assert_array_equal(after[i], before[i])
    np.testing.assert_array_equal(after[1][0][0], before[1][0][0])  # layer 0 is left alone
    np.testing.assert_array_equal(after[1][1][1:], before[0][1][1:])  # values, bit for bit
    np.testing.assert_array_equal(after[1][0][1:, 0], before[0][0][1:, 0])  # and keys that are not rotated
    for layer in (1, 2):
        rotated = model().rotate(before[0][0][layer].astype(np.float64), offset)
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(after[1][0][layer], rotated, atol=tolerance)


def fill(made: Runner, k: NDArray[np.float64], v: NDArray[np.float64]) -> None:
    """Put keys and values [L, P, K, C, D] into the pool."""
    kind = jnp.dtype(made.dtype)
    stored = (np.asarray(x.astype(kind)).view(made.storage_dtype) for x in (k, v))
    made.insert(np.arange(PAGES, dtype=np.int32), made.upload(*stored))


def test_moving_no_slots_does_nothing() -> None:
    none = np.zeros(0, np.int32)
    runner().move(none, none, none, (0, 3))


@pytest.mark.parametrize(
    ("source", "target", "offset", "layers", "named"),
    [
        ([16, PAGES * PAGE], [40, 41], [0, 0], ALL, "source holds"),
        ([16, 17], [-1, 41], [0, 0], ALL, "target holds"),
        ([16, 17], [40, 40], [0, 0], ALL, "target names a slot twice"),
        ([16, 17], [17, 40], [0, 0], ALL, "target names a slot of the source"),
        ([16, 17], [40, 41], [0, 1024], ALL, "offset holds 1024"),
        ([16, 17], [40, 41], [0, 0], (1, 4), "not between two of"),
        ([16, 17], [40, 41], [0, 0], (2, 1), "not between two of"),
    ],
)
def test_bad_moves_are_refused(
    source: list[int], target: list[int], offset: list[int], layers: tuple[int, int], named: str
) -> None:
    assert OUTSIDE > PAGES * PAGE
    arrays = (np.array(x, np.int32) for x in (source, target, offset))
    with pytest.raises(ValueError, match=named):
        runner().move(*arrays, layers)


# ------------------------------------------------------------------------------------------ passes refused


REFUSED: dict[str, Callable[[Ground, Pass], Pass]] = {
    "without rows": lambda ground, one: replace(one, rows=one.rows[:0], logits=()),
    r"over layers \(0, 4\)": lambda ground, one: replace(one, layers=(0, 4)),
    r"over layers \(2, 2\)": lambda ground, one: replace(one, layers=(2, 2)),
    "logits of a pass that ends before": lambda ground, one: replace(one, layers=(0, 2)),
    "indices in logits": lambda ground, one: replace(one, logits=(0,)),
    "indices in asking": lambda ground, one: replace(one, asking=ground.chunks),
    "measures layers": lambda ground, one: replace(one, measured=(1, 4)),
    "key_score, segment_score": lambda ground, one: replace(
        one, measures=frozenset({Measure.KEY_SCORE, Measure.SEGMENT_SCORE})
    ),
    "where no pass ended": lambda ground, one: replace(one, layers=(1, 3)),
    "cached pages": lambda ground, one: replace(one, spans=ground.kept),
}


@pytest.mark.parametrize("named", REFUSED)
def test_bad_passes_are_refused(named: str) -> None:
    def acts(ground: Ground) -> Iterator[Pass]:
        rows = ground.question
        good = Pass(rows, rows, (*ground.kept, *ground.new(rows)), LOGITS, (len(ground.prompt) - 1,))
        yield REFUSED[named](ground, good)

    with pytest.raises((ValueError, RuntimeError), match=f"script .*{named}"):
        serve(runner(), [Script(acts)], prompts()[:1])


def test_a_pass_goes_on_with_rows_of_the_one_before() -> None:
    def acts(ground: Ground) -> Iterator[Pass]:
        rows = ground.question
        spans = (*ground.kept, *ground.new(ground.chunks, rows))
        yield Pass(rows, rows, spans, layers=(0, 1))
        more = np.append(ground.chunks[-1:], rows)
        yield Pass(more, more, (*ground.without(more), *ground.new(more)), layers=(1, 2))

    with pytest.raises(ValueError, match="rows that the pass before did not have"):
        serve(runner(), [Script(acts)], prompts()[:1])


def test_a_move_keeps_to_own_slots_and_to_what_is_there() -> None:
    def acts(sources: int, own: int, ground: Ground) -> Iterator[Move]:
        yield Move(ground.chunks[:3], ground.kept[:sources], ground.new(ground.chunks[own:]), (0, 3))

    for sources, own, said in ((2, 1, "write into cached pages"), (1, 0, "does not hold")):
        with pytest.raises((ValueError, RuntimeError), match=said):
            serve(runner(), [Script(partial(acts, sources, own))], prompts()[:1])
