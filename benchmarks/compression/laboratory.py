"""A model over plain arrays: one prompt's KV and queries, and next-token logits over any part of that KV.

No pages and no engine: what is dropped is masked. A layer is a program, which all layers run one after the other (XLA
on CPU copies the weights of layers that are stacked and scanned). Prompts are padded to one length and continuations to
another: two programs in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from numpy.typing import NDArray

from ragjax.compress.choose import Quota, choose, quota
from ragjax.compress.scorers import SCORERS, Evidence
from ragjax.core.compression import Compression
from ragjax.models.decoder import Decoder, rotation_table

BLOCK = 128  # rows of a prompt whose attention is computed at a time
STEP = 64  # room for kept tokens is a multiple of it, so that few programs are compiled


@dataclass(frozen=True)
class Prefill:
    """A prompt of `count` tokens, padded to N: float32 arrays by layer, and the last token's logits [V].

    mass_LNK: attention that each key received from all rows, the mean over the heads of a KV head.
    """

    count: int
    k_LNKD: jax.Array
    v_LNKD: jax.Array
    q_LNHD: jax.Array
    mass_LNK: jax.Array
    logits_V: jax.Array


class Kept(NamedTuple):
    """What a compression leaves: bool [L, K, N]; tokens of each layer; mean cosine of the kept keys."""

    kept_LKN: jax.Array
    tokens: int
    redundancy: float


class Laboratory:
    """Prompts of at most `context` tokens, continuations of at most `tail`."""

    def __init__(self, decoder: Decoder, context: int, tail: int):
        self.context = -(-context // BLOCK) * BLOCK
        self.tail = tail
        self._decoder = decoder
        split = [nnx.split(layer) for layer in decoder.layers]
        self._graph = split[0][0]
        self._layers = [state for _, state in split]
        rotation = rotation_table(decoder.config, self.context + tail)
        self._cos, self._sin = rotation.at(jnp.arange(self.context + tail))

    def prefill(self, tokens: NDArray[np.int32]) -> Prefill:
        count = len(tokens)
        padded = jnp.asarray(np.pad(tokens, (0, self.context - count)))
        places = slice(0, self.context)
        x_NE, found = self._decoder.embed(padded), []
        for layer in self._layers:
            x_NE, *of_layer = _prefill(self._graph, layer, x_NE, self._cos[places], self._sin[places], count)
            found.append(of_layer)
        k_LNKD, v_LNKD, q_LNHD, mass_LNK = (jnp.stack(arrays) for arrays in zip(*found, strict=True))
        logits_V = self._decoder.unembed(x_NE[count - 1 : count])[0]
        return Prefill(count, k_LNKD, v_LNKD, q_LNHD, mass_LNK, logits_V)

    def keep(self, prefill: Prefill, compression: Compression) -> Kept:
        window = slice(prefill.count - compression.window, prefill.count)
        layers = len(prefill.k_LNKD)
        evidence = Evidence(
            prefill.k_LNKD, prefill.v_LNKD, jnp.full(layers, prefill.count, jnp.int32), prefill.q_LNHD[:, window],
            prefill.mass_LNK,
        )  # fmt: skip
        s_LNK = _score(evidence, compression.method)
        numbers = quota(compression, SCORERS[compression.method], prefill.count)
        room = min(self.context, -(-int(numbers.kept) // STEP) * STEP)
        # the choice does not look at method, window and question: one program serves all
        same = Compression("snapkv", room, compression.program.graph, compression.heads)
        index_LKB = _choose(s_LNK, evidence, numbers, same)
        kept_LKN = _mask(index_LKB, prefill.k_LNKD)
        return Kept(kept_LKN, int(numbers.kept), float(_redundancy(kept_LKN, prefill.k_LNKD)))

    def everything(self, prefill: Prefill) -> jax.Array:
        """All tokens of the prompt, bool [L, K, N]."""
        layers, tokens, heads, _ = prefill.k_LNKD.shape
        return jnp.broadcast_to(jnp.arange(tokens) < prefill.count, (layers, heads, tokens))

    def logits(self, prefill: Prefill, kept_LKN: jax.Array, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after each token that follows the prompt, float32 [T, V]: they see what is kept and each other."""
        padded = jnp.asarray(np.pad(np.asarray(tokens, np.int32), (0, self.tail - len(tokens))))
        places = slice(prefill.count, prefill.count + self.tail)
        x_TE = self._decoder.embed(padded)
        for layer, *kv in zip(self._layers, prefill.k_LNKD, prefill.v_LNKD, kept_LKN, strict=True):
            x_TE = _continue(self._graph, layer, x_TE, self._cos[places], self._sin[places], *kv)
        return np.asarray(self._decoder.unembed(x_TE))[: len(tokens)]

    def answer(
        self, prefill: Prefill, kept_LKN: jax.Array, ends: frozenset[int], known: Sequence[int] = ()
    ) -> list[int]:
        """What greedy decoding over what is kept says: `tail` tokens, or up to an end, which is left out.

        known: its first tokens, if they are known.
        """
        said = list(known)
        while len(said) < self.tail:
            logits_V = self.logits(prefill, kept_LKN, said)[-1] if said else prefill.logits_V
            following = int(logits_V.argmax())
            if following in ends:
                break
            said.append(following)
        return said


@partial(jax.jit, static_argnums=0)
def _prefill(
    graph: Any, state: Any, x_NE: jax.Array, cos_NR: jax.Array, sin_NR: jax.Array, count: jax.Array
) -> tuple[jax.Array, ...]:
    """A layer: residual rows behind it, keys, values and queries, and what each key received."""
    index_N = jnp.arange(len(x_NE))
    layer = nnx.merge(graph, state)
    q_NHD, k_NKD, v_NKD = layer.project(x_NE, cos_NR, sin_NR)
    heads = k_NKD.shape[1]

    def block(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q_BHD, index_B = rows
        prob_KGBN, out_BHD = _attention(q_BHD, k_NKD, v_NKD, (index_N <= index_B[:, None])[None])
        return out_BHD, jnp.where((index_B < count)[:, None], prob_KGBN, 0.0).sum(2).mean(1)

    blocks = (q_NHD.reshape(-1, BLOCK, *q_NHD.shape[1:]), index_N.reshape(-1, BLOCK))
    out, mass = lax.map(block, blocks)
    x_NE = layer.finish(x_NE, out.reshape(q_NHD.shape))
    return x_NE, k_NKD, v_NKD, q_NHD, mass.sum(0).reshape(heads, -1).T


@partial(jax.jit, static_argnums=0)
def _continue(
    graph: Any,
    state: Any,
    x_TE: jax.Array,
    cos_TR: jax.Array,
    sin_TR: jax.Array,
    k_NKD: jax.Array,
    v_NKD: jax.Array,
    kept_KN: jax.Array,
) -> jax.Array:
    rows, heads = len(x_TE), k_NKD.shape[1]
    layer = nnx.merge(graph, state)
    q_THD, k_TKD, v_TKD = layer.project(x_TE, cos_TR, sin_TR)
    own_KTT = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (heads, rows, rows))
    old_KTN = jnp.broadcast_to(kept_KN[:, None], (heads, rows, kept_KN.shape[1]))
    seen_KTS = jnp.concatenate([old_KTN, own_KTT], -1)
    _, out_THD = _attention(q_THD, jnp.concatenate([k_NKD, k_TKD]), jnp.concatenate([v_NKD, v_TKD]), seen_KTS)
    finished: jax.Array = layer.finish(x_TE, out_THD)
    return finished


def _attention(
    q_THD: jax.Array, k_SKD: jax.Array, v_SKD: jax.Array, seen_KTS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Probabilities [K, G, T, S], and what comes of them [T, H, D]; one product for each KV head."""
    rows, query_heads, width = q_THD.shape
    heads = k_SKD.shape[1]
    q_KGTD = q_THD.reshape(rows, heads, -1, width).transpose(1, 2, 0, 3) * width**-0.5
    k_KSD, v_KSD = k_SKD.swapaxes(0, 1), v_SKD.swapaxes(0, 1)
    logits_KMS = q_KGTD.reshape(heads, -1, width) @ k_KSD.swapaxes(1, 2)
    logits_KGTS = logits_KMS.reshape(*q_KGTD.shape[:3], -1)
    prob_KGTS = jax.nn.softmax(jnp.where(seen_KTS[:, None], logits_KGTS, -jnp.inf), axis=-1)
    out_KMD = prob_KGTS.reshape(logits_KMS.shape) @ v_KSD
    return prob_KGTS, out_KMD.reshape(q_KGTD.shape).transpose(2, 0, 1, 3).reshape(rows, query_heads, width)


@partial(jax.jit, static_argnames="method")
def _score(evidence: Evidence, method: str) -> jax.Array:
    s_LNK: jax.Array = lax.map(SCORERS[method].score, evidence)
    return s_LNK


@partial(jax.jit, static_argnames="compression")
def _choose(s_LNK: jax.Array, evidence: Evidence, numbers: Quota, compression: Compression) -> jax.Array:
    def of_layer(arrays: tuple[jax.Array, Evidence]) -> jax.Array:
        return choose(*arrays, numbers, compression)

    index_LKB: jax.Array = lax.map(of_layer, (s_LNK, evidence))
    return index_LKB


@jax.jit
def _mask(index_LKB: jax.Array, k_LNKD: jax.Array) -> jax.Array:
    layers, tokens, heads, _ = k_LNKD.shape
    index_LKB = jnp.broadcast_to(index_LKB, (layers, heads, index_LKB.shape[2]))

    def of_head(index_B: jax.Array) -> jax.Array:
        return jnp.zeros(tokens + 1, bool).at[index_B].set(True)[:tokens]

    kept_LKN: jax.Array = jax.vmap(jax.vmap(of_head))(jnp.where(index_LKB < 0, tokens, index_LKB))
    return kept_LKN


@jax.jit
def _redundancy(kept_LKN: jax.Array, k_LNKD: jax.Array) -> jax.Array:
    """Mean cosine of pairs of kept keys, over KV heads and layers: |sum of unit keys|^2 holds all pairs."""
    unit = k_LNKD / jnp.maximum(jnp.linalg.norm(k_LNKD, axis=-1, keepdims=True), 1e-6)
    sum_LKD = jnp.einsum("lkn,lnkd->lkd", kept_LKN.astype(jnp.float32), unit)
    number_LK = kept_LKN.sum(-1).astype(jnp.float32)
    return ((jnp.square(sum_LKD).sum(-1) - number_LK) / jnp.maximum(number_LK * (number_LK - 1), 1.0)).mean()
