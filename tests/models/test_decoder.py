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

from ragjax.models.config import ModelConfig, RopeScaling
from ragjax.models.decoder import Decoder, dense
from tests.support.oracle import Float, turn

LLAMA2 = ModelConfig(
    family="llama", vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=6, num_kv_heads=6,
    head_dim=4, rope_theta=10000.0, rope_scaling=None, norm_eps=1e-5, tie_embeddings=False, qkv_bias=False,
    qk_norm=False, context_length=64, eos_ids=(1,), bos_id=0,
)  # fmt: skip
LLAMA3 = replace(LLAMA2, num_kv_heads=2, head_dim=8, rope_theta=500.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16))
FAMILIES = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "llama-tied": replace(LLAMA3, rope_scaling=None, tie_embeddings=True),
    "mistral": replace(LLAMA2, family="mistral", num_kv_heads=3, rope_theta=1e6),
    "qwen2": replace(LLAMA2, family="qwen2", num_kv_heads=2, qkv_bias=True, tie_embeddings=True, norm_eps=1e-6),
    "qwen3": replace(LLAMA2, family="qwen3", num_kv_heads=1, head_dim=10, qk_norm=True),
}
TOKENS = np.random.default_rng(0).integers(0, 61, 37).astype(np.int32)


def tensors_of(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names; norms and biases far from their neutral values."""
    rng = np.random.default_rng(seed)
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    h, k = config.num_heads, config.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, e),
        "model.norm.weight": (e,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, e)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        for name, heads in (("q", h), ("k", k), ("v", k)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (heads * d, e)
            if config.qkv_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (heads * d,)
        if config.qk_norm:
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (d,) for name in "qk"}
        shapes |= {
            f"{layer}self_attn.o_proj.weight": (e, h * d),
            f"{layer}mlp.gate_proj.weight": (f, e),
            f"{layer}mlp.up_proj.weight": (f, e),
            f"{layer}mlp.down_proj.weight": (e, f),
            f"{layer}input_layernorm.weight": (e,),
            f"{layer}post_attention_layernorm.weight": (e,),
        }
    tensors = {}
    for name, shape in shapes.items():
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.5
        tensors[name] = (rng.standard_normal(shape) * scale + ("norm" in name)).astype(np.float32)
    return tensors


def norm(x: Float, weight: np.ndarray, eps: float) -> Float:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def frequencies(config: ModelConfig) -> Float:
    inv_freq_R = config.rope_theta ** -(np.arange(config.head_dim // 2) / (config.head_dim // 2))
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq_R
    turns_R = scaling.original_context * inv_freq_R / (2 * np.pi)
    mix_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth_R = inv_freq_R * (mix_R + (1 - mix_R) / scaling.factor)
    long_R = np.where(turns_R < scaling.low_freq_factor, inv_freq_R / scaling.factor, smooth_R)
    return np.where(turns_R > scaling.high_freq_factor, inv_freq_R, long_R)


def forward(config: ModelConfig, tensors: dict[str, np.ndarray], tokens: np.ndarray) -> Float:
    """Causal logits of one prompt, float64 [T, V]."""
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}
    d, position, inv_freq_R = config.head_dim, np.arange(len(tokens)), frequencies(config)
    x_TE = weights["model.embed_tokens.weight"][tokens]
    for i in range(config.num_layers):
        layer = {
            n.removeprefix(f"model.layers.{i}."): w for n, w in weights.items() if n.startswith(f"model.layers.{i}.")
        }
        h_TE = norm(x_TE, layer["input_layernorm.weight"], config.norm_eps)
        q, k, v = (h_TE @ layer[f"self_attn.{n}_proj.weight"].T for n in "qkv")
        if config.qkv_bias:
            q, k, v = (x + layer[f"self_attn.{n}_proj.bias"] for n, x in zip("qkv", (q, k, v), strict=True))
        q_THD, k_TKD, v_TKD = (x.reshape(len(tokens), -1, d) for x in (q, k, v))
        if config.qk_norm:
            q_THD = norm(q_THD, layer["self_attn.q_norm.weight"], config.norm_eps)
            k_TKD = norm(k_TKD, layer["self_attn.k_norm.weight"], config.norm_eps)
        q_THD, k_TKD = turn(q_THD, position, inv_freq_R), turn(k_TKD, position, inv_freq_R)
        out_THD = np.zeros_like(q_THD)
        for t in range(len(tokens)):
            for h in range(config.num_heads):
                kv_head = h // (config.num_heads // config.num_kv_heads)
                prob = np.exp(k_TKD[: t + 1, kv_head] @ q_THD[t, h] / np.sqrt(d))
                out_THD[t, h] = prob @ v_TKD[: t + 1, kv_head] / prob.sum()
        x_TE = x_TE + out_THD.reshape(len(tokens), -1) @ layer["self_attn.o_proj.weight"].T
        h_TE = norm(x_TE, layer["post_attention_layernorm.weight"], config.norm_eps)
        gate_TF = h_TE @ layer["mlp.gate_proj.weight"].T
        up_TF = h_TE @ layer["mlp.up_proj.weight"].T
        x_TE = x_TE + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ layer["mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return norm(x_TE, weights["model.norm.weight"], config.norm_eps) @ weights[head].T


def logits_of(config: ModelConfig, tensors: dict[str, np.ndarray], dtype: str = "float32") -> np.ndarray:
    decoder = Decoder.from_tensors(config, tensors, jnp.dtype(dtype))
    graph, state = nnx.split(decoder)
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state).logits(tokens))
    return np.asarray(run(state, jnp.asarray(TOKENS)))


def relative(got: np.ndarray, what: Float) -> float:
    """Worst row, relative to the typical row."""
    return float(np.linalg.norm(got - what, axis=-1).max() / np.sqrt((what**2).sum(-1).mean()))


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_equal_the_plain_forward(family: str) -> None:
    config = FAMILIES[family]
    tensors = tensors_of(config)
    got = logits_of(config, tensors)
    assert got.dtype == np.float32
    assert got.shape == (len(TOKENS), config.vocab_size)
    assert relative(got, forward(config, tensors, TOKENS)) < 1e-5


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_bfloat16_logits_are_near(family: str) -> None:
    config = FAMILIES[family]
    tensors = tensors_of(config)
    got = logits_of(config, tensors, "bfloat16")
    assert got.dtype == np.float32
    assert 1e-4 < relative(got, forward(config, tensors, TOKENS)) < 5e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_matters(family: str) -> None:
    """Plants a fault in each tensor of the last layer and the ends in turn; the plain forward disagrees."""
    config = FAMILIES[family]
    tensors = tensors_of(config)
    graph, _ = nnx.split(Decoder.abstract(config, jnp.dtype("float32")))
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state).logits(tokens))
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
