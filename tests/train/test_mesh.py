"""Training over several devices: what a mesh is made of, and that it computes what one device does."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from ragjax.core import ConfigError
from tests.support.devices import assert_agreement
from tests.support.training import SMALL
from train.mesh import make_mesh


@pytest.mark.parametrize(
    ("text", "devices", "shape"),
    [
        (None, 8, (1, 8, 1)),
        ("model=2", 8, (4, 1, 2)),
        ("fsdp=4, model=2", 8, (1, 4, 2)),
        ("data=2,fsdp=4", 8, (2, 4, 1)),
        ("data=1", 1, (1, 1, 1)),
    ],
)
def test_sizes_of_a_mesh(
    monkeypatch: pytest.MonkeyPatch, text: str | None, devices: int, shape: tuple[int, ...]
) -> None:
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr("train.mesh.mesh_of", lambda *sizes: made.append(sizes))
    make_mesh(text, SMALL)
    assert made == [shape]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp=3", "data=2, fsdp=3, model=1 are 6 devices, and JAX has 8"),
        ("data=2,model=2", "are 4 devices, and JAX has 8"),
        ("fsdp=16", "are 16 devices, and JAX has 8"),
        ("model=4", "model=4 must divide the model's 2 KV heads and the 64 of its MLP"),
        ("tensor=2", "give AXIS=N of data, fsdp, model"),
        ("model=0", "give AXIS=N"),
        ("model=2,model=4", "each once"),
        ("8", "not '8'"),
        ("", "not ''"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_error(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with pytest.raises(ConfigError, match=f"--mesh: .*{message}"):
        make_mesh(text, SMALL)


def test_the_mlp_is_shared_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="the 63 of its MLP"):
        make_mesh("model=2", replace(SMALL, intermediate_size=63))


PROGRAM = """
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np
from tests.support import training as t
from tests.support.tiny import byte_tokenizer
from train.batch import Rows
from train.example import Coder
from train.mesh import mesh_of
from ragjax.models.decoder import rotation_table
from train.model import Model, gradient_program
from train.recipe import Recipe
from train.soft import Soft
from train.trainer import Trainer

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
coder = Coder(byte_tokenizer())
samples = [replace(s, id=str(i), question=s.question * (1 + i % 3)) for i, s in enumerate(t.SAMPLES * 2)]
examples = [coder.example(s) for s in samples]
rows = Rows((256,))
rotation = rotation_table(t.SMALL, 256)


def parts_of(config, mesh, lora, soft):
    model = Model(config, mesh, jnp.dtype("float32"), lora, distil=soft is not None, soft=soft)
    weights = t.weights_of(config)
    begun = weights
    if lora is not None:  # neither of a pair is zero, so both have gradients
        begun = jax.tree.map(
            lambda x: jnp.asarray(np.random.default_rng(x.size).standard_normal(x.shape) * 0.05, jnp.float32),
            lora.init(weights["layers"], 0),
        )
    if soft is not None:
        begun = soft.init(weights["embedding"], 0)
    trained, frozen = model.specs()
    return model, model.place(begun, trained), {} if begun is weights else model.place(weights, frozen)


def measured(config, mesh, lora=None, soft=None):
    # over all examples: gradient, loss, and how many targets are the likeliest token
    model, trained, frozen = parts_of(config, mesh, lora, soft)
    sums = (jax.tree.map(jnp.zeros_like, trained), jnp.zeros(2))
    program = gradient_program(model)
    for microbatch in rows.pack(examples, model.devices):
        sums = program(trained, frozen, rotation, microbatch.batch, sums)
    return sums, trained, frozen


def assert_alike(one, other, name):
    pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
    for (path, x), y in pairs:
        x, y = np.asarray(x), np.asarray(y)
        scale, where = max(1e-3, np.abs(x).max()), f"{name} {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(y / scale, x / scale, rtol=0, atol=2e-5, err_msg=where)


def width(array, axis):
    return array.addressable_shards[0].data.shape[axis]
"""

CHEAP = """
config = replace(t.QWEN, num_layers=1)  # two KV heads, q_norm, k_norm, a head of its own
alone = measured(config, t.one_device(), t.LORA)[0]
many, trained, frozen = measured(config, mesh_of(2, 2, 2), t.LORA)
assert all(np.abs(np.asarray(g)).max() > 1e-3 for g in jax.tree.leaves(alone))
assert_alike(alone, many, "lora")
layers = frozen["layers"]
assert (width(layers["qkv"], 1), width(layers["qkv"], 4), width(layers["down"], 2)) == (1, 24, 32)
assert (width(frozen["head"], 0), width(trained["down"]["a"], 2)) == (130, 32)
model, trained, frozen = parts_of(config, mesh_of(2, 2, 2), t.LORA, None)
state = Trainer(model, Recipe(lr=1e-2, batch=6, epochs=1), rows, 3, frozen).start(trained)
# as a checkpoint is read, for a step takes no arrays of fewer devices besides
assert {len(x.sharding.device_set) for x in jax.tree.leaves(state.arrays())} == {8}
print("agree on", jax.device_count(), "devices")
"""

MATRIX = """
heads = dict(num_layers=2, num_heads=8, num_kv_heads=4)
llama, qwen = replace(t.SMALL, **heads), replace(t.QWEN, **heads)
biased, odd = replace(llama, family="qwen2", qkv_bias=True), replace(qwen, vocab_size=263)
cases = (
    (llama, {}, ((8, 1, 1), (2, 1, 4))),
    (biased, {"lora": t.LORA}, ((1, 4, 2),)),
    (qwen, {"soft": Soft(2, 3)}, ((2, 1, 4),)),
    (odd, {}, ((2, 2, 2),)),  # the vocabulary is whole on each device
)
for config, part, meshes in cases:
    alone = measured(config, t.one_device(), **part)[0]
    for sizes in meshes:
        assert_alike(alone, measured(config, mesh_of(*sizes), **part)[0], f"{config.family} {part} {sizes}")

recipe = Recipe(lr=1e-2, batch=6, epochs=1, warmup=0.0)
for lora, meshes in ((None, ((1, 1, 1), (2, 2, 2))), (t.LORA, ((1, 1, 1), (1, 8, 1)))):
    found = []
    for sizes in meshes:
        model, trained, frozen = parts_of(t.QWEN, mesh_of(*sizes), lora, None)
        trainer = Trainer(model, recipe, rows, 3, frozen)
        state = trainer.start(trained)
        reports = [trainer.step(state, examples) for _ in range(2)]
        scores = [*trainer.evaluate(state.trained, examples).values()]
        found.append([[r.loss for r in reports], [r.norm for r in reports], scores, *jax.tree.leaves(state.trained)])
        for moment in jax.tree.leaves(state.moments):
            if moment.ndim > 2 and 48 in moment.shape:  # the optimizer's state lies as the weights do
                assert width(moment, moment.shape.index(48)) == 48 // sizes[1]
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            np.testing.assert_allclose(np.asarray(y), np.asarray(x), rtol=2e-3, atol=2e-4)
print("agree on", jax.device_count(), "devices")
"""


@pytest.mark.slow
def test_heads_rows_and_stored_weights_are_shared_out() -> None:
    assert_agreement(PROGRAM + CHEAP, devices=8)


@pytest.mark.long
def test_every_mesh_computes_what_one_device_does() -> None:
    assert_agreement(PROGRAM + MATRIX, devices=8, timeout=1800)
