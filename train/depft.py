"""`python -m train.depft`: dependency-aware fine-tuning of a decoder (DepCache, doi 10.1145/3769778, section 3.3).

A pretrained model has never seen keys that stand before a token and are hidden from it. It learns from questions over
relation paths, under the masks and positions that serving uses, to answer as it would from the same paths in one chain.
Loss is on the answer and the token that ends it. See docs/training.md.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from ragjax.commands.flags import command_line, from_zero, integer, positive, share
from ragjax.core import ConfigError, RagjaxError, RequestError
from ragjax.core.depprompt import Positions
from ragjax.kernels.rope import Rotation
from ragjax.models.adapter import INPUTS, Adapter
from ragjax.models.decoder import Decoder
from ragjax.models.hub import LocalModel, cache_dir, resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.weights import load_decoder, weights_digest
from ragjax.runner.device import use_compilation_cache
from train.batch import Item, Order, Rows
from train.checkpoint import Checkpoints
from train.example import Attention, Coder, Example
from train.export import export, merge
from train.lora import Lora
from train.meter import Cost, Log, peak_flops
from train.model import Model, Remat, Tree, gradient_program, loss_program, make_mesh, rotation_of, stacked
from train.sample import Sample, read_samples

log = logging.getLogger(__name__)

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"lr": 2e-5, "batch": 64, "epochs": 1, "plain": 0.0, "lora": 0},
    "small": {"lr": 5e-4, "batch": 16, "epochs": 3, "plain": 0.1, "lora": 16},
}
"""`paper` is section 6.5's, for 7B and more; `small` is for models that a laptop trains. Flags go before presets."""


@dataclass(frozen=True)
class Recipe:
    """What decides the outcome of a run, besides model and data.

    lr: the highest, reached after `warmup` (share of all steps), from where it falls to 0 by a cosine. batch: samples a
    step. plain: share of plain causal samples. clip: largest norm of the gradient. row: tokens of the longest row of
    packed samples; what is longer is left out.
    """

    lr: float
    batch: int
    epochs: int
    attention: Attention = "dependency"
    positions: Positions = "path"
    plain: float = 0.1
    warmup: float = 0.03
    clip: float = 1.0
    weight_decay: float = 0.0
    row: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.plain < 1:
            raise ConfigError(f"the share of plain samples must be below 1, not {self.plain}")

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """AdamW behind a clip; weight decay is for the layers' matrices and their adapters."""

        def decayed(trained: Any) -> Any:
            return jax.tree_util.tree_map_with_path(lambda path, _: any(k.key in INPUTS for k in path), trained)

        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.schedule(steps), weight_decay=self.weight_decay, mask=decayed),
        )

    def schedule(self, steps: int) -> optax.Schedule:
        """Learning rate by step; the first is not zero, or it would be lost."""
        warm = min(steps - 1, round(self.warmup * steps))
        return optax.warmup_cosine_decay_schedule(self.lr / (warm + 1), self.lr, warm, steps)


# --------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Corpus:
    """Examples of a run: those of the data, and what plain ones are drawn from."""

    main: tuple[Example, ...]
    pool: tuple[Example, ...]

    def take(self, items: Sequence[Item]) -> list[Example]:
        """The examples that a step takes."""
        return [(self.pool if item.plain else self.main)[item.index] for item in items]

    @property
    def digest(self) -> str:
        """SHA-256 over all tokens and what is learned of them, hexadecimal."""
        whole = hashlib.sha256()
        for example in (*self.main, *self.pool):
            whole.update(len(example).to_bytes(4, "little") + example.token.tobytes() + example.target.tobytes())
        return whole.hexdigest()

    @staticmethod
    def of(coder: Coder, samples: Sequence[Sample], plain: Sequence[Sample], rows: Rows, progress: bool) -> Corpus:
        """Encode samples; `plain` ones as causal chains.

        Raises:
            ConfigError: if none fits.
        """
        main = encode(coder, samples, rows, progress)
        pool = encode(coder, plain, rows, progress, plain=True)
        if not main or (plain and not pool):
            raise ConfigError(f"no sample fits into a row of {rows.lengths[-1]} tokens: raise --row-tokens")
        return Corpus(tuple(main), tuple(pool))


def encode(
    coder: Coder, samples: Sequence[Sample], rows: Rows, progress: bool, *, plain: bool = False
) -> list[Example]:
    """Samples as examples; those that are too long or that the chat template refuses are left out, and counted."""
    found = []
    reasons: dict[str, int] = {}
    for sample in tqdm(samples, desc="encoding", unit="sample", disable=not progress, leave=False):
        try:
            example = coder.example(sample, plain=plain)
        except RequestError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + 1
            continue
        if rows.fits(example):
            found.append(example)
        else:
            reasons["too long"] = reasons.get("too long", 0) + 1
    for reason, count in reasons.items():
        log.warning("%d of %d samples are left out: %s", count, len(samples), reason)
    return found


# ------------------------------------------------------------------------------------------ training


@dataclass
class State:
    """What training changes: trained weights (float32), the optimizer's state, and how many steps were taken."""

    trained: Tree
    moments: Any
    step: int = 0

    def arrays(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"trained": self.trained, "moments": self.moments}


@dataclass(frozen=True)
class Report:
    """What one step did. tokens and padding in tokens, seconds on the clock."""

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
        self._rotation: Rotation = jax.device_put(
            rotation_of(model.config, rows.lengths[-1]), NamedSharding(model.mesh, P())
        )
        self._gradient = gradient_program(model)
        self._losses = loss_program(model)
        self._apply = jax.jit(partial(_apply, self._optimizer), donate_argnums=(0, 1))
        self._cost = Cost.of(model.config, model.lora)

    def start(self, trained: Tree) -> State:
        """Before the first step."""
        return State(trained, self._optimizer.init(trained))

    def step(self, state: State, examples: Sequence[Example]) -> Report:
        """Take one step, in place, over all examples at once: their gradient is that of the mean over all targets."""
        begin = time.perf_counter()
        microbatches = self._rows.pack(examples, self._model.devices)
        sums: Any = (jax.tree.map(jnp.zeros_like, state.trained), self._zeros())
        for microbatch in microbatches:
            sums = self._gradient(state.trained, self._frozen, self._rotation, microbatch.batch, sums)
        targets = sum(m.targets for m in microbatches)
        tokens = sum(m.tokens for m in microbatches)
        gradient, counts = sums
        state.trained, state.moments, norm = self._apply(state.trained, state.moments, gradient, np.float32(targets))
        state.step += 1
        nll, hits = (float(x) for x in np.asarray(counts))
        return Report(
            nll / targets,
            hits / targets,
            float(norm),
            tokens,
            sum(m.size for m in microbatches) - tokens,
            targets,
            self._cost.flops(microbatches),
            time.perf_counter() - begin,
        )

    def _zeros(self) -> jax.Array:
        zeros: jax.Array = jax.device_put(jnp.zeros(2), NamedSharding(self._model.mesh, P()))
        return zeros

    def evaluate(self, trained: Tree, examples: Sequence[Example]) -> dict[str, float]:
        """Over a file of examples: loss and accuracy by token, and by answer.

        dev_loss: mean negative log-probability of a token. dev_accuracy: share of tokens that are the likeliest.
        dev_logprob: mean log-probability of a whole answer. dev_exact: share of answers whose tokens all are the
        likeliest, so that greedy decoding would give them.
        """
        nll, hits, count = (np.zeros(len(examples)) for _ in range(3))
        for microbatch in self._rows.pack(examples, self._model.devices):
            nll_N, hit_N = (
                np.asarray(x) for x in self._losses(trained, self._frozen, self._rotation, microbatch.batch)
            )
            live_N = microbatch.example_N >= 0
            for total, x_N in ((nll, nll_N), (hits, hit_N), (count, live_N)):
                np.add.at(total, microbatch.example_N[live_N], x_N[live_N])
        return {
            "dev_loss": float(nll.sum() / count.sum()),
            "dev_accuracy": float(hits.sum() / count.sum()),
            "dev_logprob": float(-nll.mean()),
            "dev_exact": float((hits == count).mean()),
        }


def _apply(
    optimizer: optax.GradientTransformation, trained: Tree, moments: Any, gradient: Tree, targets: jax.Array
) -> tuple[Tree, Any, jax.Array]:
    """One step of the optimizer, and the norm of the mean gradient before it is clipped."""
    gradient = jax.tree.map(lambda g: g / targets, gradient)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the step's number
        updates, moments = optimizer.update(gradient, moments, trained)
        trained = cast(Tree, optax.apply_updates(trained, updates))
    return trained, moments, optax.tree.norm(gradient)


# ----------------------------------------------------------------------------------------------- run


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


@dataclass(frozen=True)
class Source:
    """The model that is trained, what leads to it, its tokenizer, and the digest of its weights."""

    local: LocalModel
    name: str
    tokenizer: Tokenizer
    digest: str

    @staticmethod
    def find(name: str) -> Source:
        """Find a model.

        Raises:
            ConfigError: if there is none of this name.
        """
        local = resolve(name)
        if local.adapter is not None:
            raise ConfigError(f"{name} has an adapter already: merge it by python -m train.export first")
        where = str(local.path) if Path(name).expanduser().exists() else name
        return Source(local, where, Tokenizer.load(local.path), weights_digest(local.path, cache_dir()).hex())

    def decoder(self, dtype: str) -> Decoder:
        """Its weights."""
        decoder = load_decoder(self.local.path, dtype, cache_dir())
        self.tokenizer.check(decoder.config)
        return decoder


def run(options: argparse.Namespace) -> dict[str, Any]:
    """A whole run: read, train, export. Returns a summary.

    Raises:
        RagjaxError: for what cannot work.
    """
    _check_given(options)
    recipe, lora = _recipe(options), _lora(options)
    rows, out = Rows.up_to(recipe.row), Path(options.out)
    if not options.resume:
        _check_untrained(out)
    use_compilation_cache(cache_dir())
    source = Source.find(options.model)
    coder = Coder.of(source.tokenizer, recipe.attention, recipe.positions)
    samples = read_samples(options.data, options.max_bad)
    plain = read_samples(options.plain_data, options.max_bad) if options.plain_data else samples
    corpus = Corpus.of(coder, samples, plain if recipe.plain else [], rows, options.progress)
    dev = encode(coder, read_samples(options.dev, options.max_bad), rows, options.progress) if options.dev else []
    if options.dev and not dev:
        raise ConfigError(f"--dev: no sample fits into a row of {recipe.row} tokens: raise --row-tokens")
    order = Order(len(corpus.main), recipe.batch, recipe.epochs, recipe.plain, len(corpus.pool), recipe.seed)
    _make_folder(out)

    dtype = jnp.dtype(options.dtype)
    decoder = source.decoder("float32" if lora is None else options.dtype)
    model = Model(decoder.config, _mesh(options.fsdp), dtype, lora, options.remat)
    if recipe.row > decoder.config.context_length:
        raise ConfigError(
            f"--row-tokens {recipe.row} is more than the model's context of {decoder.config.context_length}"
        )
    weights = stacked(decoder)
    del decoder
    trained, frozen = (weights, {}) if lora is None else (lora.init(weights["layers"], recipe.seed), weights)
    trained_specs, frozen_specs = model.specs()
    trainer = Trainer(model, recipe, rows, order.steps, model.place(frozen, frozen_specs))
    state = trainer.start(model.place(trained, trained_specs))
    del weights, trained

    settings = {
        "recipe": asdict(recipe), "lora": None if lora is None else asdict(lora), "weights": source.digest,
        "data": corpus.digest, "dtype": options.dtype, "steps": order.steps,
    }  # fmt: skip
    with Checkpoints(out / "checkpoints", settings, resume=options.resume, keep=options.keep) as saved:
        if options.resume and saved.latest is not None:
            arrays = saved.restore(saved.latest, state.arrays())
            state = State(arrays["trained"], arrays["moments"], saved.latest)
        every, peak = (options.eval_every, options.save_every), peak_flops(dtype)
        job = Job(out, tuple(dev), *every, options.stop_after, peak, options.progress)
        train(trainer, state, corpus, order, recipe, job, saved)
    if state.step == order.steps and not (out / "model").exists():
        _export(model, state.trained, source, out)
    return {"steps": state.step, "of": order.steps, "out": str(out)}


def _check_given(options: argparse.Namespace) -> None:
    """Raise ConfigError for a flag that another one makes meaningless."""
    without_lora = _lora_rank(options) == 0
    rank = f"--lora 0 of --preset {options.preset}" if options.lora is None else "--lora 0"
    plain = f"--plain 0 of --preset {options.preset}" if options.plain is None else "--plain 0"
    clashes = (
        (options.lora_alpha is not None and without_lora, "--lora-alpha", rank),
        (options.lora_matrices is not None and without_lora, "--lora-matrices", rank),
        (options.positions is not None and options.attention == "self", "--positions", "--attention self"),
        (options.plain_data is not None and _recipe(options).plain == 0, "--plain-data", plain),
    )
    for clash, flag, other in clashes:
        if clash:
            raise ConfigError(f"{flag} has no effect with {other}: change one of the two")


def _check_untrained(out: Path) -> None:
    for made in (out / "model", out / "adapter.safetensors"):
        if made.exists():
            raise ConfigError(f"{made} is there already: {out} has a trained model; give another --out")


def _make_folder(out: Path) -> None:
    """Now, and not when hours of training are to be saved."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made: {error.strerror}") from error


def _export(model: Model, trained: Tree, source: Source, out: Path) -> None:
    """The trained model, and its adapter if that is what was trained."""
    whole = jax.tree.map(np.asarray, trained)
    if model.lora is not None:
        file = out / "adapter.safetensors"
        model.lora.save(whole, file, {"weights": source.digest, "model": source.name})
        whole = merge(stacked(source.decoder("float32")), Adapter.load(file))
    part = out / "model.part"
    shutil.rmtree(part, ignore_errors=True)  # left behind by a run that was killed
    export(whole, model.config, source.local, part)
    part.rename(out / "model")


def _mesh(fsdp: int | None) -> Any:
    try:
        return make_mesh(fsdp)
    except ValueError as error:
        raise ConfigError(f"--fsdp: {error}") from error


# ------------------------------------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; an error of ours is one line, and exit status 1."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        summary = run(_options(argv))
    except RagjaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{summary['steps']} of {summary['of']} steps; see {summary['out']}")
    return 0


def _recipe(options: argparse.Namespace) -> Recipe:
    preset = PRESETS[options.preset]
    chosen = {name: preset[name] if getattr(options, name) is None else getattr(options, name) for name in preset}
    return Recipe(
        chosen["lr"], chosen["batch"], chosen["epochs"], options.attention, options.positions or "path",
        chosen["plain"], options.warmup, options.clip, options.weight_decay, options.row_tokens, options.seed,
    )  # fmt: skip


def _lora_rank(options: argparse.Namespace) -> int:
    rank: int = PRESETS[options.preset]["lora"] if options.lora is None else options.lora
    return rank


def _lora(options: argparse.Namespace) -> Lora | None:
    rank = _lora_rank(options)
    if rank == 0:
        return None
    alpha = 2.0 * rank if options.lora_alpha is None else options.lora_alpha
    return Lora(rank, alpha, tuple(INPUTS if options.lora_matrices is None else options.lora_matrices.split(",")))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("train.depft", "Dependency-aware fine-tuning (DepCache, section 3.3).")
    flag = parser.add_argument
    flag("--model", required=True, help="as the server's: a packaged model, a directory, a .gguf, a repository id")
    flag(
        "--data", required=True, nargs="+", metavar="FILE", help="samples, JSON lines (python -m train.data makes some)"
    )
    flag("--out", required=True, metavar="DIR", help="checkpoints, log.jsonl, the trained model")
    flag("--dev", nargs="+", metavar="FILE", help="samples to measure on")
    flag("--preset", choices=tuple(PRESETS), default="paper", help="paper (default): 7B and more; small: LoRA")
    flag("--attention", choices=get_args(Attention), default="dependency", help="self: paths in one chain, the control")
    flag("--positions", choices=get_args(Positions), help="of trees (default: path)")
    flag("--plain", type=share, metavar="SHARE", help="of plain causal samples (paper: 0, small: 0.1)")
    flag("--plain-data", nargs="+", metavar="FILE", help="plain samples or chats; without: the data, as causal chains")
    flag("--lr", type=positive, help="highest learning rate (paper: 2e-5, small: 5e-4)")
    flag("--batch", type=integer(1), help="samples of a step (paper: 64, small: 16)")
    flag("--epochs", type=integer(1, 1000), help="(paper: 1, small: 3)")
    flag("--warmup", type=share, default=0.03, metavar="SHARE", help="of steps (default: 0.03)")
    flag("--clip", type=positive, default=1.0, help="largest norm of a gradient (default: 1)")
    flag("--weight-decay", type=from_zero, default=0.0, help="AdamW's (default: 0)")
    flag("--lora", type=integer(0, 1024), metavar="RANK", help="0 trains all weights (paper: 0, small: 16)")
    flag("--lora-alpha", type=positive, help="default: twice the rank")
    flag("--lora-matrices", help=f"default: {','.join(INPUTS)}")
    flag("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products (default: bfloat16)")
    flag("--remat", choices=get_args(Remat), default="layers", help="what backward recomputes (default: layers)")
    flag("--row-tokens", type=integer(1), default=1024, help="of packed samples on each device (default: 1024)")
    flag("--fsdp", type=integer(1), metavar="N", help="devices that weights are split over (default: all)")
    flag("--seed", type=integer(0), default=0)
    flag("--max-bad", type=integer(0), default=0, help="lines of each kind of file that may be wrong (default: 0)")
    flag("--eval-every", type=integer(1), default=100, metavar="STEPS")
    flag("--save-every", type=integer(1), default=100, metavar="STEPS")
    flag("--keep", type=integer(1), default=2, help="checkpoints (default: 2)")
    flag("--stop-after", type=integer(1), metavar="STEP", help="end early, at this step; --resume goes on")
    flag("--resume", action="store_true", help="go on from the last checkpoint in --out")
    flag("--no-progress", dest="progress", action="store_false", help="no bars")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
