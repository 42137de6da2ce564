"""AWQ (arXiv 2306.00978) as AutoAWQ's GEMM layout stores it: 4 bits, a scale and a zero point for a group of inputs.

    weight[o, i] = (q[i, o] - zero[g, o]) * scale[g, o],  g = i // group_size

qweight is int32 [in, out / 8]: a word holds 8 outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on.
qzeros is int32 [groups, out / 8], packed alike; scales are [groups, out].
Source: https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.models.fields import check
from ragjax.models.quantization.base import Scheme, fit, group_size, setting, unpack
from ragjax.models.tensors import Array, Shape

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word each of its 8 outputs lies."""


class Awq(Scheme):
    """4 bits, in AutoAWQ's GEMM layout. group: inputs that share a scale; 0 for all of them."""

    parts = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, group: int):
        self._group = group
        self.title = f"AWQ, 4 bits, {f'groups of {group}' if group else 'a scale per output'}"

    def stores(self, dtypes: Mapping[str, str]) -> bool:
        """Wherever there is a qweight."""
        return "qweight" in dtypes

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """[out, in]."""
        inputs, words = shapes["qweight"]
        groups = inputs // (self._group or inputs)
        if self._group and inputs % self._group:
            raise ValueError(f"qweight has {inputs} inputs, which groups of {self._group} do not divide")
        fit("scales", shapes["scales"], (groups, 8 * words))
        fit("qzeros", shapes["qzeros"], (groups, words))
        return 8 * words, inputs

    def widen(self, parts: Mapping[str, Array]) -> NDArray[np.float32]:
        """As the definition above."""
        scale_GO = parts["scales"].astype(np.float32)
        zero_GO = _outputs(parts["qzeros"])
        code_IO = _outputs(parts["qweight"])
        weight_GIO = code_IO.reshape(len(scale_GO), -1, code_IO.shape[1]).astype(np.float32)
        weight_GIO -= zero_GO[:, None]
        weight_GIO *= scale_GO[:, None]
        return weight_GIO.reshape(code_IO.shape).T


def _outputs(packed: Array) -> NDArray[np.uint8]:
    """Words [..., out / 8] as numbers in the outputs' order, uint8 [..., out]."""
    return unpack(packed, 4).reshape(*packed.shape, 8)[..., _PLACES].reshape(len(packed), -1)


def read_awq(section: Mapping[str, Any]) -> Awq:
    """From `quantization_config`. Raises ConfigError that names the field which cannot be honoured."""
    setting(section, "bits", (4,), 4)
    setting(section, "zero_point", (True,), True)
    version = section.get("version", "gemm")
    check(str(version).lower() == "gemm", "quantization_config.version", version, "'gemm'")
    return Awq(group_size(section))
