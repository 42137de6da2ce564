"""How many devices can share out a model, and how its arrays are laid out for them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ragjax.core import ConfigError
from ragjax.runner.mesh import RULES, copies_of, fits, make_mesh, spec_of
from ragjax.runner.weights import _copied
from tests.support import tiny

SHAPES = {  # query heads and KV heads -> the numbers of devices up to 32 that can share them out
    (9, 3): [1, 3, 9],  # SmolLM2 135M
    (14, 2): [1, 2, 14],  # Qwen2 0.5B
    (28, 4): [1, 2, 4, 28],  # Qwen2 7B
    (32, 8): [1, 2, 4, 8, 16, 32],  # Llama 3 8B
    (12, 12): [1, 2, 3, 4, 6, 12],
}


@pytest.mark.parametrize(("heads", "numbers"), SHAPES.items(), ids=str)
def test_devices_share_out_kv_heads_or_the_query_heads_of_each(heads: tuple[int, int], numbers: list[int]) -> None:
    config = replace(tiny.CONFIG, num_heads=heads[0], num_kv_heads=heads[1])
    assert [n for n in range(1, 33) if fits(n, config)] == numbers
    assert all(config.num_kv_heads % (n // copies_of(n, config)) == 0 for n in numbers)
    assert copies_of(heads[0], config) == heads[0] // heads[1]


def test_the_error_names_the_numbers_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [None] * 16)
    config = replace(tiny.CONFIG, num_heads=9, num_kv_heads=3)
    with pytest.raises(ConfigError, match=r"parallel 2: 3 KV heads of 3 query heads .* choose one of 1, 3, 9$"):
        make_mesh(2, config)
    with pytest.raises(ConfigError, match=r"needs 27 devices, and JAX has 16 \(cpu\): lower it to at most 16"):
        make_mesh(27, config)


def test_logical_axes_go_where_the_rules_say() -> None:
    assert spec_of(("embed", "kv_heads", "groups", "head")) == P(None, "kv_heads", "groups", None)
    assert spec_of(("layers", "embed", "mlp")) == P(None, None, ("kv_heads", "groups"))
    assert spec_of(("norm",)) == P(None)
    assert RULES["vocab"] == ("kv_heads", "groups")


def test_copies_have_their_query_heads_in_order_and_the_same_key_and_value() -> None:
    weight = jnp.arange(2 * 8 * 3).reshape(2, 8, 3)  # 2 KV heads of 6 query heads
    copied = np.asarray(_copied(weight, 3))
    assert copied.shape == (6, 4, 3)
    for head, original in enumerate(np.asarray(weight)):
        own = copied[3 * head : 3 * head + 3]
        np.testing.assert_array_equal(own[:, :2].reshape(6, 3), original[:6])
        assert all(np.array_equal(one[2:], original[6:]) for one in own)
    np.testing.assert_array_equal(_copied(weight, 1), weight)
