"""What a figure is, and what it is measured with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.plot import Panel
from benchmarks.common.report import Row
from benchmarks.common.samples import Progress, Samples
from benchmarks.quality import dataset
from benchmarks.quality.dataset import QuestionSet
from benchmarks.quality.evaluation import Evaluation, Style
from benchmarks.quality.run import opened
from benchmarks.quality.score import Bootstrap
from benchmarks.quality.similarity import packaged_encoder
from ragjax.core import ConfigError
from ragjax.engine import Engine
from ragjax.engine.preprocessing import fuse_all
from ragjax.retrieval.knowledge import TextEncoder
from ragjax.reuse import strategies as all_strategies
from ragjax.reuse.base import Strategy


@dataclass(frozen=True)
class Setup:
    """What one run of a figure is measured with.

    data: the data folder; None for a figure that reads none. limit: questions (or what the figure counts) a set.
    samples: where samples of a stopped run wait.
    """

    data: Path | None
    model: str
    dtype: str
    limit: int
    samples: Samples
    quick: bool = False
    encoder: Callable[[], TextEncoder] = packaged_encoder

    @property
    def folder(self) -> Path:
        """The data folder.

        Raises:
            ConfigError: if the command line named none.
        """
        if self.data is None:
            raise ConfigError("this figure reads questions: give --data DIR")
        return self.data

    def questions(self, name: str) -> QuestionSet:
        """A set of the data folder.

        Raises:
            ConfigError: if there is no such set.
        """
        return dataset.load(self.folder, name)

    @contextmanager
    def engine(self, strategies: Mapping[str, Strategy] | None = None, **limits: Any) -> Iterator[Engine]:
        """An engine with all strategies, or those given; `limits` are those of `benchmarks.quality.run.opened`.

        It compiles programs when they are first used, and runs none ahead.
        """
        with opened(self.model, self.dtype, strategies or all_strategies(), ahead=False, **limits) as engine:
            yield engine

    def evaluation(
        self,
        engine: Engine,
        questions: QuestionSet,
        style: Style | None = None,
        *,
        whole_corpus: bool = True,
        chunk_tokens: int = 192,
    ) -> Evaluation:
        """A set's questions on an engine; neighbours come from the whole corpus unless the run is quick."""
        return Evaluation(
            engine,
            questions,
            self.limit,
            self.encoder(),
            style or Style(),
            all_strategies(),
            partial(fuse_all, progress=False),
            whole_corpus=whole_corpus and not self.quick,
            chunk_tokens=chunk_tokens,
        )

    def each(self, names: Sequence[str], what: str) -> Iterator[str]:
        """The names one after the other, with progress on standard error."""
        progress = Progress(len(names))
        for name in names:
            yield name
            progress.step(f"{what} {name}")


@dataclass(frozen=True)
class Figure:
    """One figure of a paper.

    paper: which. shows: what is drawn here. differs: what is not as in the paper. measure: the rows. panels: the
    picture of them. columns: of the printed table. limit, quick: questions a set. timed: whether other programs on
    the machine disturb it. reads_data: whether it needs a data folder.
    """

    paper: str
    shows: str
    differs: str
    measure: Callable[[Setup], Sequence[Row]]
    panels: Callable[[Sequence[Row]], Sequence[Panel]]
    columns: tuple[str, ...]
    limit: int
    quick: int = 2
    timed: bool = False
    reads_data: bool = True


def mean(values: Sequence[float], name: str) -> dict[str, float | None]:
    """A mean over questions with its 95% bootstrap interval, as columns of a row."""
    return Bootstrap([""] * len(values)).mean(values).columns(name)


def means(values: Sequence[Sequence[float]]) -> list[float]:
    """Place by place, the mean over lists of equal length, of which None and NaN are left out."""
    return [float(x) for x in np.nanmean(np.asarray(values, np.float64), axis=0)]
