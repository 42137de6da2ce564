"""FusionRAG's simulation of storage (section 5.3.3): one copy of a chunk, or one for every prefix it stands behind.

1,000 queries; 60% of the retrieved chunks lie in the knowledge base, 30% are shared among users but newly uploaded, 10%
are unique. The knowledge base's chunks were computed ahead, behind the system prompt. The standard prefix cache finds a
chunk behind exactly the chunks before it; the alternative path finds it behind any, so that one copy will do.

The paper leaves open how many chunks a query has, how large both pools are and how popular their chunks. Here: 5 chunks
a query, in random order; uniform popularity; 640 and 215 chunks of one size, for which the paper's 4,036 computations
and its 71.0% and 82.3% can be true together (600 queries hit with their first chunk, and so on).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PAPER = {"storage_saved": 0.710, "baseline_computed": 4036, "computations_avoided": 0.823, "hit_rate": 0.779}

Chunk = tuple[str, int]


@dataclass(frozen=True)
class Setting:
    """What the simulation assumes; the shares are those of the chunk's places in the prompts."""

    queries: int = 1000
    chunks: int = 5
    known: float = 0.6
    shared: float = 0.3
    known_pool: int = 640
    shared_pool: int = 215


def queries(setting: Setting, seed: int) -> Iterator[list[Chunk]]:
    random = np.random.default_rng(seed)
    unique = 0
    for _ in range(setting.queries):
        drawn: dict[Chunk, None] = {}
        while len(drawn) < setting.chunks:
            side = random.random()
            if side < setting.known:
                drawn.setdefault(("known", int(random.integers(setting.known_pool))))
            elif side < setting.known + setting.shared:
                drawn.setdefault(("shared", int(random.integers(setting.shared_pool))))
            else:
                unique += 1
                drawn.setdefault(("unique", unique))
        yield list(drawn)


def compare(prompts: Sequence[Sequence[Chunk]], known: Sequence[Chunk]) -> dict[str, Any]:
    """Both caches on the same prompts, both of them unbounded, with the KV of `known` there from the start.

    Returns chunks stored and computed by each, the hit rate of the alternative path, and what it saves.
    """
    behind: set[tuple[Chunk, ...]] = {(chunk,) for chunk in known}
    anywhere = set(known)
    computed, alone, places = 0, 0, 0
    for prompt in prompts:
        for end in range(1, len(prompt) + 1):
            computed += tuple(prompt[:end]) not in behind
            behind.add(tuple(prompt[:end]))
        alone += len(set(prompt) - anywhere)
        anywhere.update(prompt)
        places += len(prompt)
    return {
        "stored": len(anywhere), "baseline_stored": len(behind), "storage_saved": 1 - len(anywhere) / len(behind),
        "computed": alone, "baseline_computed": computed, "computations_avoided": 1 - alone / computed,
        "hit_rate": 1 - alone / places, "baseline_hit_rate": 1 - computed / places,
    }  # fmt: skip


def rows(setting: Setting, seeds: Sequence[int] = range(5)) -> list[dict[str, Any]]:
    """The paper's figures, and the means over `seeds` here."""
    known = [("known", number) for number in range(setting.known_pool)]
    runs = [compare(list(queries(setting, seed)), known) for seed in seeds]
    mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
    return [{"workload": "storage", "source": "here", **mean}, {"workload": "storage", "source": "paper", **PAPER}]
