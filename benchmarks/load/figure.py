"""The papers' figures under load, as settings of this benchmark that two cores can measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.plot import Figures, Panel, bars, label, lines
from benchmarks.common.report import Row
from ragjax.core import ConfigError

BATCHING = ("ragcache", "prefix-lru", "full")


@dataclass(frozen=True)
class Figure:
    """A figure of a paper: its title, and the flags that it stands for by name, as the command line has them."""

    title: str
    flags: Mapping[str, Any] = field(default_factory=dict)


def _questions(sets: str, systems: str, **more: Any) -> Mapping[str, Any]:
    return {"workload": "questions", "sets": sets, "systems": systems, "points": 5, **more}


OWN = ",".join(BATCHING)
REUSE = "full,prefix-lru,cachecraft,fusionrag,blend,naive"
ORDERS = "ragcache:order=fcfs,ragcache,ragcache:order=lpm"
CRAFT = "prefix-lru,cachecraft:recompute_ratio=0.3,cachecraft:recompute_ratio=0"
STAGES = "ragcache:speculate=0,ragcache"

FIGURES: Mapping[str, Figure] = {
    "ragcache_13": Figure("Time to first token by rate, mmlu (RAGCache, Figure 13)", _questions("mmlu", OWN)),
    "ragcache_14": Figure("Time to first token by rate, nq_open (RAGCache, Figure 14)", _questions("nq_open", OWN)),
    "ragcache_15": Figure(
        "Time to first token for top-1, 3 and 5, mmlu (RAGCache, Figure 15)", _questions("mmlu", OWN, top_k="1,3,5")
    ),
    "ragcache_16": Figure(
        "Time to first token of a larger model, which --model names (RAGCache, Figure 16)", _questions("mmlu", OWN)
    ),
    "ragcache_18": Figure(
        "Orders of the queue, near saturation (RAGCache, Figure 18)",
        {**_questions("mmlu,nq_open", ORDERS), "points": 0, "clients": "16"},
    ),
    "ragcache_19": Figure(
        "Speculative retrieval at a low rate (RAGCache, Figure 19 and Table 3)",
        {**_questions("mmlu,nq_open", STAGES), "points": 0, "rate": "0.1"},
    ),
    "cachecraft_22": Figure("Throughput and latency by load (Cache-Craft, Figure 22)", {
        "workload": "zipf", "systems": CRAFT, "points": 5,
    }),
    "cachecraft_24": Figure("Bursts of a trace (Cache-Craft, Figure 24)", {
        "workload": "zipf", "systems": CRAFT, "points": 3,
        "arrivals": "traces/azure_llm_2023_conv.csv",
    }),
    "fusionrag_15": Figure(
        "Reuse strategies by rate (FusionRAG, Figure 15)", _questions("nq_open", REUSE, top_k="5")
    ),
    "depcache_11": Figure("Throughput over graphs (DepCache, Figure 11)", {
        "workload": "graph", "systems": "full,prefix-lru,depcache", "points": 0, "clients": "8",
    }),
}  # fmt: skip


def flags_of(name: str) -> Mapping[str, Any]:
    """The flags that a figure stands for."""
    if name not in FIGURES:
        raise ConfigError(f"unknown figure {name!r}; choose among {', '.join(FIGURES)}")
    return FIGURES[name].flags


LINES = ("ttft_mean_ms", "ttft_p99_ms", "itl_p99_ms", "found_share")
GROUPS = ("ttft_mean_ms", "ttft_p99_ms", "requests_per_s", "found_share")
BARS = ("requests_per_s", "tokens_per_s", "ttft_mean_ms", "itl_p99_ms")


def _by_rate(rows: Sequence[Row]) -> Iterator[Panel]:
    open_loop = [r for r in rows if r["rate"]]
    if len({r["rate"] for r in open_loop}) == 1:
        yield from (_groups(open_loop, y) for y in GROUPS if any(r[y] is not None for r in open_loop))
        return
    for workload in dict.fromkeys(r["workload"] for r in rows):
        found = [r for r in rows if r["workload"] == workload and r["rate"]]
        yield from filter(None, (
            lines(found, workload, "rate", y, "system", x_label="requests a second that arrive",
                  logarithmic="y" if y.endswith("_ms") else "")
            for y in LINES
        ))  # fmt: skip


def _groups(rows: Sequence[Row], y: str) -> Panel:
    workloads = list(dict.fromkeys(r["workload"] for r in rows))
    systems = list(dict.fromkeys(r["system"] for r in rows))
    width = 0.8 / len(systems)

    def panel(axes: Any) -> None:
        for i, system in enumerate(systems):
            found = {r["workload"]: r[y] for r in rows if r["system"] == system and r[y] is not None}
            places = [workloads.index(workload) + (i + 0.5) * width - 0.4 for workload in found]
            axes.bar(places, list(found.values()), width, label=system)
        axes.set_xticks(range(len(workloads)), [name.split(":")[-1] for name in workloads], fontsize=7)
        label(axes, f"{rows[0]['rate']:g} requests a second arrive", "", y)

    return panel


def _by_clients(rows: Sequence[Row]) -> Iterator[Panel]:
    for workload in dict.fromkeys(r["workload"] for r in rows):
        found = [r for r in rows if r["workload"] == workload and r["concurrency"]]
        names = [f"{r['system']} ({r['concurrency']})" for r in found]
        yield from filter(None, (bars(found, workload, y, names) for y in BARS if found))


def figures(name: str, title: str) -> Figures:
    """The pictures of a run: by rate, and of closed loops."""
    return {name: (title, _by_rate), f"{name}_clients": (f"{title}, clients that wait", _by_clients)}
