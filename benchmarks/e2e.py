"""Time to the first token and decode speed of real model sizes with random weights, beside transformers' generate.

Llama-3-8B and Qwen2.5-7B, bfloat16, contexts of 4K to 32K tokens: a system prompt, chunks of 512 tokens, a question of
32. `full`: everything is computed. `naive`: chunks that were computed behind the system prompt alone are read where
they lie, at their new positions, and the question is computed; `cold` includes the chunks. `recompute-15`: chunks as in
`naive`, and 15% of the context is recomputed beside the question. The runner is driven without engine and
scheduler; times run from the host's arrays to the token on the host. Decoding is greedy, one host round trip a token.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from benchmarks.common import gpu, report
from benchmarks.common.machine import Ceilings
from benchmarks.latency.bare import FULL, REHEARSAL, Layout, Ours, Pass, Setting, hf_config
from ragjax.core import Span
from ragjax.models.config import ModelConfig

COLUMNS: tuple[str, ...] = ("model", "system", "strategy", "state", "context_tokens", "attention", "batch", "ttft_ms")
COLUMNS += ("floor_ms", "decode_tokens_per_s", "ttft_ratio_transformers", "ttft_ratio_full")
COLUMNS += ("decode_ratio_transformers", "failed")
WORKER = "torch_generate_worker.py"
MEMORY_SHARE = 0.55  # of the GPU for this process; transformers has the rest
PATIENCE_S = 150.0
SHARE = 0.15


def floor_ms(config: ModelConfig, one: Sequence[Pass], limits: Ceilings) -> float:
    """Least milliseconds for these rows at the speed of the best product, attention to what they see included."""
    per_layer = config.hidden_size * (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_layer += 3 * config.hidden_size * config.intermediate_size
    rows = sum(len(p.order) for p in one)
    operations = 2 * rows * per_layer * config.num_layers
    operations += 4 * sum(p.visible_pairs for p in one) * config.num_heads * config.head_dim * config.num_layers
    return operations / limits.gemm_bf16_gflops / 1e6


def measure_ours(record: gpu.Record, name: str, setting: Setting, limits: Ceilings) -> None:
    config = setting.models[name]
    ours = Ours(config, setting)
    for context in setting.contexts:
        key = f"{name}/ours/{context}"
        layout = setting.layout(context)
        whole, cold, warm, some = layout.full(), layout.chunks(), layout.naive(), layout.recompute(SHARE)

        def row(strategy: str, state: str, work: Sequence[Pass], context: int = context, key: str = key) -> None:
            known = _known(name, "ragjax", strategy, state, context) | {"floor_ms": floor_ms(config, work, limits)}
            record.row(f"{key}/{strategy}-{state}", known, partial(ours.first_token, work, setting.runs))

        row("full", "cold", [whole])
        known = _known(name, "ragjax", "full", "decode", context)
        record.row(f"{key}/decode", known, partial(_decode, ours, [layout], [whole.spans]))
        row("naive", "cold", [cold, warm])
        row("naive", "warm", [warm])
        row(f"recompute-{round(100 * SHARE)}", "warm", [some])
    apart = [setting.layout(setting.batch_context, first) for first in _first_pages(setting)]
    known = _known(name, "ragjax", "full", "decode", setting.batch_context, len(apart))
    record.row(f"{name}/ours/decode-batch", known, partial(_decode, ours, apart, [a.full().spans for a in apart]))


def _first_pages(setting: Setting) -> list[int]:
    each = setting.layout(setting.batch_context).pages
    # the question's last page and the tail's first are one page in two entries
    return [1 + i * each for i in range(min(8, setting.entries // (each + 1)))]


def _decode(ours: Ours, layouts: Sequence[Layout], spans: Sequence[Sequence[Span]]) -> dict[str, Any]:
    for layout in layouts:
        ours.prefill(layout.full())
    before = Counter(ours.runner.calls)
    rate = ours.decode(layouts, spans)
    return {"decode_tokens_per_s": rate, "attention": " ".join(sorted(ours.runner.calls - before))}


def _known(name: str, system: str, strategy: str, state: str, context: int, batch: int = 1) -> dict[str, Any]:
    return {
        "model": name, "system": system, "strategy": strategy, "state": state, "context_tokens": context,
        "batch": batch, "ttft_ms": None, "decode_tokens_per_s": None,
    }  # fmt: skip


def measure_theirs(record: gpu.Record, name: str, setting: Setting, rival: gpu.Rival) -> None:
    config, device = setting.models[name], "cuda" if jax.devices()[0].platform == "gpu" else "cpu"
    wanted = [(context, 1) for context in setting.contexts]
    wanted.append((setting.batch_context, len(_first_pages(setting))))
    loaded = False

    def ask(context: int, batch: int) -> dict[str, Any]:
        nonlocal loaded
        patience = min(PATIENCE_S, max(record.clock.left, 0) + 30)
        if not loaded:
            shapes = {"family": config.family, "config": hf_config(config), "device": device, "dtype": setting.dtype}
            rival.ask({"op": "load", **shapes}, patience)
            loaded = True
        request = {"context": context, "batch": batch, "new": setting.decoded + 1, "runs": setting.runs}
        return rival.ask({"op": "generate", **request}, patience)

    for context, batch in wanted:
        known = _known(name, "transformers", "full", "cold", context, batch)
        record.row(f"{name}/transformers/{context}x{batch}", known, partial(ask, context, batch))


def with_ratios(rows: Sequence[report.Row]) -> list[report.Row]:
    """Our rows beside transformers' and beside our own `full`, at equal length and batch."""

    def find(row: report.Row, system: str, state: str) -> report.Row:
        for r in rows:
            same = (r["model"], r["context_tokens"], r["batch"]) == (row["model"], row["context_tokens"], row["batch"])
            if same and (r["system"], r["strategy"], r["state"]) == (system, "full", state):
                return r
        return {}

    out: list[report.Row] = []
    for row in rows:
        more: dict[str, float] = {}
        theirs, own = find(row, "transformers", "cold"), find(row, "ragjax", "cold")
        if row["system"] == "ragjax" and row.get("ttft_ms"):
            more |= {f"ttft_ratio_{n}": r["ttft_ms"] / row["ttft_ms"]
                     for n, r in (("transformers", theirs), ("full", own)) if r.get("ttft_ms")}  # fmt: skip
        if row["system"] == "ragjax" and row.get("decode_tokens_per_s") and theirs.get("decode_tokens_per_s"):
            more["decode_ratio_transformers"] = row["decode_tokens_per_s"] / theirs["decode_tokens_per_s"]
        out.append({**row, **more})
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    chosen, record = gpu.begin("e2e", __doc__, arguments, MEMORY_SHARE)
    setting = REHEARSAL if chosen.quick else FULL
    with record.stoppable(), gpu.Rival(WORKER) as rival:
        for name in setting.models:
            measure_ours(record, name, setting, record.head.ceilings)
            gc.collect()  # the runner's weights and pool go before the next model's come
            measure_theirs(record, name, setting, rival)
    return gpu.conclude(record, with_ratios, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
