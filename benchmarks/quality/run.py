"""The samples of a set's questions, and the engine that they are measured on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from benchmarks.common.samples import Progress, Samples
from benchmarks.quality.evaluation import Evaluation, Setting
from benchmarks.quality.judge import Judge
from benchmarks.quality.rows import Question
from ragjax.core import StorageOptions
from ragjax.engine import Engine
from ragjax.reuse.base import Strategy

VARIANTS = 100_000
"""No limit: every chunk of the evaluated questions is to have one."""


def measure(
    work: Evaluation,
    main: Sequence[Setting],
    sweep: Sequence[Setting],
    samples: Samples,
    progress: Progress,
    *,
    swept: int = 0,
    deviations: int = 0,
    judged_by: Judge | None = None,
) -> list[Question]:
    """Samples of every question of a set: `main` on all, `sweep` on the first `swept`."""
    plans = [[*main, *(sweep if i < swept else ())] for i in range(len(work.questions))]
    keys = {(q.id, s): f"{work.name}/{q.id}/{s.key}" for q, p in zip(work.questions, plans, strict=True) for s in p}
    waiting = [
        [s for s in plan if samples.get(keys[q.id, s]) is None] for q, plan in zip(work.questions, plans, strict=True)
    ]
    if any(waiting):
        everything = [*main, *(sweep if swept else ())]
        with tqdm(desc=f"{work.name}: past requests", unit="request") as bar:
            for bar.n, bar.total in work.teach([s.strategy for s in everything]):
                bar.refresh()
        work.warm_up(everything)
    for i, (question, settings) in enumerate(zip(work.questions, waiting, strict=True)):
        if not settings:
            progress.skip()
            continue
        for setting, sample in work.measure(question, settings, deviations=i < deviations):
            if setting in settings:
                if judged_by is not None:
                    sample["faithful"] = judged_by.faithful(question, sample["text"])
                samples.put(keys[question.id, setting], sample)
        progress.step(f"{work.name}: {question.id}")
    return [
        {s.key: found for s in plan if (found := samples.get(keys[q.id, s])) is not None}
        for q, plan in zip(work.questions, plans, strict=True)
    ]


@contextmanager
def opened(
    model: str,
    dtype: str,
    strategies: Mapping[str, Strategy] | None = None,
    *,
    device_gb: float = 2.0,
    disk_gb: float = 24.0,
    variants: int = VARIANTS,
    ahead: bool = True,
) -> Iterator[Engine]:
    """An engine whose disk tier is gone afterwards.

    strategies: None: those of the model. device_gb, disk_gb: KV on the device and on disk, 2^30 bytes. variants: most
    variants that `craft` keeps. ahead: compile all programs now; False: when they are first used, for short runs in
    which nothing is timed.
    """
    # fusion's programs are most of what others need
    first = "fusion" if strategies is None or "fusion" in strategies else next(iter(strategies))
    with tempfile.TemporaryDirectory(prefix="ragjax-quality-") as folder:
        storage = StorageOptions(disk=folder, disk_gb=disk_gb, variants=variants)
        with Engine.load(
            model,
            strategy=first,
            dtype=dtype,
            device_cache_gb=device_gb,
            storage=storage,
            compile=ahead,
            strategies=None if strategies is None else dict(strategies),
        ) as engine:
            yield engine
