"""`python -m train.depft`: dependency-aware fine-tuning of a decoder (DepCache, doi 10.1145/3769778, section 3.3).

A pretrained model has never seen keys that stand before a token and are hidden from it. It learns from questions over
relation paths, under the masks and positions that serving uses, to answer as it would from the same paths in one chain.
Loss is on the answer and the token that ends it. Over passages, each by itself, it learns what it says of the answer
when every passage sees those before it (`--target teacher`). See docs/training.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from ragjax.commands.flags import Parser, from_zero, integer, positive, share
from ragjax.core import ConfigError
from ragjax.core.depprompt import Positions
from ragjax.models.decoder import INPUTS
from train.example import Attention
from train.lora import Lora
from train.recipe import PRESETS, Recipe, Target
from train.run import Asked, add_flags, command


def main(argv: Sequence[str] | None = None) -> int:
    return command("python -m train.depft", lambda: asked(argv))


def asked(argv: Sequence[str] | None) -> Asked:
    options = _options(argv)
    preset = PRESETS[options.preset]
    chosen = {name: preset[name] if getattr(options, name) is None else getattr(options, name) for name in preset}
    rank = chosen.pop("lora")
    _check_given(options, rank, chosen["plain"])
    recipe = Recipe(
        **chosen,
        attention=options.attention,
        positions=options.positions or "path",
        target=options.target,
        warmup=options.warmup,
        clip=options.clip,
        weight_decay=options.weight_decay,
        row=options.row_tokens,
        seed=options.seed,
    )
    if rank == 0:
        return options, recipe, None
    alpha = 2.0 * rank if options.lora_alpha is None else options.lora_alpha
    matrices = tuple(INPUTS if options.lora_matrices is None else options.lora_matrices.split(","))
    return options, recipe, Lora(rank, alpha, matrices)


def _check_given(options: argparse.Namespace, rank: int, plain: float) -> None:
    """Raise ConfigError for a flag that another one makes meaningless. plain: the share of plain samples."""
    without_lora = f"--lora 0 of --preset {options.preset}" if options.lora is None else "--lora 0"
    without_plain = f"--plain 0 of --preset {options.preset}" if options.plain is None else "--plain 0"
    teacher = "--target teacher, which is the model without adapters,"
    clashes = (
        (options.lora_alpha is not None and rank == 0, "--lora-alpha", without_lora),
        (options.lora_matrices is not None and rank == 0, "--lora-matrices", without_lora),
        (options.positions is not None and options.attention == "self", "--positions", "--attention self"),
        (options.target == "teacher" and rank == 0, teacher, without_lora),
        (options.plain_data is not None and plain == 0, "--plain-data", without_plain),
    )
    for clash, flag, other in clashes:
        if clash:
            raise ConfigError(f"{flag} has no effect with {other}: change one of the two")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m train.depft", "Dependency-aware fine-tuning (DepCache, section 3.3).")
    add_flags(parser)
    flag = parser.add_argument
    flag("--preset", choices=tuple(PRESETS), default="paper", help="paper (default): 7B and more; small: LoRA")
    flag("--attention", choices=get_args(Attention), default="dependency", help="self: paths in one chain, the control")
    flag("--positions", choices=get_args(Positions), help="of trees (default: path)")
    flag("--target", choices=get_args(Target), default="answer", help="teacher: what full attention says of the answer")
    flag("--plain", type=share, metavar="SHARE", help="of plain causal samples (paper: 0, small: 0.1)")
    flag("--plain-data", nargs="+", metavar="FILE", help="plain samples or chats; without: the data, as causal chains")
    flag("--lr", type=positive, help="highest learning rate (paper: 2e-5, small: 5e-4)")
    flag("--batch", type=integer(1), help="samples of a step (paper: 64, small: 16)")
    flag("--epochs", type=integer(1, 1000), help="(paper: 1, small: 3)")
    flag("--weight-decay", type=from_zero, default=0.0, help="AdamW's (default: 0)")
    flag("--lora", type=integer(0, 1024), metavar="RANK", help="0 trains all weights (paper: 0, small: 16)")
    flag("--lora-alpha", type=positive, help="default: twice the rank")
    flag("--lora-matrices", help=f"default: {','.join(INPUTS)}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
