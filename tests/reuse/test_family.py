"""Families whose attention differs from Llama's, in the engine: every strategy where it is exact, and moved chunks.

The dense computation knows nothing of pages, offsets or caches; other tests compare it with float64 and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from ragjax.core import Prompt
from ragjax.engine import Engine
from ragjax.models.config import LongRope, ModelConfig
from ragjax.models.decoder import Decoder, rotation_table
from ragjax.reuse import strategies
from ragjax.runner.runner import Runner
from tests.support import tiny
from tests.support.forward import dense_logits

FAMILIES = {
    "phi3": replace(tiny.CONFIG, family="phi3", rotary_dim=12, rope_scaling=LongRope((1, 1, 1.5, 2, 2.5, 3), 1.2)),
    "mixtral": replace(tiny.CONFIG, family="mixtral", num_experts=4, experts_per_token=2),
    "glm4": replace(tiny.CONFIG, family="glm4", rotary_dim=8, neighbours=True, post_norms=True, qkv_bias=True),
    "gemma2": replace(
        tiny.CONFIG,
        family="gemma2",
        activation="gelu",
        post_norms=True,
        embedding_scale=6.9,
        query_scalar=12.0,
        attention_cap=3.0,
        logit_cap=6.0,
    ),
}
ALONE = sorted(name for name in strategies() if not name.startswith(("packet", "dependency")))
"""Strategies that answer one chunk alone as `full` does."""


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return tiny.decoder(config=FAMILIES[request.param])


@pytest.fixture(scope="module")
def runner(decoder: Decoder) -> Runner:
    return tiny.make_runner(decoder)


@pytest.fixture
def engine(runner: Runner) -> Iterator[Engine]:
    with tiny.engine(runner) as made:
        yield made


def logits_of(engine: Engine, prompt: Prompt, strategy: str) -> NDArray[np.float32]:
    found = engine.answer_prompt(prompt, strategy=strategy, max_tokens=1, want_logits=True).logits
    return found


def naive_logits(decoder: Decoder, prompt: Prompt) -> NDArray[np.float32]:
    """Chunks saw the system prompt and themselves alone, right behind it; the question saw all where they stand."""
    config, tokens = decoder.config, jnp.asarray(prompt.tokens)
    total, system = len(prompt.tokens), prompt.starts[1]
    segment_T = np.searchsorted(prompt.starts[1:-1], np.arange(total), side="right")
    last = len(prompt.segments) - 1
    local_T = np.arange(total)
    for i in range(1, last):
        at = segment_T == i
        local_T[at] = system + np.arange(at.sum())
    asked_T = segment_T == last
    index_T = np.arange(total)
    causal_TT = index_T[:, None] >= index_T
    own_TT = causal_TT & ((segment_T[:, None] == segment_T) | (segment_T == 0))
    table = rotation_table(config, total)
    x_TE = decoder.embed(tokens)
    for layer in decoder.layers:
        outs = []
        for position_T, seen_TT in ((local_T, own_TT), (index_T, causal_TT)):
            q_THD, k_TKD, v_TKD = layer.project(x_TE, *table.at(jnp.asarray(position_T)))
            outs.append(attention(config, q_THD, k_TKD, v_TKD, seen_TT))
        x_TE = layer.finish(x_TE, jnp.where(jnp.asarray(asked_T)[:, None, None], outs[1], outs[0]))
    return np.asarray(decoder.unembed(x_TE))[-1]


def attention(config: ModelConfig, q_THD, k_TKD, v_TKD, seen_TT):
    q_THD, k_TKD, v_TKD = (np.asarray(x, np.float64) for x in (q_THD, k_TKD, v_TKD))
    out_THD = np.zeros_like(q_THD)
    for head in range(config.num_heads):
        kv = head // config.num_groups
        logits_TT = q_THD[:, head] @ k_TKD[:, kv].T * config.attention_scale
        if config.attention_cap is not None:
            logits_TT = config.attention_cap * np.tanh(logits_TT / config.attention_cap)
        logits_TT = np.where(seen_TT, logits_TT, -np.inf)
        prob_TT = np.exp(logits_TT - logits_TT.max(-1, keepdims=True))
        out_THD[:, head] = prob_TT @ v_TKD[:, kv] / prob_TT.sum(-1, keepdims=True)
    return jnp.asarray(out_THD, jnp.float32)


@pytest.mark.slow
@pytest.mark.smoke
def test_full_and_prefix_are_the_dense_computation(engine: Engine, decoder: Decoder) -> None:
    prompt = tiny.prompt(1)
    wanted = np.asarray(dense_logits(decoder, jnp.asarray(prompt.tokens)))[-1]
    for strategy in ("full", "prefix", "prefix"):
        np.testing.assert_allclose(logits_of(engine, prompt, strategy), wanted, atol=2e-4)


@pytest.mark.slow
def test_chunks_move_as_their_rotation_says(engine: Engine, decoder: Decoder) -> None:
    """Computed behind the system prompt, read where the prompt has them, in two orders."""
    prompt = tiny.prompt(2)
    system, a, b, c, question = prompt.segments
    for order in ((a, b, c), (c, a, b)):
        asked = Prompt((system, *order, question))
        wanted = naive_logits(decoder, asked)
        assert np.abs(wanted - logits_of(engine, asked, "full")).max() > 1e-2
        np.testing.assert_allclose(logits_of(engine, asked, "naive"), wanted, atol=2e-4)


@pytest.mark.long  # most strategies compile measures of their own
@pytest.mark.parametrize("name", ALONE)
def test_one_chunk_alone_is_exact_by_every_strategy(engine: Engine, decoder: Decoder, name: str) -> None:
    prompt = tiny.prompt(3, chunks=(50,))
    wanted = np.asarray(dense_logits(decoder, jnp.asarray(prompt.tokens)))[-1]
    np.testing.assert_allclose(logits_of(engine, prompt, name), wanted, atol=2e-4)
