"""Time to first token while KV arrives: passes that wait for all of it, and passes that begin with its first stages.

Cache-Craft, Fig. 29. A context lies in host memory or on disk; a request reuses it and computes a question behind it.
`whole` waits for all of the context, `layers` is what ragjax does. Both are asked in turns, so that their ratio is one
run's; `device` is the same question with nothing to load. A throttled disk is an ordinary one whose reads are held up.
`cut`, with nothing to load, runs the pass a stage at a time: what the cuts alone cost.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.plot import Figures, Panel, label
from benchmarks.common.report import Benchmark, Parser, Row, Session
from ragjax.commands.flags import integer
from ragjax.core import Kind, Prompt, Segment, StorageOptions
from ragjax.core.tiers import Record
from ragjax.engine import Engine
from ragjax.schedule.batch import rows_of
from ragjax.schedule.scheduler import Preload
from ragjax.schedule.state import RequestState
from ragjax.store.codec import Arrays
from ragjax.store.load import Disk

COLUMNS = ("tier", "disk_mb_s", "context_tokens", "new_tokens", "rounds", "device_ms", "whole_ms", "layers_ms",
           "load_ms", "faster", "exposed_less", "slowest_pair")  # fmt: skip
WARM = 2  # rounds that are not counted: the first loads say how fast loads are


class Whole(Preload):
    """Waits for all stages."""

    def _lead(self, state: RequestState) -> int:
        return len(state.held.stages) - 1


class Cut(Preload):
    """Runs a stage at a time, whether anything is loaded or not."""

    def may_run(self, state: RequestState) -> bool:
        """As for others, and never more than one stage."""
        may, rows = super().may_run(state), rows_of(state)
        if may and not rows.done:
            rows.cut(next(layer for layer in state.held.stages if layer > rows.layers[0]))
        return may


@dataclass
class Throttled:
    """A disk that is no faster than so many 10^6 bytes a second."""

    disk: Disk
    mb_s: float

    def write(self, record: Record, arrays: Mapping[str, Any]) -> int:
        return self.disk.write(record, arrays)

    def read_shares(self, key: bytes, count: int, expected: Record | None = None) -> Iterator[Arrays]:
        """As the disk, not faster than it is held up."""
        due = time.monotonic()
        for share in self.disk.read_shares(key, count, expected):
            due += sum(x.nbytes for x in share.values()) / self.mb_s / 1e6
            time.sleep(max(0.0, due - time.monotonic()))
            yield share


def prompt(context: int, new: int, question: int) -> Prompt:
    """A context that all questions share, and a question of its own."""

    def segment(name: str, kind: Kind, tokens: int, seed: int) -> Segment:
        return Segment(name, kind, np.random.default_rng(seed).integers(1000, 40_000, tokens).astype(np.int32))

    shared = segment("context", Kind.SYSTEM, context, context)
    return Prompt((shared, segment("question", Kind.QUERY, new, 10**6 + question)))


class Server:
    """An engine in which a context lies in one tier, and the modes of serving it."""

    def __init__(self, engine: Engine, new: int):
        self._engine = engine
        self.new = new
        self._asked = 0
        scheduler = engine._loop._scheduler
        ours = scheduler.preload
        # all learn the pace of prefill from the same steps
        self._modes = {"layers": ours, "whole": Whole(ours.keys), "device": ours, "cut": Cut(ours.keys)}
        assert engine._transfer is not None
        self._transfer = engine._transfer
        self._disk = self._transfer._arrivals.disk

    def hold_up(self, mb_s: float) -> None:
        """Let the disk be no faster than so many 10^6 bytes a second (0: as fast as it is)."""
        assert self._disk is not None
        disk = Throttled(self._disk, mb_s) if mb_s else self._disk
        self._transfer._arrivals = replace(self._transfer._arrivals, disk=disk)

    def ask(self, context: int, mode: str) -> tuple[float, float]:
        """Milliseconds to the first token, and of waiting for KV; the context is in the tier below unless on device."""
        if mode in ("whole", "layers"):
            self._engine.vacate_device()
        self._settle()
        self._engine._loop._scheduler.preload = self._modes[mode]
        self._asked += 1
        answer = self._engine.answer_prompt(prompt(context, self.new, self._asked), strategy="prefix", max_tokens=1)
        if answer.notices:
            raise RuntimeError(f"not as meant: {answer.notices}")
        return answer.timings.ttft, answer.timings.load

    def _settle(self) -> None:
        self._transfer.flush()
        time.sleep(0.2)


def turns(server: Server, context: int, rounds: int, modes: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Times of each mode; the first two are asked in turns, each first in every other round."""
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    for number in range(WARM + rounds):
        for mode in modes if number % 2 else (*modes[1::-1], *modes[2:]):
            times = server.ask(context, mode)
            if number >= WARM:
                found[mode].append(times)
    return found


def measure(server: Server, where: Mapping[str, Any], context: int, rounds: int) -> dict[str, Any]:
    found = turns(server, context, rounds, ("whole", "layers", "device"))
    middle = {mode: median(ttft for ttft, _ in times) for mode, times in found.items()}
    exposed = {mode: max(middle[mode] - middle["device"], 0.1) for mode in ("whole", "layers")}
    pairs = [one / other for (one, _), (other, _) in zip(found["whole"], found["layers"], strict=True)]
    return {
        **where, "context_tokens": context, "new_tokens": server.new, "rounds": rounds,
        **{f"{mode}_ms": ttft for mode, ttft in middle.items()}, "load_ms": median(load for _, load in found["whole"]),
        "faster": middle["whole"] / middle["layers"], "exposed_less": exposed["whole"] / exposed["layers"],
        "slowest_pair": min(pairs),
    }  # fmt: skip


def cuts(server: Server, context: int, rounds: int) -> dict[str, Any]:
    """What it costs to run a pass a stage at a time."""
    found = turns(server, context, rounds, ("device", "cut"))
    plain, cut = (median(ttft for ttft, _ in found[mode]) for mode in ("device", "cut"))
    return {
        "context_tokens": context, "new_tokens": server.new, "device_ms": plain, "cut_ms": cut, "cost": cut / plain - 1,
    }  # fmt: skip


def opened(**storage: Any) -> Engine:
    """An engine of the packaged model; a shape is compiled when it first runs, in rounds that are not counted."""
    return Engine.load(report.MODEL, storage=StorageOptions(**storage), progress=False, compile=False)


def panels(rows: Sequence[Row]) -> Iterator[Panel]:
    def panel(axes: Any, tier: str, speed: int | None) -> None:
        group = [row for row in rows if (row["tier"], row["disk_mb_s"]) == (tier, speed)]
        for i, mode in enumerate(("device", "whole", "layers")):
            axes.bar(
                [x + (i - 1) * 0.27 for x in range(len(group))], [r[f"{mode}_ms"] for r in group], 0.27, label=mode
            )
        axes.set_xticks(range(len(group)), [str(row["context_tokens"]) for row in group])
        label(axes, f"{tier}, {speed} MB/s" if speed else tier, "context, tokens", "time to first token, ms")

    for tier, speed in dict.fromkeys((row["tier"], row["disk_mb_s"]) for row in rows):
        yield partial(panel, tier=tier, speed=speed)


FIGURES: Figures = {"preload": ("Whole loads and layer-wise loads (Cache-Craft, Fig. 29)", panels)}


def options(flags: Parser) -> None:
    tiers, number = ["host", "disk"], report.numbers(integer(1))
    flags.add(
        "--contexts", type=number, default=[2048, 4096, 7680], quick=[2048], metavar="N,...", help="reused tokens"
    )
    flags.add("--new", type=integer(1), default=256, metavar="N", help="tokens to compute")
    flags.add(
        "--tiers", type=report.among(tiers, "tier"), default=tiers, metavar="T,...", help="where the context lies"
    )
    flags.add("--throttle", type=number, default=[400, 150], metavar="MB_S,...", help="speeds of held-up disks")
    flags.add("--rounds", type=integer(1), default=7, quick=3, metavar="N", help="of each mode")


def rows(chosen: Namespace, session: Session) -> Iterator[Row]:
    if "host" in chosen.tiers:
        with opened(host_gb=2.0) as engine:
            server = Server(engine, chosen.new)
            for n in chosen.contexts:
                yield measure(server, {"tier": "host", "disk_mb_s": None}, n, chosen.rounds)
            session.tables["cuts"] = [cuts(server, n, chosen.rounds) for n in chosen.contexts]
    if "disk" in chosen.tiers:
        with tempfile.TemporaryDirectory() as folder, opened(disk=folder) as engine:
            server = Server(engine, chosen.new)
            for speed in (0, *chosen.throttle):
                server.hold_up(speed)
                for n in chosen.contexts:
                    yield measure(server, {"tier": "disk", "disk_mb_s": speed or None}, n, chosen.rounds)


main = Benchmark("preload", __doc__, COLUMNS, rows, options, figures=FIGURES).main

if __name__ == "__main__":
    sys.exit(main())
