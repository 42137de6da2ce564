"""compressed-tensors, as llm-compressor writes it: matrices of 8-bit floats or integers, or packed integers.

Every group of `config_groups` says how the weights of its modules are rounded; all must say the same. The tensors of
"float-quantized" and "int-quantized" are those of `fp8`. Of "pack-quantized":

    weight[o, i] = (q[o, i] - zero[o, g]) * scale[o, g],  g = i // group_size, or weight_g_idx[i]

weight_packed is int32 [out, in * bits / 32]: a word holds 32 / bits inputs, the first in its lowest bits.
weight_zero_point is int32 [out * bits / 32, groups], packed along the outputs; without it, zero is 2^(bits - 1).
weight_scale is [out, groups]; weight_shape repeats out and in.
Source: https://github.com/neuralmagic/compressed-tensors, src/compressed_tensors/compressors (pack_quantized.py) and
src/compressed_tensors/quantization/quant_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.models.fields import check
from ragjax.models.quantization.base import Scheme, fit, group_size, setting, unpack
from ragjax.models.quantization.fp8 import Scaled, read_block
from ragjax.models.tensors import Array, Shape

_EIGHT_BITS = {"float-quantized": "float", "naive-quantized": "float", "int-quantized": "int"}

_IN_ROW, _BY_INDEX = ("weight", "static"), ("group", "dynamic")
"""Of `actorder`: groups of inputs in a row, or as weight_g_idx says; the second name of each is an alias."""


class Packed(Scheme):
    """bits: 4 or 8. group: inputs that share a scale; 0 for all. ordered: groups are in a row."""

    parts = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"})

    def __init__(self, bits: int, group: int, *, symmetric: bool, ordered: bool):
        self._bits, self._group, self._symmetric, self._ordered = bits, group, symmetric, ordered
        self.title = f"compressed-tensors, {bits} bits, {f'groups of {group}' if group else 'a scale per output'}"

    def stores(self, dtypes: Mapping[str, str]) -> bool:
        """Wherever there is a weight_packed."""
        return "weight_packed" in dtypes

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """[out, in]."""
        outputs, words = shapes["weight_packed"]
        inputs = words * 32 // self._bits
        groups = -(-inputs // (self._group or inputs))
        fit("weight_scale", shapes["weight_scale"], (outputs, groups))
        if not self._symmetric:
            fit("weight_zero_point", shapes["weight_zero_point"], (-(-outputs * self._bits // 32), groups))
        if not self._ordered:
            fit("weight_g_idx", shapes["weight_g_idx"], (inputs,))
        return outputs, inputs

    def widen(self, parts: Mapping[str, Array]) -> NDArray[np.float32]:
        """As the definition above."""
        weight_OI = unpack(parts["weight_packed"], self._bits).astype(np.float32)
        outputs, inputs = weight_OI.shape
        group_I = np.arange(inputs) // (self._group or inputs) if self._ordered else parts["weight_g_idx"]
        if self._symmetric:
            weight_OI -= 2 ** (self._bits - 1)
        else:
            zero_OG = np.ascontiguousarray(unpack(parts["weight_zero_point"].T, self._bits).T[:outputs])
            weight_OI -= zero_OG[:, group_I]
        weight_OI *= parts["weight_scale"].astype(np.float32)[:, group_I]
        return weight_OI


def read_compressed(section: Mapping[str, Any]) -> Scheme:
    """From `quantization_config`. Raises ConfigError that names the field which cannot be honoured."""
    layout = setting(section, "format", (*_EIGHT_BITS, "pack-quantized"))
    for key in ("sparsity_config", "transform_config"):
        inner = section.get(key)
        dense = not inner or (isinstance(inner, Mapping) and inner.get("format") == "dense")
        check(dense, f"quantization_config.{key}", inner, "absent")
    groups: Any = section.get("config_groups")
    check(isinstance(groups, Mapping) and bool(groups), "quantization_config.config_groups", groups, "an object")
    schemes = [_read_group(name, group, layout) for name, group in groups.items()]
    if len({scheme.title for scheme in schemes}) != 1:
        raise ConfigError("model configuration: quantization_config.config_groups do not agree; one way is read")
    return schemes[0]


def _read_group(name: str, group: Any, layout: str) -> Scheme:
    """How the weights of a group's modules are stored."""
    where = f"config_groups.{name}.weights"
    weights: Any = group.get("weights") if isinstance(group, Mapping) else None
    check(isinstance(weights, Mapping), f"quantization_config.{where}", weights, "an object")
    named = {f"{where}.{key}": value for key, value in weights.items()}
    if layout == "pack-quantized":
        return _read_packed(named, where)
    kind = setting(named, f"{where}.type", (_EIGHT_BITS[layout],))
    setting(named, f"{where}.num_bits", (8,))
    setting(named, f"{where}.symmetric", (True,), True)
    reach = setting(named, f"{where}.strategy", ("tensor", "channel", "block"))
    return Scaled(kind, read_block(named, f"{where}.block_structure") if reach == "block" else None)


def _read_packed(named: Mapping[str, Any], where: str) -> Packed:
    setting(named, f"{where}.type", ("int",))
    bits = setting(named, f"{where}.num_bits", (4, 8))
    reach = setting(named, f"{where}.strategy", ("group", "channel"))
    symmetric = setting(named, f"{where}.symmetric", (True, False), True)
    ordered = setting(named, f"{where}.actorder", (None, *_IN_ROW, *_BY_INDEX)) not in _BY_INDEX
    size = group_size(named, f"{where}.group_size") if reach == "group" else 0
    return Packed(bits, size, symmetric=symmetric, ordered=ordered)
