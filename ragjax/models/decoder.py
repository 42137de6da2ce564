"""The decoder of all families in Flax NNX: one class, differences by configuration.

Sources: Llama (arXiv 2302.13971, 2407.21783), Mistral (2310.06825), Qwen2 (2407.10671), Qwen3 (2505.09388), Phi-3
(2404.14219), Gemma 2 (2408.00118), GLM-4 (2406.12793); mixtures of experts: `experts.py`.
A layer is two pure halves around attention, so that whoever owns the KV pool decides how attention is done:
`layer.project` before it, `layer.finish` after it. The residual stream is float32; products take the weights' dtype and
accumulate in float32, which on CPU is both the fastest and the more exact way to use bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from numpy.typing import NDArray

from ragjax.kernels.cpu.op import PackedMatrix, packed_mlp, packed_product, packed_rows
from ragjax.kernels.cpu.packing import Packing
from ragjax.kernels.rope import Rotation, rotate
from ragjax.models.config import ModelConfig
from ragjax.models.experts import mix_experts

WHOLE_NUMBERS = "whole numbers in spans"
"""`Decoder.kernels` where all products are sums of whole numbers, which have the same bits for any rows."""

MANY = 128
"""Rows from which on widening a matrix costs less than it gains."""


class Weight(nnx.Param[jax.Array]):
    """A parameter with a logical name per axis, `axes`, which a mesh maps to devices."""


def _weight(value: jax.Array, *axes: str) -> Weight:
    return Weight(value, axes=axes)


@jax.custom_vjp
def dense(x_TE: jax.Array, w_NE: jax.Array) -> jax.Array:
    """Product with a matrix kept as [out, in], in its dtype, accumulated in float32: float32 [T, N].

    On CPU a few rows are a tenth faster this way round than with [in, out], and many rows as fast. Its gradients are
    products in the matrix's dtype as well; JAX's own rule would widen a bfloat16 matrix to float32 for them.
    """
    return _product(x_TE.astype(w_NE.dtype), w_NE, 1, 1)


def _product(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    """Two matrices of one dtype, summed over an axis of each, accumulated in float32."""
    return lax.dot_general(
        a,
        b,
        (((over_a,), (over_b,)), ((), ())),
        precision=lax.Precision.HIGHEST if b.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _dense_forward(x_TE: jax.Array, w_NE: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return dense(x_TE, w_NE), (x_TE, w_NE)


def _dense_backward(saved: tuple[jax.Array, jax.Array], g_TN: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_TE, w_NE = saved
    g_TN = g_TN.astype(w_NE.dtype)
    dx_TE = _product(g_TN, w_NE, 1, 0).astype(x_TE.dtype)
    return dx_TE, _product(g_TN, x_TE.astype(w_NE.dtype), 0, 0).astype(w_NE.dtype)


dense.defvjp(_dense_forward, _dense_backward)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (arXiv 1910.07467), float32."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rotation_table(config: ModelConfig, length: int) -> Rotation:
    """The model's RoPE table for positions and offsets below `length`."""
    return Rotation.table(config.inverse_frequencies, length)


class Layer(nnx.Module):
    """One transformer block, with weights fused per KV head, so that a mesh can split them there.

    `qkv` is [K, G + 2, D, E] (G query heads, one key, one value), `out` [E, K, G, D], `gate_up` [2, F, E]. The order of
    a head's components is that of `turning_order`. On a mesh there are [K * copies, G / copies + 2, D, E] and
    [devices, 2, F / devices, E] in place of the first and the last (`runner.weights`).
    `widen`: products of at least `MANY` rows read the matrices as float32, for CPUs that have no bfloat16 products.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
        k, g = config.num_kv_heads, config.num_groups

        def init(*shape: int) -> jax.Array:
            value: jax.Array = jax.random.normal(rngs.params(), shape) * jnp.float32(e**-0.5)
            return value.astype(dtype)

        self.eps = config.norm_eps
        self.stretch = config.query_stretch
        self.turned = (config.rotary_dim or d) // 2
        self.widen = False
        self.attention_norm = _weight(jnp.ones(e), "embed")
        self.qkv = _weight(init(k, g + 2, d, e), "kv_heads", "groups", "head", "embed")
        self.qkv_bias = _weight(jnp.zeros((k, g + 2, d)), "kv_heads", "groups", "head") if config.qkv_bias else None
        self.q_norm = _weight(jnp.ones(d), "head") if config.qk_norm else None
        self.k_norm = _weight(jnp.ones(d), "head") if config.qk_norm else None
        self.out = _weight(init(e, k, g, d), "embed", "kv_heads", "groups", "head")
        self.attention_post_norm = _weight(jnp.ones(e), "embed") if config.post_norms else None
        self.mlp_post_norm = _weight(jnp.ones(e), "embed") if config.post_norms else None
        self.gelu = config.activation == "gelu"
        self.mlp_norm = _weight(jnp.ones(e), "embed")
        n = (config.num_experts,) if config.num_experts else ()
        self.router = _weight(init(*n, e).astype(jnp.float32), "experts", "embed") if n else None
        self.chosen, self.share_out = config.experts_per_token, config.share_out
        self.gate_up = _weight(init(*n, 2, f, e), *["experts"] * len(n), "gate", "mlp", "embed")
        self.down = _weight(init(*n, e, f), *["experts"] * len(n), "embed", "mlp")

    def project(
        self, x_TE: jax.Array, cos_TR: jax.Array, sin_TR: jax.Array, live: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [T, H, D] and keys [T, K, D] rotated at their positions, and values [T, K, D], float32.

        live: how many rows are not padding, which comes last, int32 (None: all). Products may leave padding out.
        """
        k, n, d, _ = self.qkv.shape
        qkv_TKND = self.multiply("qkv", x_TE, self.attention_norm[...], live).reshape(-1, k, n, d)
        if self.qkv_bias is not None:
            qkv_TKND = qkv_TKND + self.qkv_bias[...]
        q_TKGD, k_TKD, v_TKD = qkv_TKND[:, :, :-2], qkv_TKND[:, :, -2], qkv_TKND[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            q_TKGD = rms_norm(q_TKGD, self.q_norm[...], self.eps)
            k_TKD = rms_norm(k_TKD, self.k_norm[...], self.eps)
        if self.stretch != 1.0:
            turns_D = jnp.arange(d) % (d // 2) < self.turned
            q_TKGD = q_TKGD * jnp.where(turns_D, self.stretch, 1.0)
        q_THD = rotate(q_TKGD.reshape(-1, k * (n - 2), d), cos_TR[:, None], sin_TR[:, None])
        return q_THD, rotate(k_TKD, cos_TR[:, None], sin_TR[:, None]), v_TKD

    def multiply(
        self, name: str, x_TI: jax.Array, norm_I: jax.Array | None = None, live: jax.Array | None = None
    ) -> jax.Array:
        """Product with one of the fused matrices over all its inputs, float32 [T, O]: its outputs flat.

        norm_I: scale of the norm of the rows before it.
        """
        weight: jax.Array | PackedMatrix = getattr(self, name)[...]
        if isinstance(weight, PackedMatrix):
            norm = None if norm_I is None else (norm_I, self.eps)
            return packed_product(x_TI, weight, x_TI.shape[1], norm, live)
        x_TI = x_TI if norm_I is None else rms_norm(x_TI, norm_I, self.eps)
        weight_OI = weight.reshape(-1, x_TI.shape[1])
        if self.widen and x_TI.shape[0] >= MANY:
            weight_OI = weight_OI.astype(jnp.float32)
        return dense(x_TI, weight_OI)

    def finish(self, x_TE: jax.Array, out_THD: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """Output projection and MLP, added to the residual stream, float32 [T, E]. live: as of `project`."""
        _, k, g, d = self.out.shape
        attended_TE = self.multiply("out", out_THD.reshape(-1, k * g * d), live=live)
        if self.attention_post_norm is not None:
            attended_TE = rms_norm(attended_TE, self.attention_post_norm[...], self.eps)
        x_TE = x_TE + attended_TE
        made_TE = self._mlp(x_TE, live)
        if self.mlp_post_norm is not None:
            made_TE = rms_norm(made_TE, self.mlp_post_norm[...], self.eps)
        return x_TE + made_TE

    def _mlp(self, x_TE: jax.Array, live: jax.Array | None) -> jax.Array:
        if self.router is not None:
            normed_TE = rms_norm(x_TE, self.mlp_norm[...], self.eps)
            prob_TN = jax.nn.softmax(dense(normed_TE, self.router[...]), axis=-1)
            return mix_experts(normed_TE, prob_TN, self.gate_up[...], self.down[...], self.chosen, self.share_out)
        gate_up, down = self.gate_up[...], self.down[...]
        if isinstance(gate_up, PackedMatrix) and isinstance(down, PackedMatrix) and not self.gelu:
            made_TE = packed_mlp(x_TE, gate_up, down, (self.mlp_norm[...], self.eps), live)
            if made_TE is not None:
                return made_TE
        gate_up_TN2F = self.multiply("gate_up", x_TE, self.mlp_norm[...], live).reshape(
            len(x_TE), -1, 2, self.gate_up.shape[-2]
        )
        gate_TF, up_TF = (gate_up_TN2F[:, :, part].reshape(len(x_TE), -1) for part in (0, 1))
        gate_TF = jax.nn.gelu(gate_TF, approximate=True) if self.gelu else jax.nn.silu(gate_TF)
        return self.multiply("down", gate_TF * up_TF, live=live)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. `head` is None when the embedding is tied.

    soft: embeddings of the tokens behind the vocabulary, float32 [soft_tokens, E]; None if there are none.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype = jnp.bfloat16, *, rngs: nnx.Rngs):
        v, e = config.vocab_size, config.hidden_size

        def init() -> jax.Array:
            value: jax.Array = jax.random.normal(rngs.params(), (v, e)) * jnp.float32(0.02)
            return value.astype(dtype)

        self.config = config
        self.embedding = _weight(init(), "vocab", "embed")
        self.soft = _weight(jnp.zeros((config.soft_tokens, e)), "soft", "embed") if config.soft_tokens else None
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norm = _weight(jnp.ones(e), "embed")
        self.head = None if config.tie_embeddings else _weight(init(), "vocab", "embed")

    @staticmethod
    def abstract(config: ModelConfig, dtype: jnp.dtype = jnp.bfloat16) -> Decoder:
        """The decoder with shapes and dtypes in place of arrays."""
        one = replace(config, num_layers=1)  # JAX takes a second for the thirty equal layers of a small model
        decoder = nnx.eval_shape(lambda: Decoder(one, dtype, rngs=nnx.Rngs(0)))
        definition, state = nnx.split(decoder.layers[0])
        decoder.config = config
        decoder.layers = nnx.List([nnx.merge(definition, nnx.clone(state)) for _ in range(config.num_layers)])
        return decoder

    @staticmethod
    def from_tensors(
        config: ModelConfig, tensors: Mapping[str, NDArray[np.generic]], dtype: jnp.dtype = jnp.bfloat16
    ) -> Decoder:
        """Build from tensors under Hugging Face names and orientation (`model.layers.0.self_attn.q_proj.weight`).

        Matrices are cast to `dtype`; norms and biases stay float32. Tensors are read one layer at a time.
        """
        return Decoder.from_arrays(config, own_arrays(config, tensors), dtype)

    @staticmethod
    def from_arrays(
        config: ModelConfig,
        arrays: Iterable[tuple[str, NDArray[np.generic]]],
        dtype: jnp.dtype = jnp.bfloat16,
        packings: Mapping[str, Packing] = MappingProxyType({}),
    ) -> Decoder:
        """Build from arrays in this layout, by name. Those that fit as they are stay where they are on a CPU.

        packings: of the matrices that are packed, by name. Those of all layers may come as one array, "layers.KIND".
        """
        decoder = Decoder.abstract(config, dtype)
        weights = decoder.weights()
        for name, value in arrays:
            prefix, _, kind = name.partition(".")
            members = [name] if name in weights else [f"{prefix}.{i}.{kind}" for i in range(config.num_layers)]
            weight = weights[members[0]]
            packing = packings.get(members[0])
            if packing is not None:
                data = jax.device_put(value, may_alias=True)
                for i, member in enumerate(members):
                    layer = jnp.int32(i) if name not in weights else None
                    packed = PackedMatrix(data, tuple(weight.shape), packing, layer)
                    weights[member].set_value(packed)  # type: ignore[arg-type]
                continue
            fitting = value.reshape(weight.shape).astype(weight.dtype, copy=False)
            weight.set_value(jax.device_put(fitting, may_alias=True))
        return decoder

    def weights(self) -> dict[str, Weight]:
        """The parameters that a checkpoint has, by name, in the order of `own_arrays`."""
        layers = {
            f"layers.{i}.{name}": weight
            for i, layer in enumerate(self.layers)
            for name, weight in sorted(vars(layer).items())
            if isinstance(weight, Weight)
        }
        ends = {"embedding": self.embedding, **layers, "norm": self.norm, "head": self.head}
        return {name: weight for name, weight in ends.items() if weight is not None}

    @property
    def kernels(self) -> str | None:
        """The arithmetic of the CPU kernels that multiply packed matrices, as a name; None if no matrix is packed."""
        values: dict[str, Any] = {name: weight.get_value() for name, weight in self.weights().items()}
        packings = [value.packing for value in values.values() if isinstance(value, PackedMatrix)]
        if not packings:
            return None
        rest = {name: value for name, value in values.items() if not isinstance(value, PackedMatrix)}
        others = any(value.ndim > 1 and not name.endswith("bias") for name, value in rest.items())
        return ("tiles beside " if packings[0].tiled else "") + WHOLE_NUMBERS + (" and XLA" if others else "")

    def embed(self, tokens_T: jax.Array) -> jax.Array:
        """Token embeddings, float32 [T, E]."""
        vocabulary, scale = self.config.vocab_size, self.config.embedding_scale
        text_TE = self._row(tokens_T if self.soft is None else jnp.minimum(tokens_T, vocabulary - 1))
        text_TE = text_TE if scale == 1.0 else text_TE * scale
        if self.soft is None:
            return text_TE
        soft_TE = jnp.take(self.soft[...], jnp.maximum(tokens_T - vocabulary, 0), axis=0, mode="clip")
        return jnp.where(tokens_T[:, None] < vocabulary, text_TE, soft_TE)

    def _row(self, tokens_T: jax.Array) -> jax.Array:
        table_VE: jax.Array | PackedMatrix = self.embedding[...]
        if isinstance(table_VE, PackedMatrix):
            return packed_rows(tokens_T, table_VE)
        if table_VE.dtype != jnp.bfloat16:
            return jnp.take(table_VE, tokens_T, axis=0).astype(jnp.float32)
        # gathered as bits: XLA on CPU would widen the whole table to float32 first
        bits_TE = jnp.take(lax.bitcast_convert_type(table_VE, jnp.uint16), tokens_T, axis=0)
        return lax.bitcast_convert_type(bits_TE, jnp.bfloat16).astype(jnp.float32)

    def unembed(self, x_NE: jax.Array) -> jax.Array:
        """Next-token logits of residual rows, float32 [N, V]."""
        logits_NV = self._scores(x_NE)[:, : self.config.vocab_size]  # a split table may have rows for no token
        cap = self.config.logit_cap
        return logits_NV if cap is None else cap * jnp.tanh(logits_NV / cap)

    def _scores(self, x_NE: jax.Array) -> jax.Array:
        table_VE: jax.Array | PackedMatrix = (self.embedding if self.head is None else self.head)[...]
        if isinstance(table_VE, PackedMatrix):
            return packed_product(x_NE, table_VE, x_NE.shape[1], (self.norm[...], self.config.norm_eps))
        return dense(self._normed(x_NE), table_VE)

    def _normed(self, x_NE: jax.Array) -> jax.Array:
        return rms_norm(x_NE, self.norm[...], self.config.norm_eps)


INPUTS: Mapping[str, int] = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}
"""The matrices of a layer, and how many of each one's last axes are inputs."""


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Outputs and inputs of a matrix by its name among `Decoder.weights`."""
    axes = INPUTS.get(name.split(".")[-1], 1)
    return int(np.prod(shape[:-axes])), int(np.prod(shape[-axes:]))


def turning_order(head_dim: int, rotary_dim: int | None, neighbours: bool = False) -> NDArray[np.intp]:
    """Where our components of a head are in a checkpoint's, [D], if RoPE turns but the first there (None: all).

    A checkpoint turns i with i + rotary_dim / 2, or neighbours. Ours are turned with i + D / 2, those that are not
    turned by an angle of 0. Scores are the same, as queries and keys have the same order.
    """
    rotary_dim = rotary_dim or head_dim
    turned, still = np.arange(rotary_dim), np.arange(rotary_dim, head_dim)
    turned = turned.reshape(-1, 2).T.reshape(-1) if neighbours else turned
    return np.concatenate([half for pair in zip(np.split(turned, 2), np.split(still, 2), strict=True) for half in pair])


def own_arrays(
    config: ModelConfig, tensors: Mapping[str, NDArray[np.generic]]
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """The arrays of a decoder by name, from tensors under Hugging Face names, which are read one layer at a time."""
    yield "embedding", tensors["model.embed_tokens.weight"]
    for i in range(config.num_layers):
        for name, value in sorted(_fused(config, tensors, f"model.layers.{i}.").items()):
            yield f"layers.{i}.{name}", value
    yield "norm", tensors["model.norm.weight"]
    if not config.tie_embeddings:
        yield "head", tensors["lm_head.weight"]


def per_kv_head(config: ModelConfig, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows of query, key and value projections [H D, ...], [K D, ...], [K D, ...] as `Layer.qkv` has them."""
    k, g, d = config.num_kv_heads, config.num_groups, config.head_dim
    order_D = turning_order(d, config.rotary_dim, config.neighbours)
    q, key, value = (p.reshape(k, n, d, *p.shape[1:]) for p, n in zip(parts, (g, 1, 1), strict=True))
    return np.concatenate([q[:, :, order_D], key[:, :, order_D], value], axis=1)


def _fused(
    config: ModelConfig, tensors: Mapping[str, NDArray[np.generic]], prefix: str
) -> dict[str, NDArray[np.generic]]:
    """One layer's weights in our layout, from Hugging Face's [out, in] matrices."""
    e, d = config.hidden_size, config.head_dim
    k, g = config.num_kv_heads, config.num_groups
    order_D = turning_order(d, config.rotary_dim, config.neighbours)

    def fused_heads(kind: str) -> NDArray[np.generic]:
        return per_kv_head(config, [tensors[f"{prefix}self_attn.{p}_proj.{kind}"] for p in "qkv"])

    mlp = prefix + ("mlp.experts." if config.num_experts else "mlp.")
    before = "pre_feedforward" if config.post_norms else "post_attention"
    fused = {
        "attention_norm": tensors[prefix + "input_layernorm.weight"],
        "qkv": fused_heads("weight"),
        "out": tensors[prefix + "self_attn.o_proj.weight"].reshape(e, k, g, d),
        "mlp_norm": tensors[f"{prefix}{before}_layernorm.weight"],
        "gate_up": np.stack([tensors[f"{mlp}{n}_proj.weight"] for n in ("gate", "up")], axis=-3),
        "down": tensors[mlp + "down_proj.weight"],
    }
    if config.num_experts:
        fused["router"] = tensors[prefix + "mlp.gate.weight"]
    if config.post_norms:
        fused["attention_post_norm"] = tensors[prefix + "post_attention_layernorm.weight"]
        fused["mlp_post_norm"] = tensors[prefix + "post_feedforward_layernorm.weight"]
    if config.qkv_bias:
        fused["qkv_bias"] = fused_heads("bias")
    if config.qk_norm:
        fused["q_norm"] = tensors[prefix + "self_attn.q_norm.weight"][order_D]
        fused["k_norm"] = tensors[prefix + "self_attn.k_norm.weight"][order_D]
    return fused
