"""`Decoder` against a plain float64 NumPy forward written from the Hugging Face tensor names.

The forward loops over layers, heads and rows; it shares neither the fused layout nor the rotation with the model.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder, dense
from tests.support.forward import dense_logits
from tests.support.oracle import Float
from tests.support.plain import FAMILIES, LLAMA2, forward, tensors_of

TOKENS = np.random.default_rng(0).integers(0, 61, 37).astype(np.int32)


def logits_of(config: ModelConfig, tensors: dict[str, np.ndarray], dtype: str = "float32") -> np.ndarray:
    decoder = Decoder.from_tensors(config, tensors, jnp.dtype(dtype))
    graph, state = nnx.split(decoder)
    run = jax.jit(lambda state, tokens: dense_logits(nnx.merge(graph, state), tokens))
    return np.asarray(run(state, jnp.asarray(TOKENS)))


def relative(got: np.ndarray, what: Float) -> float:
    """Worst row, relative to the typical row."""
    return float(np.linalg.norm(got - what, axis=-1).max() / np.sqrt((what**2).sum(-1).mean()))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_equal_the_plain_forward(family: str) -> None:
    config = FAMILIES[family]
    tensors = tensors_of(config)
    got = logits_of(config, tensors)
    assert got.dtype == np.float32
    assert got.shape == (len(TOKENS), config.vocab_size)
    assert relative(got, forward(config, tensors, TOKENS)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_bfloat16_logits_are_near(family: str) -> None:
    config = FAMILIES[family]
    tensors = tensors_of(config)
    got = logits_of(config, tensors, "bfloat16")
    assert got.dtype == np.float32
    assert 1e-4 < relative(got, forward(config, tensors, TOKENS)) < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_matters(family: str) -> None:
    """Plants a fault in each tensor of the last layer and the ends in turn; the plain forward disagrees."""
    config = FAMILIES[family]
    tensors = tensors_of(config)
    graph, _ = nnx.split(Decoder.abstract(config, jnp.dtype("float32")))
    run = jax.jit(lambda state, tokens: dense_logits(nnx.merge(graph, state), tokens))
    what = forward(config, tensors, TOKENS)
    for name in tensors:
        if ".layers." in name and f".layers.{config.num_layers - 1}." not in name:
            continue
        # a constant on the key bias would cancel in the softmax but for RoPE; a reversed tensor cancels nowhere
        broken = tensors | {name: tensors[name][::-1].copy()}
        _, state = nnx.split(Decoder.from_tensors(config, broken, jnp.dtype("float32")))
        assert relative(np.asarray(run(state, jnp.asarray(TOKENS))), what) > 1e-3, name


@pytest.mark.parametrize(
    "change", [{"rope_scaling": None}, {"rope_theta": 400.0}, {"norm_eps": 1e-1}], ids=["scaling", "theta", "eps"]
)
def test_every_constant_matters(change: dict[str, object]) -> None:
    config = FAMILIES["llama3"]
    tensors = tensors_of(config)
    got = logits_of(replace(config, **change), tensors)  # type: ignore[arg-type]
    assert relative(got, forward(config, tensors, TOKENS)) > 1e-3


def test_weights_have_the_dtype_asked_for_and_norms_stay_float32() -> None:
    decoder = Decoder.from_tensors(FAMILIES["qwen2"], tensors_of(FAMILIES["qwen2"]), jnp.dtype("bfloat16"))
    layer = decoder.layers[0]
    assert decoder.embedding[...].dtype == layer.qkv[...].dtype == layer.down[...].dtype == jnp.bfloat16
    assert decoder.norm[...].dtype == layer.attention_norm[...].dtype == jnp.float32
    assert layer.qkv_bias is not None and layer.qkv_bias[...].dtype == jnp.float32


def test_every_weight_has_a_name_per_axis() -> None:
    for config in FAMILIES.values():
        decoder = Decoder.abstract(config)
        for weight in jax.tree.leaves(decoder, is_leaf=lambda x: isinstance(x, nnx.Variable)):
            assert len(weight.axes) == len(weight.shape)


def test_missing_tensor_is_named() -> None:
    tensors = tensors_of(LLAMA2)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(KeyError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        Decoder.from_tensors(LLAMA2, tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_product_are_those_of_its_formula(dtype: str) -> None:
    """Its own rule, beside float64 by hand; what it hands back has the operands' dtypes."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(shape) for shape in ((5, 8), (6, 8), (5, 6)))
    w_NE = jnp.asarray(w, dtype)
    _, back = jax.vjp(dense, jnp.asarray(x, jnp.float32), w_NE)
    dx_TE, dw_NE = back(jnp.asarray(g, jnp.float32))
    assert dx_TE.dtype == jnp.float32 and dw_NE.dtype == w_NE.dtype
    tolerance = 1e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(dx_TE, g @ w, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(dw_NE.astype(jnp.float32), g.T @ x, rtol=tolerance, atol=tolerance)
