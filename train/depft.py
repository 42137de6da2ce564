"""`python -m train.depft`: dependency-aware fine-tuning of a decoder (DepCache, doi 10.1145/3769778, section 3.3).

A pretrained model has never seen keys that stand before a token and are hidden from it. It learns from questions over
relation paths, under the masks and positions that serving uses, to answer as it would from the same paths in one chain.
Loss is on the answer and the token that ends it. See docs/training.md.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ragjax.commands.flags import command_line, from_zero, integer, positive, share
from ragjax.core import ConfigError, RagjaxError
from ragjax.core.depprompt import Positions
from ragjax.models.adapter import INPUTS, Adapter
from ragjax.models.decoder import Decoder
from ragjax.models.hub import LocalModel, cache_dir, resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.weights import load_decoder, weights_digest
from ragjax.runner.device import use_compilation_cache
from train.batch import Order, Rows
from train.checkpoint import Checkpoints
from train.corpus import Corpus, encode
from train.example import Attention, Coder
from train.export import export, merge
from train.loop import Job, train
from train.lora import Lora
from train.meter import peak_flops
from train.model import Model, Remat, Tree, make_mesh, stacked
from train.recipe import PRESETS, Recipe
from train.sample import read_samples
from train.trainer import State, Trainer


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
