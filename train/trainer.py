"""One step of training, and evaluation, as compiled programs of a model and a recipe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ragjax.kernels.rope import Rotation
from ragjax.models.decoder import rotation_table
from train.batch import Rows
from train.example import Example
from train.meter import Cost
from train.model import Model, Tree, gradient_program, loss_program
from train.recipe import Recipe


@dataclass
class State:
    """The state of training: trained weights (float32), the optimizer's state, and the number of steps taken."""

    trained: Tree
    moments: Any
    step: int = 0

    def arrays(self) -> dict[str, Any]:
        """Contents of a checkpoint."""
        return {"trained": self.trained, "moments": self.moments}


@dataclass(frozen=True)
class Report:
    """Figures of one step: tokens, padding (in tokens), wall-clock seconds."""

    loss: float
    accuracy: float
    norm: float
    tokens: int
    padding: int
    targets: int
    flops: float
    seconds: float


class Trainer:
    """Compiled programs of one model and recipe."""

    def __init__(self, model: Model, recipe: Recipe, rows: Rows, steps: int, frozen: Tree):
        """steps: of the whole run, which the learning rate follows. frozen: weights that stay, placed."""
        self._model, self._rows, self._frozen = model, rows, frozen
        self._optimizer = recipe.optimizer(steps)
        self._everywhere = NamedSharding(model.mesh, P())
        table = rotation_table(model.config, rows.lengths[-1])
        self._rotation: Rotation = jax.device_put(table, self._everywhere)
        self._gradient = gradient_program(model)
        self._losses = loss_program(model)
        self._apply = jax.jit(partial(_apply, self._optimizer), donate_argnums=(0, 1))
        self._cost = Cost.of(model.config, whole=model.whole, distil=model.distil)

    def start(self, trained: Tree) -> State:
        """Before the first step. The optimizer counts steps on every device of the mesh, as a checkpoint is read."""

        def placed(x: jax.Array) -> jax.Array:
            return jax.device_put(x, self._everywhere) if x.ndim == 0 else x

        return State(trained, jax.tree.map(placed, self._optimizer.init(trained)))

    def step(self, state: State, examples: Sequence[Example]) -> Report:
        """Take one step, in place, over all examples at once: their gradient is that of the mean over all targets."""
        begin = time.perf_counter()
        microbatches = self._rows.pack(examples, self._model.devices)
        sums: Any = (jax.tree.map(jnp.zeros_like, state.trained), jax.device_put(jnp.zeros(2), self._everywhere))
        for microbatch in microbatches:
            sums = self._gradient(state.trained, self._frozen, self._rotation, microbatch.batch, sums)
        targets = sum(m.targets for m in microbatches)
        tokens = sum(m.tokens for m in microbatches)
        gradient, counts = sums
        state.trained, state.moments, norm = self._apply(state.trained, state.moments, gradient, np.float32(targets))
        state.step += 1
        nll, hits = (float(x) for x in np.asarray(counts))
        return Report(
            loss=nll / targets,
            accuracy=hits / targets,
            norm=float(norm),
            tokens=tokens,
            padding=sum(m.size for m in microbatches) - tokens,
            targets=targets,
            flops=self._cost.flops(microbatches),
            seconds=time.perf_counter() - begin,
        )

    def evaluate(self, trained: Tree, examples: Sequence[Example]) -> dict[str, float]:
        """Over a file of examples: loss and accuracy by token, and by answer where answers are learned.

        dev_loss: mean negative log-probability of a token, or divergence from the teacher. dev_accuracy: share of
        tokens that are the likeliest. dev_logprob: mean log-probability of a whole answer. dev_exact: share of answers
        whose tokens all are the likeliest, so that greedy decoding would give them. Both only where each example
        has one answer.
        """
        nll, hits, count = (np.zeros(len(examples)) for _ in range(3))
        for microbatch in self._rows.pack(examples, self._model.devices):
            nll_N, hit_N = (
                np.asarray(x) for x in self._losses(trained, self._frozen, self._rotation, microbatch.batch)
            )
            live_N = microbatch.example_N >= 0
            for total, x_N in ((nll, nll_N), (hits, hit_N), (count, live_N)):
                np.add.at(total, microbatch.example_N[live_N], x_N[live_N])
        by_token = {"dev_loss": float(nll.sum() / count.sum()), "dev_accuracy": float(hits.sum() / count.sum())}
        if self._model.distil or any(example.answers > 1 for example in examples):
            return by_token
        return {**by_token, "dev_logprob": float(-nll.mean()), "dev_exact": float((hits == count).mean())}


def _apply(
    optimizer: optax.GradientTransformation, trained: Tree, moments: Any, gradient: Tree, targets: jax.Array
) -> tuple[Tree, Any, jax.Array]:
    """One step of the optimizer, and the norm of the mean gradient before it is clipped."""
    gradient = jax.tree.map(lambda g: g / targets, gradient)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the step's number
        updates, moments = optimizer.update(gradient, moments, trained)
        trained = cast(Tree, optax.apply_updates(trained, updates))
    return trained, moments, optax.tree.norm(gradient)
