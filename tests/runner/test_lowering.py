"""Every kind of program that the engine compiles lowers for CUDA, with no GPU at hand.

tests/kernels/test_lowering.py and test_compile.py look at the kernels within.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ragjax.compress.scorers import SCORERS
from ragjax.core import Compression, Measure
from ragjax.engine.build import PAGE_SIZE, _grid
from ragjax.kernels.device import Device
from ragjax.kernels.reductions import measure as reductions
from ragjax.kernels.rope import Rotation
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder
from ragjax.runner import programs as runner_programs
from ragjax.runner.mesh import POOL
from ragjax.runner.programs import Name, Programs
from ragjax.runner.stages import Spec
from ragjax.runner.weights import Weights, split_ends, split_layers
from ragjax.store import device as page_store
from tests.support.cases import HOPPER
from tests.support.compiler import hopper, hopper_mesh, kernels

pytestmark = pytest.mark.compile

LAYERS = 2
CONFIG = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=LAYERS, num_heads=32,
    num_kv_heads=8, head_dim=128, rope_theta=5e5, rope_scaling=None, norm_eps=1e-5, tie_embeddings=False,
    qkv_bias=False, qk_norm=False, context_length=8192, eos_ids=(128001,), bos_id=128000,
)  # fmt: skip


class Lowered:
    """In place of `jax.jit` in the module of programs: what it makes is lowered for CUDA and not compiled."""

    def __init__(self, function: Any, **options: Any):
        self._jitted = jax.jit(function, **options)

    def lower(self, *shapes: Any) -> SimpleNamespace:
        with hopper():
            lowered = self._jitted.trace(*shapes).lower(lowering_platforms=("cuda",))
        return SimpleNamespace(compile=lambda: lowered)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(runner_programs, "jax", SimpleNamespace(**{**vars(jax), "jit": Lowered}))
    monkeypatch.setattr(Device, "of", staticmethod(lambda device: HOPPER))
    return programs


def programs() -> Programs:
    """Those of a model as shapes, on a mesh that is none."""
    mesh = hopper_mesh()
    decoder = Decoder.abstract(CONFIG, jnp.dtype("bfloat16"))
    layer_def, states = split_layers(decoder)
    ends_def, ends = split_ends(decoder)
    leaves, stage_def = jax.tree.flatten(tuple(states))
    weights = Weights(ends_def, layer_def, stage_def, ends, (tuple(leaves),), LAYERS)
    pool = jax.eval_shape(partial(page_store.create, CONFIG, LAYERS, 2048, PAGE_SIZE, jnp.dtype("bfloat16")))
    place = NamedSharding(mesh, POOL)  # type: ignore[arg-type]
    table: Any = jax.ShapeDtypeStruct((CONFIG.context_length, CONFIG.head_dim // 2), jnp.float32)
    made = Programs.__new__(Programs)  # its own beginning asks the mesh for a device
    vars(made).update(
        _config=CONFIG,
        _spec=Spec(layer_def, stage_def, ends_def, mesh, False, CONFIG.attention_scale),  # type: ignore[arg-type]
        _weights=weights,
        _pool=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), pool),
        _rotation=Rotation(table, table),
        _grid=_grid(CONFIG, CONFIG.context_length, "gpu", 1, packed=False),
        _attention=None,
        _device=HOPPER,
        _pool_sharding=place,
        _everywhere=NamedSharding(mesh, P()),  # type: ignore[arg-type]
        _choices={},
    )
    return made


def stage_name(what: Measure) -> Name:
    return "stage", 8, 64, LAYERS, what, 16 if what is Measure.SEGMENT_SCORE else 0


@pytest.mark.parametrize(
    "name",
    [
        ("begin", 8, 64),
        ("end", 8, 8),
        ("allow", 8),
        ("sample", 8, 0),
        ("sample", 8, 64),
        ("logprobs", 8),
        ("move", 128),
        ("extract", 4),
        ("insert", 4),
    ],
    ids=str,
)
def test_what_surrounds_the_stages_lowers(name: Name, make: Any) -> None:
    assert make()._compile(*name).as_text()


@pytest.mark.parametrize("what", [m for m in Measure if m in reductions.ARRAYS])
def test_every_measure_lowers(what: Measure, make: Any) -> None:
    found = Counter(kernel.name for kernel in kernels(make()._compile(*stage_name(what))))
    scores = {
        Measure.KEY_SCORE: "key_score",
        Measure.VALUED_SCORE: "key_score",
        Measure.SEGMENT_SCORE: "row_segment_score",
    }
    own = {scores[what]: LAYERS} if what in scores else {}
    assert {name: n for name, n in found.items() if name != "paged_interval_attention"} == own


@pytest.mark.parametrize("method", SCORERS)
def test_compression_lowers(method: str, make: Any) -> None:
    assert make()._compile("compact", Compression.parse(f"{method}:512").program, 2048).as_text()
