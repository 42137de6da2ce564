"""Mixtures of experts: both ways of grouped products against a literal sum, and what of the weights is read."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.core import ConfigError
from ragjax.models import experts
from ragjax.models.huggingface import read_config
from tests.support import tiny

E, F, N = 16, 24, 5


def weights(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(seed)
    gate_up, down = random.normal(0, 0.3, (N, 2, F, E)), random.normal(0, 0.3, (N, E, F))
    return jnp.asarray(gate_up, jnp.float32), jnp.asarray(down, jnp.float32)


def literal(x: np.ndarray, prob: np.ndarray, count: int, share_out: bool) -> np.ndarray:
    gate_up, down = (np.asarray(one, np.float64) for one in weights())
    out = np.zeros_like(x, np.float64)
    for t, row in enumerate(x):
        chosen = np.argsort(-prob[t], kind="stable")[:count]
        total = prob[t, chosen].sum() if share_out else 1.0
        for n in chosen:
            gate, up = gate_up[n] @ row
            out[t] += prob[t, n] / total * (down[n] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("way", ["by_blocks", "by_groups"])
@pytest.mark.parametrize(("rows", "count", "share_out"), [(1, 2, True), (3, 1, False), (7, 5, True), (200, 2, False)])
def test_both_ways_give_the_literal_sum(
    way: str, rows: int, count: int, share_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(rows)
    x = random.normal(size=(rows, E)).astype(np.float32)
    prob = np.asarray(jax.nn.softmax(jnp.asarray(random.normal(size=(rows, N)), jnp.float32)))
    other = "by_groups" if way == "by_blocks" else "by_blocks"
    monkeypatch.setattr(experts, other, getattr(experts, way))
    found = experts.mix_experts(jnp.asarray(x), jnp.asarray(prob), *weights(), count, share_out)
    np.testing.assert_allclose(found, literal(x, prob, count, share_out), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 150])
def test_experts_that_nobody_chose_are_not_read(rows: int) -> None:
    prob = jnp.broadcast_to(jnp.array([0.1, 0.4, 0.0, 0.5, 0.0]), (rows, N))
    gate_up, down = (one.at[jnp.array([0, 2, 4])].set(jnp.nan) for one in weights())
    found = experts.mix_experts(jnp.ones((rows, E)), prob, gate_up, down, 2, True)
    assert np.isfinite(found).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a CPU")
@pytest.mark.parametrize("rows", [1, 40])
def test_no_more_than_a_few_experts_are_widened_at_a_time(rows: int) -> None:
    """XLA would widen all of them before the loop, and read them for that."""
    gate_up, down = jnp.zeros((32, 2, 64, 128), jnp.bfloat16), jnp.zeros((32, 128, 64), jnp.bfloat16)
    compiled = (
        jax.jit(experts.mix_experts, static_argnums=(4, 5))
        .lower(jnp.zeros((rows, 128)), jnp.zeros((rows, 32)), gate_up, down, 2, True)
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * gate_up.nbytes // 32


def test_layers_with_other_sorts_of_experts_are_refused() -> None:
    given = {
        "model_type": "qwen3_moe", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8, "moe_intermediate_size": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config = read_config(given)
    assert (config.intermediate_size, config.num_experts, config.experts_per_token, config.share_out) == (4, 4, 2, True)
    with pytest.raises(ConfigError, match="decoder_sparse_step is 2; it must be 1"):
        read_config(given | {"decoder_sparse_step": 2})
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        read_config(given | {"mlp_only_layers": [0]})
    with pytest.raises(ConfigError, match="experts_per_token is 5"):
        read_config(given | {"num_experts_per_tok": 5})


def test_products_of_a_token_are_those_of_its_experts() -> None:
    one = replace(tiny.CONFIG, family="mixtral", num_experts=8, experts_per_token=2)
    mlp = 3 * one.hidden_size * one.intermediate_size
    assert one.layer_weights - tiny.CONFIG.layer_weights == mlp
