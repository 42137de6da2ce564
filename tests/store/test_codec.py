"""`codec`: exact where it says so, errors within what 8 and 4 bits can do, and slices that decode nothing else."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.store.codec import Codec, cut, kind_of, length, rest_dtype

LAYERS, HEADS, DIM = 3, 2, 8
DTYPES = [np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.float16)]
LOSSY = {"int8": 0.01, "int4": 0.1}
"""Bound of the relative RMS error on normal data, 200 tokens: a step of 3 sigma / 127 gives 0.0068 in int8.
32 normal numbers span 4.1 sigma, of which int4 makes 15 steps: 4.1 / 15 / sqrt(12) = 0.079."""


def codec(kind: str = "raw", dtype: Any = np.float32) -> Codec:
    return Codec(kind, LAYERS, HEADS, DIM, np.dtype(dtype))  # type: ignore[arg-type]


def rest(x: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Floats as a pool of this dtype keeps them."""
    with np.errstate(over="ignore"):
        return x.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == np.uint16 else x.astype(dtype)


def wide(x: np.ndarray) -> np.ndarray:
    return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float64)


def normal(tokens: int, dtype: np.dtype[Any], seed: int = 0, loud: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values whose channel 1 is `loud` times the others."""
    random = np.random.default_rng(seed)
    pair = random.standard_normal((2, LAYERS, HEADS, tokens, DIM))
    pair[..., 1] *= loud
    return rest(pair[0], dtype), rest(pair[1], dtype)


def error(got: np.ndarray, what: np.ndarray) -> float:
    return float(np.linalg.norm(wide(got) - wide(what)) / np.linalg.norm(wide(what)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_is_bit_for_bit(dtype: np.dtype[Any]) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (2, LAYERS, HEADS, 9, DIM * dtype.itemsize), np.uint8)
    k, v = bits.view(dtype)  # NaNs, infinities and all
    arrays, loss = codec(dtype=dtype).encode(k, v)
    assert (kind_of(arrays), length(arrays), loss) == ("raw", 9, 0.0)
    for one, other in zip((k, v), codec(dtype=dtype).decode(arrays), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LOSSY)
def test_error_on_normal_data_is_bounded_and_reported(kind: str, dtype: np.dtype[Any]) -> None:
    k, v = normal(200, dtype)
    arrays, loss = codec(kind, dtype).encode(k, v)
    assert kind_of(arrays) == kind
    found = [error(*pair) for pair in zip(codec(kind, dtype).decode(arrays), (k, v), strict=True)]
    assert 0.2 * LOSSY[kind] < max(found) < LOSSY[kind]
    assert loss == pytest.approx(max(found), rel=1e-6)


@pytest.mark.parametrize("kind", LOSSY)
def test_a_loud_channel_does_not_drown_the_others(kind: str) -> None:
    k, v = normal(200, np.dtype(np.float32), loud=1000)
    got, _ = codec(kind).decode(codec(kind).encode(k, v)[0])
    quiet = np.arange(DIM) != 1
    assert error(got[..., quiet], k[..., quiet]) < LOSSY[kind]


def test_the_larger_error_is_reported() -> None:
    k, v = normal(200, np.dtype(np.float32))
    v[:, :, 0] = 1000  # one token that leaves the others' values few steps
    arrays, loss = codec("int8").encode(k, v)
    (k_error, v_error) = (error(*pair) for pair in zip(codec("int8").decode(arrays), (k, v), strict=True))
    assert v_error > 2 * k_error
    assert loss == pytest.approx(v_error, rel=1e-6)


@pytest.mark.parametrize("kind", ["raw", *LOSSY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_size_is_that_of_the_arrays(kind: str, dtype: np.dtype[Any]) -> None:
    for tokens in (0, 1, 17):
        arrays, _ = codec(kind, dtype).encode(*normal(tokens, dtype))
        assert codec(kind, dtype).size(tokens) == sum(x.nbytes for x in arrays.values())
        assert length(arrays) == tokens


@pytest.mark.parametrize("kind", ["raw", *LOSSY])
@given(data=st.data())
def test_decoding_a_slice_is_slicing_the_decoded(kind: str, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 12) | st.integers(30, 110))
    begin = data.draw(st.integers(0, tokens))
    end = data.draw(st.integers(begin, tokens))
    arrays, _ = codec(kind).encode(*normal(tokens, np.dtype(np.float32), loud=50))
    part = cut(arrays, begin, end)
    assert length(part) == end - begin
    codec(kind).check(part, end - begin)
    for one, other in zip(codec(kind).decode(part), codec(kind).decode(arrays), strict=True):
        np.testing.assert_array_equal(one, other[:, :, begin:end])


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_kept_exactly(kind: str, dtype: np.dtype[Any], bad: float) -> None:
    k, v = normal(5, dtype)
    v[2, 1, 4, 3] = rest(np.array(bad), dtype)
    arrays, loss = codec(kind, dtype).encode(k, v)
    assert (kind_of(arrays), loss) == ("raw", 0.0)
    assert codec(kind, dtype).decode(arrays)[1].tobytes() == v.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_extremes_stay_finite(dtype: np.dtype[Any]) -> None:
    kind = "int8"
    limits = ml_dtypes.finfo(ml_dtypes.bfloat16 if dtype == np.uint16 else dtype)
    for value in (0.0, limits.max, limits.min, limits.smallest_normal, limits.smallest_subnormal):
        k, v = normal(5, dtype)
        k[..., 2] = rest(np.array(float(value)), dtype)
        v[...] = rest(np.array(float(value)), dtype)
        arrays, loss = codec(kind, dtype).encode(k, v)
        assert kind_of(arrays) == kind
        decoded = codec(kind, dtype).decode(arrays)
        assert all(np.isfinite(wide(x)).all() for x in decoded) and 0 <= loss <= 1
        if value == 0:
            assert not wide(decoded[0][..., 2]).any() and not wide(decoded[1]).any() and loss < LOSSY[kind]


@pytest.mark.parametrize("written", ["raw", *LOSSY])
@pytest.mark.parametrize("configured", ["raw", *LOSSY])
def test_every_kind_is_read_whatever_is_written_now(written: str, configured: str) -> None:
    k, v = normal(20, np.dtype(np.uint16))
    arrays, _ = codec(written, np.uint16).encode(k, v)
    codec(configured, np.uint16).check(arrays, 20)
    got, _ = codec(configured, np.uint16).decode(arrays)
    np.testing.assert_array_equal(got, codec(written, np.uint16).decode(arrays)[0])
    assert error(got, k) < LOSSY.get(written, 1e-9)


@pytest.mark.parametrize("kind", ["raw", *LOSSY])
def test_a_foreign_entry_is_refused(kind: str) -> None:
    own = codec(kind)
    arrays, _ = own.encode(*normal(6, np.dtype(np.float32)))
    own.check(arrays, 6)
    last = sorted(arrays)[0]
    with pytest.raises(ValueError, match="6 tokens, of which 7"):
        own.check(arrays, 7)
    for wrong in (arrays[last][1:], arrays[last][..., :-1], arrays[last].astype(np.float64), arrays[last][0, 0]):
        with pytest.raises(ValueError, match=r"of an entry is|tokens, of which"):
            own.check(arrays | {last: wrong}, 6)
    uneven = arrays | {name: x[:, :, :-1] for name, x in arrays.items() if name.startswith("v") and x.ndim == 4}
    with pytest.raises(ValueError, match=r"array v.* of an entry is"):
        own.check(uneven, 5)
    for names in (arrays | {"more": arrays[last]}, {last: arrays[last]}, {}):
        with pytest.raises(ValueError, match="no known encoding"):
            own.check(names, 6)
    with pytest.raises(ValueError, match=r"of an entry is|tokens"):
        Codec(own.kind, LAYERS + 1, HEADS, DIM, own.dtype).check(arrays, 6)


def test_other_precision_is_foreign() -> None:
    arrays, _ = codec("raw", np.uint16).encode(*normal(6, np.dtype(np.uint16)))
    with pytest.raises(ValueError, match="array k of an entry is uint16"):
        codec("raw", np.float32).check(arrays, 6)


def test_only_bfloat16_changes_its_name_at_rest() -> None:
    assert rest_dtype(np.dtype(ml_dtypes.bfloat16)) == np.uint16
    assert [rest_dtype(np.dtype(x)) for x in ("float32", "float16", "uint16")] == ["float32", "float16", "uint16"]
