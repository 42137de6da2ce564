"""Samples that outlive a stop of the benchmark, and what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.common.machine import ROOT

STORE = ROOT / "build" / "benchmarks"  # where samples of unfinished runs wait to be continued


@cache
def code_digest() -> str:
    """Digest of the sources that a figure depends on, so that a stopped run is not continued with other code."""
    whole = hashlib.sha256()
    files = [file for room in ("ragjax", "train", "benchmarks") for file in (ROOT / room).rglob("*.py")]
    for file in sorted(f for f in [*files, ROOT / "tests" / "support" / "oracle.py"] if ".envs" not in f.parts):
        whole.update(os.fsencode(file.relative_to(ROOT)) + file.read_bytes())
    return whole.hexdigest()


def weights_of(model: str) -> str:
    """Digest of a model's weights, hexadecimal: its name may stand for others by the time a stopped run goes on.

    Raises:
        ConfigError: if there is no such model.
    """
    from ragjax.models.hub import cache_dir, resolve
    from ragjax.models.trained import model_digest

    return model_digest(resolve(model), cache_dir()).hex()


class Samples:
    """Measured samples by key, kept in a file until the benchmark is done, so that a stopped run goes on.

    `settings` is what the samples depend on besides the code; a run with other settings starts from nothing.
    """

    def __init__(self, benchmark: str, settings: Mapping[str, Any]):
        """Open the store, with the samples of an unfinished run of the same settings and code."""
        everything = json.dumps({**settings, "code": code_digest()}, sort_keys=True)
        self._path = STORE / f"{benchmark}-{hashlib.sha256(everything.encode()).hexdigest()[:12]}.jsonl"
        self._samples: dict[str, dict[str, Any]] = {}
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # an empty line, or one that was being written when the run was stopped
            self._samples[entry["key"]] = entry["sample"]
        if self._samples:
            print(f"continuing a stopped run: {len(self._samples)} samples are in {self._path}", file=sys.stderr)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._samples.get(key)

    def put(self, key: str, sample: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as out:
            # on a line of its own, also after one that a stop cut off
            out.write("\n" + json.dumps({"key": key, "sample": dict(sample)}))
        self._samples[key] = dict(sample)

    def of(self, key: str, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The sample of `key`, measured if it is not there."""
        if key not in self._samples:
            self.put(key, measure())
        return self._samples[key]

    def rows(self, cells: Mapping[str, Callable[[], Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
        """The sample of each cell, those of an unfinished run at once; says how far it is."""
        progress = Progress(len(cells))
        for key, measure in cells.items():
            if key in self._samples:
                progress.skip()
            else:
                self.put(key, measure())
                progress.step(key)
            yield self._samples[key]

    def done(self) -> None:
        """Forget the samples: the report has been made."""
        self._path.unlink(missing_ok=True)


@dataclass
class Progress:
    """Says on standard error how far a run is, and when it will be done at the pace so far."""

    total: int
    done: int = 0
    _start: float = field(default_factory=time.monotonic)

    def step(self, what: str) -> None:
        """Count one step that took time; steps that were continued from a file go through `skip`."""
        self.done += 1
        left = (time.monotonic() - self._start) / self.done * (self.total - self.done)
        duration = f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min"
        print(f"[{self.done}/{self.total}] {what}; about {duration} left", file=sys.stderr)

    def skip(self) -> None:
        self.total -= 1
