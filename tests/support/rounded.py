"""Tiny checkpoints whose matrices are kept in 8 or 4 bits, and what training adds to a model: an adapter, a packet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ragjax.models.weights import load_decoder
from tests.data.make_disk import DATA, HOME
from train.lora import Lora
from train.model import stacked
from train.soft import Soft

Kind = Literal["adapter", "packet"]


def rounded(folder: Path, family: str, bits: int, layers: int = 3) -> Path:
    """The first layers of a family's tiny model, its projections in 8 or 4 bits, laid out as by compressed-tensors."""
    source = DATA / f"tiny_{family}"
    shutil.copytree(HOME / "tokenizer", folder)
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "strategy": "channel", "symmetric": True}
    layout = {8: "int-quantized", 4: "pack-quantized"}[bits]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    section = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": section}
    config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, NDArray[Any]] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= layers:
            continue
        tensors |= _parts(name, value, bits) if name.endswith("_proj.weight") else {name: value}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _parts(name: str, weight_OI: NDArray[Any], bits: int) -> dict[str, NDArray[Any]]:
    half = 2 ** (bits - 1)
    scale_O1 = np.abs(weight_OI).max(1, keepdims=True).astype(np.float32) / (half - 1)
    code_OI = np.round(weight_OI / scale_O1).astype(np.int8)
    scale = {f"{name}_scale": scale_O1}
    if bits == 8:
        return {name: code_OI, **scale}
    nibble_OWN = (code_OI.astype(np.int64) + half).astype(np.uint32).reshape(len(code_OI), -1, 8)
    words_OW = (nibble_OWN << np.arange(0, 32, 4, dtype=np.uint32)).sum(2, dtype=np.uint32)
    shape = np.array(weight_OI.shape, np.int64)
    return {f"{name}_packed": words_OW.view(np.int32), f"{name}_shape": shape, **scale}


def trained(folder: Path, kind: Kind, seed: int = 1) -> Path:
    """The file of an adapter of all matrices, or of a packet, over the model in a folder; it lies beside the folder."""
    weights = stacked(load_decoder(folder, "float32", folder.parent / "cache"))
    file, about = folder.with_name(f"{folder.name}-{kind}.safetensors"), {"model": str(folder)}
    if kind == "packet":
        soft = Soft(2, 3)
        soft.save(soft.init(weights["embedding"], seed), file, about)
        return file
    lora, random = Lora(3, 6.0), np.random.default_rng(seed)
    pairs = jax.tree.map(
        lambda x: jnp.asarray(random.standard_normal(x.shape) * 0.1, jnp.float32), lora.init(weights["layers"], seed)
    )
    lora.save(pairs, file, about)
    return file
