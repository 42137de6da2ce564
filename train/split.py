"""Puts samples aside so that nothing is learned of what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ragjax.retrieval.triples import RelationPath, Triple
from train.sample import Sample, normal


def split(samples: Sequence[Sample], aside: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Put about so many samples aside; no question and no answering path is on both sides.

    An answering path is the set of triples that a gold path walks, whichever way; where gold paths are not known, all
    paths count as such. All questions of a sample count. Samples that share one stay together, so a few less than
    `aside` may be put aside.

    Returns:
        what is left, and what was put aside, each in the order given.
    """
    group = list(range(len(samples)))

    def root(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    owner: dict[Any, int] = {}
    for i, sample in enumerate(samples):
        for key in _shared(sample):
            group[root(i)] = root(owner.setdefault(key, i))
    members: dict[int, list[int]] = {}
    for i in range(len(samples)):
        members.setdefault(root(i), []).append(i)
    groups = list(members.values())
    chosen: set[int] = set()
    for g in np.random.default_rng(seed).permutation(len(groups)):
        if len(chosen) + len(groups[g]) <= aside:
            chosen.update(groups[g])
    return [s for i, s in enumerate(samples) if i not in chosen], [s for i, s in enumerate(samples) if i in chosen]


def apart(samples: Sequence[Sample], others: Sequence[Sample]) -> list[Sample]:
    """The samples that share no question and no answering path, as `split` has them, with any of the others."""
    taken = {key for other in others for key in _shared(other)}
    return [sample for sample in samples if taken.isdisjoint(_shared(sample))]


def _shared(sample: Sample) -> list[str | frozenset[Triple]]:
    """Contents that samples of different sides must not share."""
    asked = [normal(asked.question) for asked in sample.asked]
    return [*asked, *(frozenset(RelationPath(steps).triples) for steps in sample.gold or sample.paths)]
