"""What travels to a GPU machine: pins, pieces, a checkpoint of random weights, and the server's rows there."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from benchmarks import pack, served
from benchmarks.latency import checkpoint
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.weights import open_checkpoint

ROOT = Path(__file__).parents[2]


def test_what_the_image_brings_does_not_travel() -> None:
    names = {pin.split("==")[0] for pin in pack.needed()}
    assert {"faiss-cpu", "fastapi", "pydantic-core", "llguidance"} <= names and "ragjax" not in names
    assert not names & {*pack.HELD, "pytest", "openai"}


def archive(file: Path) -> None:
    with tarfile.open(file, "w") as tar:
        for name in ("wheels/none-1-py3-none-any.whl", "cache/models/m"):
            entry = tarfile.TarInfo(name)
            entry.size = 40_000
            tar.addfile(entry, io.BytesIO(name.encode() * 4000))


def test_pieces_are_put_together_again(tmp_path: Path) -> None:
    home = tmp_path / "build" / "gpu"
    home.mkdir(parents=True)
    archive(tmp_path / "whole.tar")
    pieces = pack.cut(tmp_path / "whole.tar", home, 9_000)
    assert len(pieces) == 11 and max(piece.stat().st_size for piece in pieces) == 9_000
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "gpu_check.sh"
    script.write_bytes((ROOT / "benchmarks" / "gpu_check.sh").read_bytes())
    command = ["env", "PYTHON=true", "bash", str(script), "unpack"]  # `true` installs nothing
    subprocess.run(command, check=True, capture_output=True)
    assert (home / "here" / "cache" / "models" / "m").stat().st_size == 40_000
    pieces[3].unlink()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "of 11 pieces these are here" in done.stderr


def test_a_repository_that_fills_the_limit_alone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pack, "tracked_bytes", lambda: 30 * 2**20)
    assert pack.main([str(tmp_path), "--megabytes", "30"]) == 2
    assert "the repository alone has 30 MiB" in capsys.readouterr().err


def test_a_random_checkpoint_is_read_as_a_model(tmp_path: Path) -> None:
    config = checkpoint.SHAPES["tiny"]
    folder = checkpoint.write_random(config, tmp_path / "tiny")
    read = open_checkpoint(folder).config
    for name in ("family", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "rope_theta"):
        assert getattr(read, name) == getattr(config, name)
    tokenizer = Tokenizer.load(folder)
    assert len(tokenizer.encode("Salt, “fish”", special=False)) == len("Salt, “fish”".encode())
    assert tokenizer.eos_ids == read.eos_ids == (checkpoint.END,)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.write_random(config, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_servers_rows_have_the_runners_time() -> None:
    known = {"model": "m", "strategy": "full", "context_tokens": 600}
    rows = [
        {**known, "http_ms": 30.0}, {"model": "m", "strategy": "start", "start_s": 2.0},
        {**known, "system": "bare", "ttft_ms": 20.0}, {**known, "system": "bare", "failed": "OSError: no"},
    ]  # fmt: skip
    http, start, failed = served.joined(rows)
    assert (http["bare_ms"], http["over_ms"], start) == (20.0, 10.0, rows[1]) and failed["failed"]
