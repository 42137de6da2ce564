"""The serving decoder's layers run over packed samples, with gradients: forward, loss, and how weights lie on a mesh.

Weights are a plain tree, layers stacked: {"embedding", "norm", "head" if it is untied, "layers": {name: [L, ...]}}.
Parallelism is explicit (`train.mesh`): a weight that is sharded over `fsdp` is gathered where a layer uses it, and the
gradient of a gather is the sum and scatter of fully sharded data parallelism; over `model` each device uses its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ragjax.kernels.rope import Rotation
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import INPUTS, Decoder, Layer, rms_norm
from ragjax.models.trained import Pair
from train.attention.mask import Mask, Tokens
from train.attention.op import train_attention
from train.batch import Batch
from train.lora import Lora
from train.mesh import ROWS, spec_of
from train.part import AXIS, PartDecoder, PartLayer, enter, take_over
from train.soft import Soft

Tree = dict[str, Any]
"""Weights, adapters, or what is made of them: arrays in nested dicts."""

Remat = Literal["none", "dots", "layers"]
"""What backward recomputes: nothing, all but the products with weights, or whole layers."""


def stacked(decoder: Decoder) -> Tree:
    """A decoder's weights as a tree, in the dtypes they have."""
    ends = {name: weight[...] for name, weight in _ends(decoder).items()}
    names = nnx.to_pure_dict(nnx.state(decoder.layers[0]))
    return {**ends, "layers": {n: jnp.stack([getattr(layer, n)[...] for layer in decoder.layers]) for n in names}}


def _ends(decoder: Decoder) -> Tree:
    ends = {"embedding": decoder.embedding, "norm": decoder.norm}
    return ends if decoder.head is None else {**ends, "head": decoder.head}


def axes_of(config: ModelConfig) -> Tree:
    """Logical names of each weight's axes, a tuple each, "layers" first where they are stacked."""
    return _each_weight(config, lambda weight: weight.axes, "layers")


def shapes_of(config: ModelConfig) -> Tree:
    return _each_weight(config, lambda weight: tuple(weight.shape), config.num_layers)


def _each_weight(config: ModelConfig, told: Callable[[Any], tuple[Any, ...]], layers: str | int) -> Tree:
    """What is told of each weight, a tuple; `layers` first where they are stacked."""
    decoder = Decoder.abstract(config)
    layer = decoder.layers[0]
    of_layers = {name: (layers, *told(getattr(layer, name))) for name in nnx.to_pure_dict(nnx.state(layer))}
    return {**{name: told(weight) for name, weight in _ends(decoder).items()}, "layers": of_layers}


@dataclass(frozen=True)
class Model:
    """The computation of the loss from weights.

    dtype: of products with them. lora, soft: adapters, or embeddings of soft tokens, if these are what is trained.
    distil: whether targets are what the same weights say without adapters as the teacher, in place of tokens.
    """

    config: ModelConfig
    mesh: Mesh
    dtype: jnp.dtype
    lora: Lora | None = None
    remat: Remat = "layers"
    distil: bool = False
    soft: Soft | None = None

    @property
    def whole(self) -> bool:
        """True if all weights are trained."""
        return self.lora is None and self.soft is None

    def specs(self) -> tuple[Tree, Tree]:
        """Partitions of trained and frozen weights on the mesh."""
        axes = axes_of(self.config)
        shapes = shapes_of(self.config)
        weights = jax.tree.map(self._spec, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))
        if self.soft is not None:
            return {"soft": P()}, weights
        if self.lora is None:
            return weights, {}
        adapters = {}
        for name in self.lora.matrices:
            whole = dict(zip(axes["layers"][name], shapes["layers"][name], strict=True))
            pairs = self.lora.axes(name, axes["layers"][name][1:])
            adapters[name] = {
                part: self._spec(("layers", *of), (0, *(whole.get(axis, self.lora.rank) for axis in of)))
                for part, of in pairs.items()
            }
        return adapters, weights

    def _spec(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> P:
        return spec_of(axes, shape, self.mesh)

    def place(self, tree: Tree, specs: Tree) -> Tree:
        placed: Tree = jax.tree.map(lambda spec, x: jax.device_put(x, NamedSharding(self.mesh, spec)), specs, tree)
        return placed

    @property
    def devices(self) -> int:
        """Rows that are computed at once."""
        return int(self.mesh.shape["data"] * self.mesh.shape["fsdp"])

    def losses(self, trained: Tree, frozen: Tree, rotation: Rotation, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Negative log-probability of each target, and whether it is the likeliest token: float32 [N], 0 for padding.

        With a teacher: KL(teacher || model) in nats, and whether the likeliest token is the teacher's. On one device's
        row and shard of the weights, within `jax.shard_map`.
        """
        weights = trained if self.whole else frozen if self.soft is None else {**frozen, **trained}
        adapters = {} if self.lora is None else trained
        logits_NV = self._logits(weights, adapters, rotation, batch)
        if self.distil:
            taught_NV = lax.stop_gradient(self._logits(weights, {}, rotation, batch.taught()))
            return _divergence(taught_NV, logits_NV, batch.target_N >= 0)
        target_N1 = jnp.maximum(batch.target_N, 0)[:, None]
        chosen_N = jnp.take_along_axis(logits_NV, target_N1, axis=1)[:, 0]
        live_N = batch.target_N >= 0
        nll_N = jnp.where(live_N, jax.nn.logsumexp(logits_NV, axis=1) - chosen_N, 0.0)
        return nll_N, (live_N & (logits_NV.argmax(1) == target_N1[:, 0])).astype(jnp.float32)

    def _logits(self, weights: Tree, adapters: Tree, rotation: Rotation, batch: Batch) -> jax.Array:
        """Next-token logits of the rows that have a target, float32 [N, V]."""
        mask = Mask.build(Tokens(batch.index_T, batch.request_T, batch.hide_from_T, batch.hide_until_T))
        cos_TR, sin_TR = rotation.at(batch.position_T)
        trained, frozen = self.specs()
        specs = trained if self.whole else {**frozen, **trained} if self.soft is not None else frozen
        ends = {name: _gathered(x, specs[name]) for name, x in weights.items() if name != "layers"}
        config = self.config if self.soft is None else replace(self.config, soft_tokens=self.soft.tokens)
        parts = AXIS in specs["embedding"]
        x_TE = _decoder(config, ends, parts).embed(batch.token_T)

        def body(x_TE: jax.Array, layer: tuple[Tree, Tree]) -> tuple[jax.Array, None]:
            block = self._block(*layer, specs["layers"], trained)
            q_THD, k_TKD, v_TKD = (x.astype(self._attention) for x in block.project(x_TE, cos_TR, sin_TR))
            out_THD, _ = train_attention(q_THD, k_TKD, v_TKD, mask, scale=self.config.attention_scale)
            return block.finish(x_TE, out_THD.astype(jnp.float32)), None

        x_TE, _ = lax.scan(_rematerialised(body, self.remat), x_TE, (weights["layers"], adapters))
        matrices = {name: x if name == "norm" else x.astype(self.dtype) for name, x in ends.items() if name != "soft"}
        return _decoder(self.config, matrices, parts).unembed(x_TE[batch.row_N])

    @property
    def _attention(self) -> jnp.dtype:
        """Dtype of queries, keys and values. On CPUs attention is fastest in float32."""
        return jnp.dtype(jnp.float32) if self.mesh.devices.flat[0].platform == "cpu" else self.dtype

    def _block(self, weights: Tree, adapters: Tree, of_weights: Tree, of_adapters: Tree) -> Layer:
        """One layer as its products take it: matrices cast, everything gathered, adapters beside their matrices."""
        cast = {name: x.astype(self.dtype) if name in INPUTS else x for name, x in weights.items()}
        layer = _layer(self.config, _whole(cast, of_weights))
        parts = self.mesh.shape[AXIS] > 1
        if self.lora is not None:
            pairs = {name: _whole(pair, of_adapters[name]) for name, pair in adapters.items()}
            if parts:
                pairs = {name: _entered(pair, of_adapters[name]) for name, pair in pairs.items()}
            layer = Adapted(layer, self.lora, pairs)
        return PartLayer(layer) if parts else layer


def _divergence(taught_NV: jax.Array, logits_NV: jax.Array, live_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """KL(teacher || model) of each row in nats, and whether both have the same likeliest token: float32 [N]."""
    teacher_NV = jax.nn.log_softmax(taught_NV)
    kl_N = (jnp.exp(teacher_NV) * (teacher_NV - jax.nn.log_softmax(logits_NV))).sum(1)
    same_N = live_N & (taught_NV.argmax(1) == logits_NV.argmax(1))
    return jnp.where(live_N, kl_N, 0.0), same_N.astype(jnp.float32)


class Adapted(Layer):
    """The serving layer, with what adapters add to its products."""

    def __init__(self, layer: Layer, lora: Lora, pairs: Mapping[str, Pair]):
        take_over(self, layer)
        self._lora, self._pairs = lora, nnx.data(dict(pairs))

    def multiply(
        self, name: str, x_TI: jax.Array, norm_I: jax.Array | None = None, live: jax.Array | None = None
    ) -> jax.Array:
        """Add the adapter's part to the layer's product."""
        x_TI = x_TI if norm_I is None else rms_norm(x_TI, norm_I, self.eps)
        product = super().multiply(name, x_TI, live=live)
        return product + self._lora.change(x_TI, self._pairs[name]) if name in self._pairs else product


def _gathered(x: jax.Array, spec: P) -> jax.Array:
    """A whole weight from its shards."""
    axis = next((i for i, name in enumerate(spec) if name == "fsdp"), None)
    return x if axis is None else lax.all_gather(x, "fsdp", axis=axis, tiled=True)


def _whole(tree: Tree, specs: Tree) -> Tree:
    """One layer's weights from their shards; specs are those of all layers, stacked."""
    return {name: _gathered(x, P(*specs[name][1:])) for name, x in tree.items()}


def _entered(pair: Pair, specs: Tree) -> Pair:
    """An adapter beside a matrix of which each device has a part: what is whole of it enters that part."""
    return {name: x if AXIS in specs[name] else enter(x) for name, x in pair.items()}


def _rematerialised(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return body
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    wrapped: Callable[..., Any] = jax.checkpoint(body, policy=policy, prevent_cse=False)
    return wrapped


def _layer(config: ModelConfig, weights: Tree) -> Layer:
    """The serving layer with these weights."""
    layer: Layer = _filled(Decoder.abstract(config).layers[0], weights)
    return layer


def _decoder(config: ModelConfig, ends: Tree, parts: bool) -> Decoder:
    """The serving decoder without layers, with these weights. parts: they are some tokens' of the vocabulary."""
    decoder = Decoder.abstract(config)
    decoder.layers = nnx.List([])
    filled: Decoder = _filled(decoder, ends)
    return PartDecoder(filled) if parts else filled


def _filled(module: Any, weights: Mapping[str, jax.Array]) -> Any:
    graph, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, dict(weights))
    return nnx.merge(graph, state)


# ----------------------------------------------------------------------------------------- programs


def gradient_program(model: Model) -> Callable[..., tuple[Tree, jax.Array]]:
    """`(trained, frozen, rotation, batch, sums) -> sums`: a microbatch's gradient and losses added to those before.

    sums: the gradient of the summed negative log-probability, and float32 [2]: that, and how many targets were the
    likeliest token. It is overwritten.
    """
    trained_specs, frozen_specs = model.specs()

    def local(trained: Tree, frozen: Tree, rotation: Rotation, batch: Batch) -> tuple[Tree, jax.Array]:
        def loss(trained: Tree) -> tuple[jax.Array, jax.Array]:
            nll_N, hit_N = model.losses(trained, frozen, rotation, batch)
            return nll_N.sum(), jnp.stack([nll_N.sum(), hit_N.sum()])

        gradient, counts = jax.grad(loss, has_aux=True)(trained)
        summed = jax.tree.map(lambda spec, g: lax.psum(g, _missing(spec)), trained_specs, gradient)
        return summed, lax.psum(counts, ROWS)

    sharded = jax.shard_map(
        local,
        mesh=model.mesh,
        in_specs=(trained_specs, frozen_specs, P(), P(ROWS)),
        out_specs=(trained_specs, P()),
        check_vma=False,
    )

    @partial(jax.jit, donate_argnums=4)
    def program(trained: Tree, frozen: Tree, rotation: Rotation, batch: Batch, sums: Any) -> Any:
        return jax.tree.map(jnp.add, sums, sharded(trained, frozen, rotation, batch))

    return program


def _missing(spec: P) -> tuple[str, ...]:
    """Axes over which a gradient is still to be summed: a gather has summed over `fsdp`, and `enter` over `model`."""
    return ("data",) if "fsdp" in spec else ROWS


def loss_program(model: Model) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`(trained, frozen, rotation, batch) -> losses`, as `Model.losses`, for all devices: [N] each."""
    rows = P(ROWS)
    sharded = jax.shard_map(
        model.losses, mesh=model.mesh, in_specs=(*model.specs(), P(), rows), out_specs=(rows, rows), check_vma=False
    )
    program: Callable[..., tuple[jax.Array, jax.Array]] = jax.jit(sharded)
    return program
