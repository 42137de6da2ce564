"""Model configuration: what is read, what is refused, and that every field has a reader."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ragjax
from ragjax.core import ConfigError
from ragjax.models import gguf, huggingface
from ragjax.models.config import LongRope, ModelConfig, RopeScaling, inverse_frequencies

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": [2, 5],
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": 1024,
    "use_sliding_window": False,
    "max_window_layers": 1,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0, 1.0, 1.5, 2.0, 2.5, 3.0], "long_factor": [2.0] * 6}
PHI3 = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 512,
    "rope_scaling": LONG_ROPE,
    "sliding_window": 262144,
    "resid_pdrop": 0.0,
    "full_attn_mod": 1,
}
GEMMA2 = {key: value for key, value in LLAMA.items() if key not in ("hidden_act", "tie_word_embeddings")} | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 40.0,
    "final_logit_softcapping": 20.0,
    "sliding_window": 4096,
    "cache_implementation": "hybrid",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}

GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 3,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 500000.0,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.vocab_size": 128,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5,
    "tokenizer.ggml.bos_token_id": 1,
}


def test_reads_a_llama_config() -> None:
    config = huggingface.read_config(LLAMA)
    assert config == ModelConfig(
        family="llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=500000.0,
        rope_scaling=None,
        norm_eps=1e-5,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        context_length=2048,
        eos_ids=(2, 5),
        bos_id=1,
    )
    assert config.num_groups == 2
    assert config.kv_bytes_per_token(2) == 2 * 3 * 2 * 16 * 2


def test_gguf_metadata_gives_the_same_config_as_the_checkpoint_it_was_made_from() -> None:
    assert gguf.read_config(GGUF, tie_embeddings=False) == huggingface.read_config(LLAMA)


def test_families_differ_where_they_should() -> None:
    qwen2, qwen3, mistral = (huggingface.read_config(m) for m in (QWEN2, QWEN3, MISTRAL))
    assert (qwen2.family, qwen2.qkv_bias, qwen2.qk_norm) == ("qwen2", True, False)
    assert (qwen3.family, qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == ("qwen3", False, True, 128)
    assert (mistral.family, mistral.qkv_bias, mistral.qk_norm) == ("mistral", False, False)


def test_silent_fields_take_the_reference_defaults() -> None:
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rope_theta", "tie_word_embeddings")}
    config = huggingface.read_config(bare | {"eos_token_id": None, "bos_token_id": None})
    assert (config.num_kv_heads, config.rope_theta, config.tie_embeddings) == (4, 10000.0, False)
    assert (config.eos_ids, config.bos_id) == ((), None)


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": LLAMA3_ROPE}, {"rope_theta": None, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}],
    ids=["rope_scaling", "rope_parameters"],
)
def test_both_forms_of_llama3_rope_are_read(rope: dict[str, Any]) -> None:
    config = huggingface.read_config(LLAMA | rope)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model_type", LLAMA, {"model_type": "falcon"}),
    ("model_type", LLAMA, {"model_type": None}),
    ("model_type", LLAMA, {"model_type": []}),
    ("RoPE bases and sliding windows of their own", GEMMA2, {"model_type": "gemma3_text"}),
    ("architectures", LLAMA, {"architectures": ["LlamaForSequenceClassification"]}),
    ("hidden_act", LLAMA, {"hidden_act": "gelu"}),
    ("mlp_bias", LLAMA, {"mlp_bias": True}),
    ("attention_bias", LLAMA, {"attention_bias": True}),
    ("attention_bias", QWEN3, {"attention_bias": True}),
    ("attention_bias", QWEN2, {"attention_bias": False}),
    ("partial_rotary_factor", LLAMA, {"partial_rotary_factor": 0.5}),
    ("rotary_dim", PHI3, {"partial_rotary_factor": 0.7}),
    ("short_factor", PHI3, {"rope_scaling": LONG_ROPE | {"short_factor": [1.0] * 5}}),
    ("short_factor", PHI3, {"rope_scaling": LONG_ROPE | {"short_factor": [0.0] * 6}}),
    ("short_factor", PHI3, {"rope_scaling": LONG_ROPE | {"short_factor": "x"}}),
    ("short_mscale", PHI3, {"rope_scaling": LONG_ROPE | {"short_mscale": 1.2}}),
    ("original_max_position", PHI3, {"original_max_position_embeddings": 1}),
    ("longrope", LLAMA, {"rope_scaling": LONG_ROPE}),
    ("lm_head_bias", PHI3, {"lm_head_bias": True}),
    ("auto_map", PHI3, {"auto_map": {"AutoConfig": "other.Config"}}),
    ("query_pre_attn_scalar", LLAMA, {"query_pre_attn_scalar": 16}),
    ("hidden_activation", GEMMA2, {"hidden_activation": "silu"}),
    ("hidden_act", GEMMA2, {"hidden_act": "silu"}),
    ("attention_cap", GEMMA2, {"attn_logit_softcapping": -1.0}),
    ("query_scalar", GEMMA2, {"query_pre_attn_scalar": 0}),
    ("use_bidirectional_attention", GEMMA2, {"use_bidirectional_attention": True}),
    ("attention_bias", GEMMA2, {"attention_bias": True}),
    ("partial_rotary_factor", LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("attn_logit_softcapping", LLAMA, {"attn_logit_softcapping": 50.0}),
    ("final_logit_softcapping", LLAMA, {"final_logit_softcapping": 30.0}),
    ("num_experts", QWEN3, {"num_experts": 64}),
    ("num_local_experts", MISTRAL, {"num_local_experts": 8}),
    ("layer_types", QWEN2, {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}),
    ("rope_interleaved", LLAMA, {"rope_interleaved": True}),
    ("yarn", LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ("linear", LLAMA, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("rope_theta", LLAMA, {"rope_theta": float("inf")}),
    ("rope_theta", LLAMA, {"rope_theta": 10**400}),
    ("rms_norm_eps", LLAMA, {"rms_norm_eps": float("inf")}),
    ("head_dim", LLAMA, {"head_dim": [[16], [16]]}),
    ("attention_factor", LLAMA, {"rope_scaling": LLAMA3_ROPE | {"attention_factor": 1.2}}),
    ("high_freq_factor", LLAMA, {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}),
    ("original_max_position", LLAMA, {"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": None}}),
    ("contradict", LLAMA, {"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default"}}),
    ("auto_map", LLAMA, {"auto_map": {"AutoModel": "modeling.py"}}),
    ("num_heads", LLAMA, {"num_key_value_heads": 3}),
    ("num_key_value_heads", QWEN2, {"num_key_value_heads": None}),
    ("head_dim", LLAMA, {"head_dim": 15}),
    ("hidden_size", LLAMA, {"hidden_size": None}),
    ("num_hidden_layers", LLAMA, {"num_hidden_layers": 2.5}),
    ("vocab_size", LLAMA, {"vocab_size": True}),
    ("rms_norm_eps", LLAMA, {"rms_norm_eps": "small"}),
    ("tie_word_embeddings", LLAMA, {"tie_word_embeddings": "yes"}),
    ("eos_ids", LLAMA, {"eos_token_id": 128}),
    ("bos_token_id", LLAMA, {"bos_token_id": "<s>"}),
    ("num_attention_heads", LLAMA, {"num_attention_heads": 0}),
    ("sliding_window", MISTRAL, {"sliding_window": "x"}),
    ("sliding_window", MISTRAL, {"sliding_window": 0}),
    ("max_window_layers", QWEN2, {"use_sliding_window": True, "max_window_layers": "x"}),
    ("layer_types", QWEN2, {"layer_types": 5}),
    ("auto_map", LLAMA, {"auto_map": "x"}),
    ("layer_types", QWEN2, {"layer_types": [["full_attention"]]}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "base", "change"), REFUSED, ids=[f"{i}-{r[0]}" for i, r in enumerate(REFUSED)])
def test_what_cannot_be_honoured_is_refused_by_name(field: str, base: dict[str, Any], change: dict[str, Any]) -> None:
    huggingface.read_config(base)
    with pytest.raises(ConfigError, match=field):
        huggingface.read_config(base | change)


def test_a_sliding_window_that_never_takes_effect_is_accepted() -> None:
    for harmless in (
        MISTRAL | {"sliding_window": 2048},
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 3},
        QWEN2 | {"layer_types": ["full_attention"] * 3},
    ):
        assert huggingface.read_config(harmless).context_length == 2048


@pytest.mark.parametrize(
    ("change", "length"),
    [
        (MISTRAL | {"sliding_window": 1024}, 1024),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"} | {"max_position_embeddings": 32768}, 4096),
        (QWEN2 | {"use_sliding_window": True}, 1024),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, 1024),
        (GEMMA2 | {"sliding_window": 600}, 600),
        (PHI3, 512),
        (PHI3 | {"sliding_window": 255}, 255),
    ],
    ids=["mistral", "mistral's default", "qwen2", "qwen2 by layer", "gemma2", "phi3's first length", "phi3"],
)
def test_the_context_ends_where_the_computation_would_change(
    change: dict[str, Any], length: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert huggingface.read_config(change).context_length == length
    assert f"the context is {length} of the model's" in caplog.text


def test_gemma_is_read_and_its_defaults_hold(caplog: pytest.LogCaptureFixture) -> None:
    given = huggingface.read_config(GEMMA2)
    assert (given.activation, given.post_norms, given.embedding_scale, given.tie_embeddings) == (
        "gelu",
        True,
        8.0,
        True,
    )
    assert (given.query_scalar, given.attention_cap, given.logit_cap) == (24.0, 40.0, 20.0)
    assert given.attention_scale == pytest.approx(24**-0.5)
    names = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "head_dim", "sliding_window")
    silent = {key: value for key, value in GEMMA2.items() if key not in names}
    bare = huggingface.read_config(silent | {"max_position_embeddings": 8192})
    assert (bare.head_dim, bare.query_scalar, bare.attention_cap, bare.logit_cap) == (256, 256.0, 50.0, 30.0)
    assert bare.context_length == 4096
    plain = huggingface.read_config(GEMMA2 | {"attn_logit_softcapping": None, "tie_word_embeddings": False})
    assert plain.attention_cap is None and not plain.tie_embeddings
    assert "nothing reads" not in caplog.text


def test_long_rope_is_that_of_the_first_length() -> None:
    config = huggingface.read_config(PHI3)
    assert config.rotary_dim == 12
    assert config.rope_scaling == LongRope((1.0, 1.0, 1.5, 2.0, 2.5, 3.0), math.sqrt(1 + math.log(4) / math.log(512)))
    frequencies = [500000.0 ** (-i / 6) / f for i, f in enumerate(LONG_ROPE["short_factor"])]  # type: ignore[arg-type]
    np.testing.assert_allclose(config.inverse_frequencies, [*frequencies, 0.0, 0.0], rtol=1e-14)
    given = huggingface.read_config(PHI3 | {"rope_scaling": LONG_ROPE | {"attention_factor": 1.5}})
    assert isinstance(given.rope_scaling, LongRope) and given.rope_scaling.stretch == 1.5
    assert huggingface.read_config(PHI3 | {"rope_scaling": LONG_ROPE | {"type": "su"}}) == config


def test_fields_that_nothing_reads_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    huggingface.read_config(LLAMA | {"torch_dtype": "bfloat16"})
    assert not caplog.records
    huggingface.read_config(LLAMA | {"brand_new_trick": 3})
    assert "brand_new_trick" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "gemma3"),
        ("general.architecture", None),
        ("llama.attention.sliding_window", 4096),
        ("llama.expert_shared_count", 1),
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 32),
        ("llama.attention.head_count_kv", [2, 2, 4]),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.block_count", None),
        ("llama.attention.head_count", 0),
        ("llama.vocab_size", None),
        ("tokenizer.ggml.tokens", ["a"]),
    ],
)
def test_gguf_keys_that_cannot_be_honoured_are_refused_by_name(key: str, value: Any) -> None:
    changed = {k: v for k, v in (GGUF | {key: value}).items() if v is not None}
    with pytest.raises(ConfigError, match=key if key != "tokenizer.ggml.tokens" else "vocab_size"):
        gguf.read_config(changed, tie_embeddings=False)


def test_gguf_lists_per_layer_are_read_where_layers_agree() -> None:
    same = GGUF | {"llama.attention.head_count_kv": [2, 2, 2], "llama.expert_count": 0}
    assert gguf.read_config(same, tie_embeddings=True).num_kv_heads == 2


@pytest.mark.parametrize(
    ("architecture", "context", "window", "length"),
    [
        ("gemma2", 8192, None, 4096),
        ("gemma2", 8192, 600, 600),
        ("phi3", 4096, None, 2047),
        ("phi3", 4096, 1024, 1024),
        ("phi3", 2048, None, 2048),
        ("llama", 4096, None, 4096),
    ],
)
def test_a_gguf_file_older_than_the_key_of_its_window_has_it(
    architecture: str, context: int, window: int | None, length: int
) -> None:
    given = {k.replace("llama.", f"{architecture}."): v for k, v in GGUF.items()}
    given |= {"general.architecture": architecture, f"{architecture}.context_length": context}
    if window is not None:
        given[f"{architecture}.attention.sliding_window"] = window
    assert gguf.read_config(given, tie_embeddings=architecture == "gemma2").context_length == length


def test_equal_configurations_give_equal_json() -> None:
    assert huggingface.read_config(LLAMA).to_json() == gguf.read_config(GGUF, tie_embeddings=False).to_json()
    assert len({huggingface.read_config(one).to_json() for one in (LLAMA, QWEN2, QWEN3, MISTRAL, PHI3, GEMMA2)}) == 6


def _stretched(inv_freq: float, s: RopeScaling) -> float:
    """Llama-3.1 scaling of one inverse frequency, case by case as Meta published it."""
    wavelength = 2 * math.pi / inv_freq
    if wavelength < s.original_context / s.high_freq_factor:
        return inv_freq
    if wavelength > s.original_context / s.low_freq_factor:
        return inv_freq / s.factor
    smooth = (s.original_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - smooth) * inv_freq / s.factor + smooth * inv_freq


def test_llama3_scaling_equals_its_definition() -> None:
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    plain = [500000.0 ** (-i / 128) for i in range(0, 128, 2)]
    np.testing.assert_allclose(inverse_frequencies(500000.0, 128, None), plain, rtol=1e-14)
    scaled = inverse_frequencies(500000.0, 128, scaling)
    assert scaled.dtype == np.float64
    np.testing.assert_allclose(scaled, [_stretched(f, scaling) for f in plain], rtol=1e-13)
    assert len(np.unique(np.round(plain / scaled, 6))) > 3, "kept, interpolated and stretched wavelengths occur"


def _fields_read(source: str) -> set[str]:
    """Names of attributes read from something called config (`config.x`, `self.config.x`)."""
    holders = ("config", "bare")
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", None) in holders or getattr(node.value, "attr", None) in holders)
    }


def _fields_behind_properties() -> set[str]:
    """Fields that `ModelConfig` reads itself, for others: in its properties."""
    properties = (getattr(ModelConfig, name) for name in dir(ModelConfig))
    sources = (inspect.getsource(p.fget) for p in properties if isinstance(p, property) and p.fget)
    trees = (ast.parse(textwrap.dedent(source)) for source in sources)
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_field_is_read_somewhere() -> None:
    package = Path(ragjax.__path__[0])
    sources = [file for file in package.rglob("*.py") if file != package / "models" / "config.py"]
    read = set().union(*(_fields_read(file.read_text(encoding="utf-8")) for file in sources))
    unread = {field.name for field in dataclasses.fields(ModelConfig)} - read - _fields_behind_properties()
    assert not unread, f"fields of ModelConfig that nothing reads: {sorted(unread)}"
