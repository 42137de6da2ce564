"""The choice: the window and the best others, over heads together or each, with every scorer and graph."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.compress.choose import Quota, choose, keep, quota
from ragjax.compress.scorers import SCORERS, Evidence
from ragjax.core.compression import METHODS, Compression, GraphKV
from tests.support import eviction

N, K, G, D, W = 64, 2, 2, 8, 6
KEEP = jax.jit(keep, static_argnames="most")


@functools.partial(jax.jit, static_argnames="compression")
def chosen(s, evidence, numbers, compression):  # type: ignore[no-untyped-def]
    """Of stacked layers, as the runner does it."""
    return jax.vmap(lambda s, evidence: choose(s, evidence, numbers, compression))(s, evidence)


@functools.partial(jax.jit, static_argnames="method")
def scored(evidence, method):  # type: ignore[no-untyped-def]
    return jax.vmap(SCORERS[method].score)(evidence)


def kept_of(s, first, count, size, recent, most):  # type: ignore[no-untyped-def]
    numbers = (jnp.int32(x) for x in (count, size, recent))
    found = KEEP(jnp.asarray(s, jnp.float32), jnp.asarray(first, jnp.float32), *numbers, most)
    assert found.shape == (most,) and found.dtype == np.int32
    length = int((np.asarray(found) >= 0).sum())
    assert (np.asarray(found)[length:] == -1).all()
    return np.asarray(found)[:length].tolist()


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "evicted"])
@pytest.mark.parametrize("count", [1, 20, 40, 63, 64])
def test_the_window_and_the_best_others_are_kept(kind: str, count: int) -> None:
    rng = np.random.default_rng(count)
    for size, recent, most in ((20, 6, 20), (20, 6, 32), (21, 20, 21), (40, 1, 128)):
        first = rng.random(N).astype(np.float32)
        s = first.copy()
        if kind == "ties":
            first = s = rng.integers(0, 3, N).astype(np.float32)
        if kind == "zeros":
            s[rng.random(N) < 0.7] = 0
        if kind == "evicted":
            s[rng.random(N) < 0.9] = -np.inf
        s[count:] = first[count:] = 9
        assert kept_of(s, first, count, size, recent, most) == eviction.kept(s, first, count, size, recent)


@pytest.mark.parametrize("method", METHODS)
def test_a_quota_has_recent_tokens_and_sources(method: str) -> None:
    found = quota(Compression(method, 100, GraphKV(sources=0.25)), SCORERS[method], 1000)  # type: ignore[arg-type]
    assert found == (100, 50 if method == "h2o" else 32, 25, 32)
    plain = Compression(method, 64)  # type: ignore[arg-type]
    assert quota(plain, SCORERS[method], 1000).sources == 0
    assert [quota(plain, SCORERS[method], count).kept for count in (33, 64, 65)] == [33, 64, 64]


def test_a_share_of_sources_is_not_rounded_up_by_arithmetic() -> None:
    """0.7 * 10 is 7.000000000000001 for 0.1 * 7 * 10; a source too many would be chosen."""
    asked = Compression("snapkv", 10, GraphKV(sources=0.1 * 7), window=2)
    assert quota(asked, SCORERS["snapkv"], 1000).sources == 7


def test_a_prompt_within_the_budget_is_whole() -> None:
    assert kept_of(np.zeros(N), np.zeros(N), 20, 20, 6, 32) == list(range(20))
    assert kept_of(np.zeros(N), np.zeros(N), 12, 20, 6, 32) == list(range(12))


def test_equal_scores_are_ordered_by_those_before_the_graph() -> None:
    s, first = np.zeros(8), np.array([1, 5, 3, 4, 0, 0, 0, 0], float)
    assert kept_of(s, first, 8, 4, 2, 4) == [1, 3, 6, 7]


def prompt(seed: int, count: int, layers: int = 3) -> Evidence:
    rng = np.random.default_rng(seed)
    shapes = ((layers, N, K, D), (layers, N, K, D))
    k, v = (rng.standard_normal(shape).astype(np.float32) + 0.5 for shape in shapes)
    q = rng.standard_normal((layers, W, K * G, D)).astype(np.float32)
    mass = rng.random((layers, N, K)).astype(np.float32)
    k[:, count:] = mass[:, count:] = np.nan
    return Evidence(
        jnp.asarray(k), jnp.asarray(v), jnp.full(layers, count, jnp.int32), jnp.asarray(q), jnp.asarray(mass)
    )


GRAPHS = [None, GraphKV(neighbours=4, order="mutual"), GraphKV(neighbours=4, order="ordered", rounds=2)]


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS, ids=["none", "mutual", "ordered"])
@pytest.mark.parametrize("heads", ["all", "each"])
@pytest.mark.parametrize("method", METHODS)
def test_layers_keep_what_the_papers_keep(method: str, heads: str, graph: GraphKV | None) -> None:
    count, layers = 50, 3
    compression = Compression(method, 20, graph, heads, W)  # type: ignore[arg-type]
    evidence, scorer = prompt(len(method), count), SCORERS[method]
    score = scored(evidence, method)
    size, recent, number, _ = numbers = quota(compression, scorer, count)
    # the choice does not look at the method: one program serves all
    same = Compression("snapkv", 40, graph, heads, W)  # type: ignore[arg-type]
    found = np.asarray(chosen(score, evidence, Quota(*map(jnp.int32, numbers)), same))
    assert found.shape == (layers, K if heads == "each" else 1, 40)
    for layer in range(layers):
        s, k = (np.asarray(x[layer]) for x in (score, evidence.k_NKD))
        for node in range(found.shape[1]):
            own = slice(None) if heads == "all" else slice(node, node + 1)
            first = s.mean(1) if heads == "all" else s[:, min(node, s.shape[1] - 1)]
            after = first
            if graph is not None:
                options = {f: getattr(graph, f) for f in ("neighbours", "rounds", "order")}
                after = eviction.propagated(first, k[:, own], list(range(count - recent)), number, **options)
            kept = found[layer, node][found[layer, node] >= 0].tolist()
            assert kept == eviction.kept(after, first, count, size, recent)
            assert set(range(count - W, count)) <= set(kept) and len(kept) == size
