"""Tensor parallel over all devices beside one of them: logits, time to the first token, decode speed.

Models and passes are those of `benchmarks.e2e`: Llama-3-8B and Qwen2.5-7B with random weights, bfloat16, prompts of 4K
and 32K tokens that are computed whole, then greedy decoding. Each model runs on as many of the devices as can share
out its heads. Logits are compared in float32 over two layers of the same shapes, where devices differ by the order of
sums alone. With one device it says that it was skipped, and ends with exit code 0.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.common import gpu, report
from benchmarks.latency.bare import FULL, REHEARSAL, Layout, Ours, Setting
from ragjax.models.config import ModelConfig
from ragjax.runner.mesh import fits

COLUMNS: tuple[str, ...] = ("model", "case", "devices", "context_tokens", "error", "ttft_ms", "decode_tokens_per_s")
COLUMNS += ("ttft_ratio_one", "decode_ratio_one", "failed")
MEMORY_SHARE = 0.9
TOLERANCE = 1e-3  # of the largest logit: how far logits of several devices may be from those of one, in float32


def most_devices(there: int, config: ModelConfig) -> int:
    """As many of these devices as can share out a model's heads."""
    return max(n for n in range(1, there + 1) if fits(n, config))


def check_logits(record: gpu.Record, name: str, setting: Setting, devices: int) -> None:
    config = replace(setting.models[name], num_layers=2)
    short = replace(setting, dtype="float32", contexts=(min(setting.contexts),))

    def measure() -> dict[str, Any]:
        one, many = _logits(config, short, 1), _logits(config, short, devices)
        error = float(np.abs(one - many).max() / np.abs(one).max())
        if not error <= TOLERANCE:
            raise ArithmeticError(f"wrong result: logits differ by {error:.2g} of the largest")
        return {"error": error}

    known = _known(name, "logits", devices, short.contexts[0])
    record.row(f"{name}/logits/{devices}", known, measure)


def _logits(config: ModelConfig, setting: Setting, devices: int) -> np.ndarray:
    ours, layout = Ours(config, setting, devices), setting.layout(setting.contexts[0])
    first = ours.prefill(layout.full())
    # the same token on any number of devices: what is compared is not the choice
    token = np.array([7], np.int32)
    return np.concatenate([first, ours.next_tokens([layout], [layout.table(layout.full().spans)], [token], 0)])


def measure(record: gpu.Record, name: str, setting: Setting, devices: int) -> None:
    ours = Ours(setting.models[name], setting, devices)
    for context in setting.contexts:
        layout = setting.layout(context)
        key = f"{name}/{devices}/{context}"
        first = partial(ours.first_token, [layout.full()], setting.runs)
        record.row(f"{key}/prefill", _known(name, "prefill", devices, context), first)
        record.row(f"{key}/decode", _known(name, "decode", devices, context), partial(_decode, ours, layout))


def _decode(ours: Ours, layout: Layout) -> dict[str, Any]:
    ours.prefill(layout.full())
    return {"decode_tokens_per_s": ours.decode([layout], [layout.full().spans])}


def _known(name: str, case: str, devices: int, context: int) -> dict[str, Any]:
    return {
        "model": name, "case": case, "devices": devices, "context_tokens": context, "error": None, "ttft_ms": None,
        "decode_tokens_per_s": None,
    }  # fmt: skip


def with_ratios(rows: Sequence[report.Row]) -> list[report.Row]:
    """Rows of several devices beside those of one: how many times as fast."""
    alone = {(r["model"], r["case"], r["context_tokens"]): r for r in rows if r["devices"] == 1}
    out: list[report.Row] = []
    for row in rows:
        one = alone.get((row["model"], row["case"], row["context_tokens"]), {})
        more: dict[str, float] = {}
        if row["devices"] > 1 and row["ttft_ms"] and one.get("ttft_ms"):
            more["ttft_ratio_one"] = one["ttft_ms"] / row["ttft_ms"]
        if row["devices"] > 1 and row["decode_tokens_per_s"] and one.get("decode_tokens_per_s"):
            more["decode_ratio_one"] = row["decode_tokens_per_s"] / one["decode_tokens_per_s"]
        out.append({**row, **more})
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    gpu.choose_platform(gpu.parse("mesh", __doc__, arguments), MEMORY_SHARE)
    there = jax.device_count()
    if there < 2:
        print(f"mesh: skipped, as there is one device ({jax.devices()[0].device_kind}) and it takes at least two")
        return 0
    chosen, record = gpu.begin("mesh", __doc__, arguments, MEMORY_SHARE)
    setting = REHEARSAL if chosen.quick else replace(FULL, contexts=(max(FULL.contexts), min(FULL.contexts)))
    with record.stoppable():
        for name, config in setting.models.items():
            devices = most_devices(there, config)
            for work in (check_logits, measure):
                work(record, name, setting, devices)
                gc.collect()  # a runner's weights and pool go before the next one's come
            measure(record, name, setting, 1)
            gc.collect()
    return gpu.conclude(record, with_ratios, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
