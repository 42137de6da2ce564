"""A checkpoint as its files have it, and the tensors that a decoder's must hold.

Whatever the source, tensors appear under their Hugging Face names and in that orientation, so that a
projection is [out, in] and RoPE pairs component i with i + head_dim / 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.models.config import ModelConfig

Array = NDArray[Any]
Shape = tuple[int, ...]


class Tensors(Mapping[str, Array]):
    """Tensors by Hugging Face name, read (and dequantised) each time one is asked for."""

    def __init__(
        self, loaders: Mapping[str, Callable[[], Array]], shapes: Mapping[str, Shape], dtypes: Mapping[str, str]
    ):
        """A loader reads a tensor, `shapes` says what it will be, `dtypes` how it is stored, in the format's words."""
        self.loaders = dict(loaders)
        self.shapes = dict(shapes)
        self.dtypes = dict(dtypes)

    def __getitem__(self, name: str) -> Array:
        """Read one tensor: as stored, or float32 where the file is quantised."""
        return self.loaders[name]()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.loaders)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self.loaders)

    def without(self, names: Iterable[str]) -> Tensors:
        """The tensors but these."""
        left_out = frozenset(names)
        kept = [name for name in self if name not in left_out]
        return Tensors(
            {name: self.loaders[name] for name in kept},
            {name: self.shapes[name] for name in kept},
            {name: self.dtypes[name] for name in kept},
        )


@dataclass(frozen=True)
class Checkpoint:
    """A model as its files have it; `quantized` says that tensors are dequantised when read."""

    config: ModelConfig
    tensors: Tensors
    quantized: bool


def split_fused(tensors: Tensors, config: ModelConfig, where: Path) -> Tensors:
    """The tensors with fused projections (Phi-3) as the several that they are, each read with its neighbours.

    Raises:
        ConfigError: if a fused tensor has another number of rows than its parts ask for.
    """
    q, kv, inner = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    layouts = {
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    loaders, shapes, dtypes = {}, {}, {}
    fused = [name for name in tensors if name.split(".")[-2:-1] and name.split(".")[-2] in layouts]
    for name in fused:
        module = name.split(".")[-2]
        rows, first = tensors.shapes[name][0], 0
        if rows != sum(layouts[module].values()):
            raise ConfigError(f"{where}: tensor {name} has {rows} rows, expected {sum(layouts[module].values())}")
        for part, count in layouts[module].items():
            target = name.replace(module, part)
            loaders[target] = _rows_of(tensors.loaders[name], first, first + count)
            shapes[target] = (count, *tensors.shapes[name][1:])
            dtypes[target] = tensors.dtypes[name]
            first += count
    kept = tensors.without(fused)
    return Tensors(kept.loaders | loaders, kept.shapes | shapes, kept.dtypes | dtypes)


def raised(tensors: Tensors, amount: float, ending: str) -> Tensors:
    """The tensors with `amount` added to those whose name ends so, which become float32."""
    loaders = {name: _plus(load, amount) if name.endswith(ending) else load for name, load in tensors.loaders.items()}
    return Tensors(loaders, tensors.shapes, tensors.dtypes)


def _plus(load: Callable[[], Array], amount: float) -> Callable[[], Array]:
    return lambda: load().astype(np.float32) + np.float32(amount)


def _rows_of(load: Callable[[], Array], begin: int, end: int) -> Callable[[], Array]:
    return lambda: load()[begin:end]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every tensor that a checkpoint of this configuration has, by Hugging Face name."""
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
