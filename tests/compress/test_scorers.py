"""Every scorer against NumPy in float64, on random and degenerate prompts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.compress.scorers import SCORERS, Evidence
from ragjax.core.compression import BY_MASS, BY_QUERIES
from tests.support import eviction

N, K, G, D, W = 48, 2, 3, 8, 5


@jax.jit
def _scored(evidence: Evidence) -> dict[str, jax.Array]:
    return {name: scorer.score(evidence) for name, scorer in SCORERS.items()}


def layer(seed: int, count: int, kind: str = "random", rows: int = W) -> Evidence:
    """A layer's arrays; what lies behind `count` is not even a number."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((N, K, D)).astype(np.float32)
    if kind == "duplicates":
        k[:] = k[rng.integers(0, 3, N)]
    if kind == "zeros":
        k[rng.random(N) < 0.5] = 0
    if kind == "equal":
        k[:] = 1
    if kind == "peaked":
        k *= 30
    v, q = (rng.standard_normal(shape).astype(np.float32) for shape in ((N, K, D), (rows, K * G, D)))
    mass = rng.random((N, K)).astype(np.float32)
    for x in (k, v, mass):
        x[count:] = np.nan
    arrays = (jnp.asarray(x) for x in (k, v, np.int32(count), q, mass))
    return Evidence(*arrays)


def wanted(evidence: Evidence) -> dict[str, np.ndarray]:
    k, q, count = np.asarray(evidence.k_NKD), np.asarray(evidence.q_WHD), int(evidence.count)
    return {
        "snapkv": eviction.snapkv(k, q, count),
        "h2o": np.where(np.arange(N)[:, None] < count, np.asarray(evidence.mass_NK), 0),
        "knorm": eviction.knorm(k, count),
    }


@pytest.mark.parametrize("kind", ["random", "duplicates", "zeros", "equal", "peaked"])
@pytest.mark.parametrize("count", [W + 1, W + 3, 31, N])
def test_scores_are_the_papers(kind: str, count: int) -> None:
    evidence = layer(count, count, kind)
    found, want = _scored(evidence), wanted(evidence)
    for name in SCORERS:
        score = np.asarray(found[name])
        assert score.dtype == np.float32 and (score >= 0).all(), name
        # window rows are kept whatever their score: what a scorer gives them says nothing
        np.testing.assert_allclose(
            score[: count - W], want[name][: count - W], rtol=2e-4, atol=1e-5, err_msg=f"{name} {kind} {count}"
        )
        assert not score[count:].any(), name


def test_logits_have_the_models_scale_and_cap() -> None:
    evidence = layer(8, 40)
    k, q = np.asarray(evidence.k_NKD), np.asarray(evidence.q_WHD)
    plain = eviction.snapkv(k, q, 40)[: 40 - W]
    for scale, cap in ((0.7, None), (None, 0.5), (0.7, 0.5)):
        score = np.asarray(SCORERS["snapkv"].score(replace(evidence, scale=scale, cap=cap)))[: 40 - W]
        np.testing.assert_allclose(score, eviction.snapkv(k, q, 40, scale, cap)[: 40 - W], rtol=2e-4, atol=1e-6)
        assert np.abs(score - plain).max() > 1e-3


def test_bfloat16_bits_are_keys() -> None:
    evidence = layer(5, 40)
    rounded = evidence.k_NKD.astype(jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(rounded, jnp.uint16)
    as_floats = Evidence(rounded.astype(jnp.float32), evidence.v_NKD, evidence.count, evidence.q_WHD, evidence.mass_NK)
    as_bits = Evidence(bits, evidence.v_NKD, evidence.count, evidence.q_WHD, evidence.mass_NK)
    for name, score in _scored(as_bits).items():
        np.testing.assert_allclose(score, _scored(as_floats)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(BY_QUERIES | BY_MASS))
def test_what_is_missing_is_named(name: str) -> None:
    evidence = layer(6, 40)
    with pytest.raises(ValueError, match=r"needs the .*Evidence\.(q_WHD|mass_NK)"):
        SCORERS[name].score(Evidence(evidence.k_NKD, evidence.v_NKD, evidence.count))


def test_the_others_need_keys_only() -> None:
    evidence = layer(7, 40)
    bare = Evidence(evidence.k_NKD, evidence.v_NKD, evidence.count)
    others = sorted(SCORERS.keys() - BY_QUERIES - BY_MASS)
    assert others == ["knorm"]
    for name in others:
        np.testing.assert_array_equal(SCORERS[name].score(bare), SCORERS[name].score(evidence))
