"""A small model, samples and adapters for tests of training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder
from ragjax.models.hub import LocalModel
from tests.support.plain import tensors_of
from tests.support.tiny import CONFIG, TEMPLATE, byte_tokenizer, decoder
from train.batch import Rows
from train.export import export, hf_config
from train.lora import Lora
from train.mesh import mesh_of
from train.model import Tree, stacked
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
    return mesh_of()


def weights_of(config: ModelConfig) -> Tree:
    return stacked(Decoder.from_tensors(config, tensors_of(config), jnp.dtype("float32")))


LORA = Lora(4, 8.0)


def adapters(seed: int = 0) -> Tree:
    made = LORA.init(weights_of(SMALL)["layers"], 0)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) * 0.05, jnp.float32), made)


def make_model(folder: Path) -> Path:
    """A tiny random model, laid out as on Hugging Face."""
    made = decoder(config=SMALL)
    folder.mkdir()
    tokenizer = {"eos_token": "<|end|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()._definition))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(hf_config(SMALL, "float32")))
    whole = folder.with_name("whole")
    export(stacked(made), SMALL, LocalModel("tiny", folder, "huggingface"), whole, "float32")
    return whole


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def last_step(folder: Path) -> int:
    """The last step that a run has noted; it may be at it now."""
    try:
        return max((line["step"] for line in lines(folder)), default=0)
    except (OSError, ValueError):
        return 0
