"""Matrices of 8-bit floats (float8_e4m3fn): weight[o, i] = q[o, i] * scale, with a scale per matrix, output or block.

`weight_scale` or `weight_scale_inv` is what q is multiplied with, whatever its name says. Its shape is [] or [1] for a
matrix, [out, 1] or [out] for outputs, and [out / b0, in / b1], rounded up, for blocks. The tensors say which modules
are stored so.
Sources: https://github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py (weight_dequant); transformers'
FineGrainedFP8Config; https://github.com/vllm-project/vllm, vllm/model_executor/layers/quantization/fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ragjax.models.fields import check
from ragjax.models.quantization.base import Scheme, fit, setting
from ragjax.models.tensors import Array, Shape

_SCALES = ("weight_scale", "weight_scale_inv")


class Scaled(Scheme):
    """Numbers of 8 bits and their scales.

    kind: of the numbers, "float" or "int". block: outputs and inputs that share a scale; None for a matrix or an output
    at a time.
    """

    parts = frozenset({"weight", *_SCALES})
    unused = frozenset({"input_scale", "activation_scale", "output_scale", "k_scale", "v_scale", "kv_scale", "q_scale"})

    def __init__(self, kind: Literal["float", "int"], block: tuple[int, int] | None):
        self._dtype, name = {"float": ("F8_E4M3", "FP8"), "int": ("I8", "INT8")}[kind]
        self._block = block
        reach = f"blocks of {block[0]} x {block[1]}" if block else "a scale per matrix or output"
        self.title = f"{name}, {reach}"

    def stores(self, dtypes: Mapping[str, str]) -> bool:
        """Whatever is of this kind, or has a scale."""
        return dtypes.get("weight") == self._dtype or not dtypes.keys().isdisjoint(_SCALES)

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """[out, in]."""
        name = _scale_of(shapes)
        outputs, inputs = shapes["weight"]
        found = shapes[name]
        if self._block:
            rows, columns = self._block
            fit(name, found, (-(-outputs // rows), -(-inputs // columns)))
        elif found not in ((), (1,), (1, 1), (outputs,)):
            fit(name, found, (outputs, 1))
        return outputs, inputs

    def widen(self, parts: Mapping[str, Array]) -> NDArray[np.float32]:
        """Products of q and its scale."""
        weight_OI = parts["weight"].astype(np.float32)
        scale = parts[_scale_of(parts)].astype(np.float32)
        if not self._block:
            weight_OI *= scale.reshape(-1, 1) if scale.ndim == 1 else scale
            return weight_OI
        outputs, inputs = weight_OI.shape
        weight_OI *= scale.repeat(self._block[0], 0)[:outputs].repeat(self._block[1], 1)[:, :inputs]
        return weight_OI


def _scale_of(parts: Mapping[str, Any]) -> str:
    """The name of a module's scale. Raises KeyError with the name that it should have."""
    found = next((name for name in _SCALES if name in parts), None)
    if found is None:
        raise KeyError(_SCALES[0])
    return found


def read_block(section: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """The outputs and inputs of a block; None if there are no blocks. Raises ConfigError if it is no such pair."""
    block = section.get(key)
    if block is None:
        return None
    valid = isinstance(block, Sequence) and len(block) == 2 and all(isinstance(n, int) and n >= 1 for n in block)
    check(valid, f"quantization_config.{key}", block, "two whole numbers of at least 1")
    return int(block[0]), int(block[1])


def read_fp8(section: Mapping[str, Any]) -> Scaled:
    """From `quantization_config`. Raises ConfigError that names the field which cannot be honoured."""
    setting(section, "fmt", (None, "e4m3"))
    return Scaled("float", read_block(section, "weight_block_size"))
