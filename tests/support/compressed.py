"""What an answer over a compressed prompt has to be: dense float64 attention over the tokens that each layer keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragjax.compress import budget
from ragjax.core import Compression, Kind, Prompt, Segment
from ragjax.models.decoder import Decoder, rotation_table
from tests.support import eviction

WINDOW = 8
SAID = np.array([65, 7, 201, 33, 90, 12], np.int32)


def distinct(tokens: int = 150) -> Prompt:
    """A prompt in which no token comes twice: equal ones have keys of equal norm, and rounding would choose."""
    return Prompt((Segment("all", Kind.QUERY, np.random.default_rng(0).permutation(256)[:tokens].astype(np.int32)),))


def setting(method: str, budget: int = 48, **more: Any) -> Compression:
    return Compression(method, budget, window=WINDOW, **more)


class Layer:
    """One layer's arrays of a prompt under full attention, and attention that each key received: float64."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mass: np.ndarray):
        self.q, self.k, self.v, self.mass = q, k, v, mass


def dense(decoder: Decoder, x: jax.Array, first: int, seen: Callable[[int, int], list[Any]]) -> tuple[Any, list[Any]]:
    """Residual rows behind all layers; `seen(layer, head)`: keys, values of a KV head before these rows."""
    rotation = rotation_table(decoder.config, decoder.config.context_length)
    cos, sin = rotation.at(jnp.arange(first, first + len(x)))
    found = []
    for i, layer in enumerate(decoder.layers):
        q, k, v = (np.asarray(part, np.float64) for part in layer.project(x, cos, sin))
        group = q.shape[1] // k.shape[1]
        out, mass = np.zeros_like(q), np.zeros(len(x))
        for h in range(q.shape[1]):
            keys, values = seen(i, h // group)
            for t in range(len(x)):
                mine = np.concatenate([keys, k[: t + 1, h // group]])
                logits = mine @ q[t, h] / np.sqrt(q.shape[2])
                prob = np.exp(logits - logits.max())
                prob /= prob.sum()
                out[t, h] = prob @ np.concatenate([values, v[: t + 1, h // group]])
                mass[: t + 1] += prob[len(keys) :] / q.shape[1]
        found.append(Layer(q, k, v, mass))
        x = layer.finish(x, jnp.asarray(out, jnp.float32))
    return x, found


def budgets(layers: list[Layer], compression: Compression) -> list[int]:
    """Tokens that each layer keeps."""
    given = len(layers), compression.budget, compression.window, len(layers[0].k)
    if compression.method == "pyramidkv":
        return budget.pyramid(*given, beta=20.0).tolist()
    if compression.method != "cake":
        return [compression.budget] * len(layers)
    preference = [eviction.cake(layer.k, layer.q[-compression.window :], given[3])[1] for layer in layers]
    return budget.proportional(np.array(preference, np.float32), *given[1:]).tolist()


def kept_of(layer: Layer, compression: Compression, size: int) -> list[list[int]]:
    """Indexes that a layer keeps which keeps so many, by KV head."""
    n, window = len(layer.k), layer.q[-compression.window :]
    scores = {
        "snapkv": lambda: eviction.snapkv(layer.k, window, n),
        "pyramidkv": lambda: eviction.snapkv(layer.k, window, n),
        "cake": lambda: eviction.cake(layer.k, window, n)[0],
        "knorm": lambda: eviction.knorm(layer.k, n),
        "keydiff": lambda: eviction.keydiff(layer.k, n),
        "streaming": lambda: eviction.streaming(n, n),
        "h2o": lambda: layer.mass[:, None],
    }[compression.method]()
    recent = max(compression.window, compression.budget // 2) if compression.method == "h2o" else compression.window
    heads = layer.k.shape[1]
    nodes = [slice(None)] * heads if compression.heads == "all" else [slice(h, h + 1) for h in range(heads)]
    found = []
    for h, node in enumerate(nodes):
        s = scores.mean(1) if compression.heads == "all" else np.broadcast_to(scores, (n, heads))[:, h]
        after, graph = s, compression.graph
        if graph is not None:
            keys = layer.k[:, node].reshape(n, -1)
            tokens = list(range(n - recent))
            number = int(np.ceil(graph.sources * size))
            after = eviction.propagated(
                s, keys, keys, tokens, number, neighbours=graph.neighbours, rounds=graph.rounds, order=graph.order
            )
        found.append(eviction.kept(after, s, n, size, recent))
    return found


def expected(decoder: Decoder, tokens: np.ndarray, compression: Compression | None) -> np.ndarray:
    """Logits that predict `SAID` behind a prompt, float32 [n, V], by dense attention over what is kept."""
    nothing = np.zeros((0, decoder.config.head_dim))
    x, layers = dense(decoder, decoder.embed(jnp.asarray(tokens)), 0, lambda i, h: [nothing, nothing])
    everything = [list(range(len(tokens)))] * decoder.config.num_kv_heads
    kept = [everything] * len(layers)
    if compression is not None:
        sizes = budgets(layers, compression)
        kept = [kept_of(layer, compression, size) for layer, size in zip(layers, sizes, strict=True)]

    def seen(i: int, h: int) -> list[Any]:
        return [layers[i].k[kept[i][h], h], layers[i].v[kept[i][h], h]]

    said, _ = dense(decoder, decoder.embed(jnp.asarray(SAID[:-1])), len(tokens), seen)
    return np.asarray(decoder.unembed(jnp.concatenate([x[-1:], said])))
