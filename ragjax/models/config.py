"""The configuration of a decoder; `huggingface.read_config` and `gguf.read_config` read it from checkpoints.

Families: Llama 2/3 (with Llama-3.1 RoPE scaling), Mistral, Mixtral, Qwen2/2.5, Qwen3 (also as a mixture of experts),
Phi-3 (also Phi-3.5 and Phi-4-mini), Gemma 2 and GLM-4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError

Family = Literal["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "mixtral", "qwen3_moe", "glm", "glm4"]


GLM = ("glm", "glm4")
"""GLM-4's families: of 2024, and with norms behind attention and MLP as well."""


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
        check(self.factor >= 1.0, "rope_scaling.factor", self.factor, "at least 1")
        low, high = self.low_freq_factor, self.high_freq_factor
        check(low > 0.0, "rope_scaling.low_freq_factor", low, "above 0")
        check(high > low, "rope_scaling.high_freq_factor", high, "above low_freq_factor")
        check(self.original_context >= 1, "rope_scaling.original_context", self.original_context, "at least 1")


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753) for sequences up to the length that the model was first trained for.

    factors: what divides the inverse frequency of each pair that RoPE turns. stretch: what rotated queries and keys are
    multiplied with, each.
    """

    factors: tuple[float, ...]
    stretch: float

    def __post_init__(self) -> None:
        check(all(factor > 0.0 for factor in self.factors), "rope_scaling.short_factor", self.factors, "above 0")
        check(self.stretch > 0.0, "rope_scaling.attention_factor", self.stretch, "above 0")


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


_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    "context_length",
)


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and constants of a decoder.

    num_heads query heads share num_kv_heads key/value heads in groups of num_groups, each head_dim wide
    (not always hidden_size / num_heads). qkv_bias: q, k and v projections have a bias. qk_norm: RMSNorm
    over each query and key head. context_length: longest sequence the model was trained for, in tokens.
    soft_tokens: tokens behind the vocabulary that no text has and the model never says (`models/trained.py`).
    rotary_dim: components of a head that RoPE turns, the first in the checkpoint's order; None if all.
    activation: of the MLP's gate; "gelu" is the approximation by tanh. post_norms: attention and MLP are normed before
    they are added as well. embedding_scale: what embeddings are multiplied with. query_scalar: attention logits are
    divided by its root; None for head_dim. attention_cap, logit_cap: x becomes cap * tanh(x / cap), of attention logits
    and of the next token's; None leaves them. neighbours: RoPE turns components 2i and 2i + 1 of a checkpoint's heads,
    not i and i + rotary_dim / 2. num_experts: MLPs of a layer, intermediate_size wide each (0: one, without a router).
    experts_per_token: of them, those that a token goes through. share_out: their weights are scaled to add up to one.
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
    rope_scaling: RopeScaling | LongRope | None
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    context_length: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    soft_tokens: int = 0
    rotary_dim: int | None = None
    activation: Literal["silu", "gelu"] = "silu"
    post_norms: bool = False
    embedding_scale: float = 1.0
    query_scalar: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    neighbours: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    share_out: bool = True

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            check(isinstance(value, int) and value >= 1, name, value, "a whole number of at least 1")
        check(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, "a multiple of num_kv_heads")
        check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even, as RoPE turns pairs of components")
        check(self.rope_theta > 0.0, "rope_theta", self.rope_theta, "above 0")
        check(self.norm_eps > 0.0, "norm_eps", self.norm_eps, "above 0")
        for name in ("embedding_scale", "query_scalar", "attention_cap", "logit_cap"):
            value = getattr(self, name)
            check(value is None or value > 0.0, name, value, "above 0")
        turned = self.head_dim if self.rotary_dim is None else self.rotary_dim
        check(0 < turned <= self.head_dim and turned % 2 == 0, "rotary_dim", turned, "even, and at most head_dim")
        if isinstance(self.rope_scaling, LongRope):
            count = len(self.rope_scaling.factors)
            check(count == turned // 2, "rope_scaling.short_factor", count, f"{turned // 2} numbers")
        if self.num_experts:
            chosen = self.experts_per_token
            check(1 <= chosen <= self.num_experts, "experts_per_token", chosen, "at least 1, and at most num_experts")
        for token in self.eos_ids:
            check(0 <= token < self.vocab_size, "eos_ids", token, "a token of the vocabulary")
        if self.bos_id is not None:
            check(0 <= self.bos_id < self.vocab_size, "bos_id", self.bos_id, "a token of the vocabulary")

    @property
    def num_groups(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def inverse_frequencies(self) -> NDArray[np.float64]:
        """Radians per position of each RoPE pair, float64 [head_dim / 2]; 0 for pairs that are not turned."""
        turned = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if isinstance(self.rope_scaling, LongRope):
            inv_freq_R = inverse_frequencies(self.rope_theta, turned, None) / np.array(self.rope_scaling.factors)
        else:
            inv_freq_R = inverse_frequencies(self.rope_theta, turned, self.rope_scaling)
        return np.pad(inv_freq_R, (0, (self.head_dim - turned) // 2))

    @property
    def query_stretch(self) -> float:
        """Factor of the rotated components of queries; keys then need none."""
        return self.rope_scaling.stretch**2 if isinstance(self.rope_scaling, LongRope) else 1.0

    @property
    def layer_weights(self) -> int:
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size * max(1, self.experts_per_token))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def to_json(self) -> str:
        """Write as JSON: equal configurations give equal text, so that it may enter a cache key.

        Fields that came later are left out where they change nothing: entries written before them are still found.
        """
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self)}
        given = {
            name: value for name, value in asdict(self).items() if defaults[name] is MISSING or value != defaults[name]
        }
        return json.dumps(given, sort_keys=True, separators=(",", ":"))


def check(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"model configuration: {name} is {value!r}; it must be {wanted}")


def integer(mapping: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Read a whole number, which may be given for each layer as long as the layers agree."""
    value = _given(mapping, key, default)
    if isinstance(value, list | tuple) and value and all(item == value[0] for item in value):
        value = value[0]
    check(isinstance(value, int) and not isinstance(value, bool), key, value, "one whole number for all layers")
    return int(value)


def number(mapping: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _given(mapping, key, default)
    check(isinstance(value, int | float) and not isinstance(value, bool), key, value, "a number")
    check(abs(value) < 1e300, key, value, "a finite number")
    return float(value)


def _given(mapping: Mapping[str, Any], key: str, default: float | None) -> Any:
    value = mapping.get(key)
    if value is None and default is None:
        raise ConfigError(f"model configuration: {key} is missing")
    return default if value is None else value


def flag(mapping: Mapping[str, Any], key: str) -> bool:
    value = mapping.get(key)
    check(value is None or isinstance(value, bool), key, value, "true or false")
    return bool(value)


def token_ids(mapping: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = mapping.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else (value,)
    for token in ids:
        check(isinstance(token, int) and not isinstance(token, bool), key, value, "a token id or a list of them")
    return tuple(int(token) for token in ids)


_HARMLESS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_LLAMA3 = frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
_LONG = frozenset({"short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"})
_LONG_NAMES = ("longrope", "su")  # the second in the first files of Phi-3


@dataclass(frozen=True)
class Rope:
    """theta, scaling, rotary_dim: as of `config.ModelConfig`. context: tokens that they hold for; None if for all."""

    theta: float
    scaling: RopeScaling | LongRope | None = None
    rotary_dim: int | None = None
    context: int | None = None


def read_rope(mapping: Mapping[str, Any], family: Family, head_dim: int) -> Rope:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling`, of config.json."""
    forms = [key for key in ("rope_parameters", "rope_scaling") if mapping.get(key)]
    if len(forms) == 2 and mapping["rope_parameters"] != mapping["rope_scaling"]:
        raise ConfigError("model configuration: rope_parameters and rope_scaling contradict each other")
    where = forms[0] if forms else "rope_scaling"
    rope: Mapping[str, Any] = mapping[where] if forms else {}
    check(isinstance(rope, Mapping), where, rope, "an object")
    theta = number(rope, "rope_theta", number(mapping, "rope_theta", 10000.0))
    rotary_dim = _rotary_dim(mapping, rope, where, family, head_dim)
    method = rope.get("rope_type", rope.get("type", "default"))
    if method == "default":
        _refuse_unknown(rope, where, frozenset())
        return Rope(theta, None, rotary_dim)
    if method in _LONG_NAMES and family == "phi3":
        _refuse_unknown(rope, where, _LONG)
        scaling, original = _long_rope(mapping, rope, where)
        return Rope(theta, scaling, rotary_dim, original)
    if method != "llama3":
        raise ConfigError(f"model configuration: {where} of type {method!r} is not supported, only llama3")
    _refuse_unknown(rope, where, _LLAMA3)
    stretched = RopeScaling(
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_context=integer(rope, "original_max_position_embeddings"),
    )
    return Rope(theta, stretched, rotary_dim)


def _rotary_dim(
    mapping: Mapping[str, Any], rope: Mapping[str, Any], where: str, family: Family, head_dim: int
) -> int | None:
    name, owner = (f"{where}.", rope) if "partial_rotary_factor" in rope else ("", mapping)
    share = owner.get("partial_rotary_factor", 0.5 if family in GLM else None)
    if share in (None, 1, 1.0):
        return None
    check(family in ("phi3", *GLM), f"{name}partial_rotary_factor", share, f"1 for {family}")
    return int(head_dim * number(owner, "partial_rotary_factor", 0.5))


def _long_rope(mapping: Mapping[str, Any], rope: Mapping[str, Any], where: str) -> tuple[LongRope, int]:
    """LongRoPE and the original length: up to it, the short factors hold (transformers' `longrope`)."""
    key = "original_max_position_embeddings"
    original = integer(rope, key, integer(mapping, key, 4096))
    check(original >= 2, key, original, "at least 2")
    short = rope.get("short_factor")
    valid = isinstance(short, list | tuple) and all(isinstance(f, int | float) for f in short)
    check(valid, f"{where}.short_factor", short, "a list of numbers")
    factor = number(rope, "factor", integer(mapping, "max_position_embeddings") / original)
    usual = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return LongRope(tuple(map(float, short or ())), number(rope, "attention_factor", usual)), original


def _refuse_unknown(rope: Mapping[str, Any], where: str, wanted: frozenset[str]) -> None:
    unknown = sorted(set(rope) - _HARMLESS - wanted)
    if unknown:
        raise ConfigError(f"model configuration: {where} has unsupported fields: {', '.join(unknown)}")


GEMMA_FIELDS = frozenset(
    {
        *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "hidden_activation"),
        *("cache_implementation", "use_bidirectional_attention"),
    }
)
"""Fields that `read_gemma` reads, or that do not change the computation."""

GEMMA_HEAD_DIM, GEMMA_WINDOW = 256, 4096
GEMMA_ATTENTION_CAP, GEMMA_LOGIT_CAP = 50.0, 30.0


def read_gemma(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that Gemma 2 alone has; transformers' Gemma2Config has the defaults."""
    activation = mapping.get("hidden_activation") or "gelu_pytorch_tanh"
    check(activation == "gelu_pytorch_tanh", "hidden_activation", activation, "'gelu_pytorch_tanh'")
    both_ways = flag(mapping, "use_bidirectional_attention")
    check(not both_ways, "use_bidirectional_attention", both_ways, "false")
    return {
        "activation": "gelu",
        "post_norms": True,
        "embedding_scale": integer(mapping, "hidden_size") ** 0.5,
        "query_scalar": number(mapping, "query_pre_attn_scalar", GEMMA_HEAD_DIM),
        "attention_cap": _cap(mapping, "attn_logit_softcapping", GEMMA_ATTENTION_CAP),
        "logit_cap": _cap(mapping, "final_logit_softcapping", GEMMA_LOGIT_CAP),
        "tie_embeddings": mapping.get("tie_word_embeddings") is None or flag(mapping, "tie_word_embeddings"),
    }


def _cap(mapping: Mapping[str, Any], key: str, default: float) -> float | None:
    return None if key in mapping and mapping[key] is None else number(mapping, key, default)
