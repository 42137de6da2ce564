"""Many requests at once: latency and throughput of ragjax's systems and of rivals' servers under the same load.

Arrivals are open loop: Poisson's process, seeded, at the rates given, or a trace's times stretched to each rate;
`--points N` measures the capacity first, by 8 clients that wait, and takes N rates from a fifth of it to all of it.
`--clients N` is closed loop: N clients, each of which sends its next request when it has an answer. `--search` finds
the throughput: the largest rate whose mean time to first token is at most 5 times that at a fifth of the capacity.

Workloads: `questions` are real ones (nq_open, musique, and mmlu with its choices), drawn after Zipf, with retrieval of
the top k over the union of their corpora; `zipf` are 12 passages a request, drawn after Zipf from 200, in random order
(`--in-order`: in the pool's), about two thousand tokens, and words of the demo without --data; `graph` the relation
paths of ten entities.

Systems: `full`; `prefix-lru`, a prefix tree on the device with LRU and no tier below, as vLLM and SGLang have it;
`prefix-tiers`, with host memory, LACR, order and speculation; the reuse strategies; `contract`, the strategy that the
quality contract picks at KL 0.1 (needs the report of `ragjax gate`). NAME:FIELD=VALUE is a system with
another setting of the engine, `prefix-tiers:order=lpm` for instance; `--engine` sets one for all. Rivals:
`llamacpp-q4_0`, `llamacpp-f16` (llama.cpp's server, a slot a client), `openvino` (OpenVINO GenAI) and `vllm` (its build
for CPUs, of a Llama). They get the prompt's tokens, with retrieval done. All decode greedily, each answer to its last
token (`--output`), whatever it says.
`--http` measures ragjax as a server too, where answers end where the model ends them.

Rows: times are milliseconds from a request's arrival; `itl` is the time between two deliveries of text; `found_share`
is the share of prompt tokens whose KV was found. `jain` is Jain's index over seconds a token. Energy of wasted steps
cannot be read on these machines and is left out. Parts: `batch` compares 16 requests that decode at once, each
over a context of its own and then all over one, with a single request;
`stall` the time between tokens of four requests while a prompt of 4K tokens is prefilled with that before.
"""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.report import Benchmark, Parser, Session, listed, numbers
from benchmarks.common.samples import Samples, weights_of
from benchmarks.latency.system import OtherLoad
from benchmarks.load import figure, part, plot, server
from benchmarks.load.client import Target
from benchmarks.load.measure import COLUMNS, Bench, Plan, Results, row_of
from benchmarks.load.server import OwnServer, Prompts
from benchmarks.load.system import Own, base_settings, options_of, parse_setting, parse_system
from benchmarks.load.workload import POOL, WORKLOADS, Wish, Workload, read_trace
from ragjax.commands.flags import from_zero, integer, positive
from ragjax.core import ConfigError
from ragjax.models import hub

RIVALS = ("llamacpp-q4_0", "llamacpp-f16", "llamacpp-q4_0-reuse", "openvino", "vllm")
REUSE_TOKENS = 64  # of `llamacpp-q4_0-reuse`: chunks that moved and are this long are shifted instead of computed
REQUESTS, QUICK_REQUESTS = 120, 8
WARM, QUICK_WARM = 60, 4
SYSTEMS = "full,prefix-lru,prefix-tiers"
CONTEXT = 4096


def options(flags: Parser) -> None:
    add = flags.add
    add("--data", type=Path, metavar="DIR", help="a folder with text/SET, kg/SET and traces/")
    add("--part", choices=("load", "batch", "stall"), default="load", help="what to measure")
    add("--figure", metavar="NAME", choices=tuple(figure.FIGURES), help=f"one of {', '.join(figure.FIGURES)}")
    add("--workload", choices=WORKLOADS, help="what is asked (zipf)")
    add("--sets", type=listed, metavar="A,B", help="sets of the workload (questions: nq_open,mmlu,musique)")
    add("--systems", type=listed, metavar="A,B", help=f"who takes part ({SYSTEMS})")
    add("--clients", type=numbers(integer(1, 1000)), metavar="N,M", help="closed loops of so many clients (8)")
    add("--rate", type=numbers(positive), metavar="X,Y", help="open loops at so many requests a second")
    add("--points", type=integer(0, 20), help="open loops at so many rates up to the capacity")
    flags.add_argument("--search", action="store_true", default=None, help="find the throughput")
    add("--arrivals", type=Path, metavar="FILE", help="a trace whose arrivals are used, stretched to each rate")
    add("--requests", type=integer(2, 100000), help=f"requests of a point ({REQUESTS}; {QUICK_REQUESTS} with --quick)")
    add("--warm", type=integer(0, 100000), help=f"requests before the first point ({WARM}; {QUICK_WARM} with --quick)")
    add("--output", type=integer(1, 4096), metavar="N", help="tokens of each answer (32; mmlu 1, graph 16)")
    add("--top-k", type=numbers(integer(1, 100)), metavar="K,L", help="passages of a question (2)")
    add("--together", type=integer(1, 1000), default=Wish.together, help="passages of a request of zipf")
    add("--words", type=integer(1), default=Wish.words, help="words of a passage of zipf, at most")
    add("--pool", type=integer(2, 100000), default=POOL, quick=48, help="passages that zipf draws from")
    add("--in-order", action="store_true", help="zipf's passages stand in the pool's order")
    add("--engine", action="append", default=[], metavar="FIELD=VALUE", help="an option of all of ragjax's engines")
    add("--device-cache-gb", type=positive, default=0.5, help="KV pool of every system, 2^30 bytes")
    add("--http", action="store_true", help="measure ragjax's systems as servers, too")
    add("--context", type=integer(256, 10**6), default=CONTEXT, help="tokens of prompt and answer")
    add("--part-context", type=from_zero, default=1024, help="tokens of each prompt of --part batch")
    add("--model", default=report.MODEL, metavar="NAME_OR_PATH", help="model, .gguf where rivals run")
    add("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="of weights and KV")
    add("--seed", type=integer(0), default=0, help="of arrivals and draws")
    add("--plot", type=Path, metavar="DIR", help="also draw pictures")


def check(flags: Parser, chosen: Namespace) -> None:
    try:
        complete(chosen)
    except ConfigError as error:
        flags.error(str(error))


def complete(chosen: Namespace) -> None:
    """Fill in a figure's flags and the defaults, and check what can be checked before anything is measured.

    Raises:
        ConfigError: for what is missing or does not go together.
    """
    readers = {"sets": listed, "systems": listed, "clients": numbers(integer(1)), "rate": numbers(positive)}
    readers |= {"top_k": numbers(integer(1)), "arrivals": lambda text: chosen.data and chosen.data / text}
    for name, value in (figure.FIGURES[chosen.figure].flags if chosen.figure else {}).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, readers[name](value) if name in readers else value)
    chosen.workload = chosen.workload or "zipf"
    if chosen.part == "load" and chosen.data is None and chosen.workload != "zipf":
        raise ConfigError("--data DIR is needed: it holds the questions")
    if chosen.part == "load":
        chosen.systems = chosen.systems or listed("prefix-tiers" if chosen.quick else SYSTEMS)
    chosen.systems = chosen.systems or ["prefix-lru"]
    chosen.requests = chosen.requests or (QUICK_REQUESTS if chosen.quick else REQUESTS)
    chosen.warm = (QUICK_WARM if chosen.quick else WARM) if chosen.warm is None else chosen.warm
    chosen.top_k = chosen.top_k or [2]
    if not (chosen.rate or chosen.points or chosen.search or chosen.clients):
        chosen.clients = [8]
    if chosen.quick and chosen.points:
        chosen.points = min(chosen.points, 2)
    chosen.engine = dict(map(parse_setting, chosen.engine))
    for name in chosen.systems:
        if name not in RIVALS:
            parse_system(name)


def plan_of(chosen: Namespace) -> Plan:
    return Plan(
        requests=chosen.requests, warm=chosen.warm, seed=chosen.seed, clients=chosen.clients or (),
        rates=chosen.rate or (), geometric=chosen.points or 0, search=bool(chosen.search),
        trace=read_trace(chosen.arrivals) if chosen.arrivals else (),        warm_output=8 if chosen.quick else 1,
    )  # fmt: skip


def workloads_of(chosen: Namespace, count: int) -> list[Workload]:
    wish = Wish(
        chosen.data or Path(), count, tuple(chosen.sets or ()), output=chosen.output, seed=chosen.seed,
        quick=chosen.quick, shuffled=not chosen.in_order, pool=chosen.pool, together=chosen.together,
        words=chosen.words, made=chosen.data is None,
    )  # fmt: skip
    if chosen.workload != "questions":
        return [WORKLOADS[chosen.workload](wish)]
    return [WORKLOADS["questions"](replace(wish, top_k=k)) for k in chosen.top_k]


def targets_of(chosen: Namespace, workload: Workload) -> list[Target]:
    model = hub.resolve(chosen.model).path
    rivals = [name for name in chosen.systems if name in RIVALS]
    tokens = Prompts(workload, model) if rivals else None
    base = base_settings(
        model=chosen.model, dtype=chosen.dtype, gigabytes=chosen.device_cache_gb, context=chosen.context
    )
    made: list[Target] = []
    for name in chosen.systems:
        if name not in RIVALS:
            engine = options_of(name, chosen.engine, base)
            made.append(Own(name, engine, workload))
            if chosen.http:
                made.append(OwnServer(f"{name} (http)", engine, workload))
            continue
        assert tokens is not None
        made.append(rival_of(name, chosen, model, tokens))
    return made


def rival_of(name: str, chosen: Namespace, model: Path, tokens: Prompts) -> Target:
    """A rival by name, with as many slots as there are clients at most (8 under open arrivals)."""
    clients = max([8, *(chosen.clients or ())])
    gigabytes = max(1.0, chosen.device_cache_gb)
    if name == "openvino":
        return server.openvino(name, model, tokens, clients=clients, gigabytes=gigabytes)
    if name == "vllm":
        return server.vllm(name, model, tokens, clients=clients, gigabytes=gigabytes, context=chosen.context)
    kind = name.split("-")[1].upper()
    reuse = REUSE_TOKENS if name.endswith("-reuse") else 0
    return server.LlamaServer(name, model, kind, tokens, slots=clients, context=chosen.context, reuse=reuse)


def settings_of(chosen: Namespace) -> dict[str, Any]:
    """What the points of a run depend on besides system, workload and rate."""
    kept = (
        "dtype", "context", "device_cache_gb", "requests", "warm", "seed", "part", "part_context", "arrivals", "engine",
        "clients",
    )  # fmt: skip
    return {**{name: str(getattr(chosen, name)) for name in kept}, "model": weights_of(chosen.model)}


async def measure(chosen: Namespace, samples: Samples, results: Results) -> dict[str, str]:
    """Fill `results`; the versions of what took part."""
    plan = plan_of(chosen)
    versions: dict[str, str] = {}
    for workload in workloads_of(chosen, plan.count):
        for target in targets_of(chosen, workload):
            await Bench(target, workload, plan, samples).measure(results)
            versions |= target.versions
    return versions


def measure_part(chosen: Namespace, samples: Samples, results: Results) -> list[dict[str, Any]]:
    """Rows of a part into `results`; its verdict."""
    verdicts = []
    for name in chosen.systems:
        base = base_settings(model=chosen.model, dtype=chosen.dtype, gigabytes=2.0, context=8192)
        own = Own(name, options_of(name, chosen.engine, base), Workload(chosen.part, ()))
        kept = samples.of(f"{name}/{chosen.part}", lambda own=own: _part(own, chosen))  # type: ignore[misc]
        results.rows += kept["rows"]
        verdicts.append({"system": name, **kept["verdict"]})
    return verdicts


def _part(own: Own, chosen: Namespace) -> dict[str, Any]:
    async def all_of_it() -> dict[str, Any]:
        await own.open()
        try:
            batch, others = chosen.part == "batch", OtherLoad(os.getpid())
            loads = await (part.batch(own, int(chosen.part_context)) if batch else part.stall(own))
            rows = [row_of(own.name, what, own.served, load) for what, load in loads]
            return {"rows": rows, "verdict": {**part.verdict(chosen.part, loads), "other_load": others.so_far()}}
        finally:
            await own.close()

    return asyncio.run(all_of_it())


def run(chosen: Namespace, session: Session) -> list[dict[str, Any]]:
    """Measure what was asked for; the rows."""
    results, samples = Results(), session.samples(settings_of(chosen))
    if chosen.part != "load":
        session.tables["verdict"] = measure_part(chosen, samples, results)
        return results.rows
    session.add_versions(asyncio.run(measure(chosen, samples, results)))
    session.tables |= {"details": results.details, "throughput": results.throughput}
    return results.rows


def show(rows: Sequence[report.Row], chosen: Namespace) -> None:
    title = figure.FIGURES[chosen.figure].title if chosen.figure else f"Under load: {chosen.workload}"
    if chosen.plot is not None:
        plot.draw(rows, chosen.plot, chosen.figure or chosen.workload, title)


BENCHMARK = Benchmark("load", __doc__, COLUMNS, run, options, check=check, show=show)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
