"""Hugging Face checkpoints whose matrices are stored in fewer bits. Each is widened to float32 as it is read.

`quantization_config` of config.json says how the matrices are stored. One file a format; `READERS` has them by the name
that `quant_method` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragjax.core import ConfigError
from ragjax.models.quantization.awq import read_awq
from ragjax.models.quantization.base import Scheme, widened
from ragjax.models.quantization.compressed import read_compressed
from ragjax.models.quantization.fp8 import read_fp8
from ragjax.models.quantization.gptq import read_gptq

__all__ = ["READERS", "Scheme", "read_scheme", "section_of", "widened"]

READERS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_fp8,
    "compressed-tensors": read_compressed,
}


def section_of(mapping: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of config.json's contents that says how matrices are stored; None if they are stored plainly.

    Raises:
        ConfigError: if it is no object.
    """
    section = mapping.get("quantization_config") or mapping.get("compression_config")
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"model configuration: quantization_config is {section!r}; it must be an object")
    return section


def read_scheme(mapping: Mapping[str, Any]) -> Scheme | None:
    """How a checkpoint's matrices are stored, from the contents of config.json; None if plainly.

    Raises:
        ConfigError: that names the field which cannot be honoured.
    """
    section = section_of(mapping)
    if section is None:
        return None
    method = str(section.get("quant_method"))
    if method not in READERS:
        raise ConfigError(
            f"model configuration: quantization_config.quant_method is {method!r}; read are {', '.join(READERS)}"
        )
    return READERS[method](section)
