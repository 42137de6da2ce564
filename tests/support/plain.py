"""A plain float64 NumPy forward of a decoder, written from the Hugging Face tensor names, and random weights for it.

It loops over layers, heads and rows; it shares neither the fused layout nor the rotation with the model, but the
names and shapes of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ragjax.models.config import LongRope, ModelConfig, RopeScaling
from ragjax.models.tensors import expected_shapes
from tests.support.oracle import Float, rotate

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
    "phi3": replace(
        LLAMA2, family="phi3", num_kv_heads=2, head_dim=8, rotary_dim=6, rope_scaling=LongRope((1.0, 1.5, 3.0), 1.2)
    ),
    "gemma2": replace(
        LLAMA2,
        family="gemma2",
        num_kv_heads=3,
        tie_embeddings=True,
        activation="gelu",
        post_norms=True,
        embedding_scale=3.0,
        query_scalar=7.0,
        attention_cap=1.5,
        logit_cap=4.0,
    ),
}


def tensors_of(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names; norms and biases far from their neutral values."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.5
        tensors[name] = (rng.standard_normal(shape) * scale + ("norm" in name)).astype(np.float32)
    return tensors


def norm(x: Float, weight: np.ndarray, eps: float) -> Float:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def frequencies(config: ModelConfig) -> Float:
    pairs = (config.rotary_dim or config.head_dim) // 2
    inv_freq_R = config.rope_theta ** -(np.arange(pairs) / pairs)
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq_R
    if isinstance(scaling, LongRope):
        return inv_freq_R / np.array(scaling.factors)
    turns_R = scaling.original_context * inv_freq_R / (2 * np.pi)
    mix_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth_R = inv_freq_R * (mix_R + (1 - mix_R) / scaling.factor)
    long_R = np.where(turns_R < scaling.low_freq_factor, inv_freq_R / scaling.factor, smooth_R)
    return np.where(turns_R > scaling.high_freq_factor, inv_freq_R, long_R)


def turn(config: ModelConfig, x: Float, position: np.ndarray) -> Float:
    """Heads [T, H, D] with RoPE on their first components, as transformers does it for Phi-3 and all others."""
    turned = config.rotary_dim or config.head_dim
    stretch = config.rope_scaling.stretch if isinstance(config.rope_scaling, LongRope) else 1.0
    first = stretch * rotate(x[..., :turned], position, frequencies(config))
    return np.concatenate([first, x[..., turned:]], axis=-1)


def capped(x: Float, cap: float | None) -> Float:
    return x if cap is None else cap * np.tanh(x / cap)


def activated(x: Float, name: str) -> Float:
    if name == "gelu":  # Hendrycks and Gimpel, arXiv 1606.08415, section 2
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def forward(
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    position: np.ndarray | None = None,
    seen: np.ndarray | None = None,
) -> Float:
    """Logits of one prompt, float64 [T, V]; position: int [T] (None: in order), seen: bool [T, T] (None: causal)."""
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}
    d, n_tokens = config.head_dim, len(tokens)
    position = np.arange(n_tokens) if position is None else position
    seen = np.tri(n_tokens, dtype=bool) if seen is None else seen
    x_TE = config.embedding_scale * weights["model.embed_tokens.weight"][tokens]
    scale = (config.query_scalar or d) ** -0.5
    for i in range(config.num_layers):
        layer = {
            n.removeprefix(f"model.layers.{i}."): w for n, w in weights.items() if n.startswith(f"model.layers.{i}.")
        }
        h_TE = norm(x_TE, layer["input_layernorm.weight"], config.norm_eps)
        q, k, v = (h_TE @ layer[f"self_attn.{n}_proj.weight"].T for n in "qkv")
        if config.qkv_bias:
            q, k, v = (x + layer[f"self_attn.{n}_proj.bias"] for n, x in zip("qkv", (q, k, v), strict=True))
        q_THD, k_TKD, v_TKD = (x.reshape(n_tokens, -1, d) for x in (q, k, v))
        if config.qk_norm:
            q_THD = norm(q_THD, layer["self_attn.q_norm.weight"], config.norm_eps)
            k_TKD = norm(k_TKD, layer["self_attn.k_norm.weight"], config.norm_eps)
        q_THD, k_TKD = turn(config, q_THD, position), turn(config, k_TKD, position)
        out_THD = np.zeros_like(q_THD)
        for t in range(n_tokens):
            for h in range(config.num_heads):
                kv_head = h // (config.num_heads // config.num_kv_heads)
                logits = capped(k_TKD[seen[t], kv_head] @ q_THD[t, h] * scale, config.attention_cap)
                prob = np.exp(logits - logits.max())
                out_THD[t, h] = prob @ v_TKD[seen[t], kv_head] / prob.sum()
        out_TE = out_THD.reshape(n_tokens, -1) @ layer["self_attn.o_proj.weight"].T
        if config.post_norms:
            x_TE = x_TE + norm(out_TE, layer["post_attention_layernorm.weight"], config.norm_eps)
            h_TE = norm(x_TE, layer["pre_feedforward_layernorm.weight"], config.norm_eps)
        else:
            x_TE = x_TE + out_TE
            h_TE = norm(x_TE, layer["post_attention_layernorm.weight"], config.norm_eps)
        gate_TF = h_TE @ layer["mlp.gate_proj.weight"].T
        up_TF = h_TE @ layer["mlp.up_proj.weight"].T
        made_TE = (activated(gate_TF, config.activation) * up_TF) @ layer["mlp.down_proj.weight"].T
        if config.post_norms:
            made_TE = norm(made_TE, layer["post_feedforward_layernorm.weight"], config.norm_eps)
        x_TE = x_TE + made_TE
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return capped(norm(x_TE, weights["model.norm.weight"], config.norm_eps) @ weights[head].T, config.logit_cap)
