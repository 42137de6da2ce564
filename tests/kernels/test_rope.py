"""Rotation tables and the rotation of heads, against complex arithmetic in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.kernels.rope import Rotation, rotate
from ragjax.models.config import RopeScaling, inverse_frequencies
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


def test_float32_angles_would_be_found() -> None:
    """The reason for float64 tables: the same test fails for angles formed in float32."""
    angle_NR = np.arange(FAR, dtype=np.float32)[:, None] * INV_FREQ_R.astype(np.float32)
    assert np.abs(np.cos(angle_NR) - np.cos(np.arange(FAR)[:, None] * INV_FREQ_R)).max() > 1e-3


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


def test_plain_frequencies() -> None:
    np.testing.assert_allclose(inverse_frequencies(10000.0, 16, None), INV_FREQ_R, rtol=1e-14)


def test_llama3_frequencies() -> None:
    """The rule of the Llama 3.1 release, frequency by frequency."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    what = []
    for i in range(64):
        frequency = 500_000.0 ** -(2 * i / 128)
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            what.append(frequency)
        elif wavelength > 8192 / 1.0:
            what.append(frequency / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            what.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    got = inverse_frequencies(500_000.0, 128, scaling)
    np.testing.assert_allclose(got, what, rtol=1e-12)
    assert len({round(float(r), 6) for r in got / inverse_frequencies(500_000.0, 128, None)}) > 3
