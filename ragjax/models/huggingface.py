"""Checkpoints laid out as on Hugging Face: config.json and safetensors.

Matrices may be stored in fewer bits (`quantization.py`). A field of config.json that would change the computation in a
way the decoder does not know is refused by name.
Fields: https://huggingface.co/docs/transformers; tensors: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ragjax.core import ConfigError
from ragjax.models.config import (
    GEMMA_FIELDS,
    GEMMA_HEAD_DIM,
    GEMMA_WINDOW,
    GLM,
    Family,
    ModelConfig,
    Rope,
    check,
    flag,
    integer,
    number,
    read_gemma,
    read_rope,
    token_ids,
)
from ragjax.models.quantization import read_scheme, section_of, widened
from ragjax.models.tensors import (
    Array,
    Checkpoint,
    Stored,
    Tensors,
    check_tensors,
    expected_shapes,
    raised,
    renamed,
    split_fused,
    stacked,
)

SAFETENSORS_DTYPES: Mapping[str, DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""The dtypes that are read, by their names in the format."""

_FLOAT8 = "F8_E4M3"
_PACKED_DTYPES = frozenset({*SAFETENSORS_DTYPES, "I8", "I32", "I64", _FLOAT8})
"""What is read where config.json says that matrices are stored in fewer bits."""

_log = logging.getLogger(__name__)

ARCHITECTURES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
}
"""The families that are read, and the class that config.json names."""

# Code of a repository that transformers has taken over; what it names is not read.
_OWN_CODE: Mapping[Family, Mapping[str, str]] = {
    "phi3": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    }
}

GLM4_NAMES = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Modules of GLM-4 of 2025, by Gemma 2's names."""

_GEMMA3 = "layers with RoPE bases and sliding windows of their own are not supported"
_REFUSED: Mapping[str, str] = {"gemma3": _GEMMA3, "gemma3_text": _GEMMA3}

# What the reference implementation assumes where config.json is silent.
_WINDOWS: Mapping[Family, int] = {"mistral": 4096, "gemma2": GEMMA_WINDOW}
_HEAD_DIMS: Mapping[Family, int] = {"qwen3": 128, "gemma2": GEMMA_HEAD_DIM, "glm": 128, "glm4": 128}

# Fields that are read for one family and refused for others.
_ROUTED = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
_QWEN_ROUTED = ("num_experts", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
_OWN_FIELDS: Mapping[Family, frozenset[str]] = {
    "gemma2": GEMMA_FIELDS,
    "mixtral": frozenset({*_ROUTED, "num_local_experts", "router_jitter_noise"}),
    "qwen3_moe": frozenset({*_ROUTED, *_QWEN_ROUTED}),
}
_ACTIVATIONS: Mapping[Family, tuple[str, ...]] = {"gemma2": ("gelu", "gelu_pytorch_tanh")}

# Fields of config.json that choose something the decoder has no code for, with the values that mean "off".
_MUST_BE_OFF: Mapping[str, tuple[Any, ...]] = {
    "mlp_bias": (None, False),
    "lm_head_bias": (None, False),
    "full_attn_mod": (None, 1),
    "interpolate_factor": (None, 1),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "num_experts_per_tok": (None, 0),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}

# Fields that do not change what the trained network computes, or that are read below.
_HARMLESS_NAMES = """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rope_theta rope_scaling rope_parameters rms_norm_eps tie_word_embeddings
    attention_bias hidden_act max_position_embeddings eos_token_id bos_token_id sliding_window use_sliding_window
    max_window_layers layer_types _name_or_path attention_dropout attn_implementation chunk_size_feed_forward dtype
    hidden_dropout id2label initializer_range is_decoder is_llama_config label2id output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type return_dict tokenizer_class torch_dtype
    transformers.js_config transformers_version unk_token_id use_cache
    quantization_config compression_config auto_map partial_rotary_factor original_max_position_embeddings
    resid_pdrop embd_pdrop
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())

# Rotation tables that old checkpoints carry along; the configuration says the same.
_REDUNDANT = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def open_directory(path: Path) -> Checkpoint:
    mapping = read_json(path / "config.json")
    config, scheme = read_config(mapping), read_scheme(mapping)
    generation = path / "generation_config.json"
    if generation.exists():
        extra = token_ids(read_json(generation), "eos_token_id")
        config = replace(config, eos_ids=tuple(dict.fromkeys(config.eos_ids + extra)))
    stored = open_safetensors(weight_files(path), frozenset(SAFETENSORS_DTYPES) if scheme is None else _PACKED_DTYPES)
    if scheme is not None:
        stored = widened(stored, scheme, path)
        expected = expected_shapes(config)
        biases = (name for name in stored if name.endswith(".bias") and name not in expected)
        stored = stored.without([name for name in biases if not np.any(stored[name])])  # early AutoGPTQ gave all a bias
    if config.family in ("phi3", *GLM):
        stored = split_fused(stored, config, path)
    if config.family == "glm4":
        stored = renamed(stored, GLM4_NAMES)
    if config.num_experts:
        stored = stacked(stored, config, path)
    if config.family == "gemma2":
        stored = raised(stored, 1.0, "norm.weight")  # what is stored is the distance from 1
    tensors = _drop_redundant(stored, config, path)
    check_tensors(tensors.shapes, config, path)
    return Checkpoint(config, tensors, quantized=scheme is not None)


def storage_note(path: Path) -> bytes:
    """Canonical text of config.json's quantization; with the weights' bytes it determines their values.

    Empty where they are stored plainly. Raises ConfigError as `open_directory`.
    """
    section = section_of(read_json(path / "config.json"))
    return b"" if section is None else json.dumps(section, sort_keys=True).encode()


def read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # to read a pipe would wait for ever
        raise ConfigError(f"{path}: is no file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent}: {path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def weight_files(path: Path) -> list[Path]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ConfigError(f"{index}: weight_map is missing")
        files = sorted({path / str(name) for name in names.values()})
    elif single.exists():
        files = [single]
    else:
        raise ConfigError(f"{path}: has neither model.safetensors nor model.safetensors.index.json")
    for file in files:
        if file.parent != path:
            raise ConfigError(f"{index}: names {file}, which lies outside the model's directory")
        if not file.is_file():
            raise ConfigError(f"{path}: {file.name}, named in {index.name}, is missing")
    return files


def open_safetensors(files: list[Path], dtypes: frozenset[str] = frozenset(SAFETENSORS_DTYPES)) -> Tensors:
    """Tensors of safetensors files, of these dtypes. Raises ConfigError that names the file and what it cannot read."""
    from safetensors import SafetensorError, safe_open

    stored: dict[str, Stored] = {}
    for file in files:
        try:
            handle: Any = safe_open(file, framework="np")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: truncated or not a safetensors file: {error}") from error
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            if name in stored:
                raise ConfigError(f"{file}: tensor {name} is in another file as well")
            view = handle.get_slice(name)
            dtype = view.get_dtype()
            if dtype not in dtypes:
                raise ConfigError(f"{file}: tensor {name} has unsupported type {dtype}")
            # safetensors gives no float8 to NumPy
            load = partial(_read_float8, file, name) if dtype == _FLOAT8 else partial(handle.get_tensor, name)
            stored[name] = Stored(load, tuple(view.get_shape()), dtype)
    return Tensors(stored)


def _read_float8(file: Path, name: str) -> Array:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        entry = json.loads(stream.read(length))[name]
        start, end = entry["data_offsets"]
        stream.seek(8 + length + start)
        return np.frombuffer(stream.read(end - start), ml_dtypes.float8_e4m3fn).reshape(entry["shape"])


def _drop_redundant(tensors: Tensors, config: ModelConfig, where: Path) -> Tensors:
    """Leave out tensors that repeat what is known; refuse an output head that ties do not allow."""
    dropped = {name for name in tensors if _REDUNDANT.fullmatch(name)}
    if config.tie_embeddings and {"lm_head.weight", "model.embed_tokens.weight"} <= set(tensors):
        if not np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            raise ConfigError(
                f"{where}: lm_head.weight differs from model.embed_tokens.weight, yet tie_word_embeddings is true"
            )
        dropped.add("lm_head.weight")
    return tensors.without(dropped)


def read_config(mapping: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of config.json. Raises ConfigError that names the field it cannot honour."""
    family = _family(mapping)
    _refuse_unsupported(mapping, family)
    heads = integer(mapping, "num_attention_heads")
    check(heads >= 1, "num_attention_heads", heads, "at least 1")
    hidden = integer(mapping, "hidden_size")
    head_dim = integer(mapping, "head_dim", _HEAD_DIMS.get(family, hidden // heads))
    rope = read_rope(mapping, family, head_dim)
    own: dict[str, Any] = {"tie_embeddings": flag(mapping, "tie_word_embeddings")}
    if family == "gemma2":
        own = read_gemma(mapping)
    if family in GLM:
        own |= {"neighbours": True, "post_norms": family == "glm4"}
    inner = integer(mapping, "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size")
    if family in ("mixtral", "qwen3_moe"):
        own |= _experts(mapping, family)
    return ModelConfig(
        **own,
        family=family,
        vocab_size=integer(mapping, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=integer(mapping, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=integer(mapping, "num_key_value_heads", heads if family in ("llama", "phi3") else None),
        head_dim=head_dim,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        norm_eps=number(mapping, "rms_norm_eps"),
        qkv_bias=family == "qwen2" or (family in GLM and flag(mapping, "attention_bias")),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        context_length=_context_length(mapping, family, rope),
        eos_ids=token_ids(mapping, "eos_token_id"),
        bos_id=next(iter(token_ids(mapping, "bos_token_id")), None),
        rotary_dim=rope.rotary_dim,
    )


def _experts(mapping: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of `ModelConfig` that mixtures of experts have; transformers' configurations have the defaults."""
    if family == "mixtral":
        return {
            "num_experts": integer(mapping, "num_local_experts", 8),
            "experts_per_token": integer(mapping, "num_experts_per_tok", 2),
        }
    step, dense = integer(mapping, "decoder_sparse_step", 1), mapping.get("mlp_only_layers") or []
    check(step == 1, "decoder_sparse_step", step, "1: every layer has experts")
    check(dense == [], "mlp_only_layers", dense, "empty: every layer has experts")
    return {
        "num_experts": integer(mapping, "num_experts", 128),
        "experts_per_token": integer(mapping, "num_experts_per_tok", 8),
        "share_out": flag(mapping, "norm_topk_prob"),
    }


def _context_length(mapping: Mapping[str, Any], family: Family, rope: Rope) -> int:
    """Tokens up to which the decoder computes what the model does, whose own limit may be higher."""
    whole = integer(mapping, "max_position_embeddings")
    limits = {"sliding_window": _sliding_window(mapping, family), "original_max_position_embeddings": rope.context}
    for field, limit in limits.items():
        if limit is not None and limit < whole:
            _log.warning(
                "the context is %d of the model's %d tokens: more than %s is not supported", limit, whole, field
            )
            whole = limit
    return whole


def _family(mapping: Mapping[str, Any]) -> Family:
    model_type = mapping.get("model_type")  # of any type
    family = next((family for family in ARCHITECTURES if family == model_type), None)
    if family is None:
        reason = "".join(f" ({why})" for name, why in _REFUSED.items() if name == model_type)
        raise ConfigError(f"model_type is {model_type!r}{reason}; supported are {', '.join(ARCHITECTURES)}")
    architectures = mapping.get("architectures") or [ARCHITECTURES[family]]
    if architectures != [ARCHITECTURES[family]]:
        raise ConfigError(f"architectures is {architectures!r}; supported for {family} is {ARCHITECTURES[family]}")
    return family


def _refuse_unsupported(mapping: Mapping[str, Any], family: Family) -> None:
    known = _OWN_FIELDS.get(family, frozenset())
    for key, allowed in _MUST_BE_OFF.items():
        if key not in known and mapping.get(key) not in allowed:
            raise ConfigError(f"model configuration: {key}={mapping[key]!r} is not supported")
    activations = _ACTIVATIONS.get(family, ("silu",))
    activation = mapping.get("hidden_act", activations[0])
    if activation not in activations:
        only = " or ".join(activations)
        raise ConfigError(f"model configuration: hidden_act={activation!r} is not supported, only {only}")
    bias = mapping.get("attention_bias")
    if bias not in (None, family == "qwen2") and family not in GLM:
        raise ConfigError(f"model configuration: attention_bias={bias!r} is not supported for {family}")
    own = _OWN_CODE.get(family, {})
    auto_map = mapping.get("auto_map") or {}
    if not isinstance(auto_map, dict):
        raise ConfigError(f"model configuration: auto_map={auto_map!r} must be an object")
    foreign = {name: code for name, code in auto_map.items() if own.get(name) != code}
    if foreign:
        raise ConfigError(f"model configuration: auto_map={foreign!r} is not supported, only code of transformers")
    unknown = sorted(set(mapping) - _HARMLESS - set(_MUST_BE_OFF) - known)
    if unknown:
        _log.warning("config.json has fields that nothing reads: %s", ", ".join(unknown))


def _sliding_window(mapping: Mapping[str, Any], family: Family) -> int | None:
    layer_types = mapping.get("layer_types") or []
    check(isinstance(layer_types, list | tuple), "layer_types", layer_types, "a list")
    for kind in layer_types:
        known = kind in ("full_attention", "sliding_attention")
        check(known, "layer_types", kind, "full_attention or sliding_attention, for each layer")
    window = mapping.get("sliding_window", _WINDOWS.get(family))
    if window is None:
        return None
    check(isinstance(window, int) and window >= 1, "sliding_window", window, "a whole number of at least 1, or null")
    if family not in ("qwen2", "qwen3", "qwen3_moe"):
        return int(window)
    slides = flag(mapping, "use_sliding_window")  # Qwen's window is given even where no layer slides
    if layer_types:
        slides &= "sliding_attention" in layer_types
    elif slides:
        layers = integer(mapping, "num_hidden_layers")
        slides = integer(mapping, "max_window_layers", layers - 1) < layers
    return int(window) if slides else None
