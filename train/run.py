"""A whole run, whatever it trains: read, train, write. `train.depft` and `train.packet` are its commands."""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from ragjax.commands.flags import exit_code, integer, positive, share
from ragjax.core import ConfigError
from ragjax.models.decoder import Decoder
from ragjax.models.hub import LocalModel, cache_dir, resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.trained import BLOCK, Adapter
from ragjax.models.weights import load_decoder, open_checkpoint, weights_digest
from train.batch import Order, Rows
from train.checkpoint import Checkpoints
from train.corpus import Corpus, check_taught, encode
from train.example import Coder
from train.export import check_family, export, merge
from train.loop import Job, train
from train.lora import Lora
from train.mesh import make_mesh
from train.meter import peak_flops
from train.model import Model, Remat, Tree, stacked
from train.recipe import Recipe
from train.sample import read_samples
from train.soft import Soft
from train.trainer import State, Trainer

Part = Lora | Soft | None
"""What is trained: adapters, embeddings of soft tokens, or all weights."""


@dataclass(frozen=True)
class Source:
    """The model that is trained, what leads to it, its tokenizer, and the digest of its weights."""

    local: LocalModel
    name: str
    tokenizer: Tokenizer
    digest: str

    @staticmethod
    def find(name: str) -> Source:
        local = resolve(name)
        if local.adapter is not None:
            raise ConfigError(f"{name} has an adapter already: merge it by python -m train.export first")
        where = str(local.path) if Path(name).expanduser().exists() else name
        return Source(local, where, Tokenizer.load(local.path), weights_digest(local.path, cache_dir()).hex())

    def decoder(self, dtype: str) -> Decoder:
        decoder = load_decoder(self.local.path, dtype, cache_dir())
        self.tokenizer.check(decoder.config)
        return decoder


Asked = tuple[argparse.Namespace, Recipe, Part]
"""What a command is asked for; its flags are those of `add_flags`, and `plain_data`."""


def command(prog: str, asked: Callable[[], Asked]) -> int:
    """Exit code of a command that trains: 0, 1 after an error of ours, which is one line, 130 if stopped."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return exit_code(prog, lambda: run(*asked()), 1, "stopped; --resume goes on from the last checkpoint")


def run(options: argparse.Namespace, recipe: Recipe, part: Part) -> int:
    """Read samples, train, and write what was trained."""
    rows, out = Rows.up_to(recipe.row), Path(options.out)
    if not options.resume:
        _check_untrained(out)
    _keep_programs()
    source = Source.find(options.model)
    config = open_checkpoint(source.local.path).config
    check_family(config)
    mesh = make_mesh(options.mesh, config)
    wrapper = part.wrapper(config.vocab_size) if isinstance(part, Soft) else None
    coder = Coder(source.tokenizer, recipe.attention, recipe.positions, wrapper)
    samples = read_samples(options.data, options.max_bad)
    plain = read_samples(options.plain_data, options.max_bad) if options.plain_data else samples
    corpus = Corpus.of(coder, samples, plain if recipe.plain else [], rows, options.progress)
    dev = encode(coder, read_samples(options.dev, options.max_bad), rows, options.progress) if options.dev else []
    if options.dev and not dev:
        raise ConfigError(f"--dev: no sample fits into a row of {recipe.row} tokens: raise --row-tokens")
    if recipe.target == "teacher":
        check_taught([*corpus.main, *corpus.pool, *dev])
    order = Order(len(corpus.main), recipe.batch, recipe.epochs, recipe.plain, len(corpus.pool), recipe.seed)
    _make_folder(out)

    dtype = jnp.dtype(options.dtype)
    decoder = source.decoder("float32" if part is None else options.dtype)
    lora, soft = part if isinstance(part, Lora) else None, part if isinstance(part, Soft) else None
    distil = recipe.target == "teacher"
    model = Model(decoder.config, mesh, dtype, lora, options.remat, distil, soft)
    if recipe.row > decoder.config.context_length:
        raise ConfigError(
            f"--row-tokens {recipe.row} is more than the model's context of {decoder.config.context_length}"
        )
    weights = stacked(decoder)
    del decoder
    trained, frozen = _parted(weights, part, recipe.seed)
    trained_specs, frozen_specs = model.specs()
    trainer = Trainer(model, recipe, rows, order.steps, model.place(frozen, frozen_specs))
    state = trainer.start(model.place(trained, trained_specs))
    del weights, trained

    settings = {
        "recipe": asdict(recipe), "trained": None if part is None else {type(part).__name__.lower(): asdict(part)},
        "weights": source.digest, "data": corpus.digest, "dtype": options.dtype, "steps": order.steps,
    }  # fmt: skip
    with Checkpoints(out / "checkpoints", settings, resume=options.resume, keep=options.keep) as saved:
        if options.resume and saved.latest is not None:
            arrays = saved.restore(saved.latest, state.arrays())
            state = State(arrays["trained"], arrays["moments"], saved.latest)
        every, peak = (options.eval_every, options.save_every), peak_flops(dtype)
        job = Job(out, tuple(dev), *every, options.stop_after, peak, options.progress)
        train(trainer, state, corpus, order, recipe, job, saved)
    if state.step == order.steps and not any((out / made).exists() for made in ("model", "packet.safetensors")):
        _write(model, state.trained, source, out)
    print(f"{state.step} of {order.steps} steps; see {out}")
    return 0


def _parted(weights: Tree, part: Part, seed: int) -> tuple[Tree, Tree]:
    """Initial trained weights, and frozen ones."""
    if part is None:
        return weights, {}
    if isinstance(part, Soft):
        return part.init(weights["embedding"], seed), weights
    return part.init(weights["layers"], seed), weights


def _check_untrained(out: Path) -> None:
    for made in (out / "model", out / "adapter.safetensors", out / "packet.safetensors"):
        if made.exists():
            raise ConfigError(f"{made} is there already: {out} has a trained model; give another --out")


def _keep_programs() -> None:
    """Keep compiled programs on disk, so that a run which goes on does not compile them again."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _make_folder(out: Path) -> None:
    """Now, and not when hours of training are to be saved."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made: {error.strerror}") from error


def _write(model: Model, trained: Tree, source: Source, out: Path) -> None:
    """The packet; or the trained model, and its adapter if that is what was trained."""
    whole = jax.tree.map(np.asarray, trained)
    about = {"weights": source.digest, "model": source.name}
    if model.soft is not None:
        model.soft.save(whole, out / "packet.safetensors", about)
        return
    if model.lora is not None:
        file = out / "adapter.safetensors"
        model.lora.save(whole, file, {**about, **({"attention": BLOCK} if model.distil else {})})
        whole = merge(stacked(source.decoder("float32")), Adapter.load(file))
    part = out / "model.part"
    shutil.rmtree(part, ignore_errors=True)  # left behind by a run that was killed
    export(whole, model.config, source.local, part)
    part.rename(out / "model")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that every run has."""
    flag = parser.add_argument
    flag("--model", required=True, help="as the server's: a packaged model, a directory, a .gguf, a repository id")
    flag(
        "--data", required=True, nargs="+", metavar="FILE", help="samples, JSON lines (python -m train.data makes some)"
    )
    flag("--out", required=True, metavar="DIR", help="checkpoints, log.jsonl, what was trained")
    flag("--dev", nargs="+", metavar="FILE", help="samples to measure on")
    flag("--warmup", type=share, default=0.03, metavar="SHARE", help="of steps (default: 0.03)")
    flag("--clip", type=positive, default=1.0, help="largest norm of a gradient (default: 1)")
    flag("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products (default: bfloat16)")
    flag("--remat", choices=get_args(Remat), default="layers", help="what backward recomputes (default: layers)")
    flag("--row-tokens", type=integer(1), default=1024, help="of packed samples on each device (default: 1024)")
    flag("--mesh", metavar="AXIS=N,...", help="devices along data, fsdp and model (default: all along fsdp)")
    flag("--seed", type=integer(0), default=0)
    flag("--max-bad", type=integer(0), default=0, help="lines of each kind of file that may be wrong (default: 0)")
    flag("--eval-every", type=integer(1), default=100, metavar="STEPS")
    flag("--save-every", type=integer(1), default=100, metavar="STEPS")
    flag("--keep", type=integer(1), default=2, help="checkpoints (default: 2)")
    flag("--stop-after", type=integer(1), metavar="STEP", help="end early, at this step; --resume goes on")
    flag("--resume", action="store_true", help="go on from the last checkpoint in --out")
    flag("--no-progress", dest="progress", action="store_false", help="no bars")
