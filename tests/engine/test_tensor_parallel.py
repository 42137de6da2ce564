"""An engine over four devices answers as one over one device, and either finds the KV that the other wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragjax.core import ConfigError
from ragjax.engine import Engine
from tests.data.make_disk import model
from tests.support.devices import assert_agreement

PROGRAM = """
import re, tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

import ragjax.runner.weights
from ragjax import Engine, Kind, Prompt, Segment
from ragjax.core import ConfigError
from ragjax.runner.mesh import make_mesh
from ragjax.runner.runner import Runner
from ragjax.store.disk import DiskStore
from tests.data.make_disk import model, prompts
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.pace import Hold
from tests.support.remotes import FakeRemote, settle, tier

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
ragjax.runner.weights.STAGE_LAYERS = 1  # three stages: what one leaves is what the next takes
LINEAR, TREE = prompts()[0][2], prompts()[3][2]
SYSTEM, *CHUNKS, QUESTION = LINEAR.segments
OTHER = Segment("other", Kind.JOIN, np.arange(30, 41, dtype=np.int32))
AGAIN = Prompt((SYSTEM, *reversed(CHUNKS), OTHER))
COMPRESSIONS = ("snapkv+graph:40",) if STRATEGIES else ("snapkv+graph:40", "knorm:40")
scratch = Path(tempfile.mkdtemp())
# two KV heads on two devices each; neither the MLP nor the vocabulary is divided by four
ODD = replace(tiny.CONFIG, intermediate_size=62, vocab_size=261)
made = {
    n: tiny.make_runner(tiny.decoder(config=ODD), pages=100, scanned=False, mesh=make_mesh(n, ODD))
    for n in (1, 4)
}


def serve(devices, disk=None, **options):
    store = None if disk is None else DiskStore.open(disk, b"tiny", about={}, max_bytes=2**30)
    return tiny.engine(made[devices], **{"pages": 100, "disk": store} | options)


def collectives(program):
    names = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\\(", program.as_text())
    return sorted(names)


def answers(devices):
    found = {}
    with serve(devices) as engine:
        ask = partial(engine.begin_prompt, max_tokens=6, want_logits=True)
        for name in STRATEGIES or engine.strategies:
            asked = (TREE, TREE) if name.startswith("dependency") else (LINEAR, AGAIN)
            found[name] = [ask(prompt, strategy=name).result() for prompt in asked]  # the second one reuses KV
        for one in COMPRESSIONS:
            found[one] = [ask(LINEAR, strategy="full", compression=one).result()]
        mixed = ["prefix", "naive", "full", "blend", "prefix", "anchor"]
        futures = [ask(AGAIN if i % 2 else LINEAR, strategy=name) for i, name in enumerate(mixed)]
        found["batch"] = [future.result() for future in futures]
        audit_engine(engine)
        runner = engine._runner
        assert len(runner._pools) == 3
        pool = runner._pools[0].k_LPKCD
        assert {shard.data.shape[2] for shard in pool.addressable_shards} == {2 // min(devices, 2)}
        rows = min(shape.rows for shape in runner.grid.rows)
        entries = runner.grid.entries[0]
        kinds = {"begin": (rows, entries), "stage": (rows, entries, 1), "end": (rows, 2)}
        kinds |= {"extract": (1,), "insert": (1,)}
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


(one, alone), (two, split) = answers(1), answers(4)
assert len(one) > (len(STRATEGIES) or 20) and one.keys() == two.keys()
for name in one:
    for pair in zip(one[name], two[name], strict=True):
        assert_equal(name, *pair)
found_some = sum(answer[1].cached_tokens > 0 for name, answer in one.items() if name not in COMPRESSIONS)
assert found_some > (2 if STRATEGIES else 15)

# a layer adds up what its heads made, and what its MLP made; neither weights nor pages travel
assert alone == {"begin": [], "stage": [], "end": [], "extract": [], "insert": []}, alone
travels = {"begin": ["all-reduce"], "stage": ["all-reduce"] * 2, "end": ["all-gather"]}
assert split == {**alone, **travels}, split
weights = made[4]._weights
layers = jax.tree.unflatten(weights.stage_def, weights.stages[0])
shapes = {name: layers[0][name].get_value().addressable_shards[0].data.shape
          for name in ("qkv", "out", "gate_up", "down")}
assert shapes == {"qkv": (1, 3, 16, 48), "out": (48, 1, 1, 16), "gate_up": (1, 2, 16, 48), "down": (48, 16)}, shapes
assert weights.ends["embedding"].get_value().addressable_shards[0].data.shape == (66, 48)

# pages of the host are the same bits behind four devices
random = np.random.default_rng(3)
bits = [random.standard_normal((3, 5, 2, tiny.PAGE, 16)).astype(np.float32) for _ in "kv"]
pages = np.arange(3, 8, dtype=np.int32)
made[4].insert(pages, made[4].upload(*bits))
copies = made[4].download(pages)
for name, x in zip(("k_LPKCD", "v_LPKCD"), bits, strict=True):
    got = [np.concatenate([getattr(stage, name) for stage in one]) for one in copies]
    assert np.array_equal(np.concatenate(got, axis=1), x)

# paused requests, host memory, and a tier that servers share
with serve(1) as engine:
    alone = [engine.answer_prompt(tiny.prompt(i), max_tokens=90).tokens for i in range(2)]
with serve(4, pages=24) as engine:
    with Hold(engine):
        futures = [engine.begin_prompt(tiny.prompt(i), max_tokens=90) for i in range(2)]
    assert [future.result().tokens for future in futures] == alone
    assert engine.stats()["resumes_total"] > 0
    audit_engine(engine)
with serve(4, pages=24, host_bytes=2**24) as engine:
    first = [engine.answer_prompt(tiny.prompt(i), strategy="naive", max_tokens=4) for i in range(3)]
    again = engine.answer_prompt(tiny.prompt(0), strategy="naive", max_tokens=4)
    assert again.tokens == first[0].tokens
    assert "host" in {report.tier for report in again.segments if report.reused}
remote = FakeRemote()
with serve(1, shared=tier(remote)) as engine:
    wrote = engine.answer_prompt(LINEAR, strategy="naive", max_tokens=4, want_logits=True)
    settle(engine)
with serve(4, shared=tier(remote)) as engine:
    found = engine.answer_prompt(LINEAR, strategy="naive", max_tokens=4, want_logits=True)
    tiers = {report.tier for report in found.segments if report.reused}
    assert tiers and tiers <= {"remote", "device"}, found.segments  # it may arrive before the request starts
    assert found.tokens == wrote.tokens

for writer, reader in ((1, 4), (4, 1)):
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
print("agree on", jax.device_count(), "devices")
"""


SOME = ("prefix", "naive", "craft", "dependency")
"""Of each kind of pass one; the batch of several adds the others."""


@pytest.mark.parametrize("strategies", [SOME, pytest.param((), marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.slow
def test_four_devices_answer_as_one(strategies: tuple[str, ...]) -> None:
    assert_agreement(f"STRATEGIES = {strategies}\n{PROGRAM}", devices=8)


def test_more_devices_than_there_are_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel 64 needs 64 devices, and JAX has 1 \(cpu\)"):
        Engine.load(model(tmp_path / "tiny"), dtype="float32", tensor_parallel=64, compile=False, progress=False)


REAL = """
import jax, numpy as np
from ragjax import Engine, Kind, Prompt, Segment

random = np.random.default_rng(5)
parts = (("system", Kind.SYSTEM, 12), ("chunk", Kind.CHUNK, 40), ("question", Kind.JOIN, 9))
prompt = Prompt(tuple(
    Segment(name, kind, random.integers(100, 40000, n).astype(np.int32), title=name) for name, kind, n in parts
))
found = {}
for devices in (1, 3, 9):
    with Engine.load("smollm2-135m-instruct", dtype="float32", tensor_parallel=devices, device_cache_gb=0.5,
                     max_context=1024, compile=False, progress=False) as engine:
        found[devices] = [
            engine.answer_prompt(prompt, strategy=name, max_tokens=6, want_logits=True) for name in ("prefix", "naive")
        ]
for devices in (3, 9):
    for one, other in zip(found[1], found[devices], strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logits, other.logits, rtol=1e-4, atol=5e-4)
print("agree on", jax.device_count(), "devices")
"""


@pytest.mark.long
def test_real_weights_answer_alike_on_three_and_nine_devices() -> None:
    """SmolLM2 135M has 3 KV heads of 3 query heads each: on nine devices each of them has three copies."""
    assert_agreement(REAL, devices=9, timeout=1800)
