"""compressed-tensors, as llm-compressor writes it: matrices of 8-bit floats (format "float-quantized").

Every group of `config_groups` says how the weights of its modules are rounded; all must say the same. The tensors are
those of `fp8`. Source: https://github.com/neuralmagic/compressed-tensors, src/compressed_tensors/compressors and
src/compressed_tensors/quantization/quant_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragjax.core import ConfigError
from ragjax.models.fields import check
from ragjax.models.quantization.base import setting
from ragjax.models.quantization.fp8 import Fp8, read_block

_REACHES = ("tensor", "channel", "block")


def read_compressed(section: Mapping[str, Any]) -> Fp8:
    """From `quantization_config`. Raises ConfigError that names the field which cannot be honoured."""
    setting(section, "format", ("float-quantized", "naive-quantized"))
    for key in ("sparsity_config", "transform_config"):
        inner = section.get(key)
        dense = not inner or (isinstance(inner, Mapping) and inner.get("format") == "dense")
        check(dense, f"quantization_config.{key}", inner, "absent")
    groups: Any = section.get("config_groups")
    check(isinstance(groups, Mapping) and bool(groups), "quantization_config.config_groups", groups, "an object")
    blocks = {_read_group(name, group) for name, group in groups.items()}
    if len(blocks) != 1:
        raise ConfigError("model configuration: quantization_config.config_groups do not agree; one block size is read")
    return Fp8(blocks.pop())


def _read_group(name: str, group: Any) -> tuple[int, int] | None:
    """The block of a group's scales."""
    where = f"config_groups.{name}.weights"
    weights: Any = group.get("weights") if isinstance(group, Mapping) else None
    check(isinstance(weights, Mapping), f"quantization_config.{where}", weights, "an object")
    named = {f"{where}.{key}": value for key, value in weights.items()}
    setting(named, f"{where}.type", ("float",))
    setting(named, f"{where}.num_bits", (8,))
    setting(named, f"{where}.symmetric", (True,), True)
    reach = setting(named, f"{where}.strategy", _REACHES)
    return read_block(named, f"{where}.block_structure") if reach == "block" else None
