"""The steps of a run, one after another, with its log, evaluations and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from ragjax.core import ConfigError
from train.batch import Order
from train.checkpoint import Checkpoints
from train.corpus import Corpus
from train.example import Example
from train.meter import Log
from train.recipe import Recipe
from train.trainer import Report, State, Trainer


@dataclass(frozen=True)
class Job:
    """A run: where it writes, how often, and what it is measured on."""

    out: Path
    dev: tuple[Example, ...]
    eval_every: int
    save_every: int
    stop_after: int | None
    peak: float | None
    progress: bool


def train(
    trainer: Trainer, state: State, corpus: Corpus, order: Order, recipe: Recipe, job: Job, saved: Checkpoints
) -> None:
    """Take all steps from where the state stands; the log, evaluations and checkpoints go along.

    Raises:
        ConfigError: if the run diverges; of the step that shows it nothing is saved.
    """
    schedule = recipe.schedule(order.steps)
    last = order.steps if job.stop_after is None else min(order.steps, job.stop_after)
    bar = tqdm(total=order.steps, initial=state.step, unit="step", disable=not job.progress)
    with Log(job.out / "log.jsonl", state.step) as lines, bar:
        if state.step == 0 and job.dev:
            lines.write(_evaluated(trainer, state, job.dev))
        while state.step < last:
            items, rate, epoch = order.at(state.step), float(schedule(state.step)), state.step // order.per_epoch
            report = trainer.step(state, corpus.take(items))
            _check_finite(state.step, {"loss": report.loss, "norm of the gradient": report.norm})
            speed = _speed(report, job.peak)
            plain = sum(item.plain for item in items) / len(items)
            lines.write({"step": state.step, "epoch": epoch, "lr": rate, "plain": plain, **asdict(report), **speed})
            bar.set_postfix(loss=f"{report.loss:.3f}", **{name: f"{x:.3g}" for name, x in speed.items()})
            bar.update()
            final = state.step == last
            if job.dev and (final or state.step % job.eval_every == 0):
                lines.write(_evaluated(trainer, state, job.dev))
            if final or state.step % job.save_every == 0:
                saved.save(state.step, state.arrays())


def _evaluated(trainer: Trainer, state: State, dev: Sequence[Example]) -> dict[str, float]:
    scores = trainer.evaluate(state.trained, dev)
    _check_finite(state.step, scores)
    return {"step": state.step, **scores}


def _check_finite(step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ConfigError(
                f"the {name} is {value} at step {step}: the run ends; start again with a lower --lr and another --out"
            )


def _speed(report: Report, peak: float | None) -> dict[str, float]:
    speed = {"tokens_per_s": report.tokens / report.seconds}
    return speed if peak is None else {**speed, "mfu": report.flops / report.seconds / peak}
