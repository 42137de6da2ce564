"""Trained weights as a directory that our server and transformers load: safetensors, config.json, tokenizer.json.

    python -m train.export --model MODEL --adapter adapter.safetensors --out DIR

merges a LoRA adapter into its model. Names and orientation are Hugging Face's: the inverse of `Decoder.from_tensors`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ragjax.commands.flags import Parser, exit_code
from ragjax.core import ConfigError
from ragjax.core.file import atomic_path
from ragjax.models.config import Family, LongRope, ModelConfig
from ragjax.models.gguf import read_gguf
from ragjax.models.hub import LocalModel, cache_dir, resolve
from ragjax.models.huggingface import ARCHITECTURES, read_json
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.trained import Adapter, check_weights
from ragjax.models.weights import load_decoder, weights_digest
from train.model import Tree, stacked

SHARD_BYTES = 4 * 2**30
"""Tensors are split over files of about this size."""

TRAINED: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
"""The families whose checkpoints are written."""

BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What of a Hugging Face directory is taken over as it is, where there is such a file."""


STORAGE = ("quantization_config", "compression_config")
"""Fields of config.json that say how matrices are stored; those written are plain."""


def check_family(config: ModelConfig) -> None:
    """Raise ConfigError if checkpoints of the model's family are not written, and so not trained either."""
    if config.family not in TRAINED:
        raise ConfigError(f"models of the family {config.family} are not trained; trained are {', '.join(TRAINED)}")


def export(weights: Tree, config: ModelConfig, source: LocalModel, out: str | Path, dtype: str = "bfloat16") -> None:
    """Write a model (`model.stacked`) to a directory that does not exist yet, or is empty.

    source: the model it was made from, for its tokenizer, and its config.json if it has one. dtype: of all that is
    written; norms and biases too, as is usual.
    """
    check_family(config)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.strerror}; give a new directory") from error
    if any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; give a new directory")
    _write_tensors(tensors_of(weights, config), out, jnp.dtype(dtype))
    if source.kind == "huggingface":
        for name in BESIDE:
            if (source.path / name).exists():
                shutil.copyfile(source.path / name, out / name)
        given = read_json(out / "config.json")
        kept = {name: value for name, value in given.items() if name not in STORAGE}
        _write(out / "config.json", kept | {"torch_dtype": dtype})
        return
    _write(out / "config.json", hf_config(config, dtype))
    _write_tokenizer(source.path, out)


# ------------------------------------------------------------------------------------------ tensors


def tensors_of(weights: Tree, config: ModelConfig) -> Iterator[tuple[str, NDArray[Any]]]:
    """Each tensor under its Hugging Face name, [out, in], one layer at a time."""
    yield "model.embed_tokens.weight", np.asarray(weights["embedding"])
    for i in range(config.num_layers):
        layer = {name: np.asarray(x[i]) for name, x in weights["layers"].items()}
        for name, value in _unfused(layer, config).items():
            yield f"model.layers.{i}.{name}", value
    yield "model.norm.weight", np.asarray(weights["norm"])
    if "head" in weights:
        yield "lm_head.weight", np.asarray(weights["head"])


def _unfused(layer: Mapping[str, NDArray[Any]], config: ModelConfig) -> dict[str, NDArray[Any]]:
    """One layer's weights as Hugging Face has them; inverse of the fusing in `Decoder.from_tensors`."""
    g, e = config.num_groups, config.hidden_size
    parts = {"q": slice(0, g), "k": slice(g, g + 1), "v": slice(g + 1, g + 2)}
    tensors = {
        "input_layernorm.weight": layer["attention_norm"],
        "post_attention_layernorm.weight": layer["mlp_norm"],
        "self_attn.o_proj.weight": layer["out"].reshape(e, -1),
        "mlp.gate_proj.weight": layer["gate_up"][0],
        "mlp.up_proj.weight": layer["gate_up"][1],
        "mlp.down_proj.weight": layer["down"],
    }
    for name, part in parts.items():
        tensors[f"self_attn.{name}_proj.weight"] = layer["qkv"][:, part].reshape(-1, e)
        if "qkv_bias" in layer:
            tensors[f"self_attn.{name}_proj.bias"] = layer["qkv_bias"][:, part].reshape(-1)
        if f"{name}_norm" in layer:
            tensors[f"self_attn.{name}_norm.weight"] = layer[f"{name}_norm"]
    return tensors


def _write_tensors(tensors: Iterator[tuple[str, NDArray[Any]]], out: Path, dtype: jnp.dtype) -> None:
    from safetensors.flax import save_file

    files: list[dict[str, Any]] = [{}]
    size = total = 0
    names: dict[str, int] = {}

    def flush() -> None:
        save_file(files[-1], out / f"part-{len(files)}", {"format": "pt"})
        files[-1] = dict.fromkeys(files[-1])

    for name, value in tensors:
        bytes_of = value.size * dtype.itemsize
        if size and size + bytes_of > SHARD_BYTES:
            flush()
            files.append({})
            size = 0
        files[-1][name] = jnp.asarray(value, dtype)
        names[name] = len(files)
        size += bytes_of
        total += bytes_of
    flush()
    if len(files) == 1:
        (out / "part-1").rename(out / "model.safetensors")
        return
    final = {n: f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)}
    for n, name in final.items():
        (out / f"part-{n}").rename(out / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: final[n] for name, n in names.items()}}
    _write(out / "model.safetensors.index.json", index)


# --------------------------------------------------------------------------- config and tokenizer


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """A config.json for a configuration: the inverse of `ragjax.models.huggingface.read_config`."""
    scaling = config.rope_scaling
    assert not isinstance(scaling, LongRope), "check_family"
    value: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) if len(config.eos_ids) > 1 else next(iter(config.eos_ids), None),
        "torch_dtype": dtype,
    }
    if scaling is not None:
        value["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    if config.family == "mistral":
        value["sliding_window"] = None  # left out, it would mean 4,096
    if config.family in ("llama", "qwen3"):
        value["attention_bias"] = False
    return value


def _write_tokenizer(gguf: Path, out: Path) -> None:
    """The tokenizer of a GGUF file in Hugging Face's two files."""
    metadata = read_gguf(gguf)[0]
    tokenizer = Tokenizer.from_gguf(metadata)
    _write(out / "tokenizer.json", tokenizer._definition)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for role, name in roles.items():
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            settings[f"{role}_token"] = tokenizer.id_to_text(int(token))
    _write(out / "tokenizer_config.json", settings)


def _write(file: Path, value: Mapping[str, Any]) -> None:
    with atomic_path(file) as part:
        part.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------ command


def merge(weights: Tree, adapter: Adapter) -> Tree:
    """Weights with an adapter merged into them; what is merged becomes float32."""
    layers = {name: adapter.merged(name, weight) for name, weight in weights["layers"].items()}
    return {**weights, "layers": layers}


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("python -m train.export", lambda: _run(argv), 1)


def _run(argv: Sequence[str] | None) -> int:
    options = _options(argv)
    adapter, source = Adapter.load(options.adapter), resolve(options.model)
    if source.adapter is not None:
        raise ConfigError(f"--model: {options.model} has an adapter itself; name the model under it")
    check_weights(adapter.about, weights_digest(source.path, cache_dir()), options.model)
    decoder = load_decoder(source.path, "float32", cache_dir())
    export(merge(stacked(decoder), adapter), decoder.config, source, options.out, options.dtype)
    print(f"written to {options.out}; serve it by python -m ragjax.serve --model {options.out}")
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m train.export", "Merge a LoRA adapter into its model.")
    flag = parser.add_argument
    flag("--model", required=True, help="the model that the adapter was trained on, as the server's")
    flag("--adapter", required=True, help="adapter.safetensors of python -m train.depft")
    flag("--out", required=True, help="a new directory")
    flag("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of what is written (default: bfloat16)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
