"""A decoder's matrices as they stay packed: which can, and their bytes.

A fused matrix takes the packing that holds all its parts, and those of all layers: some checkpoints mix 4 and 6 bits.
Where a part is not quantised, or in a way that is not read as codes, it is dequantised in all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ragjax.kernels.cpu.packing import Codes, Packing, join, pack
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import own_arrays, per_kv_head
from ragjax.models.gguf_codes import PACKINGS
from ragjax.models.tensors import Tensors


class Sources:
    """The matrices of a decoder that can be packed, and the tensors that each is made of.

    tiled: products of many rows use AMX.

    Attributes:
        packings: how each is packed, by its name in the decoder.
    """

    def __init__(self, config: ModelConfig, tensors: Tensors, *, tiled: bool):
        self._config, self._tensors, self._tiled = config, tensors, tiled
        parts = _parts(config)
        whole = [name for name, of_name in parts.items() if not self._packed(of_name)]
        mixed = {_kind(name) for name in whole}  # one program serves all layers, so those of a kind are alike
        self._parts = {name: of_name for name, of_name in parts.items() if _kind(name) not in mixed}
        common = dict[str, Packing]()
        for name, of_name in self._parts.items():
            packing = self._packing(of_name)
            common[_kind(name)] = common.get(_kind(name), packing).common(packing)
        self.packings = {name: common[_kind(name)] for name in self._parts}

    def _packed(self, parts: tuple[str, ...]) -> bool:
        return all(self._tensors.stored[part].codes is not None for part in parts)

    def _packing(self, parts: tuple[str, ...]) -> Packing:
        first, *others = (PACKINGS[self._tensors.stored[part].dtype] for part in parts)
        for other in others:
            first = first.common(other)
        return replace(first, tiled=self._tiled)

    def arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """The arrays of `own_arrays`; packed matrices are uint8 (`kernels.cpu.packing.pack`)."""
        for name, value in own_arrays(self._config, _Empty(self._tensors, self._parts)):
            parts = self._parts.get(name)
            yield name, value if parts is None else pack(self._codes(name, parts))

    def _codes(self, name: str, parts: tuple[str, ...]) -> Codes:
        read = [self._tensors.stored[part].codes for part in parts]
        codes = join([one() for one in read if one is not None]).to(self.packings[name])
        if not name.endswith(".qkv"):
            return codes
        config = self._config
        ends = np.cumsum([config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2])
        rows = np.split(np.arange(ends[-1]), ends[:-1])
        return codes.rows(per_kv_head(config, rows).reshape(-1))


def _kind(name: str) -> str:
    """A matrix's name without its layer."""
    return name.rsplit(".", 1)[-1]


class _Empty(Mapping[str, NDArray[np.generic]]):
    """Tensors of which those that are packed are not read: zeros of their shape, which take no memory."""

    def __init__(self, tensors: Tensors, packed: Mapping[str, tuple[str, ...]]):
        self._tensors = tensors
        self._packed = {part for parts in packed.values() for part in parts}

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        if name not in self._packed:
            return self._tensors[name]
        return np.broadcast_to(np.zeros((), np.int8), self._tensors.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _parts(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The tensors of each of a decoder's matrices, in the order of its rows."""
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
