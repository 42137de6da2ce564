"""A decoder's matrices as they stay packed: which can, and their bytes.

A fused matrix takes the packing that holds all its parts, and those of all layers: some checkpoints mix 4 and 6 bits.
Where a part is not quantised, or in a way that is not read as codes, it is dequantised in all layers, unless
`PackedForm.bits` asks for codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.kernels.cpu.packing import NARROW, Codes, Packing, join, pack, quantize
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import own_arrays, per_kv_head
from ragjax.models.tensors import CodedMatrix, Stored, Tensors


@dataclass(frozen=True)
class PackedForm:
    """The form in which matrices stay packed.

    tiled: products of many rows use AMX where it is, and round otherwise than those of few.
    bits: 4 or 8, of matrices that the checkpoint has no codes of; None: these are dequantised. With 4, tables of the
        vocabulary take 8.
    """

    tiled: bool = True
    bits: int | None = None


class Sources:
    """The matrices of a decoder that can be packed, and the tensors of each.

    Attributes:
        packings: how each is packed, by its name in the decoder.
        stacks: which array of the kept file holds it with those of other layers, by its name.

    Raises:
        ConfigError: if a matrix cannot have `form.bits`.
    """

    def __init__(self, config: ModelConfig, tensors: Tensors, form: PackedForm):
        self._config, self._tensors, self._tiled = config, tensors, form.tiled
        parts = _parts(config)
        if form.bits is not None:
            self._tensors = _narrowed(tensors, [part for of_name in parts.values() for part in of_name], form.bits)
        whole = [name for name, of_name in parts.items() if not self._packed(of_name)]
        mixed = {_kind(name) for name in whole}  # one program serves all layers, so those of a kind are alike
        self._parts = {name: of_name for name, of_name in parts.items() if _kind(name) not in mixed}
        common = dict[str, Packing]()
        for name, of_name in self._parts.items():
            packing = self._packing(of_name)
            common[_kind(name)] = common.get(_kind(name), packing).common(packing)
        self.packings = {name: common[_kind(name)] for name in self._parts}
        of_layers = (name for name in self._parts if name.startswith("layers."))
        self.stacks = {name: f"layers.{_kind(name)}" for name in sorted(of_layers, key=_kind)}

    def _packed(self, parts: tuple[str, ...]) -> bool:
        return all(self._tensors.stored[part].coded is not None for part in parts)

    def _packing(self, parts: tuple[str, ...]) -> Packing:
        first, *others = (coded.packing for part in parts if (coded := self._tensors.stored[part].coded))
        for other in others:
            first = first.common(other)
        return replace(first, tiled=self._tiled)

    def arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """The parts of stacks, then the other arrays of `own_arrays`; packed ones are uint8 (`packing.pack`)."""
        for name, stack in self.stacks.items():
            yield stack, pack(self._codes(name, self._parts[name]))
        for name, value in own_arrays(self._config, _without(self._tensors, self._parts)):
            if name not in self.stacks:
                parts = self._parts.get(name)
                yield name, value if parts is None else pack(self._codes(name, parts))

    def _codes(self, name: str, parts: tuple[str, ...]) -> Codes:
        read = [coded.read() for part in parts if (coded := self._tensors.stored[part].coded)]
        codes = join(read).to(self.packings[name])
        if not name.endswith(".qkv"):
            return codes
        config = self._config
        ends = np.cumsum([config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2])
        rows = np.split(np.arange(ends[-1]), ends[:-1])
        return codes.rows(per_kv_head(config, rows).reshape(-1))


def _kind(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _narrowed(tensors: Tensors, names: list[str], bits: int) -> Tensors:
    """The tensors with codes for those of these matrices that have none."""
    stored = dict(tensors.stored)
    for name in names:
        one = stored[name]
        if one.coded is not None:
            continue
        if one.shape[1] % NARROW[bits].block:
            reason = f"{name} has {one.shape[1]} inputs, which {NARROW[bits].block} does not divide"
            raise ConfigError(f"weights cannot have {bits} bits: {reason}; leave --weights out")
        packing = NARROW[bits if ".layers." in name else 8]
        stored[name] = replace(one, coded=CodedMatrix(packing, partial(_quantized, one, packing)))
    return Tensors(stored)


def _quantized(stored: Stored, packing: Packing) -> Codes:
    return quantize(stored.load().astype(np.float32), packing)


def _without(tensors: Tensors, packed: Mapping[str, tuple[str, ...]]) -> Tensors:
    """The tensors, of which those that are packed are not read: zeros of their shape, which take no memory."""
    stored, nothing = dict(tensors.stored), np.zeros((), np.int8)
    for name in {part for parts in packed.values() for part in parts}:
        stored[name] = replace(stored[name], load=partial(np.broadcast_to, nothing, stored[name].shape))
    return Tensors(stored)


def _parts(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {"embedding": ("model.embed_tokens.weight",)}
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        found[f"layers.{i}.qkv"] = tuple(f"{prefix}self_attn.{p}_proj.weight" for p in "qkv")
        found[f"layers.{i}.out"] = (f"{prefix}self_attn.o_proj.weight",)
        found[f"layers.{i}.gate_up"] = tuple(f"{prefix}mlp.{p}_proj.weight" for p in ("gate", "up"))
        found[f"layers.{i}.down"] = (f"{prefix}mlp.down_proj.weight",)
    if not config.tie_embeddings:
        found["head"] = ("lm_head.weight",)
    return found
