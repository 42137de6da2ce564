"""Which dtype a CPU gets, from its features and from what XLA is told."""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax.numpy as jnp
import psutil
import pytest

from ragjax.core import ConfigError
from ragjax.runner.device import allowed_features, storage_dtype, untouched, widening_pays, widens

ZEN5 = "processor\t: 0\nflags\t\t: fpu avx2 fma avx512f avx512_bf16 avx512_vnni\n"
SAPPHIRE = "flags\t\t: avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
SKYLAKE = "flags\t\t: fpu avx2 fma avx512f avx512bw\n"
LAPTOP = "flags\t\t: fpu sse4_2 avx avx2 fma f16c\n"
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"
GRAVITON2 = "Features\t: fp asimd\n"


@pytest.mark.parametrize(
    ("cpuinfo", "flags", "expected"),
    [
        (ZEN5, "", True),
        (SAPPHIRE, "", False),
        (GRAVITON3, "", False),
        (SKYLAKE, "", True),
        (LAPTOP, "", True),
        (GRAVITON2, "", True),
        ("", "", True),
        (SAPPHIRE, "--xla_cpu_max_isa=AVX2", True),
        (SAPPHIRE, "--xla_cpu_max_isa=avx512_vnni", True),
        (SAPPHIRE, "--xla_dump_to=/d --xla_cpu_max_isa=AVX512_BF16", True),
        (SAPPHIRE, "--xla_cpu_max_isa=amx", False),
        (SAPPHIRE, "--xla_cpu_max_isa=AMX --xla_cpu_max_isa=AVX2", True),
        (LAPTOP, "--xla_cpu_max_isa=AMX", True),
    ],
)
def test_auto_follows_what_the_cpu_multiplies_and_xla_may_use(cpuinfo: str, flags: str, expected: bool) -> None:
    assert widens("auto", "cpu", allowed_features(cpuinfo, flags), lambda: True) is expected


def test_where_features_leave_it_open_it_is_measured() -> None:
    assert not widens("auto", "cpu", allowed_features(LAPTOP, ""), lambda: False)
    assert not widens("auto", "cpu", allowed_features(SAPPHIRE, ""), lambda: pytest.fail("it was measured"))


@pytest.mark.parametrize(("narrow_s", "wide_s", "pays"), [(2.0, 1.0, True), (1.0, 2.0, False)])
def test_widening_pays_if_its_product_takes_less_time(
    narrow_s: float, wide_s: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = iter([narrow_s, wide_s])

    def repeat(product: Callable[[], object], **_: int) -> list[float]:
        product()
        return [9.0, next(spent)]

    monkeypatch.setattr("ragjax.runner.device.timeit.repeat", repeat)
    assert widening_pays(8, 8, 8) is pays


def test_a_gpu_gets_bfloat16_and_a_named_dtype_stays() -> None:
    assert storage_dtype("auto") == "bfloat16" and not widens("auto", "gpu", frozenset(), lambda: True)
    for dtype in ("bfloat16", "float32"):
        assert storage_dtype(dtype) == dtype and not widens(dtype, "cpu", frozenset(), lambda: True)


def test_an_unknown_dtype_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="unknown dtype 'int4'; choose one of auto, bfloat16, float32"):
        storage_dtype("int4")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone takes pages back")
def test_zeros_take_memory_when_they_are_used() -> None:
    process, megabytes = psutil.Process(), 2**20
    before = process.memory_info().rss
    array = untouched(jnp.zeros(256 * megabytes, jnp.uint8))
    assert process.memory_info().rss - before < 64 * megabytes
    assert not array[-megabytes:].any()
