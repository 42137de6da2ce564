"""How far answers over compressed KV are from those over all of it: every scorer and graph on the same prefills.

A prompt is prefilled once with full attention, and answered greedily. Its KV is then compressed in every way, as arrays
without an engine, and the same answer is read again over what is kept. The set `demo` is the bundled documents and
questions; `needle` is DIR/needle, others are DIR/text/SET. `kl` is the mean of KL(full || compressed) over the answer's
tokens in nats, but for the first, which no compression changes; `top1` the share of these where both choose the same
token, `same` that of answers where all are the same, which is when greedy decoding would repeat the answer. `kl_change`
is the paired difference from the scorer without a graph. Intervals are 95% bootstrap over questions. `kept_tokens` are
those of a layer, `bytes` what all take in bfloat16, `redundancy` the mean cosine of pairs of kept keys
(GraphKV's Fig. 2d). `f1`, `rouge_l` and `answered` (the share that holds a reference; on the needles `needle`) are
those of the answer over what is kept, `answered_full` that over all KV.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.common import report
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.compression.case import DEMO_SET, NEEDLE, Case, cases
from benchmarks.compression.laboratory import Kept, Laboratory, Prefill
from benchmarks.quality import score
from benchmarks.quality.score import Bootstrap
from ragjax.commands.flags import integer
from ragjax.core import ConfigError
from ragjax.core.compression import METHODS, PAPER, Compression, GraphKV
from ragjax.models.hub import cache_dir, resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.trained import load_model

GRAPHS: Mapping[str, GraphKV | None] = {
    "none": None, "ordered": GraphKV(), "graphkv": PAPER, "mutual": GraphKV(order="mutual"),
    "rounds2": GraphKV(rounds=2), "rounds3": GraphKV(rounds=3),
    **{f"sources{share}": GraphKV(sources=share / 100) for share in (10, 50, 70, 100)},
    **{f"neighbours{m}": GraphKV(neighbours=m) for m in (4, 8, 16, 64)},
}  # fmt: skip
"""GraphKV's settings, one apart from the default, `ordered`; `graphkv`, with `--heads each`, is the paper's."""

DEFAULT_GRAPHS = ["none", "ordered", "mutual"]
COLUMNS = (
    "method", "graph", "budget", "set", "n", "context_tokens", "kept_tokens", "bytes", "kl", "kl_lo", "kl_hi", "top1",
    "same", "kl_change", "kl_change_lo", "kl_change_hi", "f1", "rouge_l", "needle", "answered", "answered_full",
    "redundancy",
)  # fmt: skip


def options(flags: Parser) -> None:
    flags.add("--data", type=report.existing_folder, metavar="DIR", help="folder of question sets")
    flags.add("--sets", type=report.listed, default=["musique"], help="sets of DIR, by comma")
    flags.add("--methods", type=report.among(METHODS, "method"), default=list(METHODS), help="by comma")
    flags.add("--graphs", type=report.among(GRAPHS, "graph"), default=DEFAULT_GRAPHS, help="by comma")
    flags.add("--budgets", type=report.numbers(integer(33)), default=[128, 512], quick=[128], help="tokens kept")
    flags.add("--heads", choices=("all", "each"), default="all", help="one choice for all KV heads, or each")
    flags.add("--context", type=integer(64), default=2048, quick=768, help="tokens of a prompt")
    flags.add("--limit", type=integer(1), default=16, quick=4, help="questions of a set")
    flags.add("--tokens", type=integer(2), default=16, help="of an answer, at most")


def measure(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    local = resolve(chosen.model)
    tokenizer = Tokenizer.load(local.path)
    dtype: Any = np.dtype(np.float32 if chosen.dtype == "float32" else ml_dtypes.bfloat16)
    decoder = load_model(local, dtype, cache_dir())
    laboratory = Laboratory(decoder, chosen.context, chosen.tokens)
    ends = frozenset(decoder.config.eos_ids) | frozenset(tokenizer.eos_ids)
    for name in [DEMO_SET] if chosen.data is None else chosen.sets:
        found = list(cases(tokenizer, chosen.data, name, chosen.limit, chosen.context))
        yield from rows(laboratory, tokenizer, ends, name, found, settings(chosen))


Setting = tuple[str, str, int]  # method, name of the graph, budget


def settings(chosen: Namespace) -> Mapping[Setting, Compression]:
    return {
        (method, graph, budget): Compression(method, budget, GRAPHS[graph], chosen.heads)
        for budget in chosen.budgets
        for method in chosen.methods
        for graph in chosen.graphs
    }


def rows(
    laboratory: Laboratory,
    tokenizer: Tokenizer,
    ends: frozenset[int],
    name: str,
    found: Sequence[Case],
    compressions: Mapping[Setting, Compression],
) -> Iterator[dict[str, Any]]:
    """The table's lines of a set.

    Raises:
        ConfigError: if no question has an answer of two tokens, of which compression could change one.
    """
    figures: dict[Setting, list[Mapping[str, float]]] = defaultdict(list)
    lengths, right = [], []
    for case in found:
        prefill = laboratory.prefill(case.tokens)
        everything = laboratory.everything(prefill)
        said = laboratory.answer(prefill, everything, ends)
        if len(said) < 2:
            continue
        lengths.append(prefill.count)
        right.append(score.answered(tokenizer.decode(said), case.answers))
        full_TV = laboratory.logits(prefill, everything, said)[:-1]
        for setting, compression in compressions.items():
            kept = laboratory.keep(prefill, compression.asked_by(case.question))
            logits_TV = laboratory.logits(prefill, kept.kept_LKN, said)[:-1]
            figure = compared(full_TV, logits_TV, kept, prefill)
            alike = int((full_TV.argmax(-1) == logits_TV.argmax(-1)).cumprod().sum())
            other = said if figure["same"] else laboratory.answer(prefill, kept.kept_LKN, ends, said[: alike + 1])
            figures[setting].append({**figure, **judged(tokenizer.decode(other), case.answers)})
    if not lengths:
        raise ConfigError(f"{name}: no question has an answer of two tokens")
    bootstrap = Bootstrap([name] * len(lengths))
    for method, graph, budget in compressions:
        of_setting = figures[method, graph, budget]
        column = {key: [figure[key] for figure in of_setting] for key in of_setting[0]}
        base = figures.get((method, "none", budget), of_setting)
        change = bootstrap.difference(column["kl"], [figure["kl"] for figure in base])
        means = {key: float(np.mean(values)) for key, values in column.items() if key != "kl"}
        yield {
            "method": method, "graph": graph, "budget": budget, "set": name, "n": len(lengths),
            "context_tokens": float(np.mean(lengths)), **means, **bootstrap.mean(column["kl"]).columns("kl"),
            **(change.columns("kl_change") if graph != "none" else {}), "answered_full": float(np.mean(right)),
            **({"needle": means["answered"]} if name == NEEDLE else {}),
        }  # fmt: skip


def judged(text: str, answers: Sequence[str]) -> dict[str, float]:
    return {
        "f1": score.f1(text, answers),
        "rouge_l": score.rouge_l(text, answers),
        "answered": score.answered(text, answers),
    }


def compared(
    full_TV: NDArray[np.float32], logits_TV: NDArray[np.float32], kept: Kept, prefill: Prefill
) -> dict[str, float]:
    full, other = (_log_softmax(x.astype(np.float64)) for x in (full_TV, logits_TV))
    agree = full_TV.argmax(-1) == logits_TV.argmax(-1)
    layers, _, heads, width = prefill.k_LNKD.shape
    return {
        "kl": float((np.exp(full) * (full - other)).sum(-1).mean()), "top1": float(agree.mean()),
        "same": float(agree.all()), "kept_tokens": float(kept.tokens),
        "bytes": float(layers * kept.tokens) * heads * width * 2 * 2, "redundancy": kept.redundancy,
    }  # fmt: skip


def _log_softmax(x_TV: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = x_TV - x_TV.max(-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


main = Benchmark("compress", __doc__, COLUMNS, measure, options, model=True).main

if __name__ == "__main__":
    sys.exit(main())
