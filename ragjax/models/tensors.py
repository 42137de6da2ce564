"""A checkpoint as its files have it, and the tensors that a decoder's must hold.

Whatever the source, tensors appear under their Hugging Face names and in that orientation, so that a
projection is [out, in] and RoPE pairs component i with i + head_dim / 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.kernels.cpu.packing import Codes, Packing
from ragjax.models.config import ModelConfig

Array = NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    load: reads it. shape: what it will be. dtype: how it is stored, in the format's words. coded: a matrix as whole
    numbers and scales, where its format has them.
    """

    load: Callable[[], Array]
    shape: Shape
    dtype: str
    coded: CodedMatrix | None = None


@dataclass(frozen=True)
class CodedMatrix:
    packing: Packing
    read: Callable[[], Codes]


class Tensors(Mapping[str, Array]):
    """Tensors by Hugging Face name, read (and dequantised) each time one is asked for."""

    def __init__(self, stored: Mapping[str, Stored]):
        self.stored = stored
        self.shapes = {name: one.shape for name, one in stored.items()}

    def __getitem__(self, name: str) -> Array:
        return self.stored[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def without(self, names: Iterable[str]) -> Tensors:
        left_out = frozenset(names)
        return Tensors({name: one for name, one in self.stored.items() if name not in left_out})


@dataclass(frozen=True)
class Checkpoint:
    """A model as its files have it; `quantized` says that tensors are dequantised when read."""

    config: ModelConfig
    tensors: Tensors
    quantized: bool


def split_fused(tensors: Tensors, config: ModelConfig, where: Path) -> Tensors:
    """The tensors with fused projections (Phi-3) as the several that they are, each read with its neighbours."""
    q, kv, inner = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    layouts = {
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    split: dict[str, Stored] = {}
    for name, whole in tensors.stored.items():
        parts = layouts.get((*name.split("."), "")[-3], {})
        if not parts:
            split[name] = whole
        elif whole.shape[0] != sum(parts.values()):
            raise ConfigError(f"{where}: tensor {name} has {whole.shape[0]} rows, expected {sum(parts.values())}")
        end = 0
        for part, count in parts.items():
            begin, end = end, end + count
            rows = partial(_rows, whole, begin, end)
            coded = whole.coded and replace(whole.coded, read=partial(_code_rows, whole.coded, begin, end))
            shape = (count, *whole.shape[1:])
            split[name.replace(name.split(".")[-2], part)] = Stored(rows, shape, whole.dtype, coded)
    return Tensors(split)


def raised(tensors: Tensors, amount: float, ending: str) -> Tensors:
    def load(stored: Stored) -> Array:
        return stored.load().astype(np.float32) + np.float32(amount)

    changed = {
        name: replace(one, load=partial(load, one)) for name, one in tensors.stored.items() if name.endswith(ending)
    }
    return Tensors({**tensors.stored, **changed})


_EXPERT = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def stacked(tensors: Tensors, config: ModelConfig, where: Path) -> Tensors:
    """The tensors with each kind of the experts' matrices as one, [experts, out, in], read expert by expert."""
    found = dict[str, Stored]()
    parts = dict[str, dict[int, Stored]]()
    for name, one in tensors.stored.items():
        if (match := _EXPERT.fullmatch(name)) is None:
            found[name.replace("block_sparse_moe", "mlp")] = one
            continue
        layer, expert, part = match.groups()
        parts.setdefault(f"{layer}.mlp.experts.{_MIXTRAL.get(part, part)}.weight", {})[int(expert)] = one
    for name, experts in parts.items():
        if sorted(experts) != list(range(config.num_experts)):
            raise ConfigError(f"{where}: {name} is of {len(experts)} experts, expected {config.num_experts}")
        whole = [experts[i] for i in range(config.num_experts)]
        load = partial(_stack, whole)
        found[name] = Stored(load, (len(whole), *whole[0].shape), whole[0].dtype)
    return Tensors(found)


def _stack(parts: Sequence[Stored]) -> Array:
    return np.stack([part.load() for part in parts])


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    def new(name: str) -> str:
        *before, module, kind = name.split(".")
        return ".".join((*before, names.get(module, module), kind))

    return Tensors({new(name): one for name, one in tensors.stored.items()})


def _rows(stored: Stored, begin: int, end: int) -> Array:
    return stored.load()[begin:end]


def _code_rows(coded: CodedMatrix, begin: int, end: int) -> Codes:
    return coded.read().rows(np.arange(begin, end))


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.num_experts:
        layer = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
        layer |= {"mlp.gate.weight": (config.num_experts, hidden)}
        layer |= {f"mlp.experts.{p}_proj.weight": (config.num_experts, inner, hidden) for p in ("gate", "up")}
        layer |= {"mlp.experts.down_proj.weight": (config.num_experts, hidden, inner)}
    if config.qkv_bias:
        layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if config.post_norms:
        layer |= {f"{name}_feedforward_layernorm.weight": (hidden,) for name in ("pre", "post")}
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensors(found: Mapping[str, Shape], config: ModelConfig, where: Path) -> None:
    """Compare tensors with what the configuration asks for. Raises ConfigError that names the first that differs."""
    # a damaged number of layers would fill the memory with names; so many layers miss a tensor anyway
    expected = expected_shapes(replace(config, num_layers=min(config.num_layers, len(found) + 1)))
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(f"{where}: tensor {name} is missing")
        if found[name] != shape:
            raise ConfigError(f"{where}: tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    for name in found:
        if name not in expected:
            raise ConfigError(f"{where}: unexpected tensor {name}; a {config.family} model does not have it")
