"""In work."""

from __future__ import annotations

import jax

from ragjax.kernels.device import Device
from ragjax.kernels.view import View


def attend(q_THD: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    raise NotImplementedError


def refusal(q_THD: jax.Array, view: View, device: Device) -> str | None:
    return "in work"
