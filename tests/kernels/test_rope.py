"""Rotation tables and the rotation of heads, against complex arithmetic in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.kernels.rope import Rotation, rotate
from tests.support import oracle

FAR = 128 * 1024
INV_FREQ_R = 10000.0 ** -(np.arange(8) / 8)


@pytest.fixture(scope="module")
def table() -> Rotation:
    return Rotation.table(INV_FREQ_R, FAR + 1)


def test_table_is_exact_to_rounding(table: Rotation) -> None:
    exact_NR = np.exp(1j * np.arange(FAR + 1)[:, None] * INV_FREQ_R)
    assert table.cos_NR.dtype == table.sin_NR.dtype == jnp.float32
    assert np.abs(np.asarray(table.cos_NR, np.float64) - exact_NR.real).max() <= 2.0**-24
    assert np.abs(np.asarray(table.sin_NR, np.float64) - exact_NR.imag).max() <= 2.0**-24


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_at_takes_either_sign_and_any_shape(table: Rotation, shape: tuple[int, ...]) -> None:
    position = np.random.default_rng(0).integers(-FAR, FAR + 1, shape)
    cos, sin = table.at(jnp.asarray(position, jnp.int32))
    exact = np.exp(1j * np.asarray(position)[..., None] * INV_FREQ_R)
    assert cos.shape == sin.shape == (*shape, 8)
    np.testing.assert_allclose(cos, exact.real, atol=2.0**-24)
    np.testing.assert_allclose(sin, exact.imag, atol=2.0**-24)


@pytest.mark.parametrize("position", [0, 1, 7, 4095, FAR, -1, -FAR])
def test_rotation_of_half_split_heads(table: Rotation, position: int) -> None:
    x = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
    got = rotate(jnp.asarray(x), *table.at(jnp.int32(position)))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle.rotate(x.astype(np.float64), np.asarray(position), INV_FREQ_R), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


def test_position_zero_changes_no_bit(table: Rotation) -> None:
    x = np.random.default_rng(2).standard_normal((5, 16)).astype(np.float32)
    np.testing.assert_array_equal(rotate(jnp.asarray(x), *table.at(jnp.int32(0))), x)


def test_rotations_add_and_scores_depend_on_the_distance_alone(table: Rotation) -> None:
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(rng.standard_normal(16), jnp.float32) for _ in range(2))

    def at(x: jnp.ndarray, position: int) -> jnp.ndarray:
        return rotate(x, *table.at(jnp.int32(position)))

    np.testing.assert_allclose(at(at(q, 100_000), 30_000), at(q, 130_000), atol=2e-6)
    np.testing.assert_allclose(at(at(q, 77), -77), q, atol=1e-6)
    near = float(at(q, 40) @ at(k, 7))
    assert float(at(q, 130_040) @ at(k, 130_007)) == pytest.approx(near, abs=1e-5)
    # the query rotated back by an offset is as good as the key rotated forward by it
    assert float(at(at(q, 100_040), -100_000) @ at(k, 7)) == pytest.approx(near, abs=1e-5)
    assert abs(float(at(q, 41) @ at(k, 7)) - near) > 1e-3
