"""An engine over two devices answers as one over one device, and either finds the KV that the other wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragjax.core import ConfigError
from ragjax.engine import Engine
from tests.data.make_disk import model
from tests.support.devices import assert_agreement

PROGRAM = """
import re, tempfile
from functools import partial
from pathlib import Path

import jax
import numpy as np

import ragjax.runner.weights
from ragjax import Engine, Kind, Prompt, Segment
from ragjax.core import ConfigError
from ragjax.runner.device import heads_mesh
from ragjax.runner.runner import Runner
from ragjax.store.disk import DiskStore
from tests.data.make_disk import model, prompts
from tests.support import tiny

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
ragjax.runner.weights.STAGE_LAYERS = 1  # three stages: what one leaves is what the next takes
LINEAR, TREE = prompts()[0][2], prompts()[3][2]
SYSTEM, *CHUNKS, QUESTION = LINEAR.segments
OTHER = Segment("other", Kind.JOIN, np.arange(30, 41, dtype=np.int32))
AGAIN = Prompt((SYSTEM, *reversed(CHUNKS), OTHER))
COMPRESSIONS = ("snapkv+graph:40", "pyramidkv:40")
scratch = Path(tempfile.mkdtemp())
made = {
    n: Runner(tiny.decoder(), pages=100, page_size=tiny.PAGE, grid=tiny.GRID, mesh=heads_mesh(n, 2)) for n in (1, 2)
}


def serve(devices, disk=None):
    store = None if disk is None else DiskStore.open(disk, b"tiny", about={}, max_bytes=2**30)
    return tiny.engine(made[devices], pages=100, disk=store)


def collectives(program):
    names = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\\(", program.as_text())
    return sorted(names)


def answers(devices):
    found = {}
    with serve(devices) as engine:
        ask = partial(engine.begin_prompt, max_tokens=6, want_logits=True)
        for name in engine.strategies:
            asked = (TREE, TREE) if name.startswith("dependency") else (LINEAR, AGAIN)
            found[name] = [ask(prompt, strategy=name).result() for prompt in asked]  # the second one reuses KV
        for one in COMPRESSIONS:
            found[one] = [ask(LINEAR, strategy="full", compression=one).result()]
        mixed = ["prefix", "naive", "full", "blend", "prefix", "ragjax"]
        futures = [ask(AGAIN if i % 2 else LINEAR, strategy=name) for i, name in enumerate(mixed)]
        found["batch"] = [future.result() for future in futures]
        engine.audit()
        runner = engine._runner
        assert len(runner._pools) == 3
        pool = runner._pools[0].k_LPKCD
        assert {shard.data.shape[2] for shard in pool.addressable_shards} == {2 // devices}
        rows = min(shape.rows for shape in runner.grid.rows)
        kinds = {"stage": (rows, runner.grid.entries[0], 1), "end": (rows, 1), "extract": (1,), "insert": (1,)}
        programs = {kind: collectives(runner._programs.get(kind, *sizes)) for kind, sizes in kinds.items()}
    return found, programs


def ask_disk(devices, disk):
    with serve(devices, disk) as engine:
        return [
            engine.answer_prompt(prompt, strategy=strategy, max_tokens=4, want_logits=True)
            for strategy, tenant, prompt in prompts()
            if not tenant
        ]


def assert_equal(name, one, two):
    assert one.tokens == two.tokens, name
    assert one.cached_tokens == two.cached_tokens, name
    np.testing.assert_allclose(one.logits, two.logits, rtol=1e-4, atol=1e-4, err_msg=name)


(one, alone), (two, split) = answers(1), answers(2)
assert len(one) > 20 and one.keys() == two.keys()
for name in one:
    for pair in zip(one[name], two[name], strict=True):
        assert_equal(name, *pair)
assert sum(answer[1].cached_tokens > 0 for name, answer in one.items() if name not in COMPRESSIONS) > 15

# a layer adds up once what its heads made; neither weights nor pages travel
assert alone == {"stage": [], "end": [], "extract": [], "insert": []}, alone
assert split == {**alone, "stage": ["all-reduce"]}, split

for writer, reader in ((1, 2), (2, 1)):
    disk = scratch / f"written-by-{writer}"
    written, read = ask_disk(writer, disk), ask_disk(reader, disk)
    assert len([*disk.iterdir()]) == 1, "KV does not depend on the number of devices"
    for cold, warm in zip(written, read, strict=True):
        assert warm.cached_tokens > cold.cached_tokens
        assert {report.tier for report in warm.segments[1:] if report.reused} == {"disk"}  # the system is shared
        assert warm.tokens == cold.tokens
        np.testing.assert_allclose(warm.logits, cold.logits, rtol=1e-4, atol=1e-4)
    again = ask_disk(writer, disk)
    assert [answer.cached_tokens for answer in again] == [answer.cached_tokens for answer in read]

folder = model(scratch / "tiny")
load = partial(Engine.load, folder, dtype="float32", device_cache_gb=0.01, compile=False, progress=False)
with load(tensor_parallel=2) as engine:
    assert len(engine._runner._pools[0].k_LPKCD.addressable_shards) == 2
try:
    load(tensor_parallel=4)
except ConfigError as error:
    assert str(error) == "--tensor-parallel 4 does not divide the model's 2 KV heads: choose one of 1, 2", error
else:
    raise AssertionError("four devices for two KV heads")
print("agree on", jax.device_count(), "devices")
"""


@pytest.mark.slow
def test_two_devices_answer_as_one() -> None:
    assert_agreement(PROGRAM, devices=8)


def test_more_devices_than_there_are_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel 64 needs 64 devices, and JAX has 1 \(cpu\)"):
        Engine.load(model(tmp_path / "tiny"), dtype="float32", tensor_parallel=64, compile=False, progress=False)
