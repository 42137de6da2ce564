"""CUDA lowering, and compilation for Hopper (sm_90), on a machine without a GPU.

`lower` needs JAX alone, of either supported version. What it makes for a Pallas-Triton kernel carries Triton's IR,
which the `triton` package and the ptxas in it turn into machine code: registers, spills, shared memory and the
instructions used are then known. XLA does the same with a Triton and a ptxas of its own, so this is a close likeness,
not the thing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from ragjax.kernels.blocks import Blocks
from ragjax.kernels.pages import Pages
from ragjax.kernels.reductions import triton as reductions_triton
from ragjax.kernels.rope import Rotation
from ragjax.kernels.table import PageTable, Rows
from ragjax.kernels.view import View
from ragjax.runner.mesh import AXES
from train.attention import triton as train_attention_triton
from train.attention.mask import Mask, Tiles, Tokens

SHARED_BYTES = 227 * 1024
"""What a block of threads can have on sm_90 (CUDA C++ Programming Guide, technical specifications)."""

TRITON_CALL, MOSAIC_CALL = "__gpu$xla.gpu.triton", "mosaic_gpu_v2"


@dataclass(frozen=True)
class Kernel:
    """A Pallas-Triton kernel as it leaves JAX: its name, Triton IR and options."""

    name: str
    ir: str
    warps: int
    stages: int


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes and uses; bytes are per thread for spills, per block of threads for shared memory.

    Instructions are counted where they stand in the PTX: wgmma and mma (products), copies (16 bytes, asynchronous).
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    copies: int


# ------------------------------------------------------------------------------------------- lowering


def hopper_mesh() -> AbstractMesh:
    """A mesh of one GPU: from 0.11 on JAX asks for its compute capability, before that it assumes Hopper."""
    device: dict[str, Any] = {}
    if jax.__version_info__ >= (0, 11):
        device = {"abstract_device": jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")}
    return AbstractMesh((1, 1), AXES, axis_types=(AxisType.Auto,) * 2, **device)


@contextmanager
def hopper() -> Iterator[None]:
    """The device to lower for."""
    with jax.sharding.use_abstract_mesh(hopper_mesh()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield


def lower(f: Callable[..., Any], *shapes: Any) -> jax.stages.Lowered:
    """Lower a function of these shapes (`jax.ShapeDtypeStruct` leaves) for CUDA."""
    with hopper():
        return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",))


def custom_calls(lowered: jax.stages.Lowered) -> list[tuple[str, Any]]:
    """Target and attributes of every custom call, wherever it is nested."""
    found: list[tuple[str, Any]] = []

    def walk(operation: Any) -> None:
        if operation.name == "stablehlo.custom_call":
            found.append((_text(operation.attributes["call_target_name"]), operation.attributes))
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    walk(inner.operation)

    walk(lowered.compiler_ir("stablehlo").operation)
    return found


def kernels(lowered: jax.stages.Lowered) -> list[Kernel]:
    """The Pallas-Triton kernels that a lowered function calls."""
    from jax._src.lib.mlir import ir
    from jaxlib.triton import dialect

    found = []
    for target, attributes in custom_calls(lowered):
        if target != TRITON_CALL:
            continue
        name = next(n for n in ("mhlo.backend_config", "backend_config") if n in attributes)
        config = ir.DictAttr(attributes[name])
        with ir.Context() as context:
            dialect.register_dialect(context)
            code = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes).operation.get_asm()
        warps, stages = (int(ir.IntegerAttr(config[option]).value) for option in ("num_warps", "num_stages"))
        found.append(Kernel(_text(config["name"]), code, warps, stages))
    return found


def _text(attribute: Any) -> str:
    from jax._src.lib.mlir import ir

    return str(ir.StringAttr(attribute).value)


# ----------------------------------------------------------------------------------------- compilation


def compile_kernel(kernel: Kernel) -> Resources:
    """Compile a lowered kernel for sm_90."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ttir")
        path.write_text(kernel.ir)
        return _compile(str(path), kernel.warps, kernel.stages)


def compile_program(
    program: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> Resources:
    """Compile a raw Triton program for sm_90, its pointers aligned to 16 bytes as JAX's arrays are.

    types: of what each pointer argument points to ("bf16", "i32"); constants: the compile-time arguments.
    """
    from triton.compiler import ASTSource

    names = program.arg_names
    signature = {name: "constexpr" if name in constants else f"*{types[name]}" for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants}
    return _compile(ASTSource(program, signature=signature, constexprs=constants, attrs=aligned), warps, stages)


def _compile(source: Any, warps: int, stages: int) -> Resources:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_triton

    made = compile_triton(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    ptx = made.asm["ptx"]
    usage = _usage(made.asm["cubin"])
    return Resources(
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=made.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        copies=len(re.findall(r"cp\.async\.c[ag]\.shared\.global[^\n]*, 0x10", ptx)),
    )


def _usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump, which the triton package holds, says of the one function in a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


# ------------------------------------------------------------------------------------------ shapes


@dataclass(frozen=True)
class Model:
    """The heads of a model that is served."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def padded_group(self) -> int:
        """Query heads of a KV head, up to a power of two."""
        return 1 << (self.heads // self.kv_heads - 1).bit_length()


MODELS = {
    "llama-3-8b": Model(32, 8, 128),
    "qwen2.5-7b": Model(28, 4, 128),
    "qwen2.5-0.5b": Model(14, 2, 64),
    "smollm2-135m": Model(9, 3, 64),
    "multi-head": Model(32, 32, 128),
}
PAGE_SIZES = (64, 128)
LAYERS, POOL = 32, 16384
"""Layers and pages of the pool: more than 2^31 elements for every model, so that offsets need 64 bits."""


WORK = {"prefill-64": 64, "prefill-128": 128, "decode": None}
"""Folded rows of a block; decode has one row a block, and eight requests at once."""


def serving(
    model: Model, page_size: int, work: str, *, dtype: str = "bfloat16", rows: int = 4096
) -> tuple[jax.ShapeDtypeStruct, View]:
    """Query and view of one kind of work: `rows` rows of prefill or recompute, or one row each of 8 requests."""
    folded = WORK[work]
    if folded is None:
        return production_call(model, page_size, rows=8, block_rows=1, dtype=dtype)
    return production_call(model, page_size, rows=rows, block_rows=folded // model.padded_group, dtype=dtype)


def production_call(
    model: Model, page_size: int, *, rows: int, block_rows: int, entries: int = 512, dtype: str = "bfloat16"
) -> tuple[jax.ShapeDtypeStruct, View]:
    """Shapes of a query and a view as they are in service: positions up to 128K, the layer traced."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pool = jax.ShapeDtypeStruct((LAYERS, POOL, model.kv_heads, page_size, model.dim), jnp.dtype(dtype))
    table = jax.ShapeDtypeStruct((128 * 1024, model.dim // 2), jnp.float32)
    n = rows // block_rows
    view = View(
        Rows(ints(rows), ints(rows), ints(rows)),
        Pages(pool, pool),
        ints(),
        PageTable(*(ints(entries) for _ in range(3)), *(ints(entries, page_size) for _ in range(3))),
        Rotation(table, table),
        Blocks(ints(n, entries), ints(n), ints(n, entries), ints(n, entries), ints(n)),
        scale=model.dim**-0.5,
        block_rows=block_rows,
    )
    return jax.ShapeDtypeStruct((rows, model.heads, model.dim), jnp.dtype(dtype)), view


Call = tuple[Any, ...]
"""A function and the shapes it is called with."""


def reductions(q: jax.ShapeDtypeStruct, view: View, segments: int = 16) -> dict[str, Call]:
    """The reductions over a serving call, by name."""
    lse = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    row_segment = view.rows.index_T
    key_segment = jax.ShapeDtypeStruct(view.entries.index_SC.shape, jnp.int32)
    segment_score = partial(reductions_triton.row_segment_score, segments=segments)
    return {
        "key_score": (partial(reductions_triton.key_scores, valued=False), q, lse, view),
        "key_scores": (partial(reductions_triton.key_scores, valued=True), q, lse, view),
        "row_segment_score": (segment_score, q, lse, view, row_segment, key_segment),
    }


def training(model: Model, *, block: int = 64, rows: int = 4096, dtype: str = "bfloat16") -> dict[str, Call]:
    """Attention for training over `rows` tokens, by name: forward and backward."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    n, scale = rows // block, model.dim**-0.5
    tokens, tiles = Tokens(*(ints(rows) for _ in range(4))), Tiles(ints(n, n), ints(n), ints(n))
    mask = Mask(tokens, tiles, tiles, block, block)
    q = jax.ShapeDtypeStruct((rows, model.heads, model.dim), jnp.dtype(dtype))
    k = jax.ShapeDtypeStruct((rows, model.kv_heads, model.dim), jnp.dtype(dtype))
    lse = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    return {
        "forward": (lambda q, k, v, mask: train_attention_triton.forward(q, k, v, mask, scale), q, k, k, mask),
        "backward": (
            lambda q, k, v, mask, *rest: train_attention_triton.backward(q, k, v, mask, scale, *rest),
            *(q, k, k, mask, q, lse, lse),
        ),
    }
