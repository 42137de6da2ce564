"""Scores, GraphKV and the choice of tokens as the papers write them: NumPy, float64, loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragjax.core import Compression, Kind, Prompt, Segment
from ragjax.models.decoder import Decoder, rotation_table

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


def kept_of(layer: Layer, compression: Compression) -> list[list[int]]:
    """Indexes that a layer keeps, by KV head."""
    size, n, window = compression.budget, len(layer.k), layer.q[-compression.window :]
    scores = {
        "snapkv": lambda: snapkv(layer.k, window, n),
        "knorm": lambda: knorm(layer.k, n),
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
            after = propagated(
                s, keys, tokens, number, neighbours=graph.neighbours, rounds=graph.rounds, order=graph.order
            )
        found.append(kept(after, s, n, size, recent))
    return found


def expected(
    decoder: Decoder, tokens: np.ndarray, compression: Compression | None, said: np.ndarray = SAID
) -> np.ndarray:
    """Logits that predict what is said behind a prompt, float32 [n, V], by dense attention over what is kept."""
    nothing = np.zeros((0, decoder.config.head_dim))
    x, layers = dense(decoder, decoder.embed(jnp.asarray(tokens)), 0, lambda i, h: [nothing, nothing])
    everything = [list(range(len(tokens)))] * decoder.config.num_kv_heads
    kept = [everything] * len(layers)
    if compression is not None:
        kept = [kept_of(layer, compression) for layer in layers]

    def seen(i: int, h: int) -> list[Any]:
        return [layers[i].k[kept[i][h], h], layers[i].v[kept[i][h], h]]

    rows, _ = dense(decoder, decoder.embed(jnp.asarray(said[:-1])), len(tokens), seen)
    return np.asarray(decoder.unembed(jnp.concatenate([x[-1:], rows])))


F = np.ndarray


def attention(k: F, q: F, count: int, scale: float | None = None, cap: float | None = None) -> F:
    """[H, W, N]: softmax of each window row over all keys up to its own."""
    rows, heads, width = q.shape
    group = heads // k.shape[1]
    out = np.zeros((heads, rows, len(k)))
    for h in range(heads):
        for w in range(rows):
            end = count - rows + w + 1
            logits = np.array([k[n, h // group].astype(float) @ q[w, h].astype(float) for n in range(end)])
            logits = logits * (1 / math.sqrt(width) if scale is None else scale)
            if cap is not None:
                logits = cap * np.tanh(logits / cap)
            p = np.exp(logits - logits.max())
            out[h, w, :end] = p / p.sum()
    return out


def pooled(s: F, size: int) -> F:
    """Along tokens, which is PyTorch's max_pool1d."""
    half = size // 2
    return np.array([s[max(0, n - half) : n + half + 1].max() for n in range(len(s))])


def grouped(per_head: F, kv_heads: int, total: int) -> F:
    """[H, n] to [total, K], zeros behind."""
    mean = per_head.reshape(kv_heads, -1, per_head.shape[-1]).mean(1)
    return np.pad(mean, ((0, 0), (0, total - mean.shape[1]))).T


def snapkv(k: F, q: F, count: int, scale: float | None = None, cap: float | None = None) -> F:
    before = attention(k, q, count, scale, cap)[:, :, : count - len(q)]
    per_head = np.array([pooled(head.mean(0), 7) for head in before])
    return grouped(per_head, k.shape[1], len(k))


def knorm(k: F, count: int) -> F:
    out = np.zeros(k.shape[:2])
    for n in range(count):
        out[n] = [1 / (math.sqrt(sum(float(x) ** 2 for x in head)) + 1e-6) for head in k[n]]
    return out


def cosine(a: F, b: F) -> float:
    a, b = a.astype(float).ravel(), b.astype(float).ravel()
    both = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / both) if both > 0 else 0.0


def ranked(s: F, tokens: list[int]) -> list[int]:
    """Highest first, the lower index among equals."""
    return sorted(tokens, key=lambda n: (-s[n], n))


def propagated(
    s: F, keys: F, tokens: list[int], number: int, *, neighbours: int = 32, rounds: int = 1, order: str = "ordered"
) -> F:
    """Eqs. 1 to 5, round by round; `tokens` take part."""
    out = s.astype(float).copy()
    rank = ranked(s, tokens)
    sources = rank[:number]
    for _ in range(rounds):
        factor = np.ones(len(s))
        for i in sources:
            edges = {j: cosine(keys[i], keys[j]) for j in tokens if j != i}
            for j in ranked_by(edges)[:neighbours]:
                e = min(1.0, max(0.0, edges[j]))
                if order == "ordered" and rank.index(j) < rank.index(i):
                    continue
                factor[j] *= 1 - e
        out *= factor
    return out


def ranked_by(edges: dict[int, float]) -> list[int]:
    return sorted(edges, key=lambda j: (-edges[j], j))


def kept(s: F, first: F, count: int, size: int, recent: int) -> list[int]:
    """The indexes, ascending."""
    last = list(range(max(0, count - recent), count))
    others = sorted(range(count - len(last)), key=lambda n: (-s[n], -first[n], n))
    return sorted(last + others[: max(0, size - len(last))])
