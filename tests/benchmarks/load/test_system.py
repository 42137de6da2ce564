"""Systems by name: what their engines are loaded with, and what the command line refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.load import __main__ as command
from benchmarks.load import figure, plot
from benchmarks.load.server import OwnServer
from benchmarks.load.system import OWN, base_settings, options_of, parse_setting, request_of
from benchmarks.load.workload import Ask, Workload
from ragjax.core import ConfigError
from ragjax.serve.command import parse_options

BASE = base_settings(dtype="float32", gigabytes=0.5, context=1024)


def test_every_system_has_options_and_prefix_with_lru_has_no_tier_below() -> None:
    made = {name: options_of(name, {}, BASE) for name in OWN}
    assert made["prefix-lru"].storage.host_gb == 0 and made["prefix-lru"].storage.policy == "lru"
    assert made["prefix-tiers"].storage.host_gb > 0 and made["contract"].quality_budget == "KL=0.1"
    assert made["contract"].strategy == "auto"
    assert {one.max_context for one in made.values()} == {1024}


def test_settings_of_all_and_of_one() -> None:
    made = options_of("prefix-tiers:policy=lru:max_running=4", {"max_running": 2, "host_gb": 1.5}, BASE)
    assert (made.storage.policy, made.max_running, made.storage.host_gb) == ("lru", 4, 1.5)
    assert options_of("naive:compression=snapkv:64:lookup=0", {}, BASE).compression == "snapkv:64"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("max_running=4", 4),
        ("host_gb=2", 2.0),
        ("disk=None", None),
        ("strategy=full", "full"),
        ("compile=false", False),
    ],
)
def test_values_have_the_types_of_their_fields(text: str, value: object) -> None:
    found = parse_setting(text)[1]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["nope=1", "max_running=many", "max_running", "compile=maybe"])
def test_what_the_engine_has_not_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_setting(text)


def test_the_server_takes_every_flag_that_it_is_started_with() -> None:
    engine = options_of("prefix-tiers", {}, BASE)
    server = OwnServer("http", engine, Workload("none", ()))
    words = [str(word) for word in server.command(8123)[0]]
    parsed = parse_options(words[words.index("benchmarks.baseline") + 1 :])
    assert parsed.port == 8123
    same = dataclasses.replace(parsed.engine, compile=engine.compile, progress=engine.progress)
    assert dataclasses.replace(same, index_dir=engine.index_dir, storage=engine.storage) == engine
    assert same.storage.policy == engine.storage.policy and same.storage.host_gb == engine.storage.host_gb


def test_models_keep_indexes_apart() -> None:
    """Chunks are cut in tokens: another model's index is of no use."""
    folders = [
        base_settings(model=model, dtype="float32", gigabytes=0.5, context=1024)["index_dir"]
        for model in ("smollm2-135m", "files/smollm2-135m.gguf", "files/qwen.gguf")
    ]
    assert folders[0] == folders[1] != folders[2]


def test_requests_by_kind_of_knowledge() -> None:
    by_id = request_of(Ask("a", "?", 3, documents=("x",)), "base").rag
    found = request_of(Ask("a", "?", 3, top_k=2), "base").rag
    paths = request_of(Ask("a", "?", 3, paths=(("a", "b", "c"),)), None, "full").rag
    assert by_id is not None and by_id.documents == ("x",) and by_id.top_k is None
    assert found is not None and (found.top_k, found.knowledge) == (2, "base")
    assert paths is not None and paths.strategy == "full"
    assert paths.graph is not None and paths.graph.relation_paths == (("a", "b", "c"),)


@pytest.mark.parametrize("name", figure.FIGURES)
def test_a_figures_flags_are_flags_of_the_command(name: str, tmp_path: Path) -> None:
    systems = figure.FIGURES[name].flags["systems"]
    chosen = command.BENCHMARK.parse(["--data", str(tmp_path), "--figure", name])
    assert chosen.systems == systems.split(",")
    assert chosen.clients or chosen.rate or chosen.points or chosen.search


def test_flags_that_are_given_go_before_a_figures(tmp_path: Path) -> None:
    chosen = command.BENCHMARK.parse(
        ["--data", str(tmp_path), "--figure", "ragcache_13", "--sets", "nq_open", "--rate", "1,2"]
    )
    assert chosen.sets == ["nq_open"] and chosen.rate == [1.0, 2.0]


def test_pictures_are_drawn_of_rows_by_rate_and_by_clients(tmp_path: Path) -> None:
    row = dict.fromkeys(("ttft_p99_ms", "itl_p99_ms", "ttft_mean_ms", "tokens_per_s", "requests_per_s"), 1.0)
    row |= {"system": "full", "workload": "w", "found_share": None, "rate": 1.0, "concurrency": None}
    plot.draw([row, {**row, "rate": None, "concurrency": 8}], tmp_path, "load", "Under load")
    assert {file.name for file in tmp_path.iterdir()} == {"load.png", "load_clients.png"}


def test_workloads_stand_side_by_side_where_there_is_one_rate() -> None:
    from matplotlib.figure import Figure

    row = {"ttft_mean_ms": 5.0, "ttft_p99_ms": None, "requests_per_s": 2.0, "found_share": None, "rate": 1.0}
    rows = [
        {**row, "concurrency": None, "system": system, "workload": workload}
        for system in ("full", "naive")
        for workload in ("questions:mmlu", "zipf")
    ]
    axes = [Figure().add_subplot() for _ in range(2)]
    for place, panel in zip(axes, plot.by_rate(rows), strict=True):
        panel(place)
    assert [bar.get_height() for bar in axes[0].patches] == [5.0] * 4
    assert [text.get_text() for text in axes[0].get_xticklabels()] == ["mmlu", "zipf"]
