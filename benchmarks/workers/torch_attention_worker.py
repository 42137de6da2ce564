"""PyTorch's attentions as a worker of `peers`: SDPA with the FlashAttention backend, and FlexAttention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from wire import serve

LEAST_S = 0.15  # of a sample


def start() -> Mapping[str, Any]:
    """Versions and the device. Masks of many shapes are compiled, so the limit on that is raised."""
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 64)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"versions": {"torch": torch.__version__}, "device": device}


def flash(rows: int, heads: int, kv_heads: int, dim: int, device: str, dtype: str, samples: int) -> Mapping[str, Any]:
    q, k, v = tensors(rows, rows, heads, kv_heads, dim, device, dtype)

    def grouped() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        try:
            grouped()
        except RuntimeError as error:
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            wide = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
            note = f"keys repeated for each query head, as grouped ones are refused: {error}"[:200]
            return {"ms": milliseconds(wide, device, samples), "note": note}
        return {"ms": milliseconds(grouped, device, samples)}


def flex(
    file: str, heads: int, kv_heads: int, dim: int, device: str, dtype: str, samples: int, compiled: bool
) -> Mapping[str, Any]:
    """FlexAttention under the mask of a .npz file; the making of its block mask is timed apart."""
    indices = load(file, device)
    q, k, v = tensors(len(indices["index_T"]), len(indices["index_N"]), heads, kv_heads, dim, device, dtype)
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True) if compiled else flex_attention
    note = None
    with torch.no_grad():
        began = time.perf_counter()
        make = torch.compile(create_block_mask, dynamic=False) if compiled else create_block_mask
        try:
            mask = block_mask(indices, device, make)
        except Exception as error:
            make, note = create_block_mask, f"the mask is made uncompiled: {type(error).__name__}: {error}"[:200]
            mask = block_mask(indices, device, make)
        work = lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)  # noqa: E731
        work()
        finish(device)
        first_s = time.perf_counter() - began
        return {
            "ms": milliseconds(work, device, samples),
            "mask_ms": milliseconds(lambda: block_mask(indices, device, make), device, samples), "first_s": first_s,
            "visited_pairs": visited_pairs(mask), "note": note,
        }  # fmt: skip


def flex_output(file: str, device: str, dtype: str, out: str) -> Mapping[str, Any]:
    """What FlexAttention computes, uncompiled, for q, k and v of the file; written to the .npy file `out`."""
    indices = load(file, device)
    q, k, v = (indices[n].to(getattr(torch, dtype)).transpose(0, 1)[None] for n in ("q_THD", "k_NKD", "v_NKD"))
    with torch.no_grad():
        mask = block_mask(indices, device, create_block_mask)
        result = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    np.save(out, result[0].transpose(0, 1).float().cpu().numpy())
    return {}


def load(file: str, device: str) -> dict[str, torch.Tensor]:
    with np.load(file) as arrays:
        return {name: torch.from_numpy(arrays[name]).to(device) for name in arrays.files}


def tensors(
    rows: int, keys: int, heads: int, kv_heads: int, dim: int, device: str, dtype: str
) -> tuple[torch.Tensor, ...]:
    """Random q, k and v, [1, heads, tokens, dim] each."""
    kind = getattr(torch, dtype)
    shapes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    return tuple(torch.randn(1, h, n, dim, device=device, dtype=kind) for h, n in shapes)


def block_mask(indices: Mapping[str, torch.Tensor], device: str, make: Callable[..., BlockMask]) -> BlockMask:
    row, key = indices["index_T"], indices["index_N"]
    low, high = indices["hide_from_N"], indices["hide_until_N"]

    def visible(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        hidden = (low[k] <= row[q]) & (row[q] < high[k])
        return (key[k] <= row[q]) & ~hidden

    return make(visible, None, None, len(row), len(key), device=device)


def visited_pairs(mask: BlockMask) -> int:
    tiles = mask.kv_num_blocks.sum().item()
    if mask.full_kv_num_blocks is not None:
        tiles += mask.full_kv_num_blocks.sum().item()
    return int(tiles * mask.BLOCK_SIZE[0] * mask.BLOCK_SIZE[1])


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], Any], device: str, samples: int) -> float:
    """Median milliseconds of a call when many are enqueued back to back; the first ones are not counted."""
    for _ in range(2):
        began = time.perf_counter()
        work()
        finish(device)
        once = time.perf_counter() - began
    calls = max(1, min(200, int(LEAST_S / max(once, 1e-9))))
    found = []
    for _ in range(samples):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        finish(device)
        found.append((time.perf_counter() - began) / calls * 1e3)
    return statistics.median(found)


if __name__ == "__main__":
    serve({"start": start, "flash": flash, "flex": flex, "flex_output": flex_output})
