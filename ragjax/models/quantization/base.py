"""What the formats share: a matrix is several tensors of one module, which become its `weight`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.models.fields import check
from ragjax.models.tensors import Array, Shape, Tensors

PLAIN_DTYPES = frozenset({"F32", "F16", "BF16"})
"""What a tensor may have that no scheme has to widen, by its name in safetensors."""


class Scheme(ABC):
    """How a checkpoint stores its matrices. The parts of a module are its tensors, by their last name."""

    title: str
    """For people: format, bits, and how far a scale reaches."""

    parts: frozenset[str]
    """What a stored matrix consists of, where it is stored."""

    unused: frozenset[str] = frozenset()
    """Tensors that say how to round activations or KV, which keep the engine's dtype here."""

    @abstractmethod
    def stores(self, dtypes: Mapping[str, str]) -> bool:
        """Whether a module with these parts, given with their dtypes, has a matrix that has to be widened."""

    @abstractmethod
    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Of the matrix, [out, in]. Raises ValueError that says which part's shape does not fit."""

    @abstractmethod
    def widen(self, parts: Mapping[str, Array]) -> NDArray[np.float32]:
        """The matrix, float32 [out, in]."""


def widened(stored: Tensors, scheme: Scheme, where: Path) -> Tensors:
    """The tensors with every stored matrix as a `weight`, which is widened each time it is read.

    Raises:
        ConfigError: that names the tensor which is missing or of another shape than its neighbours ask for.
    """
    modules: dict[str, dict[str, str]] = {}
    for name in stored:
        module, _, part = name.rpartition(".")
        if part in scheme.parts:
            modules.setdefault(module, {})[part] = name
    packed = {
        m: parts for m, parts in modules.items() if scheme.stores({p: stored.dtypes[n] for p, n in parts.items()})
    }
    taken = {name for parts in packed.values() for name in parts.values()}
    plain = stored.without(taken | {name for name in stored if name.rpartition(".")[2] in scheme.unused})
    for name, dtype in plain.dtypes.items():
        if dtype not in PLAIN_DTYPES:
            raise ConfigError(f"{where}: tensor {name} of type {dtype} has no place in a matrix of {scheme.title}")
    return Tensors(
        plain.loaders | {f"{m}.weight": _loader(scheme, stored, parts) for m, parts in packed.items()},
        plain.shapes | {f"{m}.weight": _shape(scheme, stored, m, parts, where) for m, parts in packed.items()},
        plain.dtypes | {f"{m}.weight": scheme.title for m in packed},
    )


def _loader(scheme: Scheme, stored: Tensors, parts: Mapping[str, str]) -> Callable[[], Array]:
    return lambda: scheme.widen({part: stored[name] for part, name in parts.items()})


def _shape(scheme: Scheme, stored: Tensors, module: str, parts: Mapping[str, str], where: Path) -> Shape:
    try:
        return scheme.shape({part: stored.shapes[name] for part, name in parts.items()})
    except KeyError as error:
        raise ConfigError(f"{where}: tensor {module}.{error.args[0]} is missing") from error
    except ValueError as error:
        raise ConfigError(f"{where}: tensor {module}.{error}") from error


def fit(part: str, found: Shape, wanted: Shape) -> None:
    """Raise ValueError, which `widened` completes, unless a part has the shape that it must have."""
    if found != wanted:
        raise ValueError(f"{part} has shape {list(found)}, expected {list(wanted)}")


def setting(section: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """A field of `quantization_config` that has one of the values which are read.

    Raises:
        ConfigError: that names it, if its value is another.
    """
    value = section.get(key, default)
    choices = ", ".join(map(repr, allowed))
    check(value in allowed, f"quantization_config.{key}", value, choices if len(allowed) == 1 else f"one of {choices}")
    return value


def group_size(section: Mapping[str, Any], key: str = "group_size") -> int:
    """Inputs that share a scale; 0 for all of a row.

    Raises:
        ConfigError: if it is no such number.
    """
    size = section.get(key, 128)
    valid = isinstance(size, int) and not isinstance(size, bool) and (size >= 1 or size == -1)
    check(valid, f"quantization_config.{key}", size, "a whole number of at least 1, or -1")
    return max(int(size), 0)


def unpack(packed: Array, bits: int) -> NDArray[np.uint8]:
    """Whole numbers of 4 or 8 bits from int32 words, lowest bits first: uint8 [..., words * 32 / bits]."""
    octets = np.ascontiguousarray(packed).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)
