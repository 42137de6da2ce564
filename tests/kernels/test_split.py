"""Splitting lists over programs, and merging attentions over disjoint keys; see tests/test_attention.py for the latter
on real attention.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.kernels.attention.split import LEAST_ENTRIES, PROGRAMS, merge_splits, merge_states, splits


@pytest.mark.parametrize("programs", [1, 7, 8, 64, 131, 132, 133, 264, 5000])
def test_splits_fill_the_device(programs: int) -> None:
    count = splits(programs, 10**6)
    assert programs * count >= PROGRAMS // 2
    assert count == 1 or programs * (count - 1) < PROGRAMS


@pytest.mark.parametrize("entries", [1, LEAST_ENTRIES - 1, LEAST_ENTRIES, 16, 1000])
def test_splits_are_no_more_than_the_list_can_share(entries: int) -> None:
    assert splits(1, entries) == max(1, min(PROGRAMS, entries // LEAST_ENTRIES))


@pytest.mark.slow
def test_merged_parts_are_softmax_over_all() -> None:
    rng = np.random.default_rng(0)
    logits, values = rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 4, 5, 2))
    logits[0, 1], logits[:, 2] = -np.inf, -np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(logits).sum(-1))
        out = np.nan_to_num(np.exp(logits - lse[..., None]))[..., None, :] @ values
        whole = np.concatenate(list(logits), axis=-1)
        prob = np.nan_to_num(np.exp(whole) / np.exp(whole).sum(-1, keepdims=True))
        what = (prob[:, None, :] @ np.concatenate(list(values), axis=1))[:, 0], np.log(np.exp(whole).sum(-1))
    parts = jnp.asarray(out[:, :, 0], jnp.float32), jnp.asarray(lse, jnp.float32)
    first = merge_states(parts[0][0], parts[1][0], parts[0][1], parts[1][1])
    for merged in (merge_splits(*parts), merge_states(*first, parts[0][2], parts[1][2])):
        np.testing.assert_allclose(merged[0], what[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(merged[1], what[1], rtol=1e-5, atol=1e-6)
