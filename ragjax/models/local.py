"""A model on this machine with what was trained for it: its decoder, its digest, and how it reads chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from ragjax.core import ConfigError, Wrapper
from ragjax.models.adapter import BLOCK, FORMAT, Adapter
from ragjax.models.decoder import Decoder
from ragjax.models.hub import LocalModel
from ragjax.models.packet import FORMAT as PACKET
from ragjax.models.packet import Packet
from ragjax.models.weights import load_decoder, open_checkpoint, weights_digest


def load_model(model: LocalModel, dtype: DTypeLike, cache_dir: str | Path) -> Decoder:
    """The decoder of a model, with its adapter if it has one.

    Raises:
        ConfigError: as `weights.open_checkpoint`; if the adapter is not for these weights.
    """
    decoder = load_decoder(model.path, dtype, cache_dir)
    if model.adapter is not None:
        trained = load_trained(model.adapter)
        check_weights(trained.about, weights_digest(model.path, cache_dir), str(model.path))
        trained.apply(decoder)
    return decoder


def load_trained(file: str | Path) -> Adapter | Packet:
    """What a file adds to a model.

    Raises:
        ConfigError: if it is neither an adapter nor a packet.
    """
    return Packet.load(file) if has_format(file, PACKET) else Adapter.load(file)


def check_weights(about: Mapping[str, str], digest: bytes, model: str) -> None:
    """Raise ConfigError if what says this of itself was trained on other weights than those of this digest."""
    if about.get("weights", digest.hex()) != digest.hex():
        raise ConfigError(f"the adapter was trained on other weights than those of {model}")


def wrapper_of(model: LocalModel) -> Wrapper | None:
    """The tokens of a model's packets; None if it has none."""
    if model.adapter is None or not has_format(model.adapter, PACKET):
        return None
    return Packet.load(model.adapter).wrapper(open_checkpoint(model.path).config.vocab_size)


def reads_blocks(model: LocalModel) -> bool:
    """Whether a model was trained to read chunks that see the system prompt and themselves alone."""
    if model.adapter is None or not has_format(model.adapter, FORMAT):
        return False
    return Adapter.load(model.adapter).about.get("attention") == BLOCK


def has_format(file: str | Path, name: str) -> bool:
    """Whether a file of safetensors says that it has this format; False if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        handle: Any = safe_open(file, framework="np")
        return bool((handle.metadata() or {}).get("format") == name)
    except (OSError, SafetensorError):
        return False


def model_digest(model: LocalModel, cache_dir: str | Path) -> bytes:
    """SHA-256 over everything a model's weights depend on, 32 bytes; of files, as `weights.weights_digest`."""
    weights = weights_digest(model.path, cache_dir)
    if model.adapter is None:
        return weights
    return hashlib.sha256(weights + weights_digest(model.adapter, cache_dir)).digest()
