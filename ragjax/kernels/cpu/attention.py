"""`paged_interval_attention` for CPUs: one loop over keys in the order of their token index, called through XLA's FFI.

Source: online softmax as in FlashAttention (arXiv 2205.14135). A row's result has the same bits whatever other rows,
pages, entries and threads there are (`attention_tile`). Products take the pool's dtype, bfloat16 or float32, and sum in
float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ragjax.kernels.cpu.attention_tile import ARGUMENTS, COUNT, AttentionForm, AttentionTile, K
from ragjax.kernels.cpu.code import Code, Value
from ragjax.kernels.cpu.foreign import CallFrame, Kernel, KernelLibrary, KernelPhase, Machine
from ragjax.kernels.cpu.numbers import LOG2E
from ragjax.kernels.cpu.score_tile import ScoreTile, add_parts, sums
from ragjax.kernels.view import View


def form_of(dim: int, dtype: DTypeLike, capped: bool, machine: Machine) -> AttentionForm:
    """dim: of a head. dtype: of the pool. capped: logits are."""
    bits, wide = jnp.dtype(dtype) != jnp.float32, machine.has("avx512f")
    tiled = bits and dim % 32 == 0 and machine.has("amx-bf16", "avx512bf16", "avx512f")
    fused = machine.has("fma") or machine.has("neon")
    return AttentionForm(dim, bits, capped, tiled, 16 if wide else 8, fused)


def unserved(dim: int, dtype: DTypeLike) -> str | None:
    """The reason why the kernel cannot serve heads of this dimension in a pool of this dtype, or None."""
    if dim % 16 or dim > 256:
        return f"head dimension {dim} is not a multiple of 16 up to 256"
    if jnp.dtype(dtype) == jnp.float16:
        return "the pool is float16"
    return None


def register_attention(dim: int, dtype: DTypeLike, capped: bool, folder: Path | None = None) -> str:
    """Compile the kernel for such heads, once a process, and register it with JAX; returns its name.

    folder: where it is kept (None: nowhere).
    """
    machine = Machine.here()
    form = form_of(dim, dtype, capped, machine)
    _registered(_WantedAttention(form, machine, folder))
    return form.name("attend", machine)


def attend(q_THD: jax.Array, view: View, machine: Machine | None = None) -> tuple[jax.Array, jax.Array]:
    """See `op.paged_interval_attention`. machine: one whose code this one can run, for tests."""
    t, heads, dim = q_THD.shape
    machine = machine or Machine.here()
    form = form_of(dim, view.pages.k_LPKCD.dtype, view.cap is not None, machine)
    _registered(_WantedAttention(form, machine))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((t, heads, dim), (t, heads))]
    out_THD, lse_TH = jax.ffi.ffi_call(form.name("attend", machine), shapes)(*_operands(q_THD, view))
    return out_THD.astype(q_THD.dtype), lse_TH


def key_scores(q_THD: jax.Array, lse_TH: jax.Array, view: View, *, valued: bool) -> tuple[jax.Array, ...]:
    """See `reductions.op.key_scores`; without `valued` the plain score alone. Float32 [S, C] each."""
    dim, shape = q_THD.shape[2], view.entries.index_SC.shape
    machine = Machine.here()
    form = form_of(dim, view.pages.k_LPKCD.dtype, view.cap is not None, machine)
    _registered(_WantedAttention(form, machine))
    tiles = view.blocks.count_N.shape[0] * view.pages.k_LPKCD.shape[2]
    parts, out = (jax.ShapeDtypeStruct((*more, 2, *shape), jnp.float32) for more in ((tiles,), ()))
    call = jax.ffi.ffi_call(_of_scores(form).name("score", machine), (parts, out))
    _, found_2SC = call(*_operands(q_THD, view), lse_TH)
    return tuple(found_2SC[: 1 + valued])


def _operands(q_THD: jax.Array, view: View) -> tuple[jax.Array, ...]:
    """The buffers of a call, in the order of their numbers."""
    entries = view.entries
    return (
        q_THD.astype(jnp.float32),
        view.pages.k_LPKCD,
        view.pages.v_LPKCD,
        jnp.asarray(view.layer, jnp.int32).reshape(1),
        entries.page_S,
        entries.offset_S,
        entries.index_SC,
        entries.hide_from_SC,
        entries.hide_until_SC,
        view.rows.index_T,
        view.rotation.cos_NR,
        view.rotation.sin_NR,
        view.blocks.entry_NS,
        view.blocks.count_N,
        jnp.asarray([view.scale * LOG2E, (view.cap or 0.0) * LOG2E], jnp.float32),
    )


@dataclass(frozen=True)
class _WantedAttention:
    form: AttentionForm
    machine: Machine
    folder: Path | None = field(default=None, compare=False)  # a kernel is registered once, wherever it is kept


@cache
def _registered(wanted: _WantedAttention) -> KernelLibrary:
    form, machine = wanted.form, wanted.machine
    name, scores = form.name("attend", machine), _of_scores(form)

    def kernels() -> list[Kernel]:
        attend = KernelPhase(_tiles, lambda *x: AttentionTile(form, *x).write())
        score = KernelPhase(_tiles, lambda *x: ScoreTile(scores, *x).write())
        add = KernelPhase(sums, add_parts)
        of_scores = Kernel(scores.name("score", machine), ARGUMENTS + 1, (score, add))
        return [Kernel(name, ARGUMENTS, (attend,)), of_scores]

    return KernelLibrary(name, kernels, machine, wanted.folder)


def _of_scores(form: AttentionForm) -> AttentionForm:
    """The form of scores: without AMX, whose tiles would prepare values for a product that scores do not make."""
    return replace(form, tiled=False)


def _tiles(code: Code, frame: CallFrame) -> Value:
    return frame.size(COUNT, 0) * frame.size(K, 2)
