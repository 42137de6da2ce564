"""The walk of a warm request: what `benchmarks.walk` counts."""

from __future__ import annotations

import json

from benchmarks import walk


def test_a_warm_request_crosses_rooms_and_both_threads(tmp_path, capsys):
    assert walk.main(["--json", str(tmp_path / "walk.json")]) == 0
    files = json.loads((tmp_path / "walk.json").read_text())
    assert "serve/app.py" in files and "engine/loop.py" in files and "runner/runner.py" in files
    assert any(functions.get("Prefix.prefill", 0) > 1 for functions in files.values())
    *_, objects, sums = capsys.readouterr().out.splitlines()
    assert sums.startswith(f"{len({f.split('/')[0] for f in files})} rooms, {len(files)} files")
    assert {"RequestState", "Match", "Answer"} <= set(objects.removeprefix("objects: ").replace(",", "").split())
