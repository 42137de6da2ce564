"""Selective strategies and baselines against their formulas, transcribed over dense float64 attention.

Strategies run by `tests.executor`, which knows no more of the papers than what a pass is. The transcriptions know no
pages, offsets or caches: KV of whole prompts as arrays, `sorted` for the top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.baseline.strategy.gradual import Gradual, narrowing
from benchmarks.baseline.strategy.random import budgets, top_each
from ragjax.cache.tree import Provenance
from ragjax.core import Kind, Measure, Move, OutOfPages, Prompt, Run, Segment
from ragjax.reuse import strategies
from ragjax.reuse.base import segments_of
from ragjax.reuse.blend import Deviation
from ragjax.reuse.fuse import Fuse
from ragjax.reuse.fusion import NEIGHBOURS, Fused, QueryGuided
from ragjax.reuse.repair import Selective, share, shares, top
from ragjax.reuse.stitch import Isolated
from tests.support import tiny
from tests.support.audit import audit_cache
from tests.support.executor import Array, Executor, Model, model, softmax
from tests.support.literal import (
    chosen_of,
    counted,
    deviations,
    highest,
    indices_of,
    isolated,
    joins,
    plant,
    preprocessed,
    repaired,
    results_of,
    shifted,
    two_turns,
)

KNOWN = strategies()
SELECTIVE = sorted(name for name, strategy in KNOWN.items() if strategy.selective)
STITCHED = [name for name in SELECTIVE if "craft" not in name]  # Cache-Craft's have a test of their own


# ------------------------------------------------------------------------------------------- pure selection


def test_share_counts_what_the_ratio_says_in_decimal():
    assert [share(ratio, 100) for ratio in (0, 0.07, 0.15, 0.29, 0.151, 1)] == [0, 7, 15, 29, 16, 100]
    assert share(0.15, 130) == 20 and share(0.001, 10) == 1 and share(0.5, 0) == 0


def test_top_breaks_ties_by_the_lower_order():
    candidates = np.array([3, 5, 8, 9], np.int32)
    assert list(top(np.array([1.0, 2.0, 2.0, 1.0]), candidates, 1)) == [5]
    assert list(top(np.array([1.0, 2.0, 2.0, 1.0]), candidates, 3)) == [3, 5, 8]
    assert list(top(np.zeros(4), candidates, 2)) == [3, 5]
    assert list(top_each(np.array([1.0, 2.0, 2.0, 1.0]), candidates, (2, 2), (1, 1))) == [5, 8]


def test_budgets_are_proportional_and_add_up():
    assert budgets((40, 33, 57), 20) == (6, 5, 9)
    assert budgets((10, 10, 10), 2) == (1, 1, 0)
    assert budgets((3, 0, 5), 8) == (3, 0, 5)
    random = np.random.default_rng(0)
    for _ in range(200):
        lengths = (*map(int, random.integers(0, 50, 5)), 1)
        count = int(random.integers(0, sum(lengths) + 1))
        given = budgets(lengths, count)
        assert sum(given) == count and all(0 <= part <= length for part, length in zip(given, lengths, strict=True))


# -------------------------------------------------------------------------------------------------- limits


@pytest.mark.slow
@pytest.mark.parametrize("name", STITCHED)
def test_limits_of_the_ratio(name):
    prompt, executor, strategy = tiny.prompt(11), Executor(), KNOWN[name]
    full = model().dense(prompt.tokens).logits[-1]
    for _ in ("cold", "warm"):
        done = executor.run(strategy, prompt, 1.0)
        np.testing.assert_allclose(done.logits, full, atol=1e-5)
        assert done.plan.exact_to == "full"
    none = executor.run(strategy, prompt, 0.0)
    np.testing.assert_allclose(none.logits, repaired(prompt, isolated(prompt), ()), atol=1e-5)
    assert none.plan.exact_to is None and len(none.passes) == 1
    half = executor.run(strategy, prompt, 0.5)
    assert half.plan.exact_to is None and np.abs(half.logits - full).max() > 1e-3


@pytest.mark.parametrize("name", [*STITCHED, "unmoved", "set-cache", "naive"])
def test_one_chunk_alone_is_full(name):
    prompt, executor, strategy = tiny.prompt(12, chunks=(50,)), Executor(), KNOWN[name]
    full = model().dense(prompt.tokens).logits[-1]
    for ratio in (None, 0.0, 0.3) if strategy.selective else (None,):
        done = executor.run(strategy, prompt, ratio)
        np.testing.assert_allclose(done.logits, full, atol=1e-5)
        assert done.plan.exact_to == "full"


@pytest.mark.slow
@pytest.mark.parametrize("name", STITCHED)
def test_two_turns(name):
    prompt, executor, strategy = two_turns(), Executor(), KNOWN[name]
    done = executor.run(strategy, prompt, 1.0)
    np.testing.assert_allclose(done.logits, model().dense(prompt.tokens).logits[-1], atol=1e-5)
    done = executor.run(strategy, prompt, 0.2)
    if name != "blend-gradual":
        assert len(chosen_of(done, prompt)) == counted(prompt, 0.2)
        expected = repaired(prompt, isolated(prompt), chosen_of(done, prompt))
        np.testing.assert_allclose(done.logits, expected, atol=1e-5)


def test_what_lost_precision_at_rest_is_exact_only_where_it_was_computed_anew():
    prompt, executor, strategy = tiny.prompt(12, chunks=(50,)), Executor(), strategies()["blend"]
    executor.run(strategy, prompt)
    chunk = next(node for node in executor.cache.tree.nodes() if node.method == "naive")
    chunk.lossy = True
    assert [executor.run(strategy, prompt, ratio).plan.exact_to for ratio in (0.0, 0.5, 1.0)] == [None, None, "full"]
    chunk.parent.lossy = True
    assert executor.run(strategy, prompt, 1.0).plan.exact_to is None


def test_fused_chunk_alone_is_full_too():
    prompt, executor = tiny.prompt(13, chunks=(50, 30)), Executor()
    executor.run(strategies()["naive"], prompt)
    digest = plant(executor, prompt, 1, prompt.segments[2:3])
    single = Prompt((prompt.segments[0], replace(prompt.segments[1], behind=digest), prompt.segments[-1]))
    done = executor.run(strategies()["fusion"], single, 0.0)
    np.testing.assert_allclose(done.logits, model().dense(single.tokens).logits[-1], atol=1e-5)
    assert done.plan.exact_to == "full"


# ------------------------------------------------------------------------------------------------- methods


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_blend_takes_the_highest_deviation_at_the_second_layer(seed: int):
    prompt, executor = tiny.prompt(20 + seed), Executor()
    kept = isolated(prompt)
    key = deviations(prompt, kept)
    strategy = Selective("blend", Isolated(), Deviation())
    for ratio in (0.15, 0.4):
        done = executor.run(strategy, prompt, ratio)
        measured = results_of(done, Measure.DEVIATION)[-1]
        np.testing.assert_allclose(measured, list(key.values()), rtol=1e-5, atol=1e-5)
        assert chosen_of(done, prompt) == highest(key, counted(prompt, ratio))
        np.testing.assert_allclose(done.logits, repaired(prompt, kept, chosen_of(done, prompt)), atol=1e-5)
        assert sum(r.recomputed for r in done.plan.reports) >= counted(prompt, ratio)


def literal_gradual(prompt: Prompt, kept: tuple[Array, Array], ratio: float, stages: Sequence[int]) -> Array:
    """Layer after layer: at each stage's end the rows that deviate least fall out, with their old KV from there on.

    Not behind the first layer, whose keys and values depend on nothing but their tokens.

    Logits of the last token.
    """
    k, v = kept[0].copy(), kept[1].copy()
    total, count = len(indices_of(prompt, Kind.CHUNK)), counted(prompt, ratio)
    key = deviations(prompt, kept)
    chosen = highest(key, min(2 * count, total))
    ends = [end for end in stages if 1 < end < stages[-1]]
    numbers = [round(len(chosen) + (count - len(chosen)) * s / len(ends)) for s in range(1, len(ends) + 1)]
    rows = np.array(sorted({*chosen, *joins(prompt)}))
    x = model().embedding[prompt.tokens[rows]]
    for layer in range(len(model().layers)):
        q, k[layer, rows], v[layer, rows] = model().project(layer, x, rows)
        seen = np.arange(len(prompt)) <= rows[:, None]
        x = model().finish(layer, x, model().mix(softmax(model().scores(q, k[layer]), seen[:, None]), v[layer]))
        if layer + 1 in ends:
            scores = {o: float(((k[layer, o] - kept[0][layer, o]) ** 2).sum()) for o in chosen}
            chosen = highest(scores, numbers.pop(0))
            staying = np.isin(rows, [*chosen, *joins(prompt)])
            rows, x = rows[staying], x[staying]
    return model().unembed(x)[-1]


@pytest.mark.parametrize("stages", [(0, 1, 2, 3, 4, 5), (0, 2, 4, 5)])
def test_gradual_narrows_step_by_step(stages: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    deep, prompt = Model(tiny.decoder(config=replace(tiny.CONFIG, num_layers=5))), tiny.prompt(24)
    for module in ("tests.support.literal", __name__):
        monkeypatch.setattr(f"{module}.model", lambda: deep)
    logits = literal_gradual(prompt, isolated(prompt), 0.15, stages)
    done = Executor(deep, stages=stages).run(Gradual(), prompt, 0.15)
    np.testing.assert_allclose(done.logits, logits, atol=1e-5)
    moved = [item.layers[0] for item in done.passes if isinstance(item, Move)]
    assert moved == [end for end in stages[1:-1] if end > 1]
    assert len(chosen_of(done, prompt)) == counted(prompt, 0.15)
    wide = Executor(deep, stages=stages).run(Gradual(), prompt, 0.6)
    assert wide.plan.exact_to is None, "all tokens were computed anew in the first stage, and not in the last"


def test_narrowing_ends_at_the_target():
    assert narrowing(20, 130, 3) == (40, 30, 20)
    assert narrowing(100, 130, 3) == (130, 115, 100)
    assert narrowing(20, 130, 1) == (20,)
    assert narrowing(0, 130, 4) == (0, 0, 0, 0) and narrowing(130, 130, 2) == (130, 130)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["isolated", "fused"])
def test_fusion_takes_what_the_question_attends_to_in_the_last_layer(source):
    executor, prompt = Executor(stages=(0, 3) if source == "isolated" else (0, 1, 2, 3)), tiny.prompt(24)
    kept = isolated(prompt)
    if source == "fused":
        prompt, kept = preprocessed(executor, prompt)
    dense = model().dense(prompt.tokens, rows=joins(prompt), kept=kept)
    scores: dict[int, float] = {}
    for i in segments_of(prompt, Kind.CHUNK):
        inside = np.arange(prompt.starts[i], prompt.starts[i + 1])
        prob = dense.prob[-1][joins(prompt)][:, :, inside]  # rows of the question, heads, tokens of the chunk
        scores |= {int(order): float(prob[:, :, j].sum(0).mean()) for j, order in enumerate(inside)}
    strategy = Selective("fusion", Fused(), QueryGuided())
    zero = executor.run(strategy, prompt, 0.0)
    np.testing.assert_allclose(zero.logits, dense.logits[-1], atol=1e-5)
    done = executor.run(strategy, prompt, 0.15)
    np.testing.assert_allclose(results_of(done, Measure.KEY_SCORE)[-1, list(scores)], list(scores.values()), atol=1e-5)
    assert chosen_of(done, prompt) == highest(scores, counted(prompt, 0.15))
    np.testing.assert_allclose(done.logits, repaired(prompt, kept, chosen_of(done, prompt)), atol=1e-5)
    assert done.plan.exact_to is None
    assert sum(r.recomputed for r in done.plan.reports[1:4]) == counted(prompt, 0.15)


def test_ragjax_takes_what_moves_the_question_most_and_nothing_of_the_anchor(monkeypatch):
    monkeypatch.setattr("ragjax.reuse.anchor.sections", lambda layers: tuple(range(layers + 1)))  # its model is shallow
    executor = Executor(stages=(0, 1, 2, 3))
    prompt, kept = preprocessed(executor, tiny.prompt(24))
    first = np.arange(prompt.starts[1], prompt.starts[2])
    kept = tuple(x.copy() for x in kept)
    for mixed, alone in zip(kept, isolated(prompt), strict=True):
        mixed[:, first] = alone[:, first]
    dense = model().dense(prompt.tokens, rows=joins(prompt), kept=kept)
    group = dense.prob.shape[2] // dense.v.shape[2]
    scores = dict.fromkeys(map(int, indices_of(prompt, Kind.CHUNK)), 0.0)
    for layer, prob in list(enumerate(dense.prob))[2:]:  # the later of sections (0, 1), (1, 2), (2, 3)
        for head in range(prob.shape[1]):
            for order in scores:
                value = np.linalg.norm(dense.v[layer, order, head // group])
                scores[order] += float(prob[joins(prompt), head, order].sum() * value) / prob.shape[1]
    strategy = strategies()["anchor"]
    np.testing.assert_allclose(executor.run(strategy, prompt, 0.0).logits, dense.logits[-1], atol=1e-5)
    done = executor.run(strategy, prompt, 0.15)
    found = results_of(done, Measure.VALUED_SCORE).sum(0)
    np.testing.assert_allclose(found[list(scores)], list(scores.values()), atol=1e-5)
    others = {order: score for order, score in scores.items() if order not in set(first)}
    assert chosen_of(done, prompt) == highest(others, counted(prompt, 0.15))
    assert set(highest(scores, counted(prompt, 0.15))) & set(map(int, first)), "the anchor would have been chosen from"
    np.testing.assert_allclose(done.logits, repaired(prompt, kept, chosen_of(done, prompt)), atol=1e-5)
    near_all = executor.run(strategy, prompt, 0.99)
    assert set(chosen_of(near_all, prompt)) == set(others)
    np.testing.assert_allclose(near_all.logits, model().dense(prompt.tokens).logits[-1], atol=1e-5)


def test_an_anchor_that_lost_precision_is_repaired_like_others():
    executor, prompt = Executor(), tiny.prompt(24)
    strategy = strategies()["anchor"]
    executor.run(strategy, prompt, 0.2)
    for node in executor.cache.tree.nodes():
        node.lossy = node.provenance is Provenance.ISOLATED
    chosen = chosen_of(executor.run(strategy, prompt, 0.99), prompt)
    assert set(range(prompt.starts[1], prompt.starts[2])) & set(chosen)


def test_fusion_asks_the_last_question_only():
    prompt, executor = two_turns(), Executor()
    kept = isolated(prompt)
    prob = model().dense(prompt.tokens, rows=joins(prompt), kept=kept).prob[-1, prompt.starts[-2] :].sum(0).mean(0)
    done = executor.run(strategies()["fusion"], prompt, 0.2)
    scores = {int(order): float(prob[order]) for order in indices_of(prompt, Kind.CHUNK)}
    assert chosen_of(done, prompt) == highest(scores, counted(prompt, 0.2))


def test_blend_sees_earlier_turns_in_the_probe():
    prompt, executor = two_turns(), Executor()
    done = executor.run(strategies()["blend"], prompt, 0.2)
    assert chosen_of(done, prompt) == highest(deviations(prompt, isolated(prompt)), counted(prompt, 0.2))


def test_blend_of_preprocessed_chunks():
    executor = Executor()
    prompt, kept = preprocessed(executor, tiny.prompt(25))
    done = executor.run(strategies()["fusion+blend"], prompt, 0.2)
    assert chosen_of(done, prompt) == highest(deviations(prompt, kept), counted(prompt, 0.2))
    np.testing.assert_allclose(done.logits, repaired(prompt, kept, chosen_of(done, prompt)), atol=1e-5)


def test_alternative_path_drops_earlier_chunks_one_by_one():
    executor, base = Executor(), tiny.prompt(26, chunks=(20, 24, 28))
    system, a, b, c, question = base.segments
    executor.run(strategies()["naive"], base)
    plant(executor, base, 2, [a])  # b behind a, and nobody marked b

    def source_of(*chunks: Segment) -> str:
        prompt = Prompt((system, *chunks, question))
        talk = executor.talk(strategies()["fusion"], prompt, 0.0)
        talk.end()
        last = talk.passes[-1]
        begin = prompt.starts[1 + [chunk.id for chunk in chunks].index(b.id)]
        offset = next(span.offset for span in last.spans if span.indices[0] == begin)
        talk.close()
        computed_at = begin - offset - len(system)
        return {0: "isolated", len(a): "behind a", len(c) + len(a): "behind c, a"}[computed_at]

    assert source_of(a, b) == "behind a"
    assert source_of(c, a, b) == "behind a"
    assert source_of(a, c, b) == source_of(b, a) == "isolated"
    mark = plant(executor, base, 2, [c, a])
    assert source_of(c, a, b) == "behind c, a", "the longest prefix first"
    assert source_of(a, replace(b, behind=mark)) == "behind c, a", "its own neighbours first of all"
    assert source_of(c, replace(b, behind=b"elsewhere")) == "isolated"


def test_alternative_path_looks_behind_so_many_chunks_alone():
    prompt = tiny.prompt(27, chunks=(4,) * 30)
    found = [len(tuple(Fused().candidates(prompt, i))) for i in range(1, 31)]
    bound = [min(i, NEIGHBOURS) for i in range(30)]
    assert found == [2 * n + 3 for n in bound], "preprocessed and causal behind them, causal anywhere, and isolated"


@pytest.mark.parametrize("seed", range(2))
def test_h2o_takes_what_its_own_chunk_attended_to(seed):
    prompt, executor = tiny.prompt(30 + seed), Executor()
    system, scores = prompt.segments[0].tokens, {}
    for i in segments_of(prompt, Kind.CHUNK):
        prob = model().dense(np.concatenate([system, prompt.segments[i].tokens])).prob
        for j in range(len(prompt.segments[i])):
            at = len(system) + j
            scores[prompt.starts[i] + j] = float(sum(prob[layer, at:, :, at].mean(1).sum() for layer in range(3)))
    for _ in ("cold", "warm"):
        done = executor.run(strategies()["h2o"], prompt, 0.15)
        assert chosen_of(done, prompt) == highest(scores, counted(prompt, 0.15))
        np.testing.assert_allclose(done.logits, repaired(prompt, isolated(prompt), chosen_of(done, prompt)), atol=1e-5)


@pytest.mark.parametrize("ratio", [0.02, 0.15, 0.6, 0.9])
def test_epic_takes_the_first_tokens_of_every_chunk_but_the_first(ratio):
    prompt, executor = tiny.prompt(32), Executor()  # chunks of 40, 33 and 57 tokens
    done, count = executor.run(strategies()["epic"], prompt, ratio), counted(prompt, ratio)
    taken = {i: [o for o in chosen_of(done, prompt) if prompt.starts[i] <= o < prompt.starts[i + 1]] for i in (1, 2, 3)}
    for i, orders in taken.items():
        assert orders == list(range(prompt.starts[i], prompt.starts[i] + len(orders))), "the first ones, without a gap"
    n, k = [len(orders) for orders in taken.values()], (count + 1) // 2
    assert n == ([0, k, count - k] if k <= 33 else [max(0, count - 90), 33, min(57, count - 33)])
    np.testing.assert_allclose(done.logits, repaired(prompt, isolated(prompt), chosen_of(done, prompt)), atol=1e-5)
    assert len(done.passes) == 2, "selecting costs no pass: what is missing, and the repair"


def test_prophet_takes_what_the_question_attends_to_over_all_layers():
    prompt, executor = tiny.prompt(24), Executor(stages=(0, 1, 3))
    kept, chunks = isolated(prompt), indices_of(prompt, Kind.CHUNK)
    dense = model().dense(prompt.tokens, rows=joins(prompt), kept=kept)
    scores = dict.fromkeys(map(int, chunks), 0.0)
    for prob in dense.prob:
        received = {order: float(prob[joins(prompt), :, order].sum()) for order in scores}
        for order, mass in received.items():
            scores[order] += mass / sum(received.values())
    done = executor.run(strategies()["prophet"], prompt, 0.15)
    assert chosen_of(done, prompt) == highest(scores, counted(prompt, 0.15))
    assert chosen_of(done, prompt) != chosen_of(executor.run(strategies()["fusion"], prompt, 0.15), prompt)
    np.testing.assert_allclose(done.logits, repaired(prompt, kept, chosen_of(done, prompt)), atol=1e-5)


def test_a_layer_without_attention_counts_nothing():
    np.testing.assert_allclose(shares(np.array([[0.0, 0.0], [3.0, 1.0]])), [[0, 0], [0.75, 0.25]])


def test_random_takes_the_same_share_of_every_chunk_and_is_reproducible():
    prompt, strategy = tiny.prompt(32), strategies()["random"]
    first, again = (chosen_of(Executor().run(strategy, prompt, 0.2), prompt) for _ in range(2))
    assert first == again
    inside = [sum(b <= o < e for o in first) for b, e in zip(prompt.starts[1:4], prompt.starts[2:5], strict=True)]
    assert inside == list(budgets((40, 33, 57), counted(prompt, 0.2)))
    other = tiny.prompt(33)
    assert first != chosen_of(Executor().run(strategy, other, 0.2), other)


def test_unmoved_reads_keys_where_they_were_computed():
    prompt, executor = tiny.prompt(34), Executor()
    expected = repaired(prompt, isolated(prompt, moved=False), ())
    done = executor.run(strategies()["unmoved"], prompt)
    np.testing.assert_allclose(done.logits, expected, atol=1e-5)
    assert np.abs(done.logits - executor.run(strategies()["naive"], prompt).logits).max() > 1e-2


# ----------------------------------------------------------------------------------------------- set-cache


def test_set_cache_takes_the_first_chunks_in_any_order():
    executor, strategy, base = Executor(), strategies()["set-cache"], tiny.prompt(35)
    system, a, b, c, question = base.segments
    cold = executor.run(strategy, Prompt((system, c, a, b, question)))
    assert cold.plan.exact_to == "full" and cold.plan.reports[1].reused == 0
    prompt = Prompt((system, a, c, replace(b, tokens=b.tokens[::-1].copy()), question))
    path = model().dense(np.concatenate([system.tokens, c.tokens, a.tokens]))
    n, size = len(system), len(prompt)
    k, v = np.zeros((3, size, 2, 16)), np.zeros((3, size, 2, 16))
    k[:, :n], v[:, :n] = path.k[:, :n], path.v[:, :n]
    for i, at in ((1, n + len(c)), (2, n)):
        begin, length = prompt.starts[i], len(prompt.segments[i])
        moved_k, moved_v = shifted(path, at, begin - at)
        k[:, begin : begin + length], v[:, begin : begin + length] = moved_k[:, :length], moved_v[:, :length]
    done = executor.run(strategy, prompt)
    expected = model().dense(prompt.tokens, rows=np.arange(prompt.starts[3], size), kept=(k, v)).logits[-1]
    np.testing.assert_allclose(done.logits, expected, atol=1e-5)
    assert done.plan.exact_to is None and [r.reused for r in done.plan.reports] == [20, 40, 57, 0, 0]
    again = executor.run(strategy, prompt)
    np.testing.assert_array_equal(again.logits, done.logits)


def test_set_cache_wants_the_first_chunks_and_prefers_their_own_order():
    executor, strategy, base = Executor(), strategies()["set-cache"], tiny.prompt(36)
    system, a, b, c, question = base.segments
    executor.run(strategy, Prompt((system, c, a, question)))
    other = executor.run(strategy, Prompt((system, a, b, c, question)))  # {a, c} is no set of first chunks
    assert other.plan.exact_to == "full" and other.plan.reports[1].reused == 0
    warm = executor.run(strategy, Prompt((system, a, b, c, question)))
    np.testing.assert_allclose(warm.logits, model().dense(base.tokens).logits[-1], atol=1e-5)
    assert warm.plan.exact_to == "full" and len(warm.passes[0].rows) == 1
    part = executor.run(strategy, Prompt((system, b, a, question)))  # a, b are kept in the other order
    assert part.plan.exact_to is None and [r.reused for r in part.plan.reports] == [20, 33, 40, 0]


# --------------------------------------------------------------------------------------- sharing, running out


@pytest.mark.parametrize("name", ["blend", "blend-gradual", "fusion", "h2o", "unmoved", "set-cache"])
def test_waiting_requests_name_the_nodes_they_will_use(name):
    prompt, executor, strategy = tiny.prompt(43), Executor(), KNOWN[name]
    if name == "fusion":
        prompt, _ = preprocessed(executor, prompt)
    executor.run(strategy, prompt)
    kept = {node.key for node in executor.cache.tree.nodes() if node.parent is not None}
    assert len(kept) >= 4 and set(strategy.keys(prompt, executor.cache, "")) >= kept


@pytest.mark.parametrize("name", ["blend", "blend-gradual"])
def test_slots_of_the_probe_are_given_back(name):
    prompt, executor = tiny.prompt(44), Executor()
    executor.run(strategies()["naive"], prompt)
    talk = executor.talk(KNOWN[name], prompt, 0.15, decode_tokens=1)
    held = []
    while talk.step():
        held.append(len(talk.allocation.own_pages))
    assert held[0] - held[-1] == -(-130 // executor.page_size)
    talk.close()


def test_requests_with_different_sets_share_chunks():
    base = tiny.prompt(40, chunks=(30, 24, 28))
    system, a, b, c, question = base.segments
    other = replace(question, tokens=question.tokens[::-1].copy())
    asked = [
        ("fusion", Prompt((system, a, b, c, question)), 0.2),
        ("blend", Prompt((system, c, b, a, other)), 0.3),
        ("blend-gradual", Prompt((system, b, a, question)), 0.2),
        ("random", Prompt((system, a, b, c, other)), 0.4),
        ("naive", Prompt((system, b, c, question)), None),
        ("craft", Prompt((system, c, a, question)), 0.2),
        ("craft-focus", Prompt((system, b, a, c, other)), 0.5),
    ]

    def warmed() -> Executor:
        executor = Executor()
        for name in ("naive", "craft"):
            executor.run(strategies()[name], base)
        return executor

    alone = [warmed().run(KNOWN[name], prompt, ratio).logits for name, prompt, ratio in asked]
    executor = warmed()
    kept = [node.run for node in executor.cache.tree.nodes()]
    slots = np.concatenate([run.slots(executor.page_size) for run in kept if isinstance(run, Run)])
    before = executor.k[:, slots].tobytes(), executor.v[:, slots].tobytes()
    talks = [executor.talk(KNOWN[name], prompt, ratio) for name, prompt, ratio in asked]
    running = list(talks)
    while running:
        running = [talk for talk in running if talk.step()]
    for talk, expected in zip(talks, alone, strict=True):
        np.testing.assert_allclose(talk.plan.logits, expected, atol=1e-6)
    assert (executor.k[:, slots].tobytes(), executor.v[:, slots].tobytes()) == before, "cached pages stay as they are"
    for talk in talks:
        talk.close()
    audit_cache(executor.cache, live=())


@pytest.mark.parametrize("name", [*STITCHED, "set-cache", "unmoved", "craft", "fuse"])
def test_running_out_of_pages_shows_before_the_first_pass(name):
    prompt, failed, done = tiny.prompt(41, chunks=(20, 24)), 0, 0
    strategy = Fuse() if name == "fuse" else KNOWN[name]
    prompt = Prompt(prompt.segments[:-1]) if name == "fuse" else prompt
    for pages in range(4, 26, 3):
        executor = Executor(pages=pages)
        talk = executor.talk(strategy, prompt, 0.4)
        try:
            more = talk.step()
        except OutOfPages:
            failed += 1
        else:
            while more:
                more = talk.step()
            done += 1
        talk.close()
        audit_cache(executor.cache, live=())
    assert failed and done


def test_generated_tokens_see_the_repaired_prompt():
    prompt, executor = tiny.prompt(42), Executor()
    continuation = np.array([5, 77, 130, 4], np.int32)
    for ratio, expected in ((1.0, None), (0.3, "chosen")):
        talk = executor.talk(strategies()["fusion"], prompt, ratio)
        talk.end()
        scores = talk.score(continuation)
        tokens = np.concatenate([prompt.tokens, continuation])
        if expected is None:
            logits = model().dense(tokens).logits
        else:
            k, v = isolated(prompt)
            rest = np.zeros((3, 4, 2, 16))
            last = talk.passes[-1]
            rows = np.concatenate([last.rows, np.arange(len(prompt), len(tokens))])
            kept = np.concatenate([k, rest], 1), np.concatenate([v, rest], 1)
            logits = model().dense(tokens, rows=rows, kept=kept).logits
        np.testing.assert_allclose(scores, logits[len(prompt) - 1 : -1], atol=1e-5)
        talk.close()
