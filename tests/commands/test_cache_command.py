"""`ragjax cache`: it finds planted damage and names it, shrinks, adds up, and refuses what it cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ragjax.commands.cache import main
from tests.support.disks import arrays_of, digest, open_store, record_of

ROOT = Path(__file__).parents[2]
OTHER = b"another model"


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Two models: entries a, b, c of one, then d, e of the other, all of one size."""
    for identity, names in ((bytes(range(32)), "abc"), (OTHER, "de")):
        with open_store(tmp_path, identity=identity) as store:
            for name in names:
                store.write(replace(record_of("alike"), key=digest(name)), arrays_of(b"alike"))
    return tmp_path


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("entries/*/*.safetensors"))


def names(directory: Path) -> str:
    known = {digest(name).hex(): name for name in "abcde"}
    return "".join(sorted(known[path.stem] for path in files(directory)))


def test_verify_of_a_sound_directory(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(filled)]) == 0
    said = capsys.readouterr().out
    assert "3 entries intact" in said and "2 entries intact" in said and "0 flaws" in said


KEPT = {"programs": ("executables", "program"), "documents": ("documents", "folder")}
"""By the command that counts them: what starts keep, where, and its name."""


@pytest.mark.parametrize("command", KEPT)
def test_what_starts_keep_is_counted_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path))
    folder, what = tmp_path / KEPT[command][0], KEPT[command][1]
    for count, *flags in ((0,), (3,), (3, "--max-gb", "1"), (1, "--max-gb", "1e-6"), (0, "--max-gb", "0")):
        assert main([command, *map(str, flags)]) == 0
        assert f"{folder}: {count} {what}" in capsys.readouterr().out and len(list(folder.glob("*"))) == count
        if not flags:
            for age in range(3):
                kept = folder / str(age) / "index.npz" if command == "documents" else folder / str(age)
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(bytes(1000))
                os.utime(kept, (age, age))
    folder.rmdir()
    folder.write_text("no folder")
    assert main([command]) == 2 and "cannot be read" in capsys.readouterr().err


def test_verify_finds_planted_damage_and_names_it(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flipped, cut, sound, *_ = files(filled)
    data = bytearray(flipped.read_bytes())
    data[-5] ^= 4
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    assert main(["verify", str(filled)]) == 1
    said = capsys.readouterr().out
    assert str(flipped) in said and str(cut) in said and str(sound) not in said and "2 flaws" in said
    assert main(["verify", str(filled)]) == 0, "damage is set aside when it is found"


def test_verify_reports_what_opening_set_right(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in filled.rglob("index.sqlite"):
        index.write_bytes(b"garbage" * 999)
    assert main(["verify", str(filled)]) == 1
    assert capsys.readouterr().out.count("index.sqlite: it is rebuilt") == 2
    assert names(filled) == "abcde" and main(["verify", str(filled)]) == 0


def test_gc_removes_what_was_accessed_longest_ago_of_all_models(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = files(filled)[0].stat().st_size
    with open_store(filled) as store:
        store.touch([digest("a")])
    assert main(["gc", str(filled), "--max-gb", str((3 * size + 10) / 2**30)]) == 0
    assert names(filled) == "ade"
    assert "removed" in capsys.readouterr().out
    assert main(["gc", str(filled), "--max-gb", "1"]) == 0 and names(filled) == "ade"
    assert main(["gc", str(filled), "--max-gb", "0"]) == 0 and names(filled) == ""


def test_stats_add_up(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [path.stat().st_size for path in files(filled)]
    assert main(["stats", str(filled), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert (stats["entries"], stats["bytes"]) == (5, sum(sizes))
    assert [model["entries"] for model in stats["models"]] in ([3, 2], [2, 3])
    assert sum(model["bytes"] for model in stats["models"]) == stats["bytes"]
    assert stats["models"][0]["about"] == {"model": "tiny", "dtype": "bfloat16"}
    assert stats["foreign"] == [] and stats["aside_files"] == 0


def test_stats_for_people(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(filled)]) == 0
    said = capsys.readouterr().out
    assert "model tiny, dtype bfloat16" in said and "3 entries" in said and "total: 5 entries" in said


@pytest.mark.parametrize("command", [["stats", "--json"], ["stats"], ["verify"], ["gc", "--max-gb", "0"]])
def test_a_folder_of_another_version_is_named_and_left_alone(
    filled: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    foreign = filled / OTHER.hex()
    manifest = foreign / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 7'))
    before = {path: path.read_bytes() for path in foreign.rglob("*") if path.is_file()}
    assert main([*command, str(filled)]) == 0
    said = capsys.readouterr().out
    assert foreign.name in said and "its format is 7" in said
    assert {path: path.read_bytes() for path in foreign.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "verify|gc|stats"),
        (["verify"], "DIR"),
        (["mend", "."], "mend"),
        (["stats", ".", "--jsn"], "--jsn"),
        (["stats", ".", "--js"], "--js"),
        (["verify", ".", "--json"], "--json"),
        (["gc", "."], "--max-gb"),
        (["gc", ".", "--max-gb", "-1"], "--max-gb"),
        (["gc", ".", "--max-gb", "nan"], "--max-gb"),
        (["gc", ".", "--max-gb", "1e305"], "--max-gb"),
        (["gc", ".", "--max-gb", "much"], "--max-gb"),
    ],
)
def test_bad_use_is_one_clear_error(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert named in output.err and output.err.count("\n") == 1 and not output.out


@pytest.mark.parametrize("command", [["stats"], ["verify"], ["gc", "--max-gb", "1"]])
@pytest.mark.parametrize("kind", ["absent", "empty", "file"])
def test_a_bad_directory_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], kind: str
) -> None:
    directory = tmp_path / "cache"
    if kind == "empty":
        directory.mkdir()
    if kind == "file":
        directory.write_text("x")
    assert main([*command, str(directory)]) == 2
    output = capsys.readouterr()
    assert f"DIR: {directory}" in output.err and output.err.count("\n") == 1 and not output.out
    assert directory.exists() is (kind != "absent")


def test_it_runs_as_a_module(filled: Path) -> None:
    command = [sys.executable, "-m", "ragjax", "cache"]
    done = subprocess.run([*command, "verify", str(filled)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "verify" in done.stdout
