"""`python -m train.depft` on a tiny model: a run learns, goes on to the bit, and what it writes is served."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragjax.core import ConfigError
from ragjax.engine import Engine
from ragjax.models.decoder import Decoder
from ragjax.models.hub import LocalModel, resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.trained import Adapter, load_model, model_digest
from ragjax.models.weights import load_decoder, open_checkpoint, weights_digest
from tests.support.devices import ROOT
from tests.support.forward import dense_logits
from tests.support.plain import FAMILIES, tensors_of
from tests.support.tiny import byte_tokenizer, decoder
from tests.support.training import LORA, SMALL, adapters, last_step, lines, make_model
from train.batch import Rows
from train.checkpoint import Checkpoints
from train.depft import asked, main
from train.export import TRAINED, export, hf_config
from train.export import main as export_main
from train.lora import Lora
from train.meter import Cost, Log
from train.model import stacked
from train.recipe import Recipe
from train.sample import Sample, write_samples

pytestmark = pytest.mark.slow

WORDS = ("red", "blue", "green")


def make_samples(file: Path, count: int = 12) -> Path:
    write_samples(
        (
            Sample(f"s{i}", f"Color of {i}?", WORDS[i % 3], ((f"e{i}", "is", WORDS[i % 3]), (f"e{i}", "in", "x")))
            for i in range(count)
        ),
        file,
    )
    return file


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    os.environ["RAGJAX_CACHE"], before = str(folder / "cache"), os.environ.get("RAGJAX_CACHE")
    make_model(folder / "model")
    make_samples(folder / "samples.jsonl")
    make_samples(folder / "dev.jsonl", 4)
    yield folder
    if before is None:
        del os.environ["RAGJAX_CACHE"]
    else:
        os.environ["RAGJAX_CACHE"] = before


def flags(home: Path, out: str, *more: str) -> list[str]:
    return [
        *("--model", str(home / "whole"), "--data", str(home / "samples.jsonl"), "--out", str(home / out)),
        *("--dev", str(home / "dev.jsonl"), "--row-tokens", "512", "--batch", "6", "--epochs", "2", "--lr", "3e-3"),
        *("--dtype", "float32", "--no-progress", "--plain", "0.25", "--seed", "3", *more),
    ]


def without_times(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in {"seconds", "tokens_per_s", "mfu"}} for line in found]


ARMS = {"full": (), "lora": ("--lora", "4", "--attention", "dependency", "--positions", "preorder", "--lr", "3e-2")}


@pytest.mark.parametrize("arm", [pytest.param("full", marks=pytest.mark.long), "lora"])
def test_run_learns_and_goes_on_to_the_bit(home: Path, arm: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Undisturbed, and stopped at the third step of six."""
    whole, parts = f"{arm}-whole", f"{arm}-parts"
    more = (*ARMS[arm], "--save-every", "2", "--eval-every", "3", "--keep", "1")
    assert main(flags(home, whole, *more)) == 0, capsys.readouterr().err
    assert main(flags(home, parts, *more, "--stop-after", "3")) == 0
    assert not (home / parts / "model").exists()
    assert main(flags(home, parts, *more, "--resume", "--data", str(home / "dev.jsonl"))) == 1
    assert "the run was started with data" in capsys.readouterr().err
    assert main(flags(home, parts, *more, "--resume")) == 0, capsys.readouterr().err
    assert main(flags(home, parts, *more, "--resume")) == 0  # nothing is left to do
    one, other = ((home / name / "model" / "model.safetensors").read_bytes() for name in (whole, parts))
    assert one == other
    assert (home / whole / "adapter.safetensors").exists() == (arm == "lora")
    assert without_times(lines(home / whole)) == without_times(lines(home / parts))
    steps = [line for line in lines(home / whole) if "loss" in line]
    devs = [line for line in lines(home / whole) if "dev_loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6] and [line["step"] for line in devs] == [0, 3, 6]
    assert devs[-1]["dev_loss"] < devs[0]["dev_loss"] - 0.3
    assert all(line["mfu"] > 0 and line["padding"] > 0 for line in steps)
    assert sum(line["plain"] for line in steps) / len(steps) == pytest.approx(0.25, abs=0.1)


def test_killed_run_goes_on_from_its_last_whole_checkpoint(home: Path) -> None:
    """In process: a checkpoint that was not finished is not there."""
    settings = {"a": 1, "b": [2]}
    state = {"x": jnp.arange(4.0), "y": {"z": jnp.zeros((), jnp.int32)}}
    with Checkpoints(home / "c", settings, resume=False, keep=2) as saved:
        for step in (1, 2, 3):
            saved.save(step, jax.tree.map(lambda x, n=step: x + jnp.asarray(n, x.dtype), state))
    (home / "c" / "steps" / "4.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(home / "c", settings, resume=True, keep=2) as saved:
        assert saved.latest == 3
        again = saved.restore(3, state)
        np.testing.assert_array_equal(again["x"], np.arange(4.0) + 3)
        assert int(again["y"]["z"]) == 3
    assert sorted(p.name for p in (home / "c" / "steps").iterdir() if p.name.isdigit()) == ["2", "3"]
    with pytest.raises(ConfigError, match="go on with --resume"):
        Checkpoints(home / "c", settings, resume=False)
    with pytest.raises(ConfigError, match="started with a 1, not 2"):
        Checkpoints(home / "c", {"a": 2, "b": [2]}, resume=True)
    with pytest.raises(ConfigError, match="leave out --resume"):
        Checkpoints(home / "none", settings, resume=True)


DOOMED = """
import os, signal, sys, threading, time
from pathlib import Path
from tests.support.training import last_step
from train.depft import main

folder, steps, delay = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def doom():
    while last_step(folder) < steps:
        time.sleep(0.02)
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


threading.Thread(target=doom, daemon=True).start()
sys.exit(main(sys.argv[4:]))
"""
"""A run that kills itself, some seconds after so many steps; another process may be too slow for it."""


@pytest.mark.long  # kills processes in the middle of steps and of checkpoints, some seconds each
def test_kill_in_the_middle_gives_the_same_weights(home: Path) -> None:
    more = ("--epochs", "24", "--save-every", "2")  # longer than a fast machine takes until the last kill
    command, environment = flags(home, "killed", *more), os.environ | {"PYTHONPATH": str(ROOT)}
    assert main(flags(home, "undisturbed", *more)) == 0
    resume: list[str] = []
    for delay in (0.0, 0.3, 0.7):
        doom = [sys.executable, "-c", DOOMED, str(home / "killed"), str(last_step(home / "killed") + 3), str(delay)]
        killed = subprocess.run([*doom, *command, *resume], env=environment, cwd=ROOT, check=False)
        assert killed.returncode == -signal.SIGKILL
        resume = ["--resume"]
    assert not (home / "killed" / "model").exists()
    subprocess.run([sys.executable, "-m", "train.depft", *command, "--resume"], env=environment, cwd=ROOT, check=True)
    for name in ("undisturbed", "killed"):
        assert len([line for line in lines(home / name) if "loss" in line]) == 72
    one, other = ((home / name / "model" / "model.safetensors").read_bytes() for name in ("undisturbed", "killed"))
    assert one == other


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--frobnicate",), "unrecognized arguments: --frobnicate"),
        (("--positions", "depth"), "invalid choice"),
        (("--row-tokens", "700"), "a row must have a multiple of 512"),
        (("--row-tokens", "2048"), "more than the model's context"),
        (("--plain", "1"), "must be below 1"),
        (("--lora", "4", "--lora-matrices", "qkv,norm"), "not on norm"),
        (("--mesh", "fsdp=3"), "--mesh: data=1, fsdp=3, model=1 are 3 devices, and JAX has 1"),
        (("--resume",), "no run to go on with"),
        (("--lora-alpha", "8"), "--lora-alpha has no effect with --lora 0 of --preset paper"),
        (("--lora-matrices", "qkv", "--lora", "0"), "--lora-matrices has no effect with --lora 0:"),
        (("--positions", "path", "--attention", "self"), "--positions has no effect with --attention self"),
        (("--plain-data", "none.jsonl", "--plain", "0"), "--plain-data has no effect with --plain 0"),
        (("--data", "none.jsonl"), "none.jsonl: cannot be read"),
        (("--model", "nothing"), "unknown model"),
    ],
)
def test_what_cannot_work_is_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert main(flags(home, "wrong", *more)) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("python -m train.depft: error: ") and error.count("\n") == 1
    assert not list((home / "wrong").rglob("*"))


def test_a_run_that_is_stopped_says_how_it_goes_on(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("train.run.run", stopped)
    assert main(flags(home, "stopped")) == 130
    assert capsys.readouterr().err == "stopped; --resume goes on from the last checkpoint\n"


def test_a_trained_model_is_not_trained_over(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for made in ("model", "adapter.safetensors"):
        (home / "had" / made).mkdir(parents=True)
        assert main(flags(home, "had")) == 1
        error = capsys.readouterr().err
        assert f"{home / 'had' / made} is there already" in error and "give another --out" in error
        (home / "had" / made).rmdir()
    assert not list((home / "had").iterdir())


def test_a_folder_that_cannot_be_made_is_said_before_the_model_is_loaded(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.run.load_decoder", None)
    for out in ("samples.jsonl", "samples.jsonl/run"):
        assert main(flags(home, out)) == 1
        error = capsys.readouterr().err
        assert f"--out: {home / out} cannot be made" in error and error.count("\n") == 1


def test_a_run_that_diverges_saves_nothing_of_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(home, "diverged", "--lr", "1e9", "--save-every", "1", "--eval-every", "5")) == 1
    error = capsys.readouterr().err
    assert "lower --lr" in error and error.count("\n") == 1

    def refuse(name: str) -> None:
        raise ValueError(name)

    kept = [json.loads(x, parse_constant=refuse) for x in (home / "diverged" / "log.jsonl").read_text().splitlines()]
    saved = {int(p.name) for p in (home / "diverged" / "checkpoints" / "steps").iterdir() if p.name.isdigit()}
    assert saved and max(saved) == kept[-1]["step"] < 6
    assert not (home / "diverged" / "model").exists()


def test_dev_samples_of_which_none_fits_are_an_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples([Sample("a", "x " * 400, "y")], home / "long-dev.jsonl")
    assert main(flags(home, "no-dev", "--dev", str(home / "long-dev.jsonl"))) == 1
    assert "--dev: no sample fits into a row of 512 tokens" in capsys.readouterr().err


def test_samples_that_do_not_fit_are_counted(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_samples([Sample("a", "x " * 400, "y"), Sample("b", "x", "y")], home / "long.jsonl")
    assert main(flags(home, "left-out", "--data", str(home / "long.jsonl"), "--stop-after", "1")) == 0
    assert "1 of 2 samples are left out: too long" in caplog.text


# ------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].family in TRAINED])
def test_exported_model_is_read_back(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = FAMILIES[family]
    tensors = tensors_of(config)
    weights = stacked(Decoder.from_tensors(config, tensors, jnp.dtype("float32")))
    source = tmp_path / "source"
    source.mkdir()
    stored = {"quantization_config": {"quant_method": "awq"}}  # what is written is plain
    (source / "config.json").write_text(json.dumps(hf_config(config, "float32") | stored))
    monkeypatch.setattr("train.export.SHARD_BYTES", 20_000)  # so that there are several files
    export(weights, config, LocalModel("m", source, "huggingface"), tmp_path / "out", "float32")
    found = open_checkpoint(tmp_path / "out")
    assert found.config == config
    assert set(found.tensors) == set(tensors)
    for name, what in tensors.items():
        np.testing.assert_array_equal(found.tensors[name], what)
    with pytest.raises(ConfigError, match="is not empty"):
        export(weights, config, LocalModel("m", source, "huggingface"), tmp_path / "out", "float32")


def test_a_family_whose_checkpoints_are_not_written_is_not_trained(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ROOT / "tests" / "data" / "tiny_phi3"
    shutil.copytree(model, home / "phi3")
    shutil.copyfile(home / "whole" / "tokenizer.json", home / "phi3" / "tokenizer.json")
    command = flags(home, "never", "--model", str(home / "phi3"))
    assert main(command) == 1
    assert "models of the family phi3 are not trained" in capsys.readouterr().err
    assert not (home / "never").exists()
    with pytest.raises(ConfigError, match="family phi3"):
        export({}, FAMILIES["phi3"], LocalModel("m", model, "huggingface"), home / "never")


def test_adapter_is_merged_by_the_command(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = weights_digest(home / "whole", home / "cache").hex()
    LORA.save(adapters(), home / "adapter.safetensors", {"weights": digest})
    command = ["--model", str(home / "whole"), "--adapter", str(home / "adapter.safetensors"), "--dtype", "float32"]
    assert export_main([*command, "--out", str(home / "merged")]) == 0
    base, merged = (load_decoder(home / name, "float32", home / "cache") for name in ("whole", "merged"))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), adapters())
    for name in ("qkv", "out", "gate_up", "down"):
        pair = {part: x[1] for part, x in rounded[name].items()}
        what = np.asarray(getattr(base.layers[1], name)[...]).reshape(-1) + 2.0 * np.tensordot(
            pair["b"], pair["a"], 1
        ).reshape(-1)
        np.testing.assert_allclose(np.asarray(getattr(merged.layers[1], name)[...]).reshape(-1), what, atol=1e-5)
    assert Tokenizer.load(home / "merged").digest == byte_tokenizer().digest
    for out in ("samples.jsonl", "samples.jsonl/x"):
        assert export_main([*command, "--out", str(home / out)]) == 1
        assert f"error: {home / out} cannot be made" in capsys.readouterr().err
    LORA.save(adapters(), home / "base.safetensors", {"weights": digest, "model": str(home / "whole")})
    assert export_main(["--model", str(home / "base.safetensors"), *command[2:], "--out", str(home / "again")]) == 1
    assert "base.safetensors has an adapter itself" in capsys.readouterr().err
    LORA.save(adapters(), home / "other.safetensors", {"weights": "of another model"})
    command[3] = str(home / "other.safetensors")
    assert export_main([*command, "--out", str(home / "again")]) == 1
    assert "trained on other weights" in capsys.readouterr().err


@pytest.mark.long  # writes the packaged model twice, hundreds of megabytes
def test_packaged_model_is_exported_whole(smollm_path: Path, tmp_path: Path) -> None:
    """From GGUF: weights, configuration, tokenizer and chat template come back as they were."""
    made = load_decoder(smollm_path, "bfloat16", tmp_path)
    export(stacked(made), made.config, LocalModel("smol", smollm_path, "gguf"), tmp_path / "out")
    again = load_decoder(tmp_path / "out", "bfloat16", tmp_path)
    assert again.config == made.config
    for x, y in zip(*(jax.tree.leaves(nnx.state(d)) for d in (made, again)), strict=True):
        np.testing.assert_array_equal(x, y)
    old, new = Tokenizer.load(smollm_path), Tokenizer.load(resolve(tmp_path / "out").path)
    assert old.digest == new.digest and old.eos_ids[0] in new.eos_ids and old.add_bos == new.add_bos
    from ragjax.core import Message

    assert old.chat((Message("user", "Hi"),)) == new.chat((Message("user", "Hi"),))


# -------------------------------------------------------------------------------------------- parts


def test_learning_rate_rises_and_falls() -> None:
    schedule = Recipe(lr=1.0, batch=1, epochs=1, warmup=0.1).schedule(100)
    rates = [float(schedule(i)) for i in range(101)]
    assert (
        rates[0] == pytest.approx(1 / 11)
        and rates[10] == pytest.approx(1.0)
        and rates[100] == pytest.approx(0.0, abs=1e-6)
    )
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert float(Recipe(lr=1.0, batch=1, epochs=1, warmup=0.1).schedule(1)(0)) == 1.0


def test_cost_of_a_token_is_six_flops_a_weight(home: Path) -> None:
    count = sum(x.size for n, x in stacked(decoder(config=SMALL))["layers"].items() if "norm" not in n)
    assert Cost.of(SMALL).token == 6 * count
    assert Cost.of(SMALL, whole=False).target == 4 * SMALL.vocab_size * SMALL.hidden_size
    assert Cost.of(SMALL, whole=False, distil=True).token == 6 * count, "two of them the teacher's"


def test_log_forgets_what_is_done_again(tmp_path: Path) -> None:
    with Log(tmp_path / "log.jsonl") as log:
        for step in (1, 2, 3):
            log.write({"step": step})
    with (tmp_path / "log.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    with Log(tmp_path / "log.jsonl", keep_until=2) as log:
        log.write({"step": 3, "again": True})
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_defaults_are_the_presets() -> None:
    needed = ["--model", "m", "--data", "d", "--out", "o"]
    (_, paper, no_lora), (_, small, lora) = (asked([*needed, "--preset", name]) for name in ("paper", "small"))
    assert (paper.lr, paper.batch, paper.epochs, no_lora) == (2e-5, 64, 1, None)
    assert (small.lr, small.batch, lora) == (5e-4, 16, Lora(16, 32.0))
    assert (paper.plain, small.plain) == (0.0, 0.1)  # the paper mixes nothing in
    with pytest.raises(ConfigError, match="--plain-data has no effect with --plain 0 of --preset paper"):
        asked([*needed, "--plain-data", "chats.jsonl"])
    _, mixed, no_lora = asked([*needed, "--preset", "small", "--lora", "0", "--lr", "0.1"])
    assert mixed.lr == 0.1 and no_lora is None
    assert Rows.up_to(paper.row).lengths[-1] == 1024


def test_an_adapter_is_a_model_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by its file it has the merged weights, and another digest, so that KV of one never serves the other."""
    monkeypatch.chdir(home)
    base = resolve("whole")
    about = {"weights": weights_digest(base.path, home / "cache").hex(), "model": "whole"}
    LORA.save(adapters(), home / "graph.safetensors", about)
    model = resolve(home / "graph.safetensors")
    assert model == LocalModel("graph", base.path, "huggingface", home / "graph.safetensors")
    assert (
        export_main(["--model", "whole", "--adapter", "graph.safetensors", "--out", "graph", "--dtype", "float32"]) == 0
    )
    made, merged = load_model(model, "float32", home / "cache"), load_decoder(home / "graph", "float32", home / "cache")
    tokens = jnp.arange(9)
    np.testing.assert_allclose(dense_logits(made, tokens), dense_logits(merged, tokens), rtol=1e-5, atol=1e-5)
    plain = load_model(base, "float32", home / "cache")
    assert np.abs(dense_logits(made, tokens) - dense_logits(plain, tokens)).max() > 0.01

    digests = {model_digest(base, home / "cache"), model_digest(model, home / "cache")}
    LORA.save(adapters(1), home / "graph.safetensors", about)
    digests.add(model_digest(model, home / "cache"))
    assert len(digests) == 3

    identities = set()
    for name in ("whole", "graph.safetensors"):
        with Engine.load(name, dtype="float32", compile=False) as engine:
            identities.add(engine.identity)
    assert len(identities) == 2

    assert main(["--model", "graph.safetensors", "--data", "samples.jsonl", "--out", "again"]) == 1
    for name, header, message in (
        ("lost", {**about, "model": "nowhere"}, "which is not found by this name"),
        ("nested", {**about, "model": str(home / "graph.safetensors")}, "which is one itself"),
        ("nameless", {"weights": about["weights"]}, "names its model"),
    ):
        LORA.save(adapters(), home / f"{name}.safetensors", header)
        with pytest.raises(ConfigError, match=message):
            resolve(home / f"{name}.safetensors")
    LORA.save(adapters(), home / "other.safetensors", {"weights": "00", "model": "whole"})
    with pytest.raises(ConfigError, match="trained on other weights"):
        load_model(resolve(home / "other.safetensors"), "float32", home / "cache")


def test_an_adapter_of_another_shape_is_refused() -> None:
    pairs = {"qkv": {part: np.asarray(value)[:, :1] for part, value in adapters()["qkv"].items()}}
    with pytest.raises(ConfigError, match="the adapter's qkv has shapes"):
        Adapter(pairs, LORA.rank, LORA.alpha, {}).apply(decoder(config=SMALL))
