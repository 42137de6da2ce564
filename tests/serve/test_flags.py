"""The command's flags, and starts that fail."""

from __future__ import annotations

import importlib.util
import json
import logging
import resource
import socket
import stat
from pathlib import Path

import pytest

from ragjax import core
from ragjax.commands.flags import flags_of
from ragjax.core.options import FIRST
from ragjax.retrieval.triple_files import read_triples
from ragjax.serve import command
from ragjax.serve.command import ServerOptions, app_options, main, parse_options, serve_parser
from tests.support.devices import ROOT
from tests.support.fakes import FakeEngine
from tests.support.flags import page
from tests.support.serving import Served, program


def test_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[core.EngineOptions] = []

    class Recorder:
        @staticmethod
        def load(options: core.EngineOptions, early: bool) -> None:
            loaded.append(options)
            raise core.ConfigError("seen enough")

    monkeypatch.setattr("ragjax.engine.Engine", Recorder)
    expected = {
        "model": "some/model",
        "strategy": "naive",
        "recompute_ratio": 0.25,
        "shadow_rate": 0.125,
        "dtype": "float32",
        "top_k": 5,
        "device_cache_gb": 0.25,
        "tensor_parallel": 2,
        "max_queue": 7,
        "speculate": "4",
        "max_context": 512,
        "index": "hnsw",
        "index_dir": str(tmp_path / "kept"),
    }
    flags = [part for name, value in expected.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    facts = tmp_path / "facts.tsv"
    facts.write_text("a\tb\tc\n")
    assert main([*flags, "--graph", str(facts), "--knowledge", "none", "--port", "0"]) == 2
    assert loaded == [core.EngineOptions(**expected, graph={"facts": facts}, preprocess=True)]
    assert not parse_options(["--no-preprocess"]).engine.preprocess
    assert not parse_options(["--replicas", "2"]).engine.preprocess, "replicas know no documents"
    assert main(["--quality-budget", "KL=0.05", "--knowledge", "none", "--port", "0"]) == 2
    assert loaded[1] == core.EngineOptions("smollm2-135m-instruct", quality_budget="KL=0.05", preprocess=True)


def test_flags_have_the_defaults_of_the_options() -> None:
    """But for preprocessing, which a server does by default."""
    given = parse_options(["--knowledge", "none"]).engine
    assert given == core.EngineOptions("smollm2-135m-instruct", preprocess=True)
    assert parse_options(["--knowledge", "none"]).engine.storage == core.StorageOptions()


def test_there_are_few_flags_and_the_first_ten_come_first() -> None:
    kinds = (core.EngineOptions, core.StorageOptions, ServerOptions)
    sections = [flag.section for kind in kinds for _, _, flag in flags_of(kind)]
    assert len(sections) <= 56 and sections.count(FIRST) == 10
    shown = serve_parser().format_help()
    titles = [shown.index(f"\n{section}:\n") for section in dict.fromkeys(sections)]
    assert min(titles) == titles[0] and len(titles) == 6


def test_the_page_of_flags_is_made_from_the_options() -> None:
    """To write it anew: `python -m tests.support.flags`."""
    assert page() == (ROOT / "docs" / "flags.md").read_text()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--frobnicate", "1"], "--frobnicate"),
        (["--speculate", "-1"], "--speculate"),
        (["--recompute-ratio", "1.2"], "--recompute-ratio"),
        (["--shadow-rate", "-1"], "--shadow-rate"),
        (["--mod", "x"], "--mod"),
        (["--port", "http"], "--port"),
        (["--port", "70000"], "--port"),
        (["--dtype", "int4"], "--dtype"),
        (["--top-k", "-1"], "--top-k"),
        (["--device-cache-gb", "nan"], "--device-cache-gb"),
        (["--device-cache-gb", "1e305"], "--device-cache-gb"),
        (["--host-cache-gb", "1e305"], "--host-cache-gb"),
        (["--max-file-mb", "-1"], "--max-file-mb"),
        (["--index", "tree"], "--index"),
        (["--knowledge", "/no/such/folder"], "/no/such/folder"),
        (["--graph", "/no/such/facts.tsv"], "--graph"),
        (["--api-key", ""], "API key"),
        (["--api-key", "key "], "--api-key"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
        (["--port"], "--port"),
        (["extra"], "extra"),
        (["--replicas", "0"], "--replicas"),
        (["--replicas", "2:magic"], "unknown router 'magic'; choose one of"),
        (["--cors-origin", "example.com/page"], "scheme://host"),
        (["--allow-host", "http://name"], "without scheme"),
        (["--replicas", "2", "--speculate", "3"], "--speculate"),
        (["--tensor-parallel", "0"], "--tensor-parallel"),
        (["--stratgy", "anchor"], "unrecognized arguments: --stratgy anchor; did you mean --strategy?"),
        (["--strategy", "fussion"], "unknown strategy 'fussion'; did you mean fusion? There are auto, full, "),
        (["--strategy", "magic"], "unknown strategy 'magic'; choose one of auto, full, "),
    ],
)
def test_bad_flag_is_one_line_and_code_2(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and word in err


def test_replicas_without_ray_are_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--replicas", "2", "--port", "0"]) == 2
    assert "pip install '.[ray]' in ragjax's folder" in capsys.readouterr().err


def test_bad_model_is_one_line_and_code_2() -> None:
    process = program("--model", "missing", "--port", "0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count("\n") == 1 and "'missing'" in err


def test_occupied_port_is_one_line_and_code_2(shared: Served, capsys: pytest.CaptureFixture[str]) -> None:
    port = shared.url.rsplit(":", 1)[1]
    assert main(["--port", port]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and port in err


def test_port_taken_while_the_model_loads_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))

        class Loads(FakeEngine):
            @classmethod
            def load(cls, options: core.EngineOptions, early: bool) -> FakeEngine:
                other.listen()
                return FakeEngine()

        monkeypatch.setattr("ragjax.engine.Engine", Loads)
        port = str(other.getsockname()[1])
        assert main(["--port", port]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and port in err


def test_storage_flags_reach_the_engine(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"k1": {"name": "acme", "quota_gb": 0.5}, "k2": {"name": "umbra"}}))
    flags = ["--host-cache-gb", "2", "--disk-cache", str(tmp_path), "--disk-cache-gb", "3", "--at-rest", "int8"]
    more = ["--policy", "lacr", "--share-knowledge", "--tenants", str(tenants)]
    options = parse_options([*flags, *more])
    assert options.engine.storage == core.StorageOptions(
        policy="lacr",
        host_gb=2.0,
        disk=str(tmp_path),
        disk_gb=3.0,
        at_rest="int8",
        quotas={"acme": 0.5},
        share_knowledge=True,
    )
    assert parse_options([]).engine.storage == core.StorageOptions()


def test_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAGJAX_API_KEY", raising=False)
    plain = parse_options([])
    assert (plain.host, plain.port, plain.api_key) == ("127.0.0.1", 8000, None)
    plain = plain.engine
    assert plain.knowledge is not None and list(plain.knowledge) == ["demo"]
    assert len(list(Path(plain.knowledge["demo"]).glob("*.md"))) >= 40, "the packaged documents"
    assert parse_options(["--knowledge", "none"]).engine.knowledge is None
    assert parse_options(["--knowledge", str(tmp_path)]).engine.knowledge == {tmp_path.name: tmp_path}
    assert plain.graph is None
    graph = parse_options(["--graph", "demo"]).engine.graph
    assert list(graph) == ["demo"] and len(list(read_triples(graph["demo"]))) >= 180, "the packaged facts"
    facts = tmp_path / "facts.tsv"
    facts.write_text("a\tb\tc\n")
    assert parse_options(["--graph", str(facts)]).engine.graph == {"facts": facts}
    monkeypatch.setenv("RAGJAX_API_KEY", "from the environment")
    assert parse_options([]).api_key == "from the environment"
    assert parse_options(["--api-key", "flag"]).api_key == "flag"
    monkeypatch.setenv("RAGJAX_METRICS_KEY", "scrape")
    assert app_options(parse_options([]))["metrics_key"] == "scrape"
    for key in ("key ", "flag"):
        monkeypatch.setenv("RAGJAX_METRICS_KEY", key)
        with pytest.raises(core.ConfigError, match="RAGJAX_METRICS_KEY"):
            parse_options(["--api-key", "flag"])
    monkeypatch.delenv("RAGJAX_METRICS_KEY")
    monkeypatch.setenv("RAGJAX_API_KEY", "from a file\n")
    with pytest.raises(core.ConfigError, match="RAGJAX_API_KEY"):
        parse_options([])
    monkeypatch.setenv("RAGJAX_API_KEY", "")
    with pytest.raises(core.ConfigError, match="empty"):
        parse_options([])


@pytest.mark.parametrize("flags", [("--index-dir", "--disk-cache"), ("--disk-cache", "--index-dir")])
def test_folders_of_state_are_made_for_the_servers_user_alone(
    flags: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there keeps its mode: the operator may share it."""
    monkeypatch.setattr("ragjax.engine.Engine.load", lambda options, early: options)
    made, shared = tmp_path / "state" / "made", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    command._load(parse_options([flags[0], str(made), flags[1], str(shared)]))
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (made, shared)] == [0o700, 0o755]


def test_a_folder_that_cannot_be_made_is_its_owners_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("ragjax.engine.Engine.load", lambda options, early: options)
    options = parse_options(["--index-dir", str(tmp_path / "file"), "--disk-cache", str(tmp_path / "file" / "below")])
    assert command._load(options) is options.engine


def test_a_server_may_open_as_many_files_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(command.resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(command.resource, "setrlimit", lambda kind, limits: asked.append((kind, limits)))
    command._open_many()
    assert asked == [(resource.RLIMIT_NOFILE, (4096, 4096))]


def test_a_limit_that_is_not_granted_stops_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(command.resource, "setrlimit", refuse)
    command._open_many()


def test_no_message_forges_a_line_of_the_log() -> None:
    quoted = 'no page: a\n2026-11-27 14:00:00,000 INFO uvicorn.access: 10.0.0.1:1 - "DELETE /v1/files" \x1b[2J'
    record = logging.LogRecord("pypdf", logging.WARNING, "", 0, "Ignoring %s", (quoted,), None)
    line = command.OneLineFormatter("%(levelname)s %(name)s: %(message)s").format(record)
    assert line.startswith("WARNING pypdf: Ignoring no page: a\\x0a2026") and line.isprintable()
