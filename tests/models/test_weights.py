"""Checkpoints: readers of safetensors and GGUF, their errors, and the dequantised cache."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Quant
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from benchmarks import parity
from ragjax.core import ConfigError
from ragjax.kernels.cpu import op
from ragjax.kernels.cpu.op import PackedMatrix
from ragjax.models import gguf as source
from ragjax.models import weights
from ragjax.models.config import Family, LongRope, ModelConfig, RopeScaling
from ragjax.models.decoder import WHOLE_NUMBERS, Decoder
from ragjax.models.gguf import read_gguf, unpermute_rope_rows
from ragjax.models.packed import PackedForm
from ragjax.models.tensors import Checkpoint, Stored, Tensors, expected_shapes
from ragjax.models.weights import load_decoder, open_checkpoint, weights_digest
from ragjax.runner.runner import Runner
from tests.support import steps
from tests.support.forward import dense_logits

Array = NDArray[Any]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
IN_GGUF: tuple[Family, ...] = (*FAMILIES, "phi3", "gemma2", "mixtral", "qwen3_moe", "glm", "glm4")
LLAMA = ("llama", "mistral", "mixtral")
ARCHITECTURES = {family: name for name, family in source.ARCHITECTURES.items()} | dict.fromkeys(LLAMA, "llama")
NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
OWN: dict[str, dict[str, Any]] = {
    "phi3": {"rotary_dim": 24, "rope_scaling": LongRope(tuple(1.0 + 0.25 * i for i in range(12)), 1.25)},
    "gemma2": {
        "activation": "gelu", "post_norms": True, "embedding_scale": 8.0, "query_scalar": 32.0, "attention_cap": 50.0,
        "logit_cap": 30.0,
    },
    "mixtral": {"num_experts": 3, "experts_per_token": 2},
    "qwen3_moe": {"num_experts": 3, "experts_per_token": 1, "qk_norm": True},
    "glm": {"rotary_dim": 16, "neighbours": True, "qkv_bias": True},
    "glm4": {"rotary_dim": 16, "neighbours": True, "qkv_bias": True, "post_norms": True},
}  # fmt: skip


def tiny(family: Family, *, tie: bool = False, scaling: RopeScaling | None = None) -> ModelConfig:
    made = ModelConfig(
        family=family,
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=10000.0,
        rope_scaling=scaling,
        norm_eps=1e-6,
        tie_embeddings=tie,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        context_length=128,
        eos_ids=(2,),
        bos_id=1,
    )
    return replace(made, **OWN.get(family, {}))


def random_tensors(config: ModelConfig) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {n: rng.normal(0, 0.1, s).astype(np.float32) for n, s in expected_shapes(config).items()}


def write_directory(path: Path, config: ModelConfig, tensors: Mapping[str, Array], shards: int = 2) -> Path:
    path.mkdir(parents=True)
    described = {
        "architectures": [f"{NAMES[config.family]}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.context_length,
        "sliding_window": None,
        "hidden_act": "silu",
        "eos_token_id": list(config.eos_ids),
        "bos_token_id": config.bos_id,
    }
    (path / "config.json").write_text(json.dumps(described))
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    names = sorted(tensors)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[shard::shards]}, path / file)
        index |= dict.fromkeys(names[shard::shards], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


GGUF_NAMES = {hf: ours for ours, hf in source.TOP_NAMES.items()}
GGUF_LAYER = {hf: ours for ours, hf in source.LAYER_NAMES.items()}


def gguf_name(name: str, family: str = "llama") -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    own = {hf: ours for ours, hf in source.OWN_LAYER_NAMES.get(family, {}).items()}
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{(GGUF_LAYER | own)['.'.join(middle)]}.{kind}"


def as_stored(tensors: Mapping[str, Array], family: str) -> dict[str, Array]:
    """Phi-3 and GLM-4 have gate and up in one tensor, and all but the latest q, k and v."""
    if family not in ("phi3", "glm", "glm4"):
        return dict(tensors)
    whole = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    if family != "glm4":
        whole |= {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    stored: dict[str, list[Array]] = {}
    for name, value in tensors.items():
        module = name.split(".")[-2]
        stored.setdefault(name.replace(module, whole.get(module, module)), []).append(value)
    return {name: np.concatenate(values) for name, values in stored.items()}


def add_own(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """What llama.cpp's conversion writes for one architecture alone."""
    if config.family == "gemma2":
        writer.add_attn_logit_softcapping(config.attention_cap)
        writer.add_final_logit_softcapping(config.logit_cap)
        writer.add_sliding_window(4096)
    if config.neighbours:
        writer.add_rope_dimension_count(config.rotary_dim)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
    if config.family == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if isinstance(config.rope_scaling, LongRope):
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_rope_scaling_orig_ctx_len(config.context_length)
        writer.add_rope_scaling_attn_factors(config.rope_scaling.stretch)
        writer.add_sliding_window(0)
        short = np.array(config.rope_scaling.factors, np.float32)
        writer.add_tensor("rope_factors_short.weight", short)
        writer.add_tensor("rope_factors_long.weight", 4 * short)


def permute(weight: Array, heads: int) -> Array:
    """Interleave each head's halves: row 2i is old row i, row 2i + 1 is old row i + D/2."""
    rows = weight.reshape(heads, -1, weight.shape[-1])
    half = rows.shape[1] // 2
    out = np.empty_like(rows)
    out[:, 0::2], out[:, 1::2] = rows[:, :half], rows[:, half:]
    return out.reshape(weight.shape)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Array],
    quant: Quant = Quant.F32,
    extra: Mapping[str, Array] | None = None,
    quants: Mapping[str, Quant] = MappingProxyType({}),
) -> Path:
    architecture = ARCHITECTURES[config.family]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(config.eos_ids[0])
    assert config.bos_id is not None
    writer.add_bos_token_id(config.bos_id)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    add_own(writer, config)
    for name, value in as_stored(tensors, config.family).items():
        if architecture == "llama" and name.endswith("q_proj.weight"):
            value = permute(value, config.num_heads)
        if architecture == "llama" and name.endswith("k_proj.weight"):
            value = permute(value, config.num_kv_heads)
        matrix = value.ndim >= 2 and not name.endswith("mlp.gate.weight")
        kind = quants.get(name, quant) if matrix else Quant.F32
        stored = value if kind == Quant.F32 else gguf.quantize(value, kind)
        writer.add_tensor(gguf_name(name, config.family), stored, raw_dtype=kind)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    finish(writer)
    return path


def llama_gguf(folder: Path, quant: Quant = Quant.Q8_0) -> Path:
    config = tiny("llama")
    return write_gguf(folder / "m.gguf", config, random_tensors(config), quant)


def assert_same(checkpoint: Checkpoint, tensors: Mapping[str, Array]) -> None:
    assert set(checkpoint.tensors) == set(tensors)
    for name, value in tensors.items():
        assert checkpoint.tensors.shapes[name] == value.shape
        got = checkpoint.tensors[name]
        assert got.dtype == value.dtype, name
        np.testing.assert_array_equal(got, value, err_msg=name)


# ----------------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_directory_reads_back(tmp_path: Path, family: Family, dtype: Any) -> None:
    config = tiny(family)
    tensors = {name: value.astype(dtype) for name, value in random_tensors(config).items()}
    checkpoint = open_checkpoint(write_directory(tmp_path / "m", config, tensors, shards=3))
    assert checkpoint.config == config
    assert not checkpoint.quantized
    assert_same(checkpoint, tensors)


def test_tied_directory_may_repeat_the_embedding_as_head_and_carry_rotation_tables(tmp_path: Path) -> None:
    config = tiny("llama", tie=True)
    tensors = random_tensors(config)
    more = tensors | {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32),
    }
    assert_same(open_checkpoint(write_directory(tmp_path / "m", config, more, shards=1)), tensors)
    more["lm_head.weight"] = more["lm_head.weight"] + 1
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        open_checkpoint(write_directory(tmp_path / "n", config, more, shards=1))


def test_end_tokens_of_generation_config_join_those_of_the_config(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", tiny("qwen2"), random_tensors(tiny("qwen2")))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert open_checkpoint(path).config.eos_ids == (2, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(tmp_path: Path, family: Family) -> None:
    config = tiny(family)
    tensors = random_tensors(config)
    for number, name in enumerate(("model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.k_proj.weight")):
        without = {key: value for key, value in tensors.items() if key != name}
        with pytest.raises(ConfigError, match=f"{name} is missing"):
            open_checkpoint(write_directory(tmp_path / f"missing{number}", config, without))
        wrong = tensors | {name: tensors[name][:-1]}
        with pytest.raises(ConfigError, match=f"{name} has shape"):
            open_checkpoint(write_directory(tmp_path / f"shape{number}", config, wrong))
    for number, name in enumerate(
        ("model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias", "score.weight")
    ):
        with pytest.raises(ConfigError, match=f"unexpected tensor {name}"):
            open_checkpoint(
                write_directory(tmp_path / f"extra{number}", config, tensors | {name: np.ones(3, np.float32)})
            )


def test_damaged_directories_say_what_is_wrong(tmp_path: Path) -> None:
    config = tiny("llama")
    whole = write_directory(tmp_path / "m", config, random_tensors(config))

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    truncated = damaged("truncated") / "model-00002-of-00002.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors: truncated"):
        open_checkpoint(truncated.parent)
    shard = damaged("shard") / "model-00001-of-00002.safetensors"
    shard.unlink()
    with pytest.raises(ConfigError, match=r"model-00001-of-00002.safetensors.* is missing"):
        open_checkpoint(shard.parent)
    config_file = damaged("config") / "config.json"
    config_file.write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: cannot be read"):
        open_checkpoint(config_file.parent)
    config_file.unlink()
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        open_checkpoint(config_file.parent)
    index = damaged("index") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../m/model-00001-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match="outside"):
        open_checkpoint(index.parent)
    index.unlink()
    with pytest.raises(ConfigError, match="neither"):
        open_checkpoint(index.parent)
    with pytest.raises(ConfigError, match="no such model"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"expected a \.gguf file"):
        open_checkpoint(whole / "config.json")
    int8 = {name: value.astype(np.int8) for name, value in random_tensors(config).items()}
    with pytest.raises(ConfigError, match="unsupported type I8"):
        open_checkpoint(write_directory(tmp_path / "int8", config, int8))


# ------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", IN_GGUF)
def test_gguf_reads_back_under_hugging_face_names_and_orientation(tmp_path: Path, family: Family, tie: bool) -> None:
    config = tiny(family, tie=tie)
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors))
    expected = replace(config, family="llama") if family == "mistral" else config
    assert checkpoint.config == expected
    assert checkpoint.quantized
    assert_same(checkpoint, tensors)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_expert_is_named(tmp_path: Path, missing: int) -> None:
    made = parity.write_tiny(tmp_path, "qwen3_moe")
    tensors = load_file(made / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.{missing}.up_proj.weight"]
    save_file(tensors, made / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.up_proj\.weight is of 5 experts, expected 6"):
        open_checkpoint(made)


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_1, Quant.Q5_0])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_gguf_dequantises_to_what_the_format_says(tmp_path: Path, family: Family, quant: Quant) -> None:
    config = tiny(family)
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors, quant))
    rounded = {
        name: gguf.dequantize(gguf.quantize(value, quant), quant).astype(np.float32) if value.ndim == 2 else value
        for name, value in tensors.items()
    }
    assert_same(checkpoint, rounded)
    assert quant == Quant.F16 or any(np.any(rounded[name] != tensors[name]) for name in tensors)


def test_undoing_the_permutation_makes_rope_on_halves_of_rope_on_neighbours() -> None:
    """Turning neighbours of the stored rows is the same as turning halves of the unpermuted rows."""
    heads, dim = 3, 8
    rng = np.random.default_rng(1)
    stored = rng.normal(size=(heads * dim, 5))
    x, angle = rng.normal(size=5), rng.normal(size=dim // 2)
    pairs = (stored @ x).reshape(heads, dim // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    halves = (unpermute_rope_rows(stored, heads) @ x).reshape(heads, 2, dim // 2)
    np.testing.assert_allclose((halves[:, 0] + 1j * halves[:, 1]) * np.exp(1j * angle), turned)
    np.testing.assert_array_equal(unpermute_rope_rows(permute(stored, heads), heads), stored)


def test_gguf_metadata_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = llama_gguf(tmp_path)
    reader = gguf.GGUFReader(path)
    metadata, tensors = read_gguf(path)
    assert metadata == {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert {
        t.name: (tuple(t.shape.tolist()[::-1]), t.tensor_type, t.data_offset, t.n_bytes) for t in reader.tensors
    } == {name: (t.shape, t.kind, t.offset, t.size) for name, t in tensors.items()}


def llama3_divisors(theta: float, dim: int, s: RopeScaling) -> NDArray[np.float32]:
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (i / dim)
        turns = s.original_context / wavelength
        smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / s.factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_rope_scaling_is_recovered_from_rope_freqs(tmp_path: Path) -> None:
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192)
    config = tiny("llama", scaling=scaling)
    tensors = random_tensors(config)
    divisors = llama3_divisors(config.rope_theta, config.head_dim, scaling)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, extra={"rope_freqs.weight": divisors})
    assert open_checkpoint(path).config == config
    path = write_gguf(tmp_path / "n.gguf", config, tensors, extra={"rope_freqs.weight": np.ones_like(divisors)})
    assert open_checkpoint(path).config.rope_scaling is None
    for number, wrong in enumerate((divisors * np.float32(1.1), divisors[:-1])):
        path = write_gguf(tmp_path / f"{number}.gguf", config, tensors, extra={"rope_freqs.weight": wrong})
        with pytest.raises(ConfigError, match=r"rope_freqs.weight"):
            open_checkpoint(path)


def test_a_gguf_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = llama_gguf(tmp_path).read_bytes()
    for length in [0, 3, 4, 7, 12, 23, *range(24, len(data) - 1, len(data) // 40), len(data) - 40]:
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"cut.gguf: .*(truncated|not a GGUF)"):
            open_checkpoint(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(data)
    open_checkpoint(tmp_path / "cut.gguf")


@pytest.mark.parametrize("alignment", [0, 2**31 - 1])
def test_a_gguf_whose_alignment_cannot_be_is_refused(tmp_path: Path, alignment: int) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("general.alignment", alignment)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    finish(writer)
    with pytest.raises(ConfigError, match=r"m.gguf: .*(truncated|damaged)"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_more_layers_than_there_are_tensors_are_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A damaged number of layers must not fill the memory with names of tensors."""
    config = tiny("llama")
    write = write_gguf if kind == "gguf" else write_directory
    path = write(tmp_path / "m.gguf", replace(config, num_layers=2**30), random_tensors(config))
    with pytest.raises(ConfigError, match=r"model.layers.2.input_layernorm.weight is missing"):
        open_checkpoint(path)


def test_gguf_of_other_versions_and_parts_is_refused(tmp_path: Path) -> None:
    path = llama_gguf(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", 1) + data[8:])
    with pytest.raises(ConfigError, match="version 1"):
        open_checkpoint(path)
    for parts in (2, "two"):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_key_value("split.count", parts, gguf.GGUFValueType.get_type(parts))
        finish(writer)
        with pytest.raises(ConfigError, match=r"split.count"):
            open_checkpoint(path)


def test_gguf_tensors_and_architectures_that_are_unknown_are_named(tmp_path: Path) -> None:
    config = tiny("qwen3")
    tensors = random_tensors(config)
    for name, target in {
        "blk.0.attn_sinks.weight": "blk.0.attn_sinks.weight",
        "blk.0.attn_q.bias": "model.layers.0.self_attn.q_proj.bias",
        "blk.7.attn_q.weight": "model.layers.7.self_attn.q_proj.weight",
        "cls.weight": "cls.weight",
    }.items():
        path = write_gguf(tmp_path / f"{name}.gguf", config, tensors, extra={name: np.ones(4, np.float32)})
        with pytest.raises(ConfigError, match=f"unexpected tensor {target}"):
            open_checkpoint(path)
    without = {name: value for name, value in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(ConfigError, match=r"model.layers.1.mlp.up_proj.weight is missing"):
        open_checkpoint(write_gguf(tmp_path / "missing.gguf", config, without))
    other = write_gguf(tmp_path / "other.gguf", config, tensors)
    other.write_bytes(other.read_bytes().replace(b"qwen3", b"gemma"))
    with pytest.raises(ConfigError, match=r"general.architecture is 'gemma'"):
        open_checkpoint(other)


# ------------------------------------------------------------------------- decoder and cache


def logits(decoder: Decoder) -> Array:
    return np.asarray(dense_logits(decoder, jnp.arange(9, dtype=jnp.int32)))


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the GGUF tensors read from here on."""
    read: list[str] = []
    original = source._read_tensor

    def spy(path: Path, tensor: source.TensorEntry, name: str, heads: int | None = None) -> NDArray[np.float32]:
        read.append(name)
        return original(path, tensor, name, heads)

    monkeypatch.setattr(source, "_read_tensor", spy)
    return read


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_start_dequantises_nothing_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    config = tiny("llama")
    file = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), Quant.Q4_1)
    direct = Decoder.from_tensors(config, open_checkpoint(file).tensors, jnp.dtype(dtype))
    read = counting(monkeypatch)
    first = load_decoder(file, dtype, tmp_path / "cache")
    assert len(read) == len(expected_shapes(config))
    read.clear()
    second = load_decoder(file, dtype, tmp_path / "cache")
    assert not read
    for decoder in (first, second):
        assert jax.tree.all(
            jax.tree.map(
                lambda a, b: a.dtype == b.dtype and bool(jnp.all(a == b)), nnx.state(decoder), nnx.state(direct)
            )
        )


@pytest.mark.parametrize("family", [family for family in IN_GGUF if family not in ("mixtral", "qwen3_moe")])
def test_packed_weights_give_the_logits_of_widened_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    config = tiny(family, tie=family == "qwen3")
    file = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), Quant.Q4_0)
    wide = logits(load_decoder(file, "float32", tmp_path / "cache"))
    read = counting(monkeypatch)
    for start in range(2):
        decoder = load_decoder(file, "bfloat16", tmp_path / "cache", PackedForm())
        assert decoder.kernels is not None
        np.testing.assert_allclose(logits(decoder), wide, atol=0.05 * np.ptp(wide))
        matrices = [name for name in read if not name.endswith(("norm.weight", ".bias"))]
        assert not matrices, f"start {start} widens {matrices}"


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_floats_can_be_packed(tmp_path: Path, bits: int) -> None:
    file = llama_gguf(tmp_path, Quant.F16)
    wide = logits(load_decoder(file, "float32", tmp_path / "cache"))
    decoder = load_decoder(file, "bfloat16", tmp_path / "cache", PackedForm(tiled=False, bits=bits))
    assert decoder.kernels == WHOLE_NUMBERS
    values = {name: weight.get_value() for name, weight in decoder.weights().items()}
    found = {name: value.packing.bits for name, value in values.items() if isinstance(value, PackedMatrix)}
    assert found.pop("embedding") == found.pop("head", 8) == 8 and set(found.values()) == {bits}
    error = np.abs(logits(decoder) - wide).max() / np.ptp(wide)
    assert error < (0.01 if bits == 8 else 0.1)


def test_weights_that_cannot_have_fewer_bits_are_named(tmp_path: Path) -> None:
    odd = replace(tiny("llama"), intermediate_size=72)
    for config, reason in ((odd, "down_proj.weight has 72 inputs, which 32"), (tiny("mixtral"), "mixture of experts")):
        file = write_gguf(tmp_path / f"{config.family}.gguf", config, random_tensors(config), Quant.F16)
        with pytest.raises(ConfigError, match=reason):
            load_decoder(file, "bfloat16", tmp_path / "cache", PackedForm(bits=8))


@pytest.mark.parametrize("other", [Quant.Q8_0, Quant.F16])
def test_layers_of_mixed_types_are_alike_and_run_as_one_program(tmp_path: Path, other: Quant) -> None:
    """As Q4_K_M has them. A stack of packed layers gives the bits of programs in which layers stand alone."""
    config = replace(tiny("llama"), num_layers=4)
    quants = {f"model.layers.{i}.mlp.down_proj.weight": other for i in (0, 3)}
    file = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), Quant.Q4_1, quants=quants)
    wide = logits(load_decoder(file, "float32", tmp_path / "cache"))

    def last(*, scanned: bool, depth: int) -> Array:
        decoder = load_decoder(file, "bfloat16", tmp_path / "cache", PackedForm())
        assert isinstance(decoder.layers[0].down[...], PackedMatrix) == (other is Quant.Q8_0)
        runner = Runner(decoder, pages=3, page_size=steps.PAGE, grid=steps.GRID, scanned=scanned, stage_layers=depth)
        part = steps.whole(np.arange(9, dtype=np.int32), 1)
        return runner.logits(runner.step(steps.step_of([part], 24)), [8])[0]

    found = last(scanned=True, depth=2)
    np.testing.assert_allclose(found, wide[8], atol=0.05 * np.ptp(wide))
    if other is Quant.Q8_0:
        np.testing.assert_array_equal(found, last(scanned=False, depth=1))


@pytest.mark.skipif(not op.tiled(), reason="this machine has no AMX")
def test_programs_of_other_packings_are_kept_apart(tmp_path: Path) -> None:
    file = llama_gguf(tmp_path, Quant.Q4_0)

    def facts(*, tiled: bool) -> tuple[object, ...]:
        decoder = load_decoder(file, "bfloat16", tmp_path / "cache", PackedForm(tiled=tiled))
        return Runner(decoder, pages=3, page_size=16)._programs._common

    assert facts(tiled=False) == facts(tiled=False) != facts(tiled=True)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux alone tells what is mapped")
def test_dequantised_weights_are_the_mapped_file(tmp_path: Path) -> None:
    file = llama_gguf(tmp_path, Quant.Q4_1)
    decoder = load_decoder(file, "bfloat16", tmp_path / "cache")
    (line,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path / "cache") in line)
    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
    assert begin <= decoder.layers[1].down[...].unsafe_buffer_pointer() < end


def test_cache_is_keyed_by_weights_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("qwen2")
    tensors = random_tensors(config)
    file = write_gguf(tmp_path / "m.gguf", config, tensors)
    load_decoder(file, "float32", tmp_path / "cache")
    read = counting(monkeypatch)
    load_decoder(file, "bfloat16", tmp_path / "cache")
    assert read
    changed = tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2}
    write_gguf(file, config, changed)
    decoder = load_decoder(file, "float32", tmp_path / "cache")
    np.testing.assert_array_equal(np.asarray(decoder.norm[...]), changed["model.norm.weight"])


def quantized(config: ModelConfig) -> Checkpoint:
    """A checkpoint whose weights are all zero, and said to be quantised."""
    zeros = {n: Stored(partial(np.zeros, s, np.float32), s, "F32") for n, s in expected_shapes(config).items()}
    return Checkpoint(config, Tensors(zeros), quantized=True)


@pytest.mark.parametrize(
    ("change", "files"),
    [
        ({"eos_ids": (2, 7)}, 1),
        ({"context_length": 64, "rope_theta": 5e5}, 1),
        ({"family": "mistral"}, 2),
        ({"num_heads": 8, "num_kv_heads": 4, "head_dim": 16}, 2),
        ({"num_layers": 1}, 2),
    ],
)
def test_weights_are_dequantised_once_however_they_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], files: int
) -> None:
    """The same files; a configuration that reads other tensors from them has a cache of its own."""
    (tmp_path / "m.gguf").write_bytes(b"the same")
    for config in (tiny("llama"), replace(tiny("llama"), **change)):
        monkeypatch.setattr(weights, "open_checkpoint", lambda path, config=config: quantized(config))
        load_decoder(tmp_path / "m.gguf", "float32", tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "dequantized").glob("*.safetensors"))) == files


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_a_damaged_cache_is_rebuilt_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    file = llama_gguf(tmp_path)
    expected = logits(load_decoder(file, "float32", tmp_path / "cache"))
    (cached,) = (tmp_path / "cache" / "dequantized").glob("*.safetensors")
    data = bytearray(cached.read_bytes())
    data[-40] ^= 0x80
    cached.write_bytes({"flip": bytes(data), "truncate": bytes(data[:-7]), "empty": b""}[damage])
    assert not caplog.records
    np.testing.assert_array_equal(logits(load_decoder(file, "float32", tmp_path / "cache")), expected)
    assert [r.levelno for r in caplog.records if "damaged" in r.message] == [logging.WARNING]
    caplog.clear()
    load_decoder(file, "float32", tmp_path / "cache")
    assert not caplog.records


def test_an_interrupted_cache_write_leaves_nothing_that_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = llama_gguf(tmp_path)
    original = source._read_tensor

    def dies(path: Path, tensor: source.TensorEntry, name: str, heads: int | None = None) -> NDArray[np.float32]:
        if name == "blk.1.ffn_up.weight":
            raise KeyboardInterrupt
        return original(path, tensor, name, heads)

    with monkeypatch.context() as patch:
        patch.setattr(source, "_read_tensor", dies)
        with pytest.raises(KeyboardInterrupt):
            load_decoder(file, "float32", tmp_path / "cache")
    assert not list((tmp_path / "cache" / "dequantized").glob("*.safetensors"))
    load_decoder(file, "float32", tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_clear(tmp_path: Path) -> None:
    file = llama_gguf(tmp_path)
    (tmp_path / "cache").write_text("no folder")
    assert len(weights_digest(file, tmp_path / "cache")) == 32, "digests are only remembered there"
    with pytest.raises(ConfigError, match=r"cache folder \S+cache cannot be written: .*set RAGJAX_CACHE"):
        load_decoder(file, "float32", tmp_path / "cache")


def test_a_read_only_cache_serves_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = llama_gguf(tmp_path)
    expected = logits(load_decoder(file, "float32", tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache" / "digests")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "write_text", "unlink", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(weights, "locked", refuse)
    np.testing.assert_array_equal(logits(load_decoder(file, "float32", tmp_path / "cache")), expected)


def test_digest_covers_the_content_of_all_weight_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("llama")
    tensors = random_tensors(config)
    path = write_directory(tmp_path / "m", config, tensors)
    digest = weights_digest(path, tmp_path / "cache")
    assert len(digest) == 32
    with monkeypatch.context() as patch:
        patch.setattr(weights.hashlib, "file_digest", lambda *_: pytest.fail("read the file again"))
        assert weights_digest(path, tmp_path / "cache") == digest
    moved = Path(shutil.copytree(path, tmp_path / "n"))
    assert weights_digest(moved, tmp_path / "cache") == digest
    shard = moved / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    assert weights_digest(moved, tmp_path / "cache") != digest
    for note in (tmp_path / "cache" / "digests").iterdir():
        note.write_text("not json")
    assert weights_digest(path, tmp_path / "cache") == digest
