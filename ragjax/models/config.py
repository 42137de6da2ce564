"""What a decoder must know of its checkpoint, read from a Hugging Face config or GGUF metadata.

Four families: Llama 2/3 (with Llama-3.1 RoPE scaling), Mistral without a sliding window, Qwen2/2.5 and
Qwen3. A field that would change the computation in a way the decoder does not know is refused by name.
Fields of config.json: https://huggingface.co/docs/transformers; GGUF keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

_log = logging.getLogger(__name__)

_ARCHITECTURES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What the reference implementation assumes where config.json is silent.
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128

# Fields of config.json that choose something the decoder has no code for, with the values that mean "off".
_MUST_BE_OFF: Mapping[str, tuple[Any, ...]] = {
    "mlp_bias": (None, False),
    "rope_interleaved": (None, False),
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None, {}),
    "partial_rotary_factor": (None, 1, 1.0),
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
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())

_ROPE_HARMLESS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

# GGUF keys below the architecture's prefix that are read, that say nothing, or that must have one value.
_GGUF_READ_NAMES = """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.finetuned tensor_data_layout
    rope.scaling.original_context_length
"""
_GGUF_READ = frozenset(_GGUF_READ_NAMES.split())
_GGUF_MUST_BE: Mapping[str, tuple[Any, ...]] = {
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


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1 stretching of the RoPE wavelengths (`rope_type: llama3`, no other kind is supported).

    Wavelengths above original_context / low_freq_factor are multiplied by factor, those below
    original_context / high_freq_factor are kept, and the inverse frequencies between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _check(self.factor >= 1.0, "rope_scaling.factor", self.factor, "at least 1")
        _check(self.low_freq_factor > 0.0, "rope_scaling.low_freq_factor", self.low_freq_factor, "above 0")
        _check(
            self.high_freq_factor > self.low_freq_factor,
            "rope_scaling.high_freq_factor",
            self.high_freq_factor,
            "above low_freq_factor",
        )
        _check(self.original_context >= 1, "rope_scaling.original_context", self.original_context, "at least 1")


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> NDArray[np.float64]:
    """Radians per position of each RoPE pair, float64 [head_dim / 2] (Llama-3.1 stretching applied)."""
    inv_freq_R = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return inv_freq_R if scaling is None else inv_freq_R / rope_divisors(inv_freq_R, scaling)


def rope_divisors(inv_freq_R: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """By what Llama-3.1 scaling divides each inverse frequency, float64 [R]; 1 where it leaves it alone."""
    turns_R = scaling.original_context * inv_freq_R / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_R = np.clip((turns_R - low) / (high - low), 0.0, 1.0)
    return 1.0 / (kept_R + (1.0 - kept_R) / scaling.factor)


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and constants of a decoder.

    num_heads query heads share num_kv_heads key/value heads in groups of num_groups, each head_dim wide
    (not always hidden_size / num_heads). qkv_bias: q, k and v projections have a bias. qk_norm: RMSNorm
    over each query and key head. context_length: longest sequence the model was trained for, in tokens.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    context_length: int
    eos_ids: tuple[int, ...]
    bos_id: int | None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "context_length",
        ):
            value = getattr(self, name)
            _check(isinstance(value, int) and value >= 1, name, value, "a whole number of at least 1")
        _check(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, "a multiple of num_kv_heads")
        _check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even, as RoPE turns pairs of components")
        _check(self.rope_theta > 0.0, "rope_theta", self.rope_theta, "above 0")
        _check(self.norm_eps > 0.0, "norm_eps", self.norm_eps, "above 0")
        for token in self.eos_ids:
            _check(0 <= token < self.vocab_size, "eos_ids", token, "a token of the vocabulary")
        if self.bos_id is not None:
            _check(0 <= self.bos_id < self.vocab_size, "bos_id", self.bos_id, "a token of the vocabulary")

    @property
    def num_groups(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that the keys and values of one token take in all layers, for elements of `itemsize` bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> ModelConfig:
        """Read the contents of config.json. Raises ConfigError that names the field it cannot honour."""
        family = _hf_family(mapping)
        _refuse_unsupported(mapping, family)
        heads = _integer(mapping, "num_attention_heads")
        _check(heads >= 1, "num_attention_heads", heads, "at least 1")
        hidden = _integer(mapping, "hidden_size")
        theta, scaling = _hf_rope(mapping)
        return cls(
            family=family,
            vocab_size=_integer(mapping, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(mapping, "intermediate_size"),
            num_layers=_integer(mapping, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_integer(mapping, "num_key_value_heads", heads if family == "llama" else None),
            head_dim=_integer(mapping, "head_dim", _QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=_number(mapping, "rms_norm_eps"),
            tie_embeddings=_flag(mapping, "tie_word_embeddings"),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            context_length=_integer(mapping, "max_position_embeddings"),
            eos_ids=token_ids(mapping, "eos_token_id"),
            bos_id=next(iter(token_ids(mapping, "bos_token_id")), None),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tie_embeddings: bool,
        rope_scaling: RopeScaling | None = None,
    ) -> ModelConfig:
        """Read GGUF metadata of the architectures llama (Llama and Mistral), qwen2 and qwen3.

        Whether the embeddings are tied, and Llama-3.1 RoPE scaling, stand in the tensors rather than in
        the metadata, so the reader of the tensors passes both. Raises ConfigError that names the key.
        """
        architecture = metadata.get("general.architecture")
        if architecture not in ("llama", "qwen2", "qwen3"):
            raise ConfigError(
                f"general.architecture is {architecture!r}; supported in GGUF are llama (Llama and Mistral), "
                "qwen2 and qwen3"
            )
        prefix = f"{architecture}."
        _refuse_unsupported_gguf(metadata, prefix)
        heads = _integer(metadata, prefix + "attention.head_count")
        _check(heads >= 1, prefix + "attention.head_count", heads, "at least 1")
        hidden = _integer(metadata, prefix + "embedding_length")
        head_dim = _integer(metadata, prefix + "attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            value = _integer(metadata, prefix + key, head_dim)
            _check(value == head_dim, prefix + key, value, f"{head_dim}, the head dimension")
        return cls(
            family=cast(Family, architecture),
            vocab_size=_gguf_vocab_size(metadata, prefix),
            hidden_size=hidden,
            intermediate_size=_integer(metadata, prefix + "feed_forward_length"),
            num_layers=_integer(metadata, prefix + "block_count"),
            num_heads=heads,
            num_kv_heads=_integer(metadata, prefix + "attention.head_count_kv", heads),
            head_dim=head_dim,
            rope_theta=_number(metadata, prefix + "rope.freq_base", 10000.0),
            rope_scaling=rope_scaling,
            norm_eps=_shortest(_number(metadata, prefix + "attention.layer_norm_rms_epsilon")),
            tie_embeddings=tie_embeddings,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            context_length=_integer(metadata, prefix + "context_length"),
            eos_ids=_gguf_eos(metadata),
            bos_id=next(iter(token_ids(metadata, "tokenizer.ggml.bos_token_id")), None),
        )

    def to_json(self) -> str:
        """Write as JSON: equal configurations give equal text, so that it may enter a cache key."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Inverse of `to_json`. Raises ConfigError when a field is missing or unknown."""
        try:
            values = json.loads(text)
            wrong = set(values) ^ {f.name for f in fields(cls)}
            if wrong:
                raise ConfigError(f"stored model configuration: fields missing or unknown: {sorted(wrong)}")
            scaling = values["rope_scaling"]
            values["rope_scaling"] = None if scaling is None else RopeScaling(**scaling)
            values["eos_ids"] = tuple(values["eos_ids"])
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"stored model configuration cannot be read: {error}") from error


# ----------------------------------------------------------------------------------- reading values


def _check(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"model configuration: {name} is {value!r}; it must be {wanted}")


def _integer(mapping: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = mapping.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"model configuration: {key} is missing")
    if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
        value = value[0]  # per-layer lists are fine as long as the layers agree
    _check(isinstance(value, int) and not isinstance(value, bool), key, value, "one whole number for all layers")
    return int(value)


def _number(mapping: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = mapping.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"model configuration: {key} is missing")
    _check(isinstance(value, int | float) and not isinstance(value, bool), key, value, "a number")
    _check(abs(value) < 1e300, key, value, "a finite number")
    return float(value)


def _flag(mapping: Mapping[str, Any], key: str) -> bool:
    value = mapping.get(key)
    _check(value is None or isinstance(value, bool), key, value, "true or false")
    return bool(value)


def token_ids(mapping: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Read a token id that configs give as a number, a list of numbers or null."""
    value = mapping.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else (value,)
    for token in ids:
        _check(isinstance(token, int) and not isinstance(token, bool), key, value, "a token id or a list of them")
    return tuple(int(token) for token in ids)


# ----------------------------------------------------------------------------------- Hugging Face


def _hf_family(mapping: Mapping[str, Any]) -> Family:
    model_type = mapping.get("model_type")
    if model_type not in get_args(Family):
        raise ConfigError(f"model_type is {model_type!r}; supported are {', '.join(get_args(Family))}")
    family = cast(Family, model_type)
    architectures = mapping.get("architectures") or [_ARCHITECTURES[family]]
    if architectures != [_ARCHITECTURES[family]]:
        raise ConfigError(f"architectures is {architectures!r}; supported for {family} is {_ARCHITECTURES[family]}")
    return family


def _refuse_unsupported(mapping: Mapping[str, Any], family: Family) -> None:
    for key, allowed in _MUST_BE_OFF.items():
        if mapping.get(key) not in allowed:
            raise ConfigError(f"model configuration: {key}={mapping[key]!r} is not supported")
    activation = mapping.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"model configuration: hidden_act={activation!r} is not supported, only silu")
    bias = mapping.get("attention_bias")
    if bias not in (None, family == "qwen2"):
        raise ConfigError(f"model configuration: attention_bias={bias!r} is not supported for {family}")
    _refuse_sliding_window(mapping, family)
    unknown = sorted(set(mapping) - _HARMLESS - set(_MUST_BE_OFF))
    if unknown:
        _log.warning("config.json has fields that nothing reads: %s", ", ".join(unknown))


def _refuse_sliding_window(mapping: Mapping[str, Any], family: Family) -> None:
    layer_types = mapping.get("layer_types") or []
    _check(isinstance(layer_types, list | tuple), "layer_types", layer_types, "a list")
    if any(kind != "full_attention" for kind in layer_types):
        raise ConfigError(f"model configuration: layer_types={layer_types!r}; only full_attention is supported")
    window = mapping.get("sliding_window", _MISTRAL_WINDOW if family == "mistral" else None)
    if window is None:
        return
    _check(isinstance(window, int), "sliding_window", window, "a whole number or null")
    if window >= _integer(mapping, "max_position_embeddings"):
        return
    if family in ("qwen2", "qwen3"):
        if not _flag(mapping, "use_sliding_window"):
            return
        layers = _integer(mapping, "num_hidden_layers")
        if _integer(mapping, "max_window_layers", layers - 1) >= layers:
            return  # every layer comes before the first one that would slide
    raise ConfigError(f"model configuration: sliding_window={window} is not supported, only full attention")


def _hf_rope(mapping: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from `rope_parameters` or from `rope_theta` and `rope_scaling`."""
    forms = [key for key in ("rope_parameters", "rope_scaling") if mapping.get(key)]
    if len(forms) == 2 and mapping["rope_parameters"] != mapping["rope_scaling"]:
        raise ConfigError("model configuration: rope_parameters and rope_scaling contradict each other")
    rope: Mapping[str, Any] = mapping[forms[0]] if forms else {}
    where = forms[0] if forms else "rope_scaling"
    _check(isinstance(rope, Mapping), where, rope, "an object")
    theta = _number(rope, "rope_theta", _number(mapping, "rope_theta", 10000.0))
    _check(rope.get("partial_rotary_factor") in (None, 1, 1.0), f"{where}.partial_rotary_factor", rope, "1")
    method = rope.get("rope_type", rope.get("type", "default"))
    if method == "default":
        _refuse_unknown_rope(rope, where, frozenset())
        return theta, None
    if method != "llama3":
        raise ConfigError(f"model configuration: {where} of type {method!r} is not supported, only llama3")
    wanted = frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
    _refuse_unknown_rope(rope, where, wanted)
    scaling = RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_context=_integer(rope, "original_max_position_embeddings"),
    )
    return theta, scaling


def _refuse_unknown_rope(rope: Mapping[str, Any], where: str, wanted: frozenset[str]) -> None:
    unknown = sorted(set(rope) - _ROPE_HARMLESS - wanted)
    if unknown:
        raise ConfigError(f"model configuration: {where} has unsupported fields: {', '.join(unknown)}")


# ------------------------------------------------------------------------------------------- GGUF


def _refuse_unsupported_gguf(metadata: Mapping[str, Any], prefix: str) -> None:
    method = metadata.get(prefix + "rope.scaling.type", "none")
    if method != "none":
        raise ConfigError(f"{prefix}rope.scaling.type is {method!r}; not supported in GGUF")
    for key in metadata:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if name in _GGUF_READ or metadata[key] in _GGUF_MUST_BE.get(name, ()):
            continue
        raise ConfigError(f"GGUF metadata: {key}={metadata[key]!r} is not supported")


def _shortest(value: float) -> float:
    """Recover the decimal meant by a number stored as float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _gguf_vocab_size(metadata: Mapping[str, Any], prefix: str) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = _integer(metadata, prefix + "vocab_size", None if tokens is None else len(tokens))
    _check(tokens is None or len(tokens) == size, prefix + "vocab_size", size, "the number of tokens listed")
    return size


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens: of the sequence, and of a turn or message where the file names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [token for key in keys for token in token_ids(metadata, f"tokenizer.ggml.{key}")]
    return tuple(dict.fromkeys(ids))
