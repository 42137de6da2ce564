"""`encoding.group`: 4 bits in groups, against a float64 oracle; cuts anywhere, any size, and what cannot be held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragjax.store.codec import Arrays, Codec, cut, kind_of, layers, length
from ragjax.store.entry import Damaged
from tests.support.disks import digest, flip, open_store, path_of, read_entry, record_of

LAYERS, HEADS = 2, 3
DTYPES = [np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.float16)]
EPSILON = {np.dtype(np.float32): 2.0**-23, np.dtype(np.uint16): 2.0**-8, np.dtype(np.float16): 2.0**-10}
Pair = tuple[NDArray[Any], NDArray[Any]]


def codec(dim: int = 64, dtype: Any = np.float32) -> Codec:
    return Codec("int4", LAYERS, HEADS, dim, np.dtype(dtype))


def rest(x: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    return x.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == np.uint16 else x.astype(dtype)


def wide(x: NDArray[Any]) -> NDArray[np.float64]:
    return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float64)


def normal(tokens: int, dim: int = 64, dtype: Any = np.float32, seed: int = 0) -> Pair:
    """Keys and values; channels differ in mean and size, tokens in size."""
    random = np.random.default_rng(seed)
    pair = random.standard_normal((2, LAYERS, HEADS, tokens, dim))
    pair = pair * random.exponential(1, (2, 1, HEADS, 1, dim)) + random.normal(0, 3, (2, 1, HEADS, 1, dim))
    pair[1] *= random.exponential(1, (tokens, 1))
    return rest(pair[0], np.dtype(dtype)), rest(pair[1], np.dtype(dtype))


def below(x: float) -> float:
    """The next bfloat16 that is not larger."""
    near = ml_dtypes.bfloat16(x)
    return float(near if float(near) <= x else np.nextafter(near, ml_dtypes.bfloat16(-np.inf)))


def levels(group: NDArray[np.float64]) -> NDArray[np.float64]:
    """The oracle: the 16 values that a group can have, by KIVI's formula."""
    least = below(group.min())
    return least + np.arange(16) * float(ml_dtypes.bfloat16((group.max() - least) / 15))


def key_groups(tokens: int) -> list[slice]:
    """Whole 32s; what is left over joins the last."""
    starts = list(range(0, tokens - 31, 32)) or [0]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], tokens], strict=True)]


def assert_nearest(x: NDArray[np.float64], got: NDArray[np.float64], epsilon: float) -> None:
    """Each value became the level nearest to it, up to rounding in the pool's precision."""
    possible = levels(x)
    best = np.abs(x[:, None] - possible).min(axis=1)
    step, size = possible[1] - possible[0], np.abs(possible).max() + np.abs(x).max()
    assert (np.abs(got - x) <= best + 1e-5 * step + epsilon * size).all()
    assert (np.abs(got[:, None] - possible).min(axis=1) <= epsilon * size).all()
    assert best.max() <= 0.56 * step and step <= (np.ptp(x) + 2.0**-7 * np.abs(x).max()) / 14.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (5, 7), (31, 33), (64, 32), (77, 64), (97, 45)])
def test_every_value_becomes_the_nearest_of_its_groups_levels(tokens: int, dim: int, dtype: np.dtype[Any]) -> None:
    pair = normal(tokens, dim, dtype)
    arrays, loss = codec(dim, dtype).encode(*pair)
    assert kind_of(arrays) == "int4"
    decoded = codec(dim, dtype).decode(arrays)
    assert all(x.dtype == dtype for x in decoded)
    (k, v), (got_k, got_v) = ([wide(x) for x in both] for both in (pair, decoded))
    for at in np.ndindex(LAYERS, HEADS):
        for part in key_groups(tokens):
            for d in range(dim):
                assert_nearest(k[at][part, d], got_k[at][part, d], EPSILON[dtype])
        for token in range(tokens):
            for first in range(0, dim, 32):
                part = slice(first, first + 32)
                assert_nearest(v[at][token, part], got_v[at][token, part], EPSILON[dtype])
    errors = [np.linalg.norm(got - x) / np.linalg.norm(x) for got, x in ((got_k, k), (got_v, v))]
    assert loss == pytest.approx(max(errors), rel=1e-6, abs=1e-9)


def test_the_layout_is_what_the_docstring_says() -> None:
    """One head, two tokens, three channels, by hand."""
    k = np.array([[[[0, 10, 7], [15, 10, 37]]]], np.float32)
    v = np.array([[[[1, 16, 2], [-3, 27, 7]]]], np.float32)
    arrays, loss = Codec("int4", 1, 1, 3, np.dtype(np.float32)).encode(k, v)
    assert loss == 0
    keys, values = [[0, 0, 0], [15, 0, 15]], [[0, 15, 1], [0, 15, 5]]
    np.testing.assert_array_equal(arrays["kv.int4"], np.array([[keys]], np.uint8) + 16 * np.array([[values]], np.uint8))
    expected = {"k.least": [[[[0, 10, 7]]]], "k.scale": [[[[1, 1, 2]]]], "v.least": [[[[1], [-3]]]],
                "v.scale": [[[[1], [2]]]]}  # fmt: skip
    for name, numbers in expected.items():
        assert arrays[name].dtype == np.uint16
        np.testing.assert_array_equal(wide(arrays[name]), np.array(numbers, ml_dtypes.bfloat16).astype(np.float64))
    assert arrays["k.skip"].dtype == np.uint8 and arrays["k.skip"].tolist() == [0]
    assert arrays.keys() == {"kv.int4", "k.skip", *expected}


def test_a_loud_channel_of_keys_and_a_loud_token_of_values_disturb_no_other() -> None:
    k, v = normal(96)
    calm = [wide(x) for x in codec().decode(codec().encode(k, v)[0])]
    k[..., 5] *= 1000
    v[:, :, 7] *= 1000
    loud = [wide(x) for x in codec().decode(codec().encode(k, v)[0])]
    others, tokens = np.arange(64) != 5, np.arange(96) != 7
    np.testing.assert_array_equal(calm[0][..., others], loud[0][..., others])
    np.testing.assert_array_equal(calm[1][:, :, tokens], loud[1][:, :, tokens])


@pytest.mark.parametrize("tokens", [20, 31, 32, 63, 64, 100, 500])
def test_it_takes_less_than_a_third_of_bfloat16(tokens: int) -> None:
    assert codec(64, np.uint16).size(tokens) < Codec("raw", LAYERS, HEADS, 64, np.dtype(np.uint16)).size(tokens) / 3


@given(data=st.data())
def test_cuts_of_cuts_of_some_layers_decode_to_the_same_bits(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, 140))
    arrays: Arrays
    arrays, _ = codec(5).encode(*normal(tokens, 5))
    expected = codec(5).decode(arrays)
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, length(arrays)))
        end = data.draw(st.integers(begin, length(arrays)))
        arrays, expected = cut(arrays, begin, end), tuple(x[:, :, begin:end] for x in expected)
        assert length(arrays) == end - begin
        codec(5).check(arrays, end - begin)
        assert arrays["k.scale"].shape[2] <= (end - begin) // 32 + 2, "groups of tokens that are gone go too"
    layer = data.draw(st.integers(0, LAYERS - 1))
    part = layers(arrays, layer, layer + 1)
    one = Codec("int4", 1, HEADS, 5, np.dtype(np.float32))
    one.check(part, length(arrays))
    for got, what in zip(one.decode(part), expected, strict=True):
        np.testing.assert_array_equal(got, what[layer : layer + 1])


def test_a_cut_copies_no_values() -> None:
    arrays, _ = codec().encode(*normal(100))
    part = cut(arrays, 40, 90)
    assert all(np.shares_memory(part[name], arrays[name]) for name in arrays if name != "k.skip")


@pytest.mark.parametrize("dtype", DTYPES)
def test_flat_groups_and_extremes(dtype: np.dtype[Any]) -> None:
    limits = ml_dtypes.finfo(ml_dtypes.bfloat16 if dtype == np.uint16 else dtype)
    for value in (0.0, 1.0, -3.25, limits.max, limits.min, limits.smallest_normal, limits.smallest_subnormal):
        k, v = normal(40, 7, dtype)
        k[..., 2] = v[:, :, 11] = rest(np.array(float(value)), dtype)
        arrays, loss = codec(7, dtype).encode(k, v)
        got_k, got_v = map(wide, codec(7, dtype).decode(arrays))
        assert np.isfinite(got_k).all() and np.isfinite(got_v).all() and 0 <= loss < 0.1
        tolerance = EPSILON[dtype] * abs(float(value)) + float(limits.smallest_normal)
        np.testing.assert_allclose(got_k[..., 2], float(value), rtol=0, atol=tolerance)
        np.testing.assert_allclose(got_v[:, :, 11], float(value), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_would_overflow_is_kept_as_it_is(dtype: np.dtype[Any]) -> None:
    limits = ml_dtypes.finfo(ml_dtypes.bfloat16 if dtype == np.uint16 else dtype)
    k, v = normal(40, 7, dtype)
    k[0, 0, :2, 0] = rest(np.array([float(limits.min), float(limits.max)]), dtype)
    arrays, _ = codec(7, dtype).encode(k, v)
    got_k, _ = codec(7, dtype).decode(arrays)
    assert np.isfinite(wide(got_k)).all()
    np.testing.assert_allclose(wide(got_k)[0, 0, :2, 0], wide(k)[0, 0, :2, 0], rtol=0.01)


def test_a_wrong_entry_is_refused_by_the_name_of_what_is_wrong() -> None:
    arrays, _ = codec().encode(*normal(70))
    codec().check(arrays, 70)
    with pytest.raises(ValueError, match=r"array k\.skip .* not the same"):
        codec().check(arrays | {"k.skip": np.array([0, 1], np.uint8)}, 70)
    for skip in (60, 64, 200):  # 2 groups cannot hold 70 tokens from there on
        with pytest.raises(ValueError, match=r"array k\.scale .* groups for 70 tokens"):
            codec().check(arrays | {"k.skip": np.full(2, skip, np.uint8)}, 70)
    for groups in (0, 1, 4):
        keys = {name: np.zeros((LAYERS, HEADS, groups, 64), np.uint16) for name in ("k.scale", "k.least")}
        with pytest.raises(ValueError, match=r"array k\.scale .* groups for 70 tokens"):
            codec().check(arrays | keys, 70)


@pytest.mark.parametrize("begin", [0, 40])
def test_entries_on_disk_come_back_whole_or_in_shares_and_damage_is_found(tmp_path: Path, begin: int) -> None:
    arrays = cut(codec().encode(*normal(70))[0], begin, 69)
    with open_store(tmp_path) as store:
        store.write(record_of("x"), arrays)
        for count in (1, LAYERS):
            shares = list(store.read_shares(digest("x"), count))
            one = Codec("int4", LAYERS // count, HEADS, 64, np.dtype(np.float32))
            for share in shares:
                one.check(share, 69 - begin)
            for i, what in enumerate(codec().decode(arrays)):
                np.testing.assert_array_equal(np.concatenate([one.decode(share)[i] for share in shares]), what)
        flip(path_of(store, "x"), -1000)
        with pytest.raises(Damaged):
            read_entry(store, digest("x"))
