"""Checkpoints in GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.kernels.cpu.packing import Codes
from ragjax.models.config import (
    GEMMA_ATTENTION_CAP,
    GEMMA_LOGIT_CAP,
    GEMMA_WINDOW,
    GLM,
    Family,
    LongRope,
    ModelConfig,
    RopeScaling,
    check,
    integer,
    inverse_frequencies,
    number,
    rope_divisors,
    token_ids,
)
from ragjax.models.gguf_codes import PACKINGS, read_codes
from ragjax.models.tensors import Array, Checkpoint, CodedMatrix, Shape, Stored, Tensors, check_tensors, split_fused

# GGUF keys below the architecture's prefix that are read, that say nothing, or that must have one value.
_READ_NAMES = """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.finetuned tensor_data_layout
    rope.scaling.original_context_length
"""
_READ = frozenset(_READ_NAMES.split())
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.factor": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
}

# Keys that are read for one architecture alone.
_EXPERTS = ("expert_count", "expert_used_count")
_OWN_KEYS: Mapping[str, frozenset[str]] = {
    "llama": frozenset(_EXPERTS),
    "qwen3moe": frozenset({*_EXPERTS, "expert_feed_forward_length"}),
    "phi3": frozenset({"attention.sliding_window", "rope.scaling.attn_factor"}),
    "gemma2": frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
}
_PHI3_4K, _PHI3_4K_WINDOW = 4096, 2047  # context and window of its mini and medium models
_GEMMA2_27B_LAYERS = 46  # the one whose attention scale is of another width; no key says so

ARCHITECTURES: Mapping[str, Family] = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma2": "gemma2", "qwen3moe": "qwen3_moe",
    "chatglm": "glm", "glm4": "glm4",
}  # fmt: skip
"""The architectures that are read, and their families; Mistral's and Mixtral's is llama."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
OWN_LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "glm": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
"""Names of one architecture, before those of all."""
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"

# Every GGUF file of Llama 3.1 and later was made from these; only the factor differs.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}


@dataclass(frozen=True)
class TensorEntry:
    """Place of a tensor in a GGUF file; shape is [out, in], offset and size are in bytes."""

    shape: Shape
    kind: int
    offset: int
    size: int


def read_gguf(path: str | Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Metadata and tensor directory of a GGUF file (versions 2 and 3, little endian).

    The header is parsed here because the reader of the gguf package takes seconds for a vocabulary of
    150,000 entries. Raises ConfigError on truncated files and unknown types.
    """
    path = Path(path)
    stat = path.stat()
    return _read_head(path.absolute(), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)  # tokenizer, configuration and weights ask for it
def _read_head(path: Path, size: int, modified_ns: int) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    header = _Header(np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8), path)
    metadata, tensors = header.read()
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConfigError(f"{path}: split.count is {parts!r}; merge the parts into one file first")
    return metadata, tensors


class _Header:
    _SCALARS: Mapping[int, str] = {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
    }  # fmt: skip
    _STRING, _ARRAY = 8, 9

    def __init__(self, data: Array, path: Path):
        self._data, self._at, self._path = data.data, 0, path

    def read(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        try:
            return self._read()
        except (struct.error, IndexError, ArithmeticError, MemoryError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self._path}: the GGUF header is truncated or damaged") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path}: the GGUF header holds text that is not UTF-8") from error

    def _read(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        if bytes(self._data[:4]) != b"GGUF":
            raise ConfigError(f"{self._path}: not a GGUF file")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ConfigError(f"{self._path}: GGUF version {version} is not supported, only 2 and 3 (little endian)")
        tensor_count, key_count = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._text()
            metadata[key] = self._value(self._scalar("<I"))
        entries = []
        for _ in range(tensor_count):
            name = self._text()
            sizes = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
            entries.append((name, tuple(reversed(sizes)), self._scalar("<I"), self._scalar("<Q")))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{self._path}: the GGUF header is damaged: general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return metadata, {name: self._place(name, shape, kind, start + at) for name, shape, kind, at in entries}

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        length = self._scalar("<Q")
        end = self._at + length
        if end > len(self._data):
            raise IndexError
        text = bytes(self._data[self._at : end]).decode("utf-8")
        self._at = end
        return text

    def _texts(self, count: int) -> list[str]:
        """Many texts: a vocabulary has some 100,000."""
        data, at, found, length_at = self._data, self._at, list[str](), struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0]
            if at > len(data):
                raise IndexError
            found.append(str(data[begin:at], "utf-8"))
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == self._STRING:
            return self._text()
        if kind == self._ARRAY:
            inner, count = self._scalar("<I"), self._scalar("<Q")
            if inner == self._STRING:
                return self._texts(count)
            if inner not in self._SCALARS:
                return [self._value(inner) for _ in range(count)]
            form = f"<{count}{self._SCALARS[inner][1]}"
            values = list(struct.unpack_from(form, self._data, self._at))
            self._at += struct.calcsize(form)
            return values
        if kind not in self._SCALARS:
            raise ConfigError(f"{self._path}: the GGUF header has a value of unknown type {kind}")
        return self._scalar(self._SCALARS[kind])

    def _place(self, name: str, shape: Shape, kind: int, offset: int) -> TensorEntry:
        from gguf import GGML_QUANT_SIZES

        if kind not in GGML_QUANT_SIZES:
            raise ConfigError(f"{self._path}: tensor {name} has unknown type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[kind]  # type: ignore[index]
        if not shape or shape[-1] % block:
            raise ConfigError(
                f"{self._path}: tensor {name} of shape {list(shape)} does not divide into blocks of {block}"
            )
        size = int(np.prod(shape, dtype=object)) // block * block_bytes
        if offset + size > len(self._data):
            raise ConfigError(f"{self._path}: truncated: tensor {name} ends beyond the end of the file")
        return TensorEntry(shape, kind, offset, size)


def open_gguf(path: Path) -> Checkpoint:
    from gguf import GGMLQuantizationType

    metadata, stored = read_gguf(path)
    bare = read_config(metadata, tie_embeddings="output.weight" not in stored)
    if bare.family in GLM:
        bare = replace(bare, qkv_bias=not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(stored))
    config = bare
    if _ROPE in stored:
        scaling = _rope_scaling(_read_tensor(path, stored.pop(_ROPE), _ROPE), bare, path)
        config = replace(bare, rope_scaling=scaling)
    if _SHORT in stored:
        stored.pop(_LONG, None)  # LongRoPE is read up to the first length, for which the short factors are
        prefix = f"{config.family}.rope.scaling."
        original = integer(metadata, prefix + "original_context_length")
        factors = tuple(map(_shortest, _read_tensor(path, stored.pop(_SHORT), _SHORT)))
        scaled = LongRope(factors, number(metadata, prefix + "attn_factor", 1.0))
        config = replace(bare, rope_scaling=scaled, context_length=min(config.context_length, original))
    names = {**LAYER_NAMES, **OWN_LAYER_NAMES.get(config.family, {})}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if config.family in ("llama", "mixtral") else {}
    found: dict[str, Stored] = {}
    for name, tensor in stored.items():
        target = _name_of(name, names, path)
        count = heads.get(target.split(".")[-2])
        load = partial(_read_tensor, path, tensor, name, count)
        kind = GGMLQuantizationType(tensor.kind).name
        packable = kind in PACKINGS and len(tensor.shape) == 2
        read = partial(_read_codes, path, tensor, kind, count)
        coded = CodedMatrix(PACKINGS[kind], read) if packable else None
        found[target] = Stored(load, tensor.shape, kind, coded)
    tensors = Tensors(found)
    if config.family in ("phi3", *GLM):
        tensors = split_fused(tensors, config, path)
    check_tensors(tensors.shapes, config, path)
    return Checkpoint(config, tensors, quantized=True)


def _name_of(name: str, layer_names: Mapping[str, str], path: Path) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in layer_names:
        raise ConfigError(f"{path}: unexpected tensor {name}")
    return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"


def _read_tensor(path: Path, tensor: TensorEntry, name: str, heads: int | None = None) -> NDArray[np.float32]:
    """Read a tensor as float32. heads: whose rows are brought from GGUF's order (`unpermute_rope_rows`)."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.kind)
    try:
        read = dequantize(_raw(path, tensor), kind).reshape(tensor.shape).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise ConfigError(f"{path}: tensor {name} has type {kind.name}, which cannot be dequantised") from error
    return read if heads is None else unpermute_rope_rows(read, heads)


def _raw(path: Path, tensor: TensorEntry) -> NDArray[np.uint8]:
    return np.asarray(np.memmap(path, np.uint8, "r", tensor.offset, (tensor.size,))).reshape(*tensor.shape[:-1], -1)


def _read_codes(path: Path, tensor: TensorEntry, kind: str, heads: int | None) -> Codes:
    codes = read_codes(_raw(path, tensor), kind)
    return codes if heads is None else codes.rows(unpermute_rope_rows(np.arange(tensor.shape[0]), heads))


def unpermute_rope_rows(weight: Array, heads: int) -> Array:
    """Bring q or k rows from RoPE on neighbours (2i, 2i+1) to RoPE on halves (i, i + D/2).

    weight: [heads * D, ...], as GGUF's llama architecture stores it.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _rope_scaling(divisors: NDArray[np.float32], config: ModelConfig, path: Path) -> RopeScaling | None:
    """Recover the Llama-3.1 scaling that a table of divisors [D / 2] was made from."""
    inv_freq_R = inverse_frequencies(config.rope_theta, config.head_dim, None)
    if divisors.shape != inv_freq_R.shape:
        raise ConfigError(f"{path}: tensor {_ROPE} has shape {list(divisors.shape)}, expected {list(inv_freq_R.shape)}")
    if np.all(divisors == 1.0):
        return None
    scaling = RopeScaling(factor=float(divisors.max()), **_LLAMA3_ROPE)  # type: ignore[arg-type]
    if not np.allclose(divisors, rope_divisors(inv_freq_R, scaling), rtol=1e-4):
        raise ConfigError(f"{path}: tensor {_ROPE} is not Llama-3.1 RoPE scaling, the only kind supported")
    return scaling


def read_config(metadata: Mapping[str, Any], *, tie_embeddings: bool) -> ModelConfig:
    """Read GGUF metadata of the architectures of `ARCHITECTURES`.

    Whether the embeddings are tied stands in the tensors, so their reader says so; scaling of RoPE, which stands there
    too, is added by `open_gguf`. Raises ConfigError that names the key.
    """
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"general.architecture is {architecture!r}; supported in GGUF are {', '.join(ARCHITECTURES)}")
    prefix = f"{architecture}."
    _refuse_unsupported(metadata, prefix)
    heads = integer(metadata, prefix + "attention.head_count")
    check(heads >= 1, prefix + "attention.head_count", heads, "at least 1")
    hidden = integer(metadata, prefix + "embedding_length")
    head_dim = integer(metadata, prefix + "attention.key_length", hidden // heads)
    turned = integer(metadata, prefix + "rope.dimension_count", head_dim)
    values = integer(metadata, prefix + "attention.value_length", head_dim)
    check(values == head_dim, prefix + "attention.value_length", values, f"{head_dim}, the head dimension")
    family = ARCHITECTURES[architecture]
    whole = turned == head_dim or family in ("phi3", *GLM)
    check(whole, prefix + "rope.dimension_count", turned, f"{head_dim}, the head dimension")
    layers = integer(metadata, prefix + "block_count")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_size = integer(metadata, prefix + "vocab_size", None if tokens is None else len(tokens))
    listed = tokens is None or len(tokens) == vocab_size
    check(listed, prefix + "vocab_size", vocab_size, "the number of tokens listed")
    # of the sequence, and of a turn or message where the file names them
    ends = [e for kind in ("eos", "eot", "eom") for e in token_ids(metadata, f"tokenizer.ggml.{kind}_token_id")]
    context = integer(metadata, prefix + "context_length")
    # the windows of files older than their key, as llama.cpp has them
    phi3_window = _PHI3_4K_WINDOW if context == _PHI3_4K else 0
    old_window = {"gemma2": GEMMA_WINDOW, "phi3": phi3_window}.get(architecture, 0)
    window = integer(metadata, prefix + "attention.sliding_window", old_window)
    own = _gemma2(metadata, layers, hidden, heads, head_dim) if architecture == "gemma2" else {}
    if family in GLM:
        own = {"neighbours": True, "post_norms": family == "glm4"}
    experts, inner = integer(metadata, prefix + "expert_count", 0), "feed_forward_length"
    if experts:
        family = "mixtral" if family == "llama" else family
        own = {"num_experts": experts, "experts_per_token": integer(metadata, prefix + "expert_used_count")}
        inner = "expert_feed_forward_length" if family == "qwen3_moe" else inner
    return ModelConfig(
        **own,
        rotary_dim=None if turned == head_dim else turned,
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=integer(metadata, prefix + inner),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=integer(metadata, prefix + "attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=number(metadata, prefix + "rope.freq_base", 10000.0),
        rope_scaling=None,
        norm_eps=_shortest(number(metadata, prefix + "attention.layer_norm_rms_epsilon")),
        tie_embeddings=tie_embeddings,
        qkv_bias=architecture == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        context_length=min(context, window) if window > 0 else context,
        eos_ids=tuple(dict.fromkeys(ends)),
        bos_id=next(iter(token_ids(metadata, "tokenizer.ggml.bos_token_id")), None),
    )


def _gemma2(metadata: Mapping[str, Any], layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Read Gemma 2's own fields as llama.cpp's conversion writes them: norms already hold 1 + weight."""
    return {
        "activation": "gelu",
        "post_norms": True,
        "embedding_scale": hidden**0.5,
        "query_scalar": float(hidden // heads if layers == _GEMMA2_27B_LAYERS else head_dim),
        "attention_cap": number(metadata, "gemma2.attn_logit_softcapping", GEMMA_ATTENTION_CAP),
        "logit_cap": number(metadata, "gemma2.final_logit_softcapping", GEMMA_LOGIT_CAP),
    }


def _refuse_unsupported(metadata: Mapping[str, Any], prefix: str) -> None:
    own = _OWN_KEYS.get(prefix.removesuffix("."), frozenset())
    method = metadata.get(prefix + "rope.scaling.type", "none")
    if method != "none":
        raise ConfigError(f"{prefix}rope.scaling.type is {method!r}; not supported in GGUF")
    for key in metadata:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if name in _READ or name in own or metadata[key] in _MUST_BE.get(name, ()):
            continue
        raise ConfigError(f"GGUF metadata: {key}={metadata[key]!r} is not supported")


def _shortest(value: float) -> float:
    """Recover the decimal meant by a number stored as float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
