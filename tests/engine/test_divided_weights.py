"""Adapters, packets and checkpoints in few bits answer over several devices as over one."""

from __future__ import annotations

import pytest

from tests.support.devices import assert_agreement

PROGRAM = """
import tempfile
from functools import partial
from pathlib import Path

import jax
import numpy as np

from ragjax import Engine
from tests.data.make_disk import prompts
from tests.support.rounded import rounded, trained

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
scratch = Path(tempfile.mkdtemp())
load = partial(Engine.load, dtype="float32", device_cache_gb=0.01, max_context=256, compile=False, progress=False)
LINEAR = prompts()[0][2]


def answers(model, devices, strategies):
    with load(str(model), tensor_parallel=devices) as engine:
        assert len(engine._runner._pools[0].k_LPKCD.addressable_shards) == devices
        return [
            engine.answer_prompt(LINEAR, strategy=name, max_tokens=4, want_logits=True)
            for name in strategies for _ in range(2)  # the second one reuses KV
        ]


def assert_alike(model, strategies, among=(2, 4), unlike=None):
    alone = answers(model, 1, strategies)
    assert alone[1].cached_tokens > 0
    if unlike is not None:  # what was trained changes the answer
        assert np.abs(alone[0].logits - unlike[0].logits).max() > 1e-2
    for devices in among:  # on four, each KV head has two copies
        for one, other in zip(alone, answers(model, devices, strategies), strict=True):
            assert one.tokens == other.tokens, (model.name, devices)
            np.testing.assert_allclose(one.logits, other.logits, rtol=1e-4, atol=1e-4)
    return alone
"""

CHEAP = """
base = rounded(scratch / "base", "qwen2", 8, layers=1)
assert_alike(trained(base, "adapter"), ["naive"], among=[4])
print("agree on", jax.device_count(), "devices")
"""

MATRIX = """
base = rounded(scratch / "llama", "llama", 4)
bare = assert_alike(base, ["prefix", "naive"])
assert_alike(trained(base, "adapter"), ["prefix", "anchor"], among=[2], unlike=bare)
assert_alike(trained(base, "packet"), ["packet", "naive"], among=[4])
assert_alike(trained(rounded(scratch / "phi3", "phi3", 8), "adapter"), ["naive"])
assert_alike(trained(rounded(scratch / "gemma2", "gemma2", 8), "adapter"), ["naive"])
print("agree on", jax.device_count(), "devices")
"""


@pytest.mark.slow
def test_an_adapter_over_eight_bits() -> None:
    assert_agreement(PROGRAM + CHEAP, devices=4)


@pytest.mark.long
def test_fewer_bits_and_other_families_with_what_was_trained() -> None:
    assert_agreement(PROGRAM + MATRIX, devices=4, timeout=1800)
