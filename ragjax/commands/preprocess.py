"""`ragjax preprocess`: a knowledge base's chunks are computed behind their most similar ones, offline.

ragjax preprocess --knowledge docs/ --index-dir index/ --disk-cache kv/
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ragjax.commands.flags import Parser, add_engine_flags, engine_options, exit_code, integer
from ragjax.engine import Engine
from ragjax.engine.preprocessing import preprocess
from ragjax.reuse.fusion import NEIGHBOURS


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("ragjax preprocess", lambda: _run(argv), stopped="stopped; the same command goes on from here")


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(
        "ragjax preprocess",
        "Compute every chunk behind its most similar ones; a server with the same directories uses it.",
    )
    fields = ("model", "knowledge", "index", "index_dir", "dtype", "device_cache_gb", "tensor_parallel", "max_context")
    tiers = ("host_gb", "disk", "disk_gb", "at_rest", "share_knowledge")
    add_engine_flags(parser, (*fields, *tiers), needed=("knowledge", "index_dir", "disk"))
    flag = parser.add_argument
    flag("--neighbours", type=integer(1), help=f"chunks that each is computed behind ({NEIGHBOURS})")
    flag("--system", metavar="TEXT", help="system message of the requests (default: that of requests without one)")
    flag("--record", action="store_true", help="keep what the strategy fusion+craft needs, too")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("ragjax").setLevel(logging.INFO)
    logging.getLogger("ragjax.runner.programs").setLevel(logging.WARNING)  # a line for each would break the bar
    with Engine.load(engine_options(options), compile=False) as engine:  # a third of the programs are used
        neighbours = options.neighbours or NEIGHBOURS
        report = preprocess(engine, n=neighbours, system=options.system, record=options.record)
    print(report)
    return 1 if report.lost else 0
