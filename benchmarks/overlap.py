"""What the host does while the device computes a decode step, and what the device waits for.

Of steps in which all clients decode, medians in milliseconds: `step_ms` from its first program to its tokens,
`hidden_ms` of host work that is done meanwhile (sampling ordered, text, admission, transfers), `waited_ms` that the
host then waits for the tokens, and `exposed_ms` from these to the first program of the next step, while the device has
nothing to do. `greedy` takes the likeliest token; `sampled` has temperature 0.8, top-p 0.9, top-k 200 and
log-probabilities; `penalized` has the three penalties as well.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.report import Benchmark, Parser, Session
from ragjax.commands.flags import integer
from ragjax.core import Kind, Prompt, Segment
from ragjax.engine import Engine
from ragjax.runner.runner import StepResult
from ragjax.schedule.batch import Batch

COLUMNS = ("sampling", "clients", "steps", "step_ms", "hidden_ms", "waited_ms", "exposed_ms")
SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 200, "seed": 1, "logprobs": 5}
MODES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "penalized": {**SAMPLED, "presence_penalty": 0.2, "frequency_penalty": 0.2, "repetition_penalty": 1.05},
}


def options(flags: Parser) -> None:
    flags.add("--clients", type=report.numbers(integer(1)), default=[1, 8], help="by comma")
    flags.add("--tokens", type=integer(8), default=64, help="of an answer")
    flags.add("--rounds", type=integer(1), default=4, quick=1, help="of answers")


class Watch:
    """Notes when the engine launches a step, waits for it, and has its tokens."""

    def __init__(self, engine: Engine, clients: int):
        self._engine = engine
        self._execution: Any = engine._loop._execution
        self._clients = clients
        self._began = self._ready = self._dispatched = 0.0  # of the last step, or 0 if it does not count
        self.found: dict[str, list[float]] = defaultdict(list)

    def __enter__(self) -> Watch:
        execution = self._execution
        runner: Any = self._engine._runner
        land, launch, step = execution.land, execution.launch, runner.step

        def stepped(arrays: Any) -> StepResult:
            began = time.perf_counter()
            outcome: StepResult = step(arrays)
            self._dispatched, self._began = time.perf_counter(), began
            return outcome

        def launched(batch: Batch) -> None:
            launch(batch)
            if not self._counts(batch):
                self._began = self._ready = 0.0
            elif self._ready:
                self._note("exposed_ms", self._ready, self._began)

        def landed() -> bool:
            if execution._flight is None or not self._began:
                return bool(land())
            waits = time.perf_counter()
            execution._flight.sampled.read()
            self._ready = time.perf_counter()
            self._note("hidden_ms", self._dispatched, waits)
            self._note("waited_ms", waits, self._ready)
            self._note("step_ms", self._began, self._ready)
            return bool(land())

        execution.land, execution.launch, runner.step = landed, launched, stepped
        return self

    def __exit__(self, *_: object) -> None:
        del self._execution.land, self._execution.launch, self._engine._runner.step

    def _counts(self, batch: Batch) -> bool:
        return len(batch.parts) == self._clients and all(part.rows.sampled for part in batch.parts)

    def _note(self, name: str, begin: float, end: float) -> None:
        self.found[name].append((end - begin) * 1e3)


def prompt(number: int, vocabulary: int) -> Prompt:
    tokens = np.random.default_rng(number).integers(0, vocabulary, 200).astype(np.int32)
    return Prompt((Segment("question", Kind.QUERY, tokens),))


def row(engine: Engine, mode: str, clients: int, tokens: int, rounds: int) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "strategy": "full",
        "max_tokens": tokens,
        "logit_bias": dict.fromkeys({*engine._runner.config.eos_ids, *engine.tokenizer.eos_ids}, -100.0),
    }
    asked |= MODES[mode]
    prompts = [prompt(i, engine.tokenizer.vocab_size) for i in range(clients)]
    with Watch(engine, clients) as watch:
        for number in range(1 + rounds):
            if number == 1:  # the first round compiles what is compiled at its first use
                watch.found.clear()
            for future in [engine.begin_prompt(one, **asked) for one in prompts]:
                future.result()
    found = {name: median(times) for name, times in watch.found.items()}
    return {"sampling": mode, "clients": clients, "steps": len(watch.found["step_ms"]), **found}


def measure(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    with Engine.load(chosen.model, dtype=chosen.dtype, lookup=0, max_context=1024, device_cache_gb=0.5) as engine:
        for clients in chosen.clients:
            for mode in MODES:
                yield row(engine, mode, clients, chosen.tokens, chosen.rounds)


main = Benchmark("overlap", __doc__, COLUMNS, measure, options, model=True).main

if __name__ == "__main__":
    sys.exit(main())
