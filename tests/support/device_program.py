"""Answers of a small engine with heads of 64 on JAX's default device, written to a file.

python -m tests.support.device_program FILE.npz DTYPE: every strategy cold and warm, two compressions, many requests at
once, and chunks that come back from host memory.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import numpy as np

from ragjax.core import Answer, Kind, Prompt, Segment
from ragjax.engine import Engine
from tests.data.make_disk import prompts
from tests.support import tiny
from tests.support.audit import audit_engine

PAGES = 100
CONFIG = replace(tiny.CONFIG, head_dim=64)  # GPU kernels take heads of 64 and 128
COMPRESSIONS = ("snapkv+graph:40", "knorm:40")
MIXED = ("prefix", "naive", "full", "blend", "prefix", "anchor")


def answers(engine: Engine) -> dict[str, list[Answer]]:
    """Of all strategies and compressions, by name; the second answer of each strategy reuses KV."""
    linear, tree = prompts()[0][2], prompts()[3][2]
    system, *chunks, _ = linear.segments
    again = Prompt((system, *reversed(chunks), Segment("other", Kind.JOIN, np.arange(30, 41, dtype=np.int32))))
    ask = partial(engine.begin_prompt, max_tokens=6, want_logits=True)
    found = {}
    for name in engine.strategies:
        asked = (tree, tree) if name.startswith("dependency") else (linear, again)
        found[name] = [ask(prompt, strategy=name).result() for prompt in asked]
    for one in COMPRESSIONS:
        found[one] = [ask(linear, strategy="full", compression=one).result()]
    futures = [ask(again if i % 2 else linear, strategy=name) for i, name in enumerate(MIXED)]
    found["batch"] = [future.result() for future in futures]
    audit_engine(engine)
    return found


def from_host(engine: Engine) -> dict[str, list[Answer]]:
    """Answers over more chunks than the device has room for, twice each."""
    many = [tiny.prompt(seed, chunks=(60, 50, 70)) for seed in range(5)]
    ask = partial(engine.answer_prompt, strategy="naive", max_tokens=4, want_logits=True)
    found = [ask(prompt) for _ in range(2) for prompt in many]
    assert any("host" in str(answer.segments) for answer in found), "nothing came back from host memory"
    audit_engine(engine)
    return {"host": found}


def main(file: str, dtype: str) -> None:
    """Write tokens and the logits of the first one by name and number, and the attentions that ran, by backend."""
    runner = tiny.make_runner(tiny.decoder(dtype, CONFIG), pages=PAGES, scanned=False)
    with tiny.engine(runner, pages=PAGES) as engine:
        found = answers(engine)
    with tiny.engine(runner, pages=40, host_bytes=2**26) as engine:
        found |= from_host(engine)
    arrays = {}
    for name, of_name in found.items():
        for i, answer in enumerate(of_name):
            arrays[f"{name} {i} tokens"] = np.array(answer.tokens)
            arrays[f"{name} {i} logits"] = np.asarray(answer.logits)[0]
    np.savez(file, backends=sorted(runner.calls), **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
