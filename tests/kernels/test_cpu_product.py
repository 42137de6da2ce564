"""Products with packed matrices against float64, in every form that a CPU may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragjax.kernels.cpu import mlp, op, product, tiles
from ragjax.kernels.cpu.foreign import Kernel, KernelLibrary, Machine
from ragjax.kernels.cpu.op import PackedMatrix, packed_product, packed_rows
from ragjax.kernels.cpu.packing import NARROW, Codes, Packing, join, pack, quantize
from ragjax.models.gguf_codes import PACKINGS, read_codes

HERE = Machine.here()
AVX2 = frozenset({"avx2", "fma", "f16c"})
MACHINES = {
    "here": HERE,
    "haswell": Machine("haswell", AVX2),
    "plain": Machine("x86-64", frozenset()),
    "vnni": Machine("icelake-server", AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
}
"""Machines whose code is tried; each needs what this one may lack."""

EPS = 1e-5

FOLDER = Path(__file__).parents[2] / "build" / "tests" / "kernels"
"""Where compiled kernels are kept from one run to the next."""


def forms() -> list[str]:
    """Machines whose code runs here."""
    return [name for name, machine in MACHINES.items() if machine.features <= HERE.features]


@cache
def library(form: str, packing: Packing) -> KernelLibrary:
    """Kernels of a form under names of their own."""
    machine = MACHINES[form]

    def kernels() -> list[Kernel]:
        made = [product.product(packing, machine, normed=normed) for normed in (False, True)]
        return [replace(kernel, name=f"{kernel.name}_{form}") for kernel in made]

    return KernelLibrary(f"test_{form}_{packing.name()}", kernels, machine, FOLDER)


def random_codes(packing: Packing, outputs: int, inputs: int, seed: int) -> Codes:
    random = np.random.default_rng(seed)
    low, high = (-127, 128) if packing.bits == 8 else (0, 16) if packing.lows else (-8, 8)
    shape = outputs, inputs // packing.block
    scale_OG = random.uniform(0.01, 0.1, shape).astype(np.float16).astype(np.float32)
    low_OG = random.normal(size=shape).astype(np.float16).astype(np.float32) if packing.lows else None
    return Codes(packing, random.integers(low, high, (outputs, inputs)).astype(np.int16), scale_OG, low_OG)


def weight_of(codes: Codes) -> PackedMatrix:
    op.register_packed([codes.packing], FOLDER)
    return PackedMatrix(jnp.asarray(pack(codes)), codes.value_OI.shape, codes.packing)


def by_form(form: str, codes: Codes, x_TI: NDArray[np.float32], norm: NDArray[np.float32] | None) -> jax.Array:
    """The product as a machine without AMX makes it."""
    packing = replace(codes.packing, tiled=False)
    library(form, packing)
    digits = product.digits_for(packing, MACHINES[form])
    out = jax.ShapeDtypeStruct((len(x_TI), len(codes.value_OI)), jnp.float32)
    scratch = jax.ShapeDtypeStruct((digits.bytes(*x_TI.shape),), jnp.uint8)
    name = f"{product.kernel_name(packing, norm is not None)}_{form}"
    scale = np.zeros(1, np.float32) if norm is None else np.append(norm, np.float32(EPS))
    weight = jnp.asarray(pack(replace(codes, packing=packing)))
    about = np.array([0, len(x_TI)], np.int32)
    made: jax.Array = jax.jit(jax.ffi.ffi_call(name, (out, scratch)))(x_TI, scale, weight[None], about)[0]
    return made


def exact(codes: Codes, x_TI: NDArray[np.float32], norm: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """The product in float64, from the codes' definition."""
    groups = np.repeat(np.arange(codes.scale_OG.shape[1]), codes.packing.block)
    weight_OI = codes.value_OI.astype(np.float64) * codes.scale_OG[:, groups]
    if codes.low_OG is not None:
        weight_OI += codes.low_OG[:, groups]
    rows_TI = x_TI.astype(np.float64)
    if norm is not None:
        rows_TI = rows_TI / np.sqrt((rows_TI**2).mean(1, keepdims=True) + EPS) * norm
    return rows_TI @ weight_OI.T


@pytest.mark.parametrize("bits", [8, 4])
def test_floats_become_the_nearest_codes(bits: int) -> None:
    weight_OI = np.random.default_rng(0).standard_t(4, (40, 96)).astype(np.float32)
    weight_OI[3, 32:64] = 0
    weight_OI[4, 32:64] = 0.25
    codes = quantize(weight_OI, NARROW[bits])
    by_group = weight_OI.reshape(40, 3, 32)
    error_OG = np.abs(codes.widen().reshape(by_group.shape) - by_group).max(2)
    step_OG = np.ptp(by_group, 2) / 15 if bits == 4 else np.abs(by_group).max(2) / 127
    rounding_OG = np.abs(by_group).max(2) * 2.0**-11  # float16's, of the scale or the low
    assert (error_OG <= step_OG * (1.0 if bits == 4 else 0.5) + 2 * rounding_OG).all()
    np.testing.assert_array_equal(error_OG[3, 1], 0)
    np.testing.assert_array_equal(error_OG[4, 1] <= 0.25 * 2.0**-11, True)
    if bits == 4:  # scales that fit are nearer than those of the least and the greatest
        low, scale = by_group.min(2, keepdims=True), np.ptp(by_group, 2)[..., None] / 15
        plain = np.rint((by_group - low) / np.maximum(scale, 1e-9)) * scale + low
        found = np.square(codes.widen().reshape(by_group.shape) - by_group).sum()
        assert found < 0.95 * np.square(plain - by_group).sum()


PAIR = [Packing(4, 32, wide=False, lows=True), Packing(8, 16, wide=True, lows=False)]
"""Between them every branch of the code."""

EVERY = sorted({*PACKINGS.values(), Packing(8, 16, wide=True, lows=True)} - set(PAIR), key=repr)


def of_packings(test: Callable[..., None]) -> Callable[..., None]:
    """Run with the two that have every branch, and in `make test-long` with all."""
    others = [pytest.param(packing, marks=pytest.mark.long, id=packing.name()) for packing in EVERY]
    return pytest.mark.parametrize("packing", [*(pytest.param(x, id=x.name()) for x in PAIR), *others])(test)


@of_packings
@settings(max_examples=12, deadline=None)
@given(
    outputs=st.integers(1, 70),
    units=st.integers(1, 4),
    rows=st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 49]),
    normed=st.booleans(),
    seed=st.integers(0, 2**16),
)
@pytest.mark.parametrize("form", forms())
def test_product(form: str, packing: Packing, outputs: int, units: int, rows: int, normed: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    codes = random_codes(packing, outputs, 32 * units, seed)
    x_TI = random.normal(size=(rows, 32 * units)).astype(np.float32) * random.choice([1e-3, 1, 1e3], (rows, 1))
    x_TI = x_TI.astype(np.float32)
    norm = random.uniform(0.5, 1.5, 32 * units).astype(np.float32) if normed else None
    made_TO = np.asarray(by_form(form, codes, x_TI, norm))
    wanted_TO = exact(codes, x_TI, norm)
    # digits round to half of 1/2032 or 1/16256 of a span's greatest input
    step = np.abs(x_TI if norm is None else exact_rows(x_TI, norm)).max(1, keepdims=True) / (127 * 16) / 2
    reach = np.abs(codes.widen()).sum(1) * step + 1e-5 * np.abs(wanted_TO).max(1, keepdims=True)
    assert (np.abs(made_TO - wanted_TO) <= reach + 1e-6).all()


def exact_rows(x_TI: NDArray[np.float32], norm: NDArray[np.float32]) -> NDArray[np.float64]:
    rows_TI = x_TI.astype(np.float64)
    return rows_TI / np.sqrt((rows_TI**2).mean(1, keepdims=True) + EPS) * norm


@pytest.mark.parametrize(("rows", "inputs"), [(19, 96), (27, 2240)])
@pytest.mark.parametrize("packing", [*PAIR, Packing(4, 32, wide=False, lows=False)])
def test_forms_agree_to_the_bit(packing: Packing, rows: int, inputs: int) -> None:
    """AMX takes whole tiles and most of another; long rows have several spans, and more blocks than are kept."""
    codes = random_codes(packing, 40, inputs, 1)
    x_TI = np.random.default_rng(2).normal(size=(rows, inputs)).astype(np.float32)
    made = [np.asarray(by_form(form, codes, x_TI, None)) for form in forms()]
    assert all((one == made[0]).all() for one in made)


needs_amx = pytest.mark.skipif(not op.tiled(), reason="needs AMX")


@needs_amx
@of_packings
@settings(max_examples=12, deadline=None)
@given(
    outputs=st.integers(1, 70),
    units=st.sampled_from([1, 2, 65, 130]),
    rows=st.sampled_from([24, 31, 32, 33, 49]),
    normed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_tiles(packing: Packing, outputs: int, units: int, rows: int, normed: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    codes = random_codes(replace(packing, tiled=True), outputs, 32 * units, seed)
    x_TI = random.normal(size=(rows, 32 * units)).astype(np.float32)
    norm = random.uniform(0.5, 1.5, 32 * units).astype(np.float32) if normed else None
    weight = weight_of(codes)
    made_TO = np.asarray(packed_product(x_TI, weight, 32 * units, None if norm is None else (norm, EPS)))
    rows_TI = x_TI if norm is None else exact_rows(x_TI, norm)
    as_read = lambda x: np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)  # noqa: E731
    wanted_TO = as_read(rows_TI) @ as_read(codes.widen()).T
    # a code's bfloat16 may be rounded the other way: one part in 256 of some weights
    reach = (np.abs(rows_TI) @ np.abs(codes.widen()).T) / 256 / np.sqrt(32 * units) * 4 + 1e-4
    assert (np.abs(made_TO - wanted_TO) <= reach).all()


@pytest.mark.parametrize("tiled", [False, pytest.param(True, marks=needs_amx)])
@pytest.mark.parametrize("packings", [(PAIR[0], PAIR[1]), (PAIR[1], PAIR[0])], ids=["4-8", "8-4"])
@pytest.mark.parametrize(("inputs", "hidden"), [(64, 32), (96, 1056)])
def test_mlp(packings: tuple[Packing, Packing], inputs: int, hidden: int, tiled: bool) -> None:
    """Near the MLP in float64 from the codes' definition, and a row the same beside any rows."""
    random = np.random.default_rng(hidden)
    packings = (replace(packings[0], tiled=tiled), replace(packings[1], tiled=tiled))
    gate_up = random_codes(packings[0], 2 * hidden, inputs, 1)
    down = random_codes(packings[1], inputs, hidden, 2)
    op.register_packed([], FOLDER, [packings])
    matrices = weight_of(gate_up), weight_of(down)
    x_TE = random.normal(size=(70, inputs)).astype(np.float32)
    norm = random.uniform(0.5, 1.5, inputs).astype(np.float32) / 40

    def made(begin: int, end: int) -> NDArray[np.float32]:
        found = op.packed_mlp(jnp.asarray(x_TE[begin:end]), *matrices, (norm, EPS))
        assert found is not None
        return np.asarray(found)

    gate_TF, up_TF = np.split(exact(gate_up, x_TE, norm), 2, axis=1)
    hidden_TF = gate_TF / (1 + np.exp(-gate_TF)) * up_TF
    wanted_TE = exact(down, hidden_TF.astype(np.float32), None)
    whole_TE = made(0, 70)
    assert np.abs(whole_TE - wanted_TE).max() < (0.02 if tiled else 0.003) * np.abs(wanted_TE).max()
    for begin, end in ((0, 24), (3, 30), (31, 70), *(() if tiled else ((0, 1), (5, 13), (3, 20)))):
        np.testing.assert_array_equal(made(begin, end), whole_TE[begin:end])


@pytest.mark.parametrize("packings", [(PAIR[0], PAIR[1]), (PAIR[1], PAIR[0])], ids=["4-8", "8-4"])
def test_forms_of_the_mlp_agree_to_the_bit(packings: tuple[Packing, Packing]) -> None:
    rows, inputs, hidden = 27, 64, 96
    gate_up = random_codes(packings[0], 2 * hidden, inputs, 1)
    down = random_codes(packings[1], inputs, hidden, 2)
    x_TE = np.random.default_rng(3).normal(size=(rows, inputs)).astype(np.float32)
    scale = np.append(np.full(inputs, 1 / 40, np.float32), np.float32(EPS))
    found = []
    for form in forms():
        machine, name = MACHINES[form], f"test_mlp_{packings[0].name()}_{form}"
        libraries.append(
            KernelLibrary(name, lambda m=machine, n=name: [mlp.gated_mlp(*packings, m, n)], machine, FOLDER)  # type: ignore[misc]
        )
        sizes = (product.digits_for(packings[0], machine), inputs), (product.digits_for(packings[1], machine), hidden)
        scratch = [jax.ShapeDtypeStruct((digits.bytes(rows, size),), jnp.uint8) for digits, size in sizes]
        call = jax.ffi.ffi_call(name, (jax.ShapeDtypeStruct((rows, inputs), jnp.float32), *scratch))
        about = np.array([0, rows], np.int32)
        found.append(np.asarray(jax.jit(call)(x_TE, scale, pack(gate_up)[None], about, pack(down)[None])[0]))
    assert all((one == found[0]).all() for one in found)


@pytest.mark.parametrize("tiled", [False, pytest.param(True, marks=needs_amx)])
@pytest.mark.parametrize("live", [0, 1, 16, 33, 69, 70])
def test_padding_gives_zeros_and_changes_no_other_row(live: int, tiled: bool) -> None:
    """Whatever stands in it."""
    packing = replace(PAIR[0], tiled=tiled)
    op.register_packed([], FOLDER, [(packing, packing)])
    matrices = weight_of(random_codes(packing, 2 * 96, 64, 1)), weight_of(random_codes(packing, 64, 96, 2))
    x_TE, scale = np.random.default_rng(4).normal(size=(70, 64)).astype(np.float32), (np.full(64, 0.1, np.float32), EPS)

    def made(x_TE: NDArray[np.float32], live: int | None) -> list[NDArray[np.float32]]:
        rows, count = jnp.asarray(x_TE), None if live is None else jnp.int32(live)
        found = [op.packed_product(rows, matrices[0], 64, norm, count) for norm in (None, scale)]
        mlp = op.packed_mlp(rows, *matrices, scale, count)
        assert mlp is not None
        return [np.asarray(x) for x in (*found, mlp)]

    whole = made(x_TE, None)
    x_TE[live:] = np.nan
    for part, all_TO in zip(made(x_TE, live), whole, strict=True):
        np.testing.assert_array_equal(part[:live], all_TO[:live])
        assert not part[live:].any()


libraries: list[KernelLibrary] = []
"""Kernels that tests registered, which live as long as the process."""


@needs_amx
def test_products_of_their_own_serve_where_the_mlp_is_not_for() -> None:
    """Rows that are longer than the room of its tiles."""
    packing = replace(PAIR[0], tiled=True)
    gate_up, down = (weight_of(random_codes(packing, *shape, 1)) for shape in ((32, 4096), (4096, 32)))
    assert op.packed_mlp(jnp.ones((op.MANY, 4096)), gate_up, down, (jnp.ones(4096), EPS)) is None


def _alone(codes: Codes, x_TI: NDArray[np.float32], form: str | None) -> Callable[[int, int], NDArray[np.float32]]:
    weight = None if form is not None else weight_of(codes)

    def product_of(begin: int, end: int) -> NDArray[np.float32]:
        rows_TI = x_TI[begin:end]
        if weight is None:
            return np.asarray(by_form(str(form), codes, rows_TI, None))
        return np.asarray(packed_product(rows_TI, weight, rows_TI.shape[1], None))

    return product_of


@pytest.mark.parametrize("form", [*forms(), pytest.param(None, marks=needs_amx, id="tiles")])
@pytest.mark.parametrize("packing", PAIR)
def test_a_row_has_the_same_bits_beside_any_rows(form: str | None, packing: Packing) -> None:
    codes = random_codes(replace(packing, tiled=form is None), 560, 64 if form else 64 * 40, 3)
    x_TI = np.random.default_rng(4).normal(size=(49, codes.value_OI.shape[1])).astype(np.float32)
    made = _alone(codes, x_TI, form)
    whole_TO = made(0, 49)
    for begin, end in (
        (0, 24),
        (16, 44),
        (1, 49),
        *(() if form is None else ((0, 1), (48, 49), (3, 5), (0, 8), (41, 49), (3, 14), (16, 33))),
    ):
        assert (made(begin, end) == whole_TO[begin:end]).all()


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("tiled", [False, True])
def test_types_of_gguf(kind: str, tiled: bool) -> None:
    random = np.random.default_rng(5)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = random.integers(0, 256, (40, 512 // block, size)).astype(np.uint8)
    for at in {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2)):
        raw[..., at : at + 2] = random.normal(size=(*raw.shape[:2], 1)).astype(np.float16).view(np.uint8)
    raw_OB = raw.reshape(40, -1)
    codes = read_codes(raw_OB, kind)
    wanted_OI = dequantize(raw_OB, GGMLQuantizationType[kind])
    assert np.array_equal(codes.widen(), wanted_OI)
    weight = weight_of(replace(codes, packing=replace(codes.packing, tiled=tiled)))
    index_T = jnp.asarray([39, 0, 17, 5], jnp.int32)
    # a scale times a code, and then its low: the kernel rounds as the reader does
    np.testing.assert_allclose(packed_rows(index_T, weight), wanted_OI[np.asarray(index_T)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (("Q4_0", "Q4_1"), Packing(4, 32, wide=False, lows=True)),
        (("Q5_0", "Q4_K"), Packing(8, 32, wide=True, lows=True)),
        (("Q6_K", "Q8_0", "Q4_1"), Packing(8, 16, wide=True, lows=True)),
    ],
)
def test_fused_matrices_of_several_types(kinds: tuple[str, ...], wanted: Packing) -> None:
    parts = [random_codes(PACKINGS[kind], 24, 64, i) for i, kind in enumerate(kinds)]
    whole = join(parts)
    assert whole.packing == wanted
    np.testing.assert_allclose(whole.widen(), np.concatenate([part.widen() for part in parts]), rtol=1e-6, atol=1e-6)
    weight = weight_of(whole)
    made = packed_rows(jnp.arange(24 * len(kinds), dtype=jnp.int32), weight)
    np.testing.assert_allclose(made, whole.widen(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("form", [*forms(), pytest.param(None, marks=needs_amx, id="tiles")])
def test_what_is_no_number_stays_in_its_row_and_shows(form: str | None, wrong: float) -> None:
    codes = random_codes(replace(PAIR[0], tiled=form is None), 40, 64, 7)
    x_TI = np.random.default_rng(8).normal(size=(30, 64)).astype(np.float32)
    clean_TO = _alone(codes, x_TI, form)(0, 30)
    x_TI[5, 40] = wrong
    made_TO = _alone(codes, x_TI, form)(0, 30)
    others = np.arange(30) != 5
    assert (made_TO[others] == clean_TO[others]).all()
    assert not np.isfinite(made_TO[5]).any()


@pytest.mark.parametrize("rows", [2, op.MANY])
def test_a_matrix_of_a_stack_has_the_bits_of_the_matrix_alone(rows: int) -> None:
    """Its place in the stack is an array, so that one program serves all layers."""
    x_TI = np.random.default_rng(5).normal(size=(rows, 64)).astype(np.float32)
    weights = [weight_of(random_codes(replace(PAIR[0], tiled=op.tiled()), 40, 64, seed)) for seed in range(3)]
    stack = replace(weights[0], data=jnp.stack([weight.data for weight in weights]))

    @jax.jit
    def product_of(layer: jax.Array) -> jax.Array:
        return op.packed_product(x_TI, replace(stack, layer=layer), 64, None)

    for layer, weight in enumerate(weights):
        alone = op.packed_product(jnp.asarray(x_TI), weight, 64, None)
        np.testing.assert_array_equal(product_of(jnp.int32(layer)), alone)


def test_bytes_of_tiles_hold_all_rows() -> None:
    assert tiles.cast_bytes(17, 64) == 2 * 2 * 1024
