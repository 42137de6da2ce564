"""A checkpoint of a real model's shapes with random weights and one token a byte, for machines without a network.

Its command line is a name of `SHAPES` and a folder.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.latency.bare import LLAMA, TINY, hf_config
from ragjax.models.config import ModelConfig
from ragjax.models.tensors import expected_shapes

SHAPES: Mapping[str, ModelConfig] = {"llama-3-8b": LLAMA, "tiny": TINY}
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
END = 257  # behind 256 bytes and the token that begins a message
BLOCK = 1 << 22  # random numbers, which all tensors share


def write_random(config: ModelConfig, folder: Path) -> Path:
    """Write a checkpoint unless a whole one is there; its folder."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_tensors(expected_shapes(config), folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    _write_config(config, folder, END)
    return folder


def write_weights(config: ModelConfig, folder: Path, tensors: Mapping[str, NDArray[Any]]) -> Path:
    """Write a Llama without its tokenizer, in bfloat16, unless it is there; its folder."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: np.asarray(tensor).astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(config, folder, config.eos_ids[0])
    return folder


def _write_config(config: ModelConfig, folder: Path, end: int) -> None:
    """Write it last: it says that the checkpoint is whole."""
    about: dict[str, Any] = {"model_type": config.family, "architectures": ["LlamaForCausalLM"]}
    about |= {"torch_dtype": "bfloat16", "rope_theta": config.rope_theta, "head_dim": config.head_dim}
    (folder / "config.json").write_text(json.dumps(hf_config(config) | about | {"eos_token_id": end}), encoding="utf-8")


def _write_tensors(shapes: Mapping[str, tuple[int, ...]], file: Path) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    normal = np.random.default_rng(0).normal(size=BLOCK).astype(np.float32)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            left = int(np.prod(shape))
            scale = 0.02 if len(shape) == 1 or "embed" in name else shape[-1] ** -0.5
            block = (np.ones(left) if len(shape) == 1 else normal * scale).astype(ml_dtypes.bfloat16)
            while left:
                out.write(block[:left].tobytes())
                left -= min(left, len(block))


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|start|>", "<|end|>"])
    return made


def main(arguments: Sequence[str]) -> int:
    name, folder = arguments
    print(write_random(SHAPES[name], Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
