"""A model on this machine with what was trained for it: its decoder, its digest, and how it reads chunks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import DTypeLike, NDArray

from ragjax.core import ConfigError, Wrapper
from ragjax.models.decoder import INPUTS, Decoder
from ragjax.models.hub import LocalModel
from ragjax.models.packed import PackedForm
from ragjax.models.weights import load_decoder, open_checkpoint, weights_digest


def load_model(model: LocalModel, dtype: DTypeLike, cache_dir: str | Path, packed: PackedForm | None = None) -> Decoder:
    """The decoder of a model, with its adapter if it has one, which asks for matrices that are not packed."""
    trained = None if model.adapter is None else load_trained(model.adapter)
    if isinstance(trained, Adapter):
        if packed is not None and packed.bits is not None:
            raise ConfigError(f"{model.adapter}: an adapter changes weights as they are stored; leave --weights out")
        packed = None
    decoder = load_decoder(model.path, dtype, cache_dir, packed)
    if trained is not None:
        check_weights(trained.about, weights_digest(model.path, cache_dir), str(model.path))
        trained.apply(decoder)
    return decoder


def load_trained(file: str | Path) -> Adapter | PacketFile:
    return PacketFile.load(file) if _read(file)[0]["format"] == PACKET_FORMAT else Adapter.load(file)


def _read(file: str | Path) -> tuple[dict[str, str], Arrays]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as handle:
            about = {"format": "", **(handle.metadata() or {})}
            return about, {name: handle.get_tensor(name).astype(np.float32) for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError) as error:
        raise ConfigError(f"{file}: cannot be read as an adapter or packet: {error}") from error


def check_weights(about: Mapping[str, str], digest: bytes, model: str) -> None:
    if about.get("weights", digest.hex()) != digest.hex():
        raise ConfigError(f"the adapter was trained on other weights than those of {model}")


def wrapper_of(model: LocalModel) -> Wrapper | None:
    trained = None if model.adapter is None else load_trained(model.adapter)
    if not isinstance(trained, PacketFile):
        return None
    return trained.wrapper(open_checkpoint(model.path).config.vocab_size)


def reads_blocks(model: LocalModel) -> bool:
    """True if a model was trained on chunks that see only the system prompt and themselves."""
    trained = None if model.adapter is None else load_trained(model.adapter)
    return isinstance(trained, Adapter) and trained.about.get("attention") == BLOCK


def model_digest(model: LocalModel, cache_dir: str | Path) -> bytes:
    """SHA-256 over everything a model's weights depend on, 32 bytes; of files, as `weights.weights_digest`."""
    weights = weights_digest(model.path, cache_dir)
    if model.adapter is None:
        return weights
    return hashlib.sha256(weights + weights_digest(model.adapter, cache_dir)).digest()


LORA_FORMAT = "ragjax-lora-1"

BLOCK = "block"
"""The attention that an adapter says it was trained for, if that is block attention (arXiv 2409.15355)."""

Arrays = dict[str, NDArray[np.float32]]
Pair = dict[str, Any]
"""a: [L, rank, *inputs]; b: [L, *outputs, rank]. Of one layer, without L."""


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapters of all layers (LoRA, arXiv 2106.09685): W + s B A, s = alpha / rank; float32, by matrix name.

    A fused matrix has one adapter: query, key and value share its A, as do gate and up. about: what else the file says:
    the model's name, and the digest of the weights they were trained on.
    """

    pairs: Mapping[str, Mapping[str, NDArray[np.float32]]]
    rank: int
    alpha: float
    about: Mapping[str, str]

    @staticmethod
    def load(file: str | Path) -> Adapter:
        about, tensors = _read(file)
        if about.pop("format") != LORA_FORMAT:
            raise ConfigError(f"{file}: not a LoRA adapter of ragjax")
        try:
            pairs: dict[str, dict[str, NDArray[np.float32]]] = {}
            for name, value in tensors.items():
                matrix, part = name.split(".")
                pairs.setdefault(matrix, {})[part] = value
            values = json.loads(about.pop("lora"))
            rank = int(values["rank"])
            if rank < 1 or not set(pairs) <= set(INPUTS):
                raise ValueError(f"rank {rank}, on {', '.join(pairs)}")
            return Adapter(pairs, rank, float(values["alpha"]), about)
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(f"{file}: cannot be read as a LoRA adapter: {error}") from error

    def merged(self, name: str, weight_LOI: jax.Array) -> jax.Array:
        """All layers' matrices of this name, stacked, with their adapters, float32; as they are if they have none."""
        if name not in self.pairs:
            return weight_LOI
        found = {part: tuple(value.shape) for part, value in self.pairs[name].items()}
        wanted = pair_shapes(name, weight_LOI.shape, self.rank)
        if found != wanted:
            raise ConfigError(f"the adapter's {name} has shapes {found}, and the model asks for {wanted}")
        factor, (a_LRI, b_LOR) = jnp.float32(self.alpha / self.rank), (self.pairs[name][part] for part in "ab")
        changes = (
            jnp.tensordot(jnp.asarray(b), jnp.asarray(a), axes=1, precision="highest")
            for a, b in zip(a_LRI, b_LOR, strict=True)
        )
        merged = (w.astype(jnp.float32) + factor * change for w, change in zip(weight_LOI, changes, strict=True))
        return jnp.stack(list(merged))

    def apply(self, decoder: Decoder) -> None:
        for name in self.pairs:
            weights = [getattr(layer, name) for layer in decoder.layers]
            merged_LOI = self.merged(name, jnp.stack([weight[...] for weight in weights]))
            for weight, value in zip(weights, merged_LOI, strict=True):
                weight.set_value(value.astype(weight.dtype))


def pair_shapes(name: str, shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    layers, outputs, inputs = shape[:1], shape[1 : -INPUTS[name]], shape[-INPUTS[name] :]
    return {"a": (*layers, rank, *inputs), "b": (*layers, *outputs, rank)}


PACKET_FORMAT = "ragjax-packet-1"


@dataclass(frozen=True)
class PacketFile:
    """Soft tokens around passages (KV Packet, arXiv 2604.13226): a header [h, E] and a trailer [t, E], float32.

    They are embeddings, trained by `python -m train.packet`; in a prompt they are tokens behind the vocabulary: no text
    contains them, and the model never says one. about: as of `Adapter`.
    """

    header_HE: NDArray[np.float32]
    trailer_HE: NDArray[np.float32]
    about: Mapping[str, str]

    @staticmethod
    def load(file: str | Path) -> PacketFile:
        about, tensors = _read(file)
        if about.pop("format") != PACKET_FORMAT:
            raise ConfigError(f"{file}: not a packet of ragjax")
        shapes = {name: tensors[name].shape for name in ("header", "trailer") if name in tensors}
        if [len(shape) for shape in shapes.values()] != [2, 2] or len({shape[1] for shape in shapes.values()}) != 1:
            raise ConfigError(f"{file}: cannot be read as a packet: shapes {shapes}")
        return PacketFile(tensors["header"], tensors["trailer"], about)

    def wrapper(self, vocabulary: int) -> Wrapper:
        return Wrapper.of(vocabulary, len(self.header_HE), len(self.trailer_HE))

    def apply(self, decoder: Decoder) -> None:
        rows_SE = np.concatenate([self.header_HE, self.trailer_HE])
        if rows_SE.shape[1] != decoder.config.hidden_size:
            raise ConfigError(
                f"the packet's embeddings have {rows_SE.shape[1]} components, the model's {decoder.config.hidden_size}"
            )
        config = replace(decoder.config, soft_tokens=len(rows_SE))
        soft = Decoder.abstract(config).soft
        assert soft is not None
        soft.set_value(jnp.asarray(rows_SE))
        decoder.config, decoder.soft = config, nnx.data(soft)
