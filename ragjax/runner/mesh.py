"""Several devices for one model: their mesh, and which of its axes each logical axis of weights and KV is split over.

The mesh has an axis of KV heads and one of their copies. Where there are more devices than KV heads, each KV head is on
several, which share out the query heads that look at it ("groups"). What is no attention is split over both axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import jax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ragjax.core import ConfigError
from ragjax.models.config import ModelConfig

AXES = ("kv_heads", "groups")
"""Of the mesh. Devices in its order have query heads in theirs."""

RULES: Mapping[str, tuple[str, ...]] = {
    "kv_heads": ("kv_heads",),
    "groups": ("groups",),
    "copied_kv_heads": AXES,
    "shares": AXES,
    "mlp": AXES,
    "vocab": AXES,
}
"""Axes of the mesh that a logical axis is split over; others are whole on each device. None is used twice."""

POOL = P(None, None, "kv_heads", None, None)  # how a pool of pages [L, P, K, C, D] is split
HEADS = P(None, AXES, None)  # how queries [T, H, D] are split, and new keys and values, which have a head for each copy


def make_mesh(devices: int, config: ModelConfig) -> Mesh:
    """The first devices of the default platform, for a model of this shape; ConfigError: they do not fit."""
    there = jax.devices()
    if len(there) < devices:
        raise ConfigError(
            f"--tensor-parallel {devices} needs {devices} devices, and JAX has {len(there)} "
            f"({jax.default_backend()}): lower it to at most {len(there)}"
        )
    if not fits(devices, config):
        numbers = ", ".join(str(n) for n in range(1, len(there) + 1) if fits(n, config))
        raise ConfigError(
            f"--tensor-parallel {devices}: {config.num_kv_heads} KV heads of {config.num_groups} query heads each "
            f"cannot be shared out evenly among {devices} devices: choose one of {numbers}"
        )
    copies = copies_of(devices, config)
    return mesh_of(there[:devices], copies)


def mesh_of(devices: Sequence[jax.Device], copies: int = 1) -> Mesh:
    shape = (len(devices) // copies, copies)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def fits(devices: int, config: ModelConfig) -> bool:
    heads, groups = config.num_kv_heads, config.num_groups
    return heads % devices == 0 or (devices % heads == 0 and groups % (devices // heads) == 0)


def copies_of(devices: int, config: ModelConfig) -> int:
    return max(1, devices // config.num_kv_heads)


def spec_of(axes: Sequence[str]) -> P:
    return P(*(RULES.get(axis) for axis in axes))


def host_memory() -> AbstractContextManager[object]:
    """Arrays are made in host memory within it: those that are too large for one device."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ConfigError(
            "--tensor-parallel reads the model into host memory, and JAX has no CPU: add cpu to JAX_PLATFORMS"
        ) from error
    place: AbstractContextManager[object] = jax.default_device(cpu)
    return place
