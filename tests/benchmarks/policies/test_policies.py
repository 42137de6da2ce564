"""`python -m benchmarks.policies`: its reports, its figures, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import profiles
from benchmarks.policies import __main__ as policies
from benchmarks.policies.cell import Cell
from benchmarks.policies.source import PATTERNS
from ragjax.cache.profile import Profile
from tests.support.files import write_lines


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a graph, two text sets and a trace, all made up and small."""
    home = tmp_path / "data"

    def write(path: str, lines: list[Any]) -> None:
        write_lines(home / path, lines)

    triples = [(f"e{i}", f"r{j}", f"e{(i + 3 * j) % 40}") for i in range(40) for j in range(3)]
    paths = [[f"e{i}", "r0", f"e{i}"] for i in range(3)]
    write("kg/made/questions.jsonl", [{"topic_entities": ["e0"], "paths": paths, "triples": triples}] * 4)
    for name in ("one", "two"):
        texts = [{"id": f"{name}{i}", "title": f"{name}{i}", "text": f"thing{i} " * (i + 1)} for i in range(20)]
        write(f"text/{name}/corpus.jsonl", texts)
        passages = [{"id": f"{name}3", "is_supporting": True}]
        write(
            f"text/{name}/questions.jsonl", [{"question": f"which thing{i}?", "passages": passages} for i in range(12)]
        )
    blocks = [list(range(i % 4, i % 4 + 3)) for i in range(20)]
    chained = [[1000 * b[0] + j for j in range(3)] for b in blocks]
    write(
        "traces/mooncake_made_trace.jsonl",
        [{"timestamp": 0, "input_length": 1300, "output_length": 1, "hash_ids": b} for b in chained],
    )
    return home


@pytest.mark.slow
def test_policies_reports_every_policy_beside_the_bound(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    flags = ["--data", str(data), "--quick", "--limit", "15", "--json", str(out)]
    assert policies.main(flags) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {r["policy"] for r in rows} == set(policies.NAMES)
    assert {r["workload"] for r in rows} == {*PATTERNS, "documents", "mooncake_made"}
    asked = {(r["top_k"], r["keep"]) for r in rows if r["workload"] == "documents"}
    assert asked == {(2, None), (5, None), (5, 3)}
    for row in rows:
        assert row["requests"] <= 15
        assert 0 <= row["token_hit_rate"] <= row["bound"] + 1e-9 and row["min"] <= row["bound"] + 1e-9
        assert row["document_hit_rate"] is None or row["document_hit_rate"] <= row["document_bound"] + 1e-9
        assert (row["moved_bytes"] == 0 or row["host_tokens"]) and row["decision_us"] > 0
        assert row["recomputed_tokens"] > 0 and row["prefill_s"] > 0
    assert any(row["moved_bytes"] for row in rows)
    words = capsys.readouterr().out
    assert words.index("ceiling") < words.index("decision_us") < words.index("lacr_gain")
    assert list((tmp_path / "store").iterdir()) == []


def test_a_stopped_run_goes_on_where_it_stopped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve, served = policies.serve, []

    def counted(cell: Cell, name: str, profile: Profile) -> dict[str, Any]:
        if len(served) == 25:
            raise KeyboardInterrupt
        served.append(cell.name + name)
        return serve(cell, name, profile)

    monkeypatch.setattr(policies, "serve", counted)
    flags = ["--data", str(data), "--quick", "--limit", "10", "--json", str(tmp_path / "out.json")]
    with pytest.raises(KeyboardInterrupt):
        policies.main(flags)
    first, served[:] = list(served), []
    monkeypatch.setattr(policies, "serve", lambda *cell: served.append(cell[0].name + cell[1]) or serve(*cell))
    assert policies.main(flags) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(first) == 25 and not set(first) & set(served) and len(rows) == 25 + len(served)
    assert "continuing a stopped run: 25 samples" in capsys.readouterr().err


def test_the_real_cache_serves_documents_too(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert policies.main(["--data", str(data), "--through", "cache", "--limit", "15", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {r["policy"] for r in rows} == {*policies.NAMES} - {"belady"}
    assert {(r["keep"], r["answer_tokens"]) for r in rows} == {("documents", 8), ("all", 8), ("all", 32)}
    assert all(0 <= r["document_hit_rate"] <= 1 and r["requests"] == 15 for r in rows)


def test_a_measured_profile_is_used(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = Profile((0, 10), (1, 10), ((0.5, 0.5), (0.5, 0.5)), "a stopwatch")
    profiles.save(flat, tmp_path / "profile.json")
    out = tmp_path / "out.json"
    flags = ["--data", str(data), "--quick", "--limit", "5", "--profile", str(tmp_path / "profile.json")]
    assert policies.main([*flags, "--json", str(out)]) == 0
    assert "a stopwatch" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert all(row["prefill_s"] <= 0.5 * row["requests"] for row in rows)


def test_a_folder_without_data_is_an_error(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert policies.main(["--data", str(tmp_path / "empty")]) == 1
    assert "holds no requests" in capsys.readouterr().err
