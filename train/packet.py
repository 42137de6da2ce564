"""`python -m train.packet`: soft tokens around passages, for a model that stays as it is (KV Packet, arXiv 2604.13226).

What is trained are the embeddings of a header and a trailer. Each passage is computed by itself between the two, and
the model is to say of the answer what it says where every passage sees those before it and there are no soft tokens:
distillation from its own full attention. See docs/training.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ragjax.commands.flags import Parser, integer, positive
from train.recipe import Recipe
from train.run import Asked, add_flags, command
from train.soft import Soft


def main(argv: Sequence[str] | None = None) -> int:
    return command("python -m train.packet", lambda: asked(argv))


def asked(argv: Sequence[str] | None) -> Asked:
    options = _options(argv)
    recipe = Recipe(
        options.lr, options.batch, options.epochs, target="teacher", plain=0.0, warmup=options.warmup,
        clip=options.clip, row=options.row_tokens, seed=options.seed,
    )  # fmt: skip
    return options, recipe, Soft(options.header, options.trailer)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m train.packet", "Soft tokens around passages (KV Packet).")
    add_flags(parser)
    flag = parser.add_argument
    flag("--header", type=integer(0, 256), default=8, metavar="N", help="soft tokens before a passage (default: 8)")
    flag("--trailer", type=integer(0, 256), default=8, metavar="N", help="soft tokens behind it (default: 8)")
    flag("--lr", type=positive, default=5e-3, help="highest learning rate (default: 5e-3)")
    flag("--batch", type=integer(1), default=8, help="samples of a step (default: 8)")
    flag("--epochs", type=integer(1, 1000), default=1, help="(default: 1)")
    parser.set_defaults(plain_data=None)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
