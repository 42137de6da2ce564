"""Matrices in fewer bits: each format beside float64 loops over its definition, and whole checkpoints.

The packers here place one number at a time, as the formats' own libraries say; they share nothing with the readers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ragjax.core import ConfigError
from ragjax.models.hub import LocalModel
from ragjax.models.quantization import GroupedScheme, read_scheme
from ragjax.models.trained import Adapter, load_model
from ragjax.models.weights import load_decoder, open_checkpoint, weights_digest
from tests.support.devices import ROOT
from tests.support.forward import dense_logits

Array = NDArray[Any]
TINY = ROOT / "tests" / "data" / "tiny_llama"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, WQLinear_GEMM.from_linear: order_map
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 20]}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BLOCKS = WEIGHTS | {"strategy": "block", "block_structure": [8, 8]}
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True, "actorder": None}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


def words(values: Array, bits: int = 4, order: Sequence[int] | None = None) -> Array:
    """Each row's values in int32 words, the lowest bits first. order: of the values that share a word."""
    count = 32 // bits
    packed = np.zeros((len(values), values.shape[1] // count), np.uint32)
    for row, column in np.ndindex(*packed.shape):
        for place, i in enumerate(order or range(count)):
            packed[row, column] |= int(values[row, column * count + i]) << (bits * place)
    return packed.view(np.int32)


def widened(code: Array, zero: Array, scale: Array, order: Array) -> Array:
    """Values of codes [out, in] with zero points and scales [out, groups], float64. order: the group of each input."""
    value = np.zeros(code.shape)
    for o, i in np.ndindex(*code.shape):
        value[o, i] = float(code[o, i] - zero[o, order[i]]) * float(scale[o, order[i]])
    return value


def awq(rng: np.random.Generator, weight: Array, group: int = 8) -> tuple[dict[str, Array], Array]:
    """Tensors of a matrix [out, in] of random codes, and its values, float64."""
    outputs, inputs = weight.shape
    groups = inputs // group
    code, zero = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (groups, outputs))
    scale = scales(rng, (groups, outputs))
    parts = {"qweight": words(code, order=AWQ_ORDER), "qzeros": words(zero, order=AWQ_ORDER), "scales": scale}
    return parts, widened(code.T, zero.T, scale.T, np.arange(inputs) // group)


def gptq(
    rng: np.random.Generator,
    weight: Array,
    *,
    bits: int = 4,
    group: int = 8,
    symmetric: bool = False,
    shuffled: bool = True,
    second: bool = False,
) -> tuple[dict[str, Array], Array]:
    """As `awq`. shuffled: the groups' inputs are in disorder (desc_act); second: zero points as they are (gptq_v2)."""
    outputs, inputs = weight.shape
    groups, top = -(-inputs // group), 2**bits
    code = rng.integers(0, top, (inputs, outputs))
    zero = np.full((groups, outputs), top // 2) if symmetric else rng.integers(0, top, (groups, outputs))
    scale = scales(rng, (groups, outputs))
    order = np.arange(inputs) // group
    if shuffled:
        order = rng.permutation(order)
    parts = {"qweight": words(code.T, bits).T, "qzeros": words((zero - (not second)) % top, bits), "scales": scale}
    return parts | {"g_idx": order.astype(np.int32)}, widened(code.T, zero.T, scale.T, order)


def fp8(
    rng: np.random.Generator, weight: Array, reach: str = "block", name: str = "weight_scale_inv"
) -> tuple[dict[str, Array], Array]:
    """As `awq`. reach: of a scale, "matrix", "output" or "block" (24 outputs by 20 inputs)."""
    outputs, inputs = weight.shape
    code = (rng.standard_normal(weight.shape) * 100).astype(ml_dtypes.float8_e4m3fn)
    shape = {"matrix": (), "output": (outputs, 1), "block": (-(-outputs // 24), -(-inputs // 20))}[reach]
    scale = np.asarray(rng.uniform(0.0005, 0.002, shape), np.float32)
    value = np.zeros(weight.shape)
    for o, i in np.ndindex(*weight.shape):
        where = {"matrix": (), "output": (o, 0), "block": (o // 24, i // 20)}[reach]
        value[o, i] = float(code[o, i]) * float(scale[where])
    return {"weight": code, name: scale}, value


def int8(rng: np.random.Generator, weight: Array) -> tuple[dict[str, Array], Array]:
    """As `awq`, with a scale per output."""
    code = rng.integers(-128, 128, weight.shape).astype(np.int8)
    scale = rng.uniform(0.0005, 0.002, (len(code), 1)).astype(np.float32)
    value = np.array([[float(q) * float(scale[o, 0]) for q in row] for o, row in enumerate(code)])
    return {"weight": code, "weight_scale": scale}, value


def packed(
    rng: np.random.Generator,
    weight: Array,
    *,
    bits: int = 4,
    group: int = 8,
    symmetric: bool = True,
    shuffled: bool = False,
) -> tuple[dict[str, Array], Array]:
    """As `gptq`, in the layout of compressed-tensors' "pack-quantized": signed codes, moved by half their range."""
    outputs, inputs = weight.shape
    groups, half = -(-inputs // group), 2 ** (bits - 1)
    code = rng.integers(-half, half, (outputs, inputs))
    zero = np.zeros((outputs, groups), int) if symmetric else rng.integers(-half, half, (outputs, groups))
    scale = scales(rng, (outputs, groups))
    order = np.arange(inputs) // group
    if shuffled:
        order = rng.permutation(order)
    parts = {"weight_packed": words(code + half, bits), "weight_scale": scale}
    parts["weight_shape"] = np.array([outputs, inputs], np.int64)
    parts |= {} if symmetric else {"weight_zero_point": words((zero + half).T, bits).T}
    parts |= {"weight_g_idx": order.astype(np.int32)} if shuffled else {}
    return parts, widened(code, zero, scale, order)


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return COMPRESSED | {"format": layout, "config_groups": {"group_0": {"weights": weights}}}


def scales(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(0.005, 0.02, shape).astype(np.float16)


ASYMMETRIC = compressed("pack-quantized", **PACKED | {"symmetric": False})
IN_DISORDER = compressed("pack-quantized", **PACKED | {"symmetric": False, "actorder": "group"})
PACKED_BY_OUTPUT = compressed("pack-quantized", num_bits=4, type="int", strategy="channel")
CASES: dict[str, tuple[Any, Mapping[str, Any], dict[str, Any]]] = {
    "awq": (awq, AWQ, {}),
    "awq-one-group": (awq, AWQ | {"group_size": -1}, {"group": 32}),
    "gptq": (gptq, GPTQ, {"symmetric": True, "shuffled": False}),
    "gptq-asymmetric": (gptq, GPTQ | {"sym": False}, {"shuffled": False}),
    "gptq-desc-act": (gptq, GPTQ | {"desc_act": True}, {}),
    "gptq-v2": (gptq, GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, {"second": True}),
    "gptq-8-bits": (gptq, GPTQ | {"bits": 8, "sym": False}, {"bits": 8}),
    "gptq-8-bits-symmetric": (gptq, GPTQ | {"bits": 8}, {"bits": 8, "symmetric": True, "shuffled": False}),
    "gptq-one-group": (gptq, GPTQ | {"group_size": -1}, {"group": 32, "shuffled": False}),
    "fp8-block": (fp8, FP8, {}),
    "fp8-block-other-name": (fp8, FP8, {"name": "weight_scale"}),
    "fp8-matrix": (fp8, FP8 | {"weight_block_size": None}, {"reach": "matrix", "name": "weight_scale"}),
    "compressed-int8": (int8, compressed("int-quantized", num_bits=8, type="int", strategy="channel"), {}),
    "compressed-packed": (packed, compressed("pack-quantized", **PACKED), {}),
    "compressed-asymmetric": (packed, ASYMMETRIC, {"symmetric": False}),
    "compressed-actorder": (packed, IN_DISORDER, {"symmetric": False, "shuffled": True}),
    "compressed-packed-8-bits": (packed, compressed("pack-quantized", **PACKED | {"num_bits": 8}), {"bits": 8}),
    "compressed-packed-output": (packed, PACKED_BY_OUTPUT, {"group": 32}),
    "compressed-output": (fp8, COMPRESSED, {"reach": "output", "name": "weight_scale"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_matrix_is_widened_to_what_its_format_says(case: str) -> None:
    """To the last bit: every value is one product, which float32 rounds once."""
    make, section, settings = CASES[case]
    parts, value = make(np.random.default_rng(0), np.zeros((48, 32)), **settings)
    scheme = read_scheme({"quantization_config": section})
    assert scheme is not None
    assert scheme.shape({name: part.shape for name, part in parts.items()}) == (48, 32)
    got = scheme.widen(parts)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, value.astype(np.float32))


@pytest.mark.parametrize("case", [case for case, (make, *_) in CASES.items() if make not in (fp8, int8)])
def test_codes_of_a_matrix_are_what_its_format_says(case: str) -> None:
    make, section, settings = CASES[case]
    group = 64 if settings.get("group") else 32
    section = json.loads(json.dumps(section).replace('"group_size": 8', '"group_size": 32'))
    parts, value = make(np.random.default_rng(0), np.zeros((48, 64)), **settings | {"group": group})
    scheme = read_scheme({"quantization_config": section})
    assert scheme is not None
    assert isinstance(scheme, GroupedScheme)
    packing = scheme.packing(64, parts.get("g_idx", parts.get("weight_g_idx")))
    if settings.get("shuffled", make is gptq):
        assert packing is None
        return
    assert packing is not None and packing.block == 32
    np.testing.assert_allclose(scheme.codes(parts, packing).widen(), value, rtol=2e-6, atol=1e-9)


def test_groups_that_no_block_divides_are_widened() -> None:
    scheme = read_scheme({"quantization_config": GPTQ | {"group_size": 24}})
    assert isinstance(scheme, GroupedScheme) and scheme.packing(48, None) is None


def test_gptq_without_an_order_has_its_inputs_in_a_row() -> None:
    parts, value = gptq(np.random.default_rng(0), np.zeros((16, 32)), shuffled=False)
    del parts["g_idx"]
    scheme = read_scheme({"quantization_config": GPTQ})
    assert scheme is not None and scheme.shape({name: part.shape for name, part in parts.items()}) == (16, 32)
    np.testing.assert_array_equal(scheme.widen(parts), value.astype(np.float32))
    unordered = read_scheme({"quantization_config": GPTQ | {"desc_act": True}})
    assert unordered is not None
    with pytest.raises(KeyError, match="g_idx"):
        unordered.shape({name: part.shape for name, part in parts.items()})


# -------------------------------------------------------------------------------- whole checkpoints


def save(path: Path, tensors: Mapping[str, Array], section: Mapping[str, Any] | None) -> Path:
    """A checkpoint of tiny_llama's configuration. Written by hand: safetensors takes no float8 of NumPy's."""
    names = {
        "float32": "F32",
        "float16": "F16",
        "int32": "I32",
        "float8_e4m3fn": "F8_E4M3",
        "int8": "I8",
        "int64": "I64",
    }
    path.mkdir()
    config = json.loads((TINY / "config.json").read_text()) | ({"quantization_config": section} if section else {})
    (path / "config.json").write_text(json.dumps(config))
    header, blocks, offset = {}, [], 0
    for name, value in tensors.items():
        block = np.ascontiguousarray(value).tobytes()
        span = [offset, offset + len(block)]
        header[name] = {"dtype": names[value.dtype.name], "shape": list(value.shape), "data_offsets": span}
        blocks.append(block)
        offset += len(block)
    head = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"".join(blocks))
    return path


def packed_tensors(case: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """tiny_llama's tensors with every projection packed, and the same widened."""
    make, _, settings = CASES[case]
    rng = np.random.default_rng(1)
    packed, wide = {}, {}
    for name, tensor in load_file(TINY / "model.safetensors").items():
        if "_proj.weight" not in name:
            packed[name] = wide[name] = tensor
            continue
        parts, value = make(rng, tensor, **settings)
        packed |= {f"{name.removesuffix('weight')}{part}": array for part, array in parts.items()}
        wide[name] = value.astype(np.float32)
    return packed, wide


def logits(path: Path, cache: Path) -> Array:
    return np.asarray(dense_logits(load_decoder(path, "float32", cache), jnp.arange(24) % 90))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["awq", "gptq-desc-act", "fp8-block", "compressed-output", "compressed-asymmetric"])
def test_a_packed_checkpoint_computes_what_the_widened_one_does(tmp_path: Path, case: str) -> None:
    packed, wide = packed_tensors(case)
    stored = save(tmp_path / "packed", packed, CASES[case][1])
    plain = save(tmp_path / "wide", wide, None)
    assert open_checkpoint(stored).quantized and not open_checkpoint(plain).quantized
    wanted = logits(plain, tmp_path / "cache")
    assert np.ptp(wanted) > 0.1
    for _ in range(2):  # the second time from the cache of dequantised weights
        np.testing.assert_array_equal(logits(stored, tmp_path / "cache"), wanted)


def test_an_adapter_over_a_packed_checkpoint_is_one_over_the_widened(tmp_path: Path) -> None:
    packed, wide = packed_tensors("awq")
    homes = [save(tmp_path / "packed", packed, AWQ), save(tmp_path / "wide", wide, None)]
    shape = load_decoder(homes[1], "float32", tmp_path / "cache").layers[0].down.shape
    rng = np.random.default_rng(2)
    layers = json.loads((TINY / "config.json").read_text())["num_hidden_layers"]
    pair = {"a": rng.standard_normal((layers, 2, shape[1])), "b": rng.standard_normal((layers, shape[0], 2))}
    trained = Adapter({"down": {name: value.astype(np.float32) for name, value in pair.items()}}, 2, 4.0, {})
    tokens, results = jnp.arange(24) % 90, []
    for home in homes:
        decoder = load_model(LocalModel(home.name, home, "huggingface"), "float32", tmp_path / "cache")
        bare = np.asarray(dense_logits(decoder, tokens))
        trained.apply(decoder)
        results.append(np.asarray(dense_logits(decoder, tokens)))
        assert np.abs(results[-1] - bare).max() > 0.1
    np.testing.assert_array_equal(*results)


def test_scales_of_activations_and_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    packed, _ = packed_tensors("gptq")
    bias = "model.layers.0.self_attn.o_proj.bias"
    width = packed["model.norm.weight"].shape
    path = save(tmp_path / "zeros", packed | {bias: np.zeros(width, np.float16)}, GPTQ)
    assert bias not in open_checkpoint(path).tensors
    with pytest.raises(ConfigError, match=f"unexpected tensor {bias}"):
        open_checkpoint(save(tmp_path / "ones", packed | {bias: np.ones(width, np.float16)}, GPTQ))
    packed, _ = packed_tensors("fp8-block")
    packed |= {f"model.layers.0.self_attn.{name}": np.ones(1, np.float32) for name in ("k_scale", "q_proj.input_scale")}
    assert open_checkpoint(save(tmp_path / "scales", packed, FP8)).quantized


def test_a_change_of_how_the_bytes_are_read_is_another_model(tmp_path: Path) -> None:
    packed, wide = packed_tensors("gptq")
    first = save(tmp_path / "first", packed, GPTQ)
    second = save(tmp_path / "second", packed, GPTQ | {"checkpoint_format": "gptq_v2"})
    assert weights_digest(first, tmp_path) != weights_digest(second, tmp_path)
    assert np.abs(logits(first, tmp_path) - logits(second, tmp_path)).max() > 0.01
    plain = save(tmp_path / "plain", wide, None)
    plain_digest = weights_digest(plain, tmp_path)
    (plain / "config.json").write_text((plain / "config.json").read_text() + "\n")
    assert weights_digest(plain, tmp_path) == plain_digest, "plain weights are their bytes alone"


# ---------------------------------------------------------------------------------------- refusals


def group(**changes: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": {"weights": WEIGHTS | changes}}}


REFUSED: list[tuple[str, Any]] = [
    ("quantization_config", "awq"),
    ("quant_method", {"quant_method": "bitsandbytes"}),
    ("quant_method", {"bits": 4}),
    ("bits", AWQ | {"bits": 8}),
    ("version", AWQ | {"version": "gemv"}),
    ("zero_point", AWQ | {"zero_point": False}),
    ("group_size", AWQ | {"group_size": 0}),
    ("bits", GPTQ | {"bits": 3}),
    ("bits", {key: value for key, value in GPTQ.items() if key != "bits"}),
    ("checkpoint_format", GPTQ | {"checkpoint_format": "marlin"}),
    ("checkpoint_format", GPTQ | {"format": "bitblas"}),
    ("is_marlin_format", GPTQ | {"is_marlin_format": True}),
    ("dynamic", GPTQ | {"dynamic": {"-:.*down.*": {}}}),
    ("pack_dtype", GPTQ | {"pack_dtype": "int16"}),
    ("group_size", GPTQ | {"group_size": "x"}),
    ("desc_act", GPTQ | {"desc_act": "yes"}),
    ("fmt", FP8 | {"fmt": "e5m2"}),
    ("weight_block_size", FP8 | {"weight_block_size": [128]}),
    ("format", COMPRESSED | {"format": "marlin-24"}),
    ("group_size", compressed("pack-quantized", **PACKED | {"group_size": 0})),
    ("actorder", compressed("pack-quantized", **PACKED | {"actorder": "other"})),
    ("num_bits", compressed("pack-quantized", **PACKED | {"num_bits": 3})),
    ("sparsity_config", COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}),
    ("transform_config", COMPRESSED | {"transform_config": {"config_groups": {}}}),
    ("config_groups", COMPRESSED | {"config_groups": {}}),
    ("group_0.weights", COMPRESSED | {"config_groups": {"group_0": {}}}),
    ("type", group(type="int")),
    ("num_bits", group(num_bits=4)),
    ("symmetric", group(symmetric=False)),
    ("strategy", group(strategy="group")),
    ("block_structure", group(strategy="block", block_structure="128x128")),
    ("do not agree", COMPRESSED | {"config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": BLOCKS}}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "section"), REFUSED, ids=[f"{i}-{r[0]}" for i, r in enumerate(REFUSED)])
def test_a_setting_that_cannot_be_read_is_refused_by_name(field: str, section: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        read_scheme({"quantization_config": section})


@pytest.mark.parametrize(
    ("case", "part", "message"),
    [
        ("awq", "qzeros", "qzeros is missing"),
        ("awq", "scales", "scales is missing"),
        ("gptq-desc-act", "g_idx", "g_idx is missing"),
        ("fp8-block", "weight_scale_inv", "weight_scale is missing"),
        ("compressed-actorder", "weight_g_idx", "weight_g_idx is missing"),
        ("compressed-asymmetric", "weight_zero_point", "weight_zero_point is missing"),
    ],
)
def test_a_matrix_that_lacks_a_part_names_it(tmp_path: Path, case: str, part: str, message: str) -> None:
    packed, _ = packed_tensors(case)
    name = "model.layers.1.mlp.up_proj"
    less = {key: value for key, value in packed.items() if key != f"{name}.{part}"}
    with pytest.raises(ConfigError, match=f"{name}.{message}"):
        open_checkpoint(save(tmp_path / "m", less, CASES[case][1]))


@pytest.mark.parametrize(("case", "part"), [("awq", "scales"), ("gptq", "qzeros"), ("fp8-block", "weight_scale_inv")])
def test_a_part_of_another_shape_is_named(tmp_path: Path, case: str, part: str) -> None:
    packed, _ = packed_tensors(case)
    name = f"model.layers.1.mlp.up_proj.{part}"
    with pytest.raises(ConfigError, match=f"{name} has shape"):
        open_checkpoint(save(tmp_path / "m", packed | {name: packed[name][:-1]}, CASES[case][1]))


def test_what_no_format_explains_is_refused(tmp_path: Path) -> None:
    packed, _ = packed_tensors("awq")
    name = "model.layers.0.mlp.up_proj.codebook"
    with pytest.raises(ConfigError, match=f"{name} of type I32"):
        open_checkpoint(save(tmp_path / "m", packed | {name: np.zeros(3, np.int32)}, AWQ))
    with pytest.raises(ConfigError, match="unsupported type I32"):
        open_checkpoint(save(tmp_path / "n", packed, None))
