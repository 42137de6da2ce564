"""Every GPU kernel lowers for CUDA at the shapes of the models that are served, with no GPU at hand.

Lowering traces the kernel and builds and verifies its Triton or Mosaic module, which finds most mistakes of type, shape
and layout. tests/test_compile.py goes on to machine code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ragjax.core import Grid, Measure
from ragjax.kernels.attention import op as attention
from ragjax.kernels.attention import triton as attention_triton
from ragjax.kernels.attention import xla as attention_xla
from ragjax.kernels.pages import Pages
from ragjax.kernels.reductions import op as reductions_op
from ragjax.kernels.reductions import triton as reductions_triton
from ragjax.kernels.reductions.measure import ARRAYS
from ragjax.kernels.rope import Rotation
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder
from ragjax.runner import stages
from ragjax.runner.weights import split_ends, split_layers
from tests.support.cases import HOPPER
from tests.support.compiler import MODELS, PAGE_SIZES, WORK, hopper_mesh, kernels, lower, reductions, serving, training
from tests.support.matrix import few, with_smoke

pytestmark = pytest.mark.slow

PREFILL = [work for work, folded in WORK.items() if folded]
HEADS = ["llama-3-8b", "smollm2-135m"]
"""One model for each head dimension, where more would show the same."""


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("page_size", few(PAGE_SIZES, [64]))
@pytest.mark.parametrize("name", with_smoke(MODELS, "smollm2-135m"))
def test_triton_lowers(name: str, page_size: int, work: str) -> None:
    q, view = serving(MODELS[name], page_size, work)
    assert attention_triton.refusal(q, view, HOPPER) is None
    (kernel,) = kernels(lower(attention_triton.attend, q, view))
    assert kernel.ir.count("tt.dot") >= 6


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("name", HEADS)
def test_triton_lowers_in_other_dtypes(name: str, work: str, dtype: str) -> None:
    (kernel,) = kernels(lower(attention_triton.attend, *serving(MODELS[name], 64, work, dtype=dtype)))
    # by default a float32 product would be TF32, with a relative error of 1e-3
    assert ("inputPrecision = tf32" in kernel.ir) == (dtype != "float32")


@pytest.mark.parametrize("work", PREFILL)
def test_triton_lowers_at_32k_rows(work: str) -> None:
    (_,) = kernels(lower(attention_triton.attend, *serving(MODELS["llama-3-8b"], 64, work, rows=32 * 1024)))


def wide_offsets(ir: str) -> int:
    """Tiles of bfloat16 that are addressed by 64-bit offsets."""
    return len(re.findall(r"tt\.addptr [^\n]*: tensor<(\w+)x!tt\.ptr<bf16>>, tensor<\1xi64>", ir))


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("name", MODELS)
def test_pools_beyond_32_bits_are_indexed_with_64(name: str, work: str) -> None:
    q, view = serving(MODELS[name], 64, work)
    assert view.pages.k_LPKCD.size > 2**31
    loads = 2 * 3  # two halves of the keys, and the values; of full pages and of partial ones
    assert wide_offsets(kernels(lower(attention_triton.attend, q, view))[0].ir) == loads
    pool = jax.ShapeDtypeStruct((1, 64, *view.pages.k_LPKCD.shape[2:]), jnp.bfloat16)
    small = replace(view, pages=Pages(pool, pool))
    assert wide_offsets(kernels(lower(attention_triton.attend, q, small))[0].ir) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("name", HEADS)
def test_reductions_lower(name: str, work: str, dtype: str) -> None:
    q, view = serving(MODELS[name], 64, work, dtype=dtype)
    assert reductions_triton.refusal(q, view, HOPPER, 64) is None
    for call in reductions(q, view).values():
        (kernel,) = kernels(lower(*call))
        assert kernel.ir.count("tt.dot") == (3 if kernel.name == "row_segment_score" else 2)
        assert "atomic" not in kernel.ir
        assert ("inputPrecision = tf32" in kernel.ir) == (dtype != "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_training_lowers(name: str, dtype: str) -> None:
    calls = training(MODELS[name], dtype=dtype)
    found = [kernel for call in calls.values() for kernel in kernels(lower(*call))]
    assert [kernel.name for kernel in found] == ["train_attention", "train_attention_dq", "train_attention_dkv"]
    assert [kernel.ir.count("tt.dot") for kernel in found] == [4, 6, 8]  # twice the products: with a mask and without


def test_xla_on_a_gpu_multiplies_no_single_row_by_values() -> None:
    """XLA would make a reduction of it, and copy the pool into another layout at every step."""
    q, view = serving(MODELS["multi-head"], 64, "decode")
    products = r"dot_general[^\n]*tensor<32x(\d+)x512xbf16>, tensor<32x512x128xbf16>"  # of entries that are a tile
    for target, rows in ((lower(attention_xla.attend, q, view), "2"), (on_a_cpu(attention_xla.attend, q, view), "1")):
        assert set(re.findall(products, target.as_text())) == {rows}


def on_a_cpu(f: Callable[..., Any], *shapes: Any) -> jax.stages.Lowered:
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cpu",))


# ------------------------------------------------------------------------------------------ whole programs

LLAMA = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, rope_theta=5e5, rope_scaling=None, norm_eps=1e-5, tie_embeddings=False,
    qkv_bias=False, qk_norm=False, context_length=8192, eos_ids=(128001,), bos_id=128000,
)  # fmt: skip
QWEN = replace(
    LLAMA, family="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28,
    num_kv_heads=4, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True,
)  # fmt: skip


MEASURED = ((None, []), (Measure.KEY_SCORE, ["key_score"]), (Measure.SEGMENT_SCORE, ["row_segment_score"]))
# buckets of decoding, of both, and of prefill
STEPS = [(*measured, bucket) for measured in MEASURED for bucket in (1, 3, -1)]


@pytest.mark.parametrize(("what", "kernel", "bucket"), few(STEPS, [STEPS[0], STEPS[2], STEPS[4], STEPS[8]]))
@pytest.mark.parametrize(
    "config", [pytest.param(LLAMA, id="llama-3-8b"), pytest.param(QWEN, id="qwen2.5-7b", marks=pytest.mark.long)]
)
def test_stage_of_a_model_lowers(
    config: ModelConfig, bucket: int, what: Measure | None, kernel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers under shard_map, one after the other over the same pool."""
    monkeypatch.setitem(attention.BACKENDS, "triton", attention.Backend(attention_triton.attend, lambda *_: None))  # type: ignore[arg-type]
    monkeypatch.setattr(reductions_triton, "refusal", lambda *_: None)
    monkeypatch.setattr(reductions_op, "cpu_refusal", lambda *_: "lowered for a GPU")
    row_shape = Grid.gpu_rows(config.num_heads // config.num_kv_heads)[bucket]
    rows = row_shape.rows
    layers, entries, slots = 4, 1024, 64
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    step = {f"{n}_T": shape((rows,)) for n in ("token", "index", "position", "request", "slot")}
    step |= {f"{n}_S": shape((entries,)) for n in ("page", "offset", "request")}
    step |= {f"{n}_SC": shape((entries, slots)) for n in ("index", "hide_from", "hide_until")}
    step["sharer_O"] = shape(row_shape.sharing[:1])
    table = Rotation(*[jax.ShapeDtypeStruct((config.context_length, 64), jnp.float32)] * 2)  # type: ignore[arg-type]
    pool = Pages(*[jax.ShapeDtypeStruct((layers, 4096, config.num_kv_heads, slots, 128), jnp.bfloat16)] * 2)  # type: ignore[arg-type]
    decoder = Decoder.abstract(config)
    layer, states = split_layers(decoder)
    ends_def, ends = split_ends(decoder)
    leaves, stage_def = jax.tree.flatten(tuple(states[:layers]))
    spec = stages.Spec(layer, stage_def, ends_def, hopper_mesh(), False, config.head_dim**-0.5)  # type: ignore[arg-type]
    begin = partial(stages.begin, spec, row_shape)
    lower(begin, ends, table, step)
    x_TE, inputs = jax.eval_shape(begin, ends, table, step)
    measure = None if what is None else (what, 16)
    attentions = len(row_shape.parts) + bool(row_shape.sharing[0])
    sizes = {"T": (rows,), "S": (entries,), "SC": (entries, slots)}
    probe = {name: shape(sizes[name.rsplit("_", 1)[1]]) for name in (ARRAYS[what] if what else ())}
    chosen_L = jax.ShapeDtypeStruct((layers if what else 0,), jnp.bool_)
    whole = partial(stages.stage, spec, row_shape, ("triton",) * attentions, layers, measure)
    stage = lower(whole, tuple(leaves), pool, x_TE, inputs, table, chosen_L, probe)
    of_layer = ["paged_interval_attention"] * attentions + kernel
    assert [one.name for one in kernels(stage)] == of_layer * layers
