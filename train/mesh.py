"""Several devices for one run: their mesh, and which of its axes each logical axis of a weight is split over.

Rows of samples are split over `data` and `fsdp`. A weight is split over `fsdp` where it is kept, and gathered where it
is used (arXiv 2304.11277). Over `model` it is split where it is used too: devices along it compute the same rows, each
with its own heads, part of the MLP and tokens of the vocabulary (`train.part`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ragjax.core import ConfigError
from ragjax.models.config import ModelConfig

AXES = ("data", "fsdp", "model")
"""Of the mesh. Devices along the last are next to each other: they exchange most."""

ROWS = ("data", "fsdp")
"""The axes that rows of samples are split over."""

RULES: Mapping[str, str] = {"embed": "fsdp", "kv_heads": "model", "mlp": "model", "vocab": "model"}
"""The axis of the mesh that a logical axis is split over; others are whole on each device."""


def make_mesh(text: str | None, config: ModelConfig) -> Mesh:
    """All devices, for a model of this shape.

    text: sizes, `fsdp=4,model=2` for instance. `fsdp` and `model` are 1 if they are not among them, and `data` takes
    the devices that are left. None: weights are split over all devices by `fsdp`.
    """
    count = jax.device_count()
    sizes = {"fsdp": count} if text is None else _sizes(text)
    sizes = {"fsdp": 1, "model": 1} | sizes
    others = sizes["fsdp"] * sizes["model"]
    data = sizes.get("data", max(1, count // others))
    if data * others != count:
        said = f"data={data}, fsdp={sizes['fsdp']}, model={sizes['model']}"
        raise ConfigError(f"--mesh: {said} are {data * others} devices, and JAX has {count}")
    heads, mlp, parts = config.num_kv_heads, config.intermediate_size, sizes["model"]
    if heads % parts or mlp % parts:
        raise ConfigError(f"--mesh: model={parts} must divide the model's {heads} KV heads and the {mlp} of its MLP")
    return mesh_of(data, sizes["fsdp"], parts)


def mesh_of(data: int = 1, fsdp: int = 1, model: int = 1) -> Mesh:
    """The first devices, so many along each axis."""
    devices = jax.devices()[: data * fsdp * model]
    return jax.make_mesh((data, fsdp, model), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def _sizes(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(rf"({'|'.join(AXES)})=([1-9]\d*)", part.strip())
        if match is None or match[1] in found:
            raise ConfigError(f"--mesh: give AXIS=N of {', '.join(AXES)}, each once, with commas between, not {text!r}")
        found[match[1]] = int(match[2])
    return found


def spec_of(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    """The partition of a weight with these logical axes; norms and axes that do not divide stay whole."""
    if len([axis for axis in axes if axis != "layers"]) < 2:
        return P()

    def split(axis: str, length: int) -> str | None:
        name = RULES.get(axis)
        return name if name is not None and mesh.shape[name] > 1 and length % mesh.shape[name] == 0 else None

    return P(*(split(axis, length) for axis, length in zip(axes, shape, strict=True)))
