"""The machine: what it is, what it can do at best, and the time of a call on its device."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ragjax

ROOT = Path(__file__).parents[2]
PACKAGES = ("ragjax", "jax", "jaxlib", "flax", "numpy", "ml-dtypes", "faiss-cpu")
GPU_PACKAGES = ("optax", "torch", "transformers", "triton", "jax-triton", "jax-cuda13-plugin")
COPIES = 20  # of the array that is copied on a GPU, in one program


@dataclass(frozen=True)
class Ceilings:
    """What the device can do at best, whatever program runs on it.

    copy_gb_s: bytes read plus bytes written, in 1e9 a second; on a CPU by one copying thread a core.
    gemm_*_gflops: the fastest large matrix product through jax, accumulated in float32, in 1e9 operations a second.
    """

    copy_gb_s: float
    gemm_bf16_gflops: float
    gemm_f32_gflops: float


def machine() -> dict[str, Any]:
    """What the figures were measured on; of a GPU also its capability, driver, power limit and clock."""
    import jax

    found: dict[str, Any] = {
        "cpu": _cpu_model(), "cores": cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(), "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
    }  # fmt: skip
    if on_gpu():
        capability = str(getattr(jax.devices()[0], "compute_capability", ""))
        found |= {"capability": capability, "driver": _driver()}
    return found


def on_gpu() -> bool:
    """Whether figures are a GPU's."""
    import jax

    return bool(jax.devices()[0].platform == "gpu")


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that are installed; ragjax's own from the project if it is not."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *(GPU_PACKAGES if on_gpu() else ())):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "ragjax" not in found:
        found["ragjax"] = ragjax.__version__
    return found


def ceilings() -> Ceilings:
    """Measure the ceilings; takes about two seconds on two cores."""
    import jax.numpy as jnp

    copy = _gpu_copy_rate() if on_gpu() else _copy_rate()
    return Ceilings(copy, _gemm_rate(jnp.bfloat16), _gemm_rate(jnp.float32))


def _copy_rate(megabytes: int = 128) -> float:
    pairs = [(np.zeros(megabytes << 17), np.ones(megabytes << 17)) for _ in range(cores())]

    def copy_all() -> None:
        with ThreadPoolExecutor(len(pairs)) as pool:
            list(pool.map(lambda pair: np.copyto(*pair), pairs))

    return 2 * sum(target.nbytes for target, _ in pairs) / min(samples_ms(copy_all)) / 1e6


def _gpu_copy_rate() -> float:
    import jax
    import jax.numpy as jnp

    source = jnp.zeros(1 << 29, jnp.uint32)
    # reads and writes every word; a bare copy may be left out
    copy = jax.jit(chained(lambda x: x ^ jnp.uint32(1), COPIES))
    return 2 * source.nbytes * COPIES / min(samples_ms(lambda: copy(source))) / 1e6


def _gemm_rate(dtype: Any) -> float:
    import jax
    import jax.numpy as jnp

    size = 8192 if on_gpu() else 2048
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    a, b = (jax.random.normal(jax.random.key(i), (size, size)).astype(dtype) for i in range(2))
    return 2 * size**3 / min(samples_ms(lambda: product(a, b))) / 1e6


def samples_ms(work: Callable[[], Any], *, samples: int = 5, least_s: float = 0.15) -> list[float]:
    """Milliseconds of a call, a sample each; in a sample many calls are enqueued back to back.

    The device is waited for once a sample, so dispatch costs show only where a call is shorter than its dispatch; time
    such calls in a loop within one program (`chained`).
    """
    import jax

    jax.block_until_ready(work())
    start = time.perf_counter()
    jax.block_until_ready(work())
    once = time.perf_counter() - start
    # more than that in flight would fill the memory with results
    calls = max(1, min(50, math.ceil(least_s / max(once, 1e-9))))
    found = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            out = work()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - start) / calls * 1e3)
    return found


def milliseconds(work: Callable[[], Any], *, samples: int = 5, least_s: float = 0.15) -> float:
    """Milliseconds of a call, the median of `samples_ms`."""
    return float(np.median(samples_ms(work, samples=samples, least_s=least_s)))


def chained(step: Callable[..., Any], times: int) -> Callable[..., Any]:
    """`times` calls of `step(x, *rest)` in one program, each on the result of the one before."""
    import jax

    return lambda x, *rest: jax.lax.fori_loop(0, times, lambda _, x: step(x, *rest), x)


def median(values: Sequence[float | None]) -> float | None:
    """The median of the values that are there; None if there are none."""
    there = [v for v in values if v is not None]
    return float(np.median(there)) if there else None
