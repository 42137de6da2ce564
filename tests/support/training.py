"""A small model, samples and adapters for tests of training."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder
from tests.support.plain import tensors_of
from tests.support.tiny import CONFIG
from train.batch import Rows
from train.lora import Lora
from train.model import DEVICES, Tree, stacked
from train.sample import Sample

SMALL = replace(CONFIG, num_layers=2)
QWEN = replace(SMALL, family="qwen3", qk_norm=True, tie_embeddings=False)
ROWS = Rows((512,))
SAMPLES = (
    Sample("a", "Who?", "Ann", (("B", "r", "C"), ("B", "r", "Cd", "s", "E"), ("B", "q", "C"), ("F", "r", "B"))),
    Sample("b", "Where to?", "Rome, Bath", (("Ann", "went to", "Rome"), ("Ann", "went to", "Bath"))),
    Sample("c", "Hello.", "Hello yourself."),
)


def one_device() -> Mesh:
    return jax.make_mesh((1, 1), DEVICES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])


def weights_of(config: ModelConfig) -> Tree:
    return stacked(Decoder.from_tensors(config, tensors_of(config), jnp.dtype("float32")))


LORA = Lora(4, 8.0)


def adapters(seed: int = 0) -> Tree:
    made = LORA.init(weights_of(SMALL)["layers"], 0)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) * 0.05, jnp.float32), made)
