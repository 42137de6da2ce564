"""`train_attention`: attention for training, differentiable, over packed samples under visibility intervals.

The rule is that of serving (`visibility`), so what a model learns under it is what `paged_interval_attention`
later computes. Forward keeps out and LSE alone; backward computes the probabilities again, tile by tile:
FlashAttention-2 (arXiv 2307.08691), with FlashMask's tiles (arXiv 2410.01359). Memory is O(tokens).
`reference.py` is the definition, `xla.py` the form for CPU and the fallback, `triton.py` the Pallas kernels for GPUs.

It is made for `jax.grad`, `jax.checkpoint` and `lax.scan` over layers; batches are packed, not mapped. There is no
forward mode and no second derivative.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ragjax.kernels.device import Device
from train.attention import reference, triton, xla
from train.attention.mask import Mask

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """An implementation.

    forward: `(q_THD, k_TKD, v_TKD, mask, scale)` to `(out_THD, lse_TH)`.
    backward: `(q_THD, k_TKD, v_TKD, mask, scale, dout_THD, lse_TH, delta_TH)` to `(dq_THD, dk_TKD, dv_TKD)`. With
        P = exp(scale q·k - lse) where visible: dv = Pᵀdout, dS = P (dout·v - delta), dq = scale dS k,
        dk = scale dSᵀ q, keys summed over their group of query heads. A row that sees nothing has lse +inf, so that
        its P is 0. None where JAX differentiates `forward`.
    refusal: `(q_THD, mask, device)` to why it cannot serve the call, or None.

    Padding is zero in all arrays they are given.
    """

    forward: Callable[[jax.Array, jax.Array, jax.Array, Mask, float], tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    refusal: Callable[[jax.Array, Mask, Device], str | None] = lambda *_: None


BACKENDS: Mapping[str, Backend] = {
    "reference": Backend(reference.attend),
    "xla": Backend(xla.forward, xla.backward),
    "triton": Backend(triton.forward, triton.backward, triton.refusal),
}


def choose(q_THD: jax.Array, mask: Mask, device: Device) -> str:
    """The name of the best backend for calls of these shapes on this device."""
    reason = BACKENDS["triton"].refusal(q_THD, mask, device)
    if reason is None:
        return "triton"
    if device.platform == "gpu":
        log.warning("attention for training falls back to XLA: %s", reason)
    return "xla"


def train_attention(
    q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, mask: Mask, *, scale: float, backend: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention of all tokens to those that are visible to them, differentiable in q, k and v.

    q_THD: queries, rotated at their positions; float32, bfloat16 or float16, and products accumulate in float32. H is a
    multiple of K, heads ordered by KV head (GQA). k_TKD, v_TKD: rotated keys and values of the same tokens, in the
    dtype of q. Padding may hold anything. scale: of the softmax, 1/sqrt(D) as a rule. backend: None for the one that
    `choose` finds for the default device.

    Returns:
        out [T, H, D] in the dtype of q, and the natural log of the softmax denominator, float32 [T, H]; both may be
        differentiated. A row that sees no token, as padding, gets zeros and -inf, and has no gradient.
    """
    backend = backend or choose(q_THD, mask, Device.of(jax.devices()[0]))
    return attend(BACKENDS[backend], scale, q_THD, k_TKD, v_TKD, mask)


def attend(
    backend: Backend, scale: float, q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, mask: Mask
) -> tuple[jax.Array, jax.Array]:
    """`train_attention` by a backend that need not be listed; nothing is checked."""
    if backend.backward is None:
        return backend.forward(q_THD, k_TKD, v_TKD, mask, scale)
    result: tuple[jax.Array, jax.Array] = _attend(backend, scale, q_THD, k_TKD, v_TKD, mask)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    backend: Backend, scale: float, q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, mask: Mask
) -> tuple[jax.Array, jax.Array]:
    return backend.forward(*_without_padding(q_THD, k_TKD, v_TKD, mask), mask, scale)


def _forward(
    backend: Backend, scale: float, q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, mask: Mask
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array, Mask, jax.Array, jax.Array]]:
    out_THD, lse_TH = backend.forward(*_without_padding(q_THD, k_TKD, v_TKD, mask), mask, scale)
    return (out_THD, lse_TH), (q_THD, k_TKD, v_TKD, mask, out_THD, lse_TH)


def _backward(
    backend: Backend,
    scale: float,
    saved: tuple[jax.Array, jax.Array, jax.Array, Mask, jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q_THD, k_TKD, v_TKD, mask, out_THD, lse_TH = saved
    dout_THD, dlse_TH = cotangents
    assert backend.backward is not None
    dead_TH = jnp.isneginf(lse_TH)
    dout_THD = jnp.where(dead_TH[..., None], jnp.zeros((), dout_THD.dtype), dout_THD)
    product_TH = (dout_THD.astype(jnp.float32) * out_THD.astype(jnp.float32)).sum(-1)
    # the LSE's own gradient is the probability, so it joins the term that all keys of a row share
    delta_TH = jnp.where(dead_TH, 0.0, product_TH - dlse_TH)
    lse_TH = jnp.where(dead_TH, jnp.inf, lse_TH)
    clean = _without_padding(q_THD, k_TKD, v_TKD, mask)
    return *backend.backward(*clean, mask, scale, dout_THD, lse_TH, delta_TH), None


_attend.defvjp(_forward, _backward)


def _without_padding(
    q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, mask: Mask
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zeros for padding, which may hold NaN: hidden though it is, 0 * NaN is NaN."""
    live_T11 = (mask.tokens.request_T >= 0)[:, None, None]

    def keep(x: jax.Array) -> jax.Array:
        return jnp.where(live_T11, x, jnp.zeros((), x.dtype))

    return keep(q_THD), keep(k_TKD), keep(v_TKD)
