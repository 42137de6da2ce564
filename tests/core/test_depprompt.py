"""Dependency attention: trees of tokens, who sees whom, and reuse that equals computing anew (DepCache)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragjax.core import Kind, Prompt, RequestError, Segment, Span, StepLimits, Tokens, Visibility, VisibilityError
from ragjax.core.depprompt import DepPrompt, LinearNode, Positions, TreeNode, layout, merge, paths_of
from ragjax.engine import Engine
from ragjax.reuse import DEPENDENCY, strategies
from ragjax.reuse.dependency import Dependency
from ragjax.schedule.rows import SpanTable
from tests.support import tiny
from tests.support.audit import audit_cache
from tests.support.executor import Done, Executor, Keys, model

SYSTEM, QUESTION = np.arange(200, 207, dtype=np.int32), np.arange(100, 105, dtype=np.int32)
SCHEMES: tuple[Positions, ...] = ("path", "preorder")

token_paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=8)
graphs = st.lists(token_paths, min_size=1, max_size=3)
CALM = settings(max_examples=25, deadline=None, derandomize=True, database=None,
                suppress_health_check=[HealthCheck.too_slow])  # fmt: skip


def array(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def graph_prompt(trees: Sequence[Sequence[Sequence[int]]]) -> Prompt:
    """System, trees (each with a root token of its own), question."""
    nodes = [TreeNode(f"e{i}", tuple(array(40 + i, *path) for path in paths)) for i, paths in enumerate(trees)]
    return DepPrompt((LinearNode("system", SYSTEM), *nodes, LinearNode("question", QUESTION))).prompt()


def every(prompt: Prompt) -> list[tuple[int, tuple[int, ...]]]:
    """Token by token: which tree (-1: none), and the tokens of its path up to and with it."""
    paths, found = paths_of(prompt), []
    for i, segment in enumerate(prompt.segments):
        above = [int(t) for j in paths.get(i, (i,))[:-1] for t in prompt.segments[j].tokens]
        tree = int(segment.id[1:]) if segment.kind is Kind.NODE else -1
        found += [(tree, (*above, *map(int, segment.tokens[: n + 1]))) for n in range(len(segment))]
    return found


def ancestor_mask(prompt: Prompt) -> NDArray[np.bool_]:
    """Algorithm 1's mask, pair by pair: a tree's token sees the system and the beginnings of its own path."""
    owner, n = every(prompt), len(prompt)
    mask = np.zeros((n, n), bool)
    for q, (tree, path) in enumerate(owner):
        for k, (other, beginning) in enumerate(owner[: q + 1]):
            if tree < 0:
                mask[q, k] = True
            else:
                mask[q, k] = k < len(SYSTEM) if other < 0 else other == tree and path[: len(beginning)] == beginning
    return mask


def expected_positions(prompt: Prompt, scheme: Positions) -> NDArray[np.int64]:
    """Under `path`: tokens before it on its path, behind the system; else the order."""
    owner = every(prompt)
    return np.array([i if tree < 0 or scheme == "preorder" else len(SYSTEM) + len(path) - 1
                     for i, (tree, path) in enumerate(owner)])  # fmt: skip


# ------------------------------------------------------------------------------------------------ trees


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(token_paths)
def test_a_merged_tree_spells_every_beginning_once(paths: list[list[int]]) -> None:
    branches = merge([array(*path) for path in paths])
    spelled: list[tuple[int, ...]] = []
    whole: list[tuple[int, ...]] = []
    for i, branch in enumerate(branches):
        above = whole[branch.parent] if branch.parent is not None else ()
        assert branch.parent is None or branch.parent < i
        assert len(branch.tokens)
        whole.append((*above, *map(int, branch.tokens)))
        spelled += [whole[-1][:n] for n in range(len(above) + 1, len(whole[-1]) + 1)]
    beginnings = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    assert len(spelled) == len(set(spelled)) and set(spelled) == beginnings
    for i, branch in enumerate(branches):  # compressed: an only child is no branch of its own
        assert [b.parent for b in branches].count(i) != 1, branch


@settings(max_examples=75, deadline=None, derandomize=True, database=None)
@given(graphs)
def test_intervals_say_algorithm_one(trees: list[list[list[int]]]) -> None:
    prompt = graph_prompt(trees)
    for scheme in SCHEMES:
        made = layout(prompt, scheme)
        np.testing.assert_array_equal(made.visible(), ancestor_mask(prompt))
        np.testing.assert_array_equal(made.position, expected_positions(prompt, scheme))
        assert made.position.dtype == made.hide_from.dtype == np.int32


def test_custom_dependencies() -> None:
    tree = TreeNode("a", (array(1, 2), array(1, 3)))
    on_tree = TreeNode("b", (array(5, 6),), depends=("a",))
    alone = LinearNode("task", QUESTION, depends=("system", "b"))
    prompt = DepPrompt((LinearNode("system", SYSTEM), tree, on_tree, alone)).prompt()
    assert [s.kind for s in prompt.segments] == [Kind.SYSTEM, *[Kind.NODE] * 4, Kind.QUERY]
    seen = layout(prompt, "path").visible()
    assert seen[10, 7:10].all(), "b depends on all of a"
    assert layout(prompt, "path").position[10] == len(SYSTEM) + 2
    assert seen[-1].all(), "what b depends on, the task does too"


def test_what_one_interval_cannot_say_is_refused() -> None:
    tree, other = TreeNode("a", (array(1, 2),)), TreeNode("b", (array(3),))
    first = LinearNode("first", QUESTION, depends=("a",))
    last = LinearNode("last", QUESTION, depends=("b",))
    nodes = (LinearNode("system", SYSTEM), tree, first, other, last)
    assert Visibility.dependency(DepPrompt(nodes).prompt())
    again = LinearNode("again", QUESTION, depends=("a",))
    with pytest.raises(VisibilityError, match="two separate ranges"):
        Visibility.dependency(DepPrompt((*nodes, again, LinearNode("end", QUESTION, depends=("b",)))).prompt())


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((LinearNode("q", QUESTION, depends=("later",)),), "'q' depends on 'later'"),
        ((TreeNode("a", ()), LinearNode("q", QUESTION)), "'a' of the prompt is empty"),
        ((LinearNode("a", SYSTEM), LinearNode("a", QUESTION)), "'a' of the prompt is given twice"),
    ],
)
def test_prompts_that_cannot_be(nodes: tuple[LinearNode | TreeNode, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DepPrompt(nodes).prompt()


def test_a_segment_depends_on_earlier_ones_alone() -> None:
    with pytest.raises(ValueError, match="only on earlier ones"):
        Prompt((Segment("a", Kind.NODE, QUESTION, depends=(0,)),))


# ------------------------------------------------------------------------------------------------ reuse


def dense(prompt: Prompt, scheme: Positions) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Keys and values [L, T, K, D] and the last logits, over the whole mask at once."""
    made = model().dense(prompt.tokens, ancestor_mask(prompt), expected_positions(prompt, scheme))
    return made.k, made.v, made.logits[-1]


def kept(executor: Executor, done: Done) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Keys and values [L, T, K, D] as the finished prompt reads them, turned to their places."""
    keys = Keys.of(done.plan.spans, executor.page_size)
    at = keys.at(np.arange(len(keys.index)))
    k = np.stack([executor.model.rotate(layer[keys.slot], keys.offset) for layer in executor.k])
    return k[:, at], executor.v[:, keys.slot][:, at]


@pytest.mark.parametrize("scheme", SCHEMES)
@CALM
@given(trees=graphs)
def test_cold_is_dense_attention_under_the_ancestor_mask(scheme: Positions, trees: list[list[list[int]]]) -> None:
    prompt, executor = graph_prompt(trees), Executor()
    done = executor.run(Dependency(scheme), prompt)
    k, v, logits = dense(prompt, scheme)
    np.testing.assert_allclose(done.logits, logits, atol=1e-5)
    for found, what in zip(kept(executor, done), (k, v), strict=True):
        np.testing.assert_allclose(found, what, atol=1e-9)
    assert done.plan.exact_to == "dependency" and len(done.passes) == 1
    audit_cache(executor.cache, ())


@CALM
@given(before=st.lists(graphs, min_size=1, max_size=3), now=graphs)
def test_path_positions_reuse_is_computing_anew(
    before: list[list[list[list[int]]]], now: list[list[list[int]]]
) -> None:
    executor, strategy = Executor(), Dependency("path")
    for trees in before:
        executor.run(strategy, graph_prompt(trees))
    prompt = graph_prompt(now)
    done = executor.run(strategy, prompt)
    k, v, logits = dense(prompt, "path")
    for found, what in zip(kept(executor, done), (k, v), strict=True):
        np.testing.assert_allclose(found, what, atol=1e-9)
    np.testing.assert_allclose(done.logits, logits, atol=1e-5)
    assert done.plan.exact_to == "dependency"
    seen = {owner for trees in before for owner in every(graph_prompt(trees))}
    assert sum(r.reused for r in done.plan.reports) == len(SYSTEM) + sum(o in seen for o in every(prompt) if o[0] >= 0)
    assert sum(r.tokens for r in done.plan.reports) == len(prompt)
    audit_cache(executor.cache, ())
    assert executor.cache.metrics.approximate_hit_tokens == 0


@CALM
@given(before=st.lists(graphs, min_size=1, max_size=3), now=graphs)
def test_preorder_says_whether_reuse_was_exact(before: list[list[list[list[int]]]], now: list[list[list[int]]]) -> None:
    executor, strategy = Executor(), Dependency("preorder")
    for trees in before:
        executor.run(strategy, graph_prompt(trees))
    prompt = graph_prompt(now)
    done = executor.run(strategy, prompt)
    k, v, _ = dense(prompt, "preorder")
    found_k, found_v = kept(executor, done)
    if done.plan.exact_to == "dependency":
        np.testing.assert_allclose(found_k, k, atol=1e-9)
        np.testing.assert_allclose(found_v, v, atol=1e-9)
    else:
        assert np.abs(found_v - v).max() > 1e-6, "a place was called changed that is not"
    audit_cache(executor.cache, ())


def test_preorder_is_exact_where_nothing_moved_and_is_not_where_a_sibling_came() -> None:
    executor, strategy = Executor(), Dependency("preorder")
    tree = [[1, 2, 3], [1, 2, 4], [2, 5]]
    executor.run(strategy, graph_prompt([tree]))
    again = executor.run(strategy, graph_prompt([tree]))
    assert again.plan.exact_to == "dependency" and again.plan.reports[1].recomputed == 0
    longer = executor.run(strategy, graph_prompt([[*tree[:1], [1, 2, 3, 3], *tree[1:]]]))
    assert longer.plan.exact_to is None and longer.plan.reports[1].recomputed == 1


def test_what_was_computed_on_turned_kv_is_exact_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, strategy = Executor(), Dependency("preorder")
    executor.run(strategy, graph_prompt([[[5, 6]], [[1, 2]]]))
    moved = graph_prompt([[[5, 6, 7]], [[1, 2, 3], [1, 2, 4]]])  # the second tree stands further on, and goes on
    assert executor.run(strategy, moved).plan.exact_to is None
    densest, turned = StepLimits.densest, next(i for i, s in enumerate(moved.segments) if s.id == "e1")

    def dropped(limits: StepLimits, found: Mapping[int, Sequence[Span]], room: int) -> frozenset[int]:
        return densest(limits, found, room) - {turned}

    monkeypatch.setattr(StepLimits, "densest", dropped)  # what it goes on from is computed anew, it is reused itself
    assert executor.run(strategy, moved).plan.exact_to is None


def test_without_a_tree_it_is_full_attention() -> None:
    prompt = tiny.prompt(3)
    done = Executor().run(Dependency("path"), prompt)
    np.testing.assert_allclose(done.logits, model().dense(prompt.tokens).logits[-1], atol=1e-5)
    assert done.plan.exact_to == "full"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_names_its_dependencies_is_not_called_full(scheme: Positions) -> None:
    tree = TreeNode("a", (array(41, 2), array(41, 3)), depends=("system",))
    text, alone = LinearNode("text", array(1, 2, 3)), LinearNode("task", QUESTION, depends=("system",))
    for nodes in ((tree, LinearNode("question", QUESTION)), (text, alone)):
        prompt, executor = DepPrompt((LinearNode("system", SYSTEM), *nodes)).prompt(), Executor()
        for _ in ("cold", "warm"):
            done = executor.run(Dependency(scheme), prompt)
            made = layout(prompt, scheme)
            expected = model().dense(prompt.tokens, made.visible(), made.position).logits[-1]
            np.testing.assert_allclose(done.logits, expected, atol=1e-5)
            assert done.plan.exact_to == "dependency"
        assert np.abs(done.logits - model().dense(prompt.tokens).logits[-1]).max() > 1e-5


@pytest.mark.parametrize("name", sorted(strategies()))
def test_strategies_of_chunks_refuse_a_tree_rather_than_leave_it_out(name: str) -> None:
    prompt, executor, strategy = graph_prompt([[[1, 2], [1, 3]]]), Executor(), strategies()[name]
    if name in (*DEPENDENCY, "full", "prefix", "moved", "set-cache"):
        exact_to = "dependency" if name in DEPENDENCY else "full"
        assert executor.run(strategy, prompt).plan.exact_to == exact_to
        return
    with pytest.raises(RequestError, match="trees of paths"):
        executor.run(strategy, prompt)


def test_one_entity_named_twice_reads_its_pages_twice() -> None:
    tree = tuple(array(41, *path) for path in ([1, 2], [1, 3]))
    nodes = (LinearNode("system", SYSTEM), TreeNode("a", tree), TreeNode("b", tree), LinearNode("q", QUESTION))
    prompt, executor = DepPrompt(nodes).prompt(), Executor()
    cold = executor.run(Dependency("path"), prompt)
    warm = executor.run(Dependency("path"), prompt)
    np.testing.assert_allclose(cold.logits, warm.logits, atol=1e-6)
    assert [r.reused for r in warm.plan.reports] == [len(SYSTEM), 4, 4, 0]


def test_scattered_branches_are_read_only_as_far_as_entries_go() -> None:
    executor, strategy = Executor(pages=400, entries=24), Dependency("path")
    for token in range(40):  # each request leaves one branch on a page of its own
        executor.run(strategy, graph_prompt([[[token, 1, 2]]]))
    prompt = graph_prompt([[[token, 1, 2] for token in range(40)]])
    done = executor.run(strategy, prompt)
    np.testing.assert_allclose(done.logits, dense(prompt, "path")[2], atol=1e-5)
    assert 0 < done.plan.reports[1].reused < done.plan.reports[1].tokens


def test_scattered_branches_that_stand_twice_are_read_through_entries_of_their_own() -> None:
    executor, strategy = Executor(pages=400, entries=40), Dependency("path")
    for token in range(30):
        executor.run(strategy, graph_prompt([[[token, 1, 2]]]))
    trees = [TreeNode(f"{n}, {token}", (array(40, token, 1, 2),)) for n in range(3) for token in range(30)]
    prompt = DepPrompt((LinearNode("system", SYSTEM), *trees, LinearNode("question", QUESTION))).prompt()
    done = executor.run(strategy, prompt)
    assert sum(report.reused for report in done.plan.reports[1:]) > 0
    tail = Span.consecutive(len(prompt), done.plan.tail)
    assert len(SpanTable((*done.plan.spans, tail), executor.page_size)) <= executor.entries


# ------------------------------------------------------------------------------------------------ engine


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_engine_does_what_the_literal_executor_does(engine: Engine, scheme: Positions) -> None:
    random = np.random.default_rng(5)
    literal, strategy = Executor(stages=engine._runner.stages), Dependency(scheme)
    continuation = array(7, 99, 200)
    for _ in range(4):
        trees = [random.integers(0, 3, (random.integers(2, 9), 6)).tolist() for _ in range(random.integers(1, 4))]
        prompt = graph_prompt(trees)
        talk = literal.talk(strategy, prompt)
        talk.end()
        answer = engine.answer_prompt(
            prompt, strategy=strategy.name, max_tokens=3, want_logits=True, continuation=continuation
        )
        assert talk.plan is not None and answer.scores is not None and answer.logits is not None
        assert answer.exact_to == talk.plan.exact_to
        assert answer.segments == talk.plan.reports
        np.testing.assert_allclose(answer.logits, talk.plan.logits, atol=2e-4)
        np.testing.assert_allclose(answer.scores, talk.score(continuation), atol=2e-4)
        talk.close()
