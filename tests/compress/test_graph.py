"""GraphKV against NumPy in float64, and the identities that follow from its equations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.compress import graph as graph_module
from ragjax.compress.graph import propagate, sources
from ragjax.core.compression import PAPER, Compression, GraphKV
from ragjax.kernels.reductions.op import key_neighbours
from tests.support import eviction

N, K, D = 40, 2, 6


@functools.partial(jax.jit, static_argnames=("graph", "most"))
def compiled(s, k, candidate, number, edges, graph, most):  # type: ignore[no-untyped-def]
    return propagate(s, k, candidate, number, edges, graph, most)


def after(s, k, graph, *, number=8, edges=None, most=12, candidate=None):  # type: ignore[no-untyped-def]
    candidate = np.ones(len(s), bool) if candidate is None else candidate
    edges = jnp.int32(graph.neighbours if edges is None else edges)
    arrays = jnp.asarray(s, jnp.float32), jnp.asarray(k, jnp.float32), jnp.asarray(candidate)
    found = compiled(*arrays, jnp.int32(number), edges, graph, most)
    assert found.dtype == np.float32 and not np.isnan(found).any()
    return np.asarray(found)


def case(seed: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    s, k = rng.random(N).astype(np.float32), rng.standard_normal((N, K, D)).astype(np.float32)
    if kind == "alike":
        k += 2
    if kind == "duplicates":
        k = k[rng.integers(0, 4, N)]
    if kind == "zeros":
        k[rng.random(N) < 0.5] = 0
        s[rng.random(N) < 0.3] = 0
    if kind == "negative":
        k[:] = k[0]
        k[N // 2 :] *= -1
    if kind == "ties":
        s[:] = 0.5
    return s, k


GRAPHS = {
    "printed": GraphKV(neighbours=5),
    "thrice": GraphKV(neighbours=5, rounds=3),
    "ordered": GraphKV(neighbours=5, order="ordered", rounds=2),
    "all neighbours": GraphKV(neighbours=64),
    "more than there are": GraphKV(neighbours=1024),
}


@pytest.mark.parametrize("kind", ["random", "alike", "duplicates", "zeros", "negative", "ties"])
@pytest.mark.parametrize("name", GRAPHS)
def test_scores_follow_equation_5(name: str, kind: str) -> None:
    graph = GRAPHS[name]
    for seed in range(4):
        s, k = case(seed, kind)
        candidate = np.arange(N) < (N if seed % 2 else 25)
        number = [0, 1, 8, 12][seed]
        options = {f: getattr(graph, f) for f in ("neighbours", "rounds", "order")}
        tokens = np.flatnonzero(candidate).tolist()
        want = eviction.propagated(s, k, tokens, number, **options)
        k[~candidate] = np.nan
        found = after(s, k, graph, number=number, candidate=candidate)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("question", [1, 3, 12])
def test_an_adaptive_graph_goes_by_the_question_in_one_program(question: int) -> None:
    """M = min(preset, query length) (section 6.2), without a program for each length."""
    asked = [Compression("snapkv", 512, PAPER, "each").asked_by(n) for n in (question, 500)]
    graph = asked[0].graph
    assert graph is not None and asked[1].graph == PAPER and graph.neighbours == question
    assert asked[0].program == asked[1].program
    s, k = case(1, "random")
    want = eviction.propagated(s, k, list(range(N)), 8, neighbours=question, order="mutual")
    np.testing.assert_allclose(after(s, k, PAPER, edges=graph.neighbours), want, rtol=1e-4, atol=1e-6)


def test_neither_rounds_nor_sources_is_the_base() -> None:
    s, k = case(0, "alike")
    for graph, number in ((GraphKV(rounds=0), 8), (GraphKV(), 0)):
        np.testing.assert_array_equal(after(s, k, graph, number=number), s)


def test_disjoint_neighbourhoods_are_algorithm_2() -> None:
    """Which overwrites: with one source for each token, both say the same."""
    angle = np.array([0.0, 0.3, 1.5, 1.9])
    k = np.stack([np.cos(angle), np.sin(angle)], 1)[:, None]
    s = np.array([4.0, 1.0, 3.0, 2.0])
    found = after(s, k, GraphKV(neighbours=1), number=2)
    want = [4, 1 * (1 - np.cos(0.3)), 3, 2 * (1 - np.cos(0.4))]
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_signals_from_two_sources_are_multiplied() -> None:
    """Equation 5; Algorithm 2 as printed keeps the last one."""
    angle = np.array([0.0, 1.0, 0.5])
    k = np.stack([np.cos(angle), np.sin(angle)], 1)[:, None]
    found = after(np.array([4.0, 3.0, 2.0]), k, GraphKV(neighbours=1), number=2)
    assert found[2] == pytest.approx(2 * (1 - np.cos(0.5)) ** 2, rel=1e-4)


def test_two_equal_sources_erase_each_other_unless_ordered() -> None:
    s, k = np.array([1.0, 0.9, 0.1]), np.array([[1, 0], [1, 0], [0, 1]], float)[:, None]
    np.testing.assert_allclose(after(s, k, GraphKV(order="mutual"), number=2), [0, 0, 0.1], atol=1e-6)
    np.testing.assert_allclose(after(s, k, GraphKV(order="ordered"), number=2), [1, 0, 0.1], atol=1e-6)


def test_among_equal_scores_the_lower_index_stays() -> None:
    s, k = np.full(3, 0.5), np.ones((3, 1, 2))
    np.testing.assert_allclose(after(s, k, GraphKV(order="ordered"), number=2), [0.5, 0, 0], atol=1e-6)


def test_bfloat16_bits_are_compared_as_numbers() -> None:
    s, k = case(2, "alike")
    rounded = jnp.asarray(k, jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(rounded, jnp.uint16)
    found = [
        compiled(jnp.asarray(s), x, jnp.ones(N, bool), jnp.int32(8), jnp.int32(32), GraphKV(), 8)
        for x in (bits, rounded.astype(jnp.float32))
    ]
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("share", "budget", "number"), [(0.3, 512, 154), (0.3, 10, 3), (1.0, 7, 7), (0.01, 32, 1)])
def test_sources_are_a_share_of_the_budget_rounded_up(share: float, budget: int, number: int) -> None:
    assert sources(GraphKV(sources=share), budget) == number


def test_neighbours_take_no_room_beyond_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    s, k = case(0, "random")
    widths = []

    def spied(*arrays, **options):  # type: ignore[no-untyped-def]
        found = key_neighbours(*arrays, **options)
        widths.extend(x.shape[1] for x in found)
        return found

    monkeypatch.setattr(graph_module, "key_neighbours", spied)
    propagate(
        jnp.asarray(s), jnp.asarray(k), jnp.ones(N, bool), jnp.int32(8), jnp.int32(1024), GraphKV(neighbours=1024), 12
    )
    assert widths == [N, N]
