"""The papers' figures under load, as settings of this benchmark that two cores can measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
