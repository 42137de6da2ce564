"""Hugging Face checkpoints whose matrices are stored in fewer bits; each matrix is widened to float32 when it is read.

`quantization_config` of config.json names the format. A stored matrix is several tensors of one module, which become
its `weight`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.kernels.cpu.packing import Codes, Packing
from ragjax.models.config import check
from ragjax.models.tensors import Array, CodedMatrix, Shape, Stored, Tensors

PLAIN_DTYPES = frozenset({"F32", "F16", "BF16"})
"""What a tensor may have that no scheme has to widen, by its name in safetensors."""


class Scheme(ABC):
    """A storage format of matrices. The parts of a module are its tensors, by the last component of their name."""

    title: str
    """For people: format, bits, and how far a scale reaches."""

    parts: frozenset[str]
    """What a stored matrix consists of, where it is stored."""

    unused: frozenset[str] = frozenset()
    """Tensors that say how to round activations or KV, which keep the engine's dtype here."""

    def stores(self, dtypes: Mapping[str, str]) -> bool:
        """True if a module with these parts and dtypes has a matrix to widen."""
        return not dtypes.keys().isdisjoint(("qweight", "weight_packed"))

    @abstractmethod
    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Shape of the matrix, [out, in]. Raises ValueError naming the part whose shape does not fit."""

    @abstractmethod
    def widen(self, parts: Mapping[str, Array]) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class GroupedCodes:
    """A matrix whose weights are (code[o, i] - zero[o, g]) * scale[o, g], where g is group[i].

    code_OI, zero_OG: uint8. scale_OG: float32. group_I: None if groups of equal size are in a row.
    """

    code_OI: NDArray[np.uint8]
    zero_OG: NDArray[np.uint8]
    scale_OG: NDArray[np.float32]
    group_I: Array | None


class GroupedScheme(Scheme):
    """A format of whole numbers, a scale and a zero for each output's group of inputs.

    bits: 4 or 8. size: inputs of a group; 0 for all. ordered: groups are in a row.
    """

    def __init__(self, name: str, bits: int, size: int, *, ordered: bool):
        self.bits, self.size, self.ordered = bits, size, ordered
        self.title = f"{name}, {bits} bits, {f'groups of {size}' if size else 'a scale per output'}"

    @abstractmethod
    def read(self, parts: Mapping[str, Array]) -> GroupedCodes: ...

    def widen(self, parts: Mapping[str, Array]) -> NDArray[np.float32]:
        read = self.read(parts)
        weight_OI = read.code_OI.astype(np.float32)
        group_I = read.group_I
        if group_I is None:
            group_I = np.arange(weight_OI.shape[1]) // (self.size or weight_OI.shape[1])
        weight_OI -= read.zero_OG[:, group_I]
        weight_OI *= read.scale_OG[:, group_I]
        return weight_OI

    def packing(self, inputs: int, group_I: Array | None) -> Packing | None:
        """The packing of codes; None if no block divides the groups, or their inputs are in no row.

        group_I: as of `GroupedCodes`.
        """
        size = self.size or inputs
        block = next((block for block in (32, 16) if size % block == 0 and inputs % size == 0), None)
        if block is None or (group_I is not None and np.any(group_I != np.arange(inputs) // size)):
            return None
        return Packing(self.bits, block, wide=True, lows=True)

    def codes(self, parts: Mapping[str, Array], packing: Packing) -> Codes:
        read = self.read(parts)
        first = packing.zero  # of codes as they are packed
        value_OI = read.code_OI.astype(np.int16) - first
        blocks = value_OI.shape[1] // packing.block // read.scale_OG.shape[1]
        low_OG = (first - read.zero_OG.astype(np.float32)) * read.scale_OG
        return Codes(packing, value_OI, read.scale_OG.repeat(blocks, 1), low_OG.repeat(blocks, 1))


def widened(stored: Tensors, scheme: Scheme, where: Path) -> Tensors:
    """The tensors with every stored matrix as a `weight`, which is widened each time it is read."""
    modules: dict[str, dict[str, str]] = {}
    for name in stored:
        module, _, part = name.rpartition(".")
        if part in scheme.parts:
            modules.setdefault(module, {})[part] = name
    packed = {
        m: parts
        for m, parts in modules.items()
        if scheme.stores({part: stored.stored[name].dtype for part, name in parts.items()})
    }
    taken = {name for parts in packed.values() for name in parts.values()}
    found = dict(stored.without(taken | {name for name in stored if name.rpartition(".")[2] in scheme.unused}).stored)
    for name, tensor in found.items():
        if tensor.dtype not in PLAIN_DTYPES:
            reason = f"tensor {name} of type {tensor.dtype} has no place in a matrix of {scheme.title}"
            raise ConfigError(f"{where}: {reason}")

    def load(parts: Mapping[str, str]) -> Array:
        return scheme.widen({part: stored[name] for part, name in parts.items()})

    def codes(parts: Mapping[str, str], packing: Packing) -> Codes:
        assert isinstance(scheme, GroupedScheme)
        return scheme.codes({part: stored[name] for part, name in parts.items()}, packing)

    for module, parts in packed.items():
        try:
            shape = scheme.shape({part: stored.shapes[name] for part, name in parts.items()})
        except KeyError as error:
            raise ConfigError(f"{where}: tensor {module}.{error.args[0]} is missing") from error
        except ValueError as error:
            raise ConfigError(f"{where}: tensor {module}.{error}") from error
        coded = None
        if isinstance(scheme, GroupedScheme):
            index = next((stored[name] for part, name in parts.items() if part.endswith("g_idx")), None)
            packing = scheme.packing(shape[1], index)
            coded = None if packing is None else CodedMatrix(packing, partial(codes, parts, packing))
        found[f"{module}.weight"] = Stored(partial(load, parts), shape, scheme.title, coded)
    return Tensors(found)


def fit(part: str, found: Shape, wanted: Shape) -> None:
    """Raise ValueError, which `widened` completes, unless a part has the shape that it must have."""
    if found != wanted:
        raise ValueError(f"{part} has shape {list(found)}, expected {list(wanted)}")


def setting(section: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """A field of `quantization_config` that has one of the values which are read, else ConfigError."""
    value = section.get(key, default)
    choices = ", ".join(map(repr, allowed))
    check(value in allowed, f"quantization_config.{key}", value, choices if len(allowed) == 1 else f"one of {choices}")
    return value


def group_size(section: Mapping[str, Any], key: str = "group_size") -> int:
    """Inputs that share a scale; 0 for all of a row. Raises ConfigError if it is no such number."""
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


_SCALES = ("weight_scale", "weight_scale_inv")


class Scaled(Scheme):
    """Numbers of 8 bits and their scales: weight[o, i] = q[o, i] * scale, a scale per matrix, output or block.

    `weight_scale` or `weight_scale_inv` is what q is multiplied with, whatever its name says. Its shape is [] or [1]
    for a matrix, [out, 1] or [out] for outputs, and [out / b0, in / b1], rounded up, for blocks. The tensors say which
    modules are stored so.

    Sources: https://github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py (weight_dequant); transformers'
    FineGrainedFP8Config; https://github.com/vllm-project/vllm, vllm/model_executor/layers/quantization/fp8.py.

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
        weight_OI = parts["weight"].astype(np.float32)
        scale = parts[_scale_of(parts)].astype(np.float32)
        if not self._block:
            weight_OI *= scale.reshape(-1, 1) if scale.ndim == 1 else scale
            return weight_OI
        outputs, inputs = weight_OI.shape
        weight_OI *= scale.repeat(self._block[0], 0)[:outputs].repeat(self._block[1], 1)[:, :inputs]
        return weight_OI


def _scale_of(parts: Mapping[str, Any]) -> str:
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
    setting(section, "fmt", (None, "e4m3"))
    return Scaled("float", read_block(section, "weight_block_size"))


_EIGHT_BITS = {"float-quantized": "float", "naive-quantized": "float", "int-quantized": "int"}

_IN_ROW, _BY_INDEX = ("weight", "static"), ("group", "dynamic")
"""Of `actorder`: groups of inputs in a row, or as weight_g_idx says; the second name of each is an alias."""


class Packed(GroupedScheme):
    """compressed-tensors' "pack-quantized": weight[o, i] = (q[o, i] - zero[o, g]) * scale[o, g].

    g is i // group_size, or weight_g_idx[i]. weight_packed is int32 [out, in * bits / 32]: a word holds 32 / bits
    inputs, the first in its lowest bits. weight_zero_point is int32 [out * bits / 32, groups], packed along the
    outputs; without it, zero is 2^(bits - 1). weight_scale is [out, groups]; weight_shape repeats out and in.

    Source: https://github.com/neuralmagic/compressed-tensors, src/compressed_tensors/compressors (pack_quantized.py)
    and src/compressed_tensors/quantization/quant_args.py.

    bits: 4 or 8. group: inputs that share a scale; 0 for all. ordered: groups are in a row.
    """

    parts = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"})

    def __init__(self, bits: int, group: int, *, symmetric: bool, ordered: bool):
        super().__init__("compressed-tensors", bits, group, ordered=ordered)
        self._symmetric = symmetric

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        outputs, words = shapes["weight_packed"]
        inputs = words * 32 // self.bits
        groups = -(-inputs // (self.size or inputs))
        fit("weight_scale", shapes["weight_scale"], (outputs, groups))
        if not self._symmetric:
            fit("weight_zero_point", shapes["weight_zero_point"], (-(-outputs * self.bits // 32), groups))
        if not self.ordered:
            fit("weight_g_idx", shapes["weight_g_idx"], (inputs,))
        return outputs, inputs

    def read(self, parts: Mapping[str, Array]) -> GroupedCodes:
        code_OI = unpack(parts["weight_packed"], self.bits)
        scale_OG = parts["weight_scale"].astype(np.float32)
        if self._symmetric:
            zero_OG = np.full(scale_OG.shape, 2 ** (self.bits - 1), np.uint8)
        else:
            zero_OG = np.ascontiguousarray(unpack(parts["weight_zero_point"].T, self.bits).T[: len(code_OI)])
        return GroupedCodes(code_OI, zero_OG, scale_OG, None if self.ordered else parts["weight_g_idx"])


def read_compressed(section: Mapping[str, Any]) -> Scheme:
    """Read a `quantization_config` of llm-compressor; all groups of `config_groups` must say the same."""
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


_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word each of its 8 outputs lies."""


class Awq(GroupedScheme):
    """AWQ (arXiv 2306.00978) in AutoAWQ's GEMM layout: weight[o, i] = (q[i, o] - zero[g, o]) * scale[g, o].

    g is i // group_size. qweight is int32 [in, out / 8]: a word holds 8 outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7
    from the lowest bits on. qzeros is int32 [groups, out / 8], packed alike; scales are [groups, out].

    Source: https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.

    group: inputs that share a scale; 0 for all of them.
    """

    parts = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, group: int):
        super().__init__("AWQ", 4, group, ordered=True)

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        inputs, words = shapes["qweight"]
        groups = inputs // (self.size or inputs)
        if self.size and inputs % self.size:
            raise ValueError(f"qweight has {inputs} inputs, which groups of {self.size} do not divide")
        fit("scales", shapes["scales"], (groups, 8 * words))
        fit("qzeros", shapes["qzeros"], (groups, words))
        return 8 * words, inputs

    def read(self, parts: Mapping[str, Array]) -> GroupedCodes:
        def by_outputs(packed: Array) -> NDArray[np.uint8]:
            ordered = unpack(packed, 4).reshape(*packed.shape, 8)[..., _PLACES]
            return np.ascontiguousarray(ordered.reshape(len(packed), -1).T)

        scale_OG = np.ascontiguousarray(parts["scales"].T, np.float32)
        return GroupedCodes(by_outputs(parts["qweight"]), by_outputs(parts["qzeros"]), scale_OG, None)


def read_awq(section: Mapping[str, Any]) -> Awq:
    setting(section, "bits", (4,), 4)
    setting(section, "zero_point", (True,), True)
    version = section.get("version", "gemm")
    check(str(version).lower() == "gemm", "quantization_config.version", version, "'gemm'")
    return Awq(group_size(section))


_FORMATS = ("gptq", "gptq_v2")


class Gptq(GroupedScheme):
    """GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel store it: weight[o, i] = (q[i, o] - zero[g, o]) * scale[g, o].

    g is g_idx[i], int32 [in]; with `desc_act` it is not i // group_size. qweight is int32 [in * bits / 32, out]: a word
    holds 32 / bits inputs, the first in its lowest bits. qzeros is int32 [groups, out * bits / 32], scales are
    [groups, out]. The format "gptq" stores zero - 1 and wraps around, "gptq_v2" stores zero.

    Sources: https://github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py;
    https://github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py (conversion of format 1 to 2).

    bits: 4 or 8. group: inputs that share a scale; 0 for all. less_one: zero points are stored less 1.
    """

    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, bits: int, group: int, *, ordered: bool, less_one: bool):
        super().__init__("GPTQ", bits, group, ordered=ordered)
        self._less_one = less_one

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        words, outputs = shapes["qweight"]
        inputs = words * 32 // self.bits
        groups = -(-inputs // (self.size or inputs))
        fit("scales", shapes["scales"], (groups, outputs))
        fit("qzeros", shapes["qzeros"], (groups, outputs * self.bits // 32))
        if not self.ordered or "g_idx" in shapes:
            fit("g_idx", shapes["g_idx"], (inputs,))
        return outputs, inputs

    def read(self, parts: Mapping[str, Array]) -> GroupedCodes:
        scale_OG = np.ascontiguousarray(parts["scales"].T, np.float32)
        zero_OG = np.ascontiguousarray(unpack(parts["qzeros"], self.bits).T)
        if self._less_one:
            zero_OG = (zero_OG + np.uint8(1)) & np.uint8(2**self.bits - 1)
        code_OI = unpack(parts["qweight"].T, self.bits)
        return GroupedCodes(code_OI, zero_OG, scale_OG, parts.get("g_idx"))


def read_gptq(section: Mapping[str, Any]) -> Gptq:
    bits = setting(section, "bits", (4, 8))
    layout = section.get("checkpoint_format", section.get("format", "gptq"))
    check(layout in _FORMATS, "quantization_config.checkpoint_format", layout, f"one of {', '.join(_FORMATS)}")
    setting(section, "is_marlin_format", (None, False))
    setting(section, "pack_dtype", (None, "int32"))
    setting(section, "dynamic", (None, {}))  # other bits or groups for some modules
    ordered = not setting(section, "desc_act", (None, False, True))
    return Gptq(bits, group_size(section), ordered=ordered, less_one=layout == "gptq")


# each raises ConfigError that names the field which cannot be honoured
READERS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_fp8,
    "compressed-tensors": read_compressed,
}


def section_of(mapping: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of config.json's contents that says how matrices are stored; None if they are stored plainly."""
    section = mapping.get("quantization_config") or mapping.get("compression_config")
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"model configuration: quantization_config is {section!r}; it must be an object")
    return section


def read_scheme(mapping: Mapping[str, Any]) -> Scheme | None:
    """The storage format of a checkpoint's matrices from config.json; None if they are not quantized."""
    section = section_of(mapping)
    if section is None:
        return None
    method = str(section.get("quant_method"))
    if method not in READERS:
        raise ConfigError(
            f"model configuration: quantization_config.quant_method is {method!r}; read are {', '.join(READERS)}"
        )
    return READERS[method](section)
