"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel store it: 4 or 8 bits, inputs in groups, in any order.

    weight[o, i] = (q[i, o] - zero[g, o]) * scale[g, o],  g = g_idx[i]

qweight is int32 [in * bits / 32, out]: a word holds 32 / bits inputs, the first in its lowest bits. qzeros is int32
[groups, out * bits / 32], scales are [groups, out]. `g_idx` int32 [in] is the group of each input; with `desc_act` it
is no plain i // group_size. The format "gptq" stores zero - 1 and wraps around, "gptq_v2" stores zero.
Sources: https://github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py;
https://github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py (conversion of format 1 to 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.models.fields import check
from ragjax.models.quantization.base import Scheme, fit, group_size, setting, unpack
from ragjax.models.tensors import Array, Shape

_FORMATS = ("gptq", "gptq_v2")


class Gptq(Scheme):
    """bits: 4 or 8. group: inputs that share a scale; 0 for all. less_one: zero points are stored less 1."""

    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, bits: int, group: int, *, ordered: bool, less_one: bool):
        self._bits, self._group, self._ordered, self._less_one = bits, group, ordered, less_one
        self.title = f"GPTQ, {bits} bits, {f'groups of {group}' if group else 'a scale per output'}"

    def stores(self, dtypes: Mapping[str, str]) -> bool:
        """Wherever there is a qweight."""
        return "qweight" in dtypes

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """[out, in]."""
        words, outputs = shapes["qweight"]
        inputs = words * 32 // self._bits
        groups = -(-inputs // (self._group or inputs))
        fit("scales", shapes["scales"], (groups, outputs))
        fit("qzeros", shapes["qzeros"], (groups, outputs * self._bits // 32))
        if not self._ordered or "g_idx" in shapes:
            fit("g_idx", shapes["g_idx"], (inputs,))
        return outputs, inputs

    def widen(self, parts: Mapping[str, Array]) -> NDArray[np.float32]:
        """As the definition above."""
        scale_OG = np.ascontiguousarray(parts["scales"].T, np.float32)
        zero_OG = np.ascontiguousarray(unpack(parts["qzeros"], self._bits).T)
        if self._less_one:
            zero_OG = (zero_OG + np.uint8(1)) & np.uint8(2**self._bits - 1)
        weight_OI = unpack(parts["qweight"].T, self._bits).astype(np.float32)
        group_I = self._groups(parts, weight_OI.shape[1])
        weight_OI -= zero_OG[:, group_I]
        weight_OI *= scale_OG[:, group_I]
        return weight_OI

    def _groups(self, parts: Mapping[str, Array], inputs: int) -> Array:
        if "g_idx" in parts:
            return parts["g_idx"]
        return np.arange(inputs) // (self._group or inputs)


def read_gptq(section: Mapping[str, Any]) -> Gptq:
    """From `quantization_config`. Raises ConfigError that names the field which cannot be honoured."""
    bits = setting(section, "bits", (4, 8))
    layout = section.get("checkpoint_format", section.get("format", "gptq"))
    check(layout in _FORMATS, "quantization_config.checkpoint_format", layout, f"one of {', '.join(_FORMATS)}")
    setting(section, "is_marlin_format", (None, False))
    setting(section, "pack_dtype", (None, "int32"))
    setting(section, "dynamic", (None, {}))  # other bits or groups for some modules
    ordered = not setting(section, "desc_act", (None, False, True))
    return Gptq(bits, group_size(section), ordered=ordered, less_one=layout == "gptq")
