"""`paged_interval_attention`: the one attention op of ragjax, and the choice of the backend that computes it.

Query rows (any subset of the tokens of many requests) attend to keys that lie in a paged pool, under the rule of
`visibility`. A cached key is stored rotated at the position it was computed at; an entry's RoPE offset moves it to
where it takes part, without copying or rewriting the page. `reference.py` is the definition, `xla.py` the blockwise
form and the fallback, `triton.py` the Pallas kernels for GPUs, `mosaic.py` the one for Hopper, and
`kernels/cpu/attention.py` the kernel for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from ragjax.kernels.attention import reference, triton, xla
from ragjax.kernels.device import Device
from ragjax.kernels.view import View


class Backend(NamedTuple):
    """An implementation: `attend(q_THD, view)`, and `refusal(q_THD, view, device)`, why it cannot, or None."""

    attend: Callable[[jax.Array, View], tuple[jax.Array, jax.Array]]
    refusal: Callable[[jax.Array, View, Device], str | None]


def _mosaic() -> ModuleType:
    """Imported where a Hopper is: JAX's part of it takes a quarter of the time of all imports."""
    return import_module("ragjax.kernels.attention.mosaic")


def _cpu() -> ModuleType:
    """Imported where it serves: it needs llvmlite."""
    return import_module("ragjax.kernels.cpu.attention")


def cpu_refusal(q_THD: jax.Array, view: View, device: Device) -> str | None:
    if device.platform != "cpu":
        return f"it runs on CPUs, not on {device.platform}"
    if find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    reason: str | None = _cpu().unserved(q_THD.shape[-1], view.pages.k_LPKCD.dtype)
    return reason


BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference.attend, lambda *_: None),
    "xla": Backend(xla.attend, lambda *_: None),
    "cpu": Backend(lambda q_THD, view: _cpu().attend(q_THD, view), cpu_refusal),
    "triton": Backend(triton.attend, triton.refusal),
    "mosaic": Backend(
        lambda q_THD, view: _mosaic().attend(q_THD, view),
        lambda q_THD, view, device: device.lacks((9, 0)) or _mosaic().refusal(q_THD, view, device),
    ),
}

PREFERRED: Mapping[str, tuple[str, ...]] = {"cpu": ("cpu", "xla"), "gpu": ("triton", "xla")}
"""Backends by platform, best first; others have XLA alone. Mosaic comes before them where it is the fastest."""


@dataclass(frozen=True)
class Choice:
    backend: str
    refused: Mapping[str, str]


def choose(q_THD: jax.Array, view: View, device: Device, backend: str | None = None) -> Choice:
    """The first backend of the device's list that can serve the call; a named one is tried before the list.

    Only shapes and dtypes are looked at.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    refused: dict[str, str] = {}
    listed = PREFERRED.get(device.platform, ("xla",))
    if not device.lacks((9, 0)) and _mosaic().leads(q_THD, view, device):
        listed = ("mosaic", *listed)
    for name in dict.fromkeys((backend, *listed) if backend else listed):
        reason = BACKENDS[name].refusal(q_THD, view, device)
        if reason is None:
            return Choice(name, refused)
        refused[name] = reason
    raise AssertionError("unreachable: XLA refuses nothing")


def register_kernel(dim: int, dtype: DTypeLike, capped: bool, device: Device, folder: Path | None) -> str | None:
    """Register the kernel that compiled programs of this device call by its name; returns it (None: they call none).

    dim: of a head. capped: logits have a soft cap. folder: where the compiled kernel is kept (None: nowhere).
    """
    if device.platform != "cpu" or find_spec("llvmlite") is None or _cpu().unserved(dim, dtype) is not None:
        return None
    name: str = _cpu().register_attention(dim, dtype, capped, folder)
    return name


def paged_interval_attention(
    q_THD: jax.Array, view: View, *, backend: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention of rows over the keys of their request that are visible to them.

    Args:
        q_THD: queries rotated at `view.rows.position_T`; float32, bfloat16 or float16.
        view: rows, pool, entries and block lists.
        backend: which implementation computes it; None for the one that `choose` finds for the default device.

    Returns:
        out [T, H, D] in the dtype of q, and the natural log of the softmax denominator, float32 [T, H]. A row that
        sees no key gets zeros and -inf.
    """
    choice = choose(q_THD, view, Device.of(jax.devices()[0]), backend)
    if backend and backend in choice.refused:
        raise ValueError(f"backend {backend!r} cannot serve this call: {choice.refused[backend]}")
    return BACKENDS[choice.backend].attend(q_THD, view)
