"""Files of a model with random damage: they are opened, or refused with a ConfigError."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from ragjax.core import ConfigError
from ragjax.models.gguf import read_gguf
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.tokenizer_files import build
from ragjax.models.trained import LORA_FORMAT as ADAPTER
from ragjax.models.trained import PACKET_FORMAT as PACKET
from ragjax.models.trained import Adapter, PacketFile
from ragjax.models.weights import open_checkpoint
from tests.support import tiny
from tests.support.mutation import EXAMPLES, altered, damaged, tried

MODEL = Path(__file__).parents[1] / "data" / "tiny_llama"


def opened_or_refused(path: Path, *opens: Callable[[], object]) -> Callable[[bytes], None]:
    """What writes a file, and opens what it belongs to."""

    def check(data: bytes) -> None:
        path.write_bytes(data)
        for one in opens:
            with suppress(ConfigError):
                one()

    return check


def header_of(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_configurations(tmp_path: Path, examples: int) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    path = folder / "config.json"
    whole = path.read_bytes()

    check = opened_or_refused(path, lambda: open_checkpoint(folder))
    tried(examples, altered(json.loads(whole)) | damaged(whole), check)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_headers_of_weights(tmp_path: Path, examples: int) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    head = header_of(whole)

    check = opened_or_refused(path, lambda: open_checkpoint(folder))
    tried(examples, damaged(whole[:head]), lambda data: check(data + whole[head:]))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_gguf_files(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    check = opened_or_refused(path, lambda: Tokenizer.from_gguf(read_gguf(path)[0]), lambda: open_checkpoint(path))
    tried(examples, damaged(path.read_bytes()), check)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_tokenizers(tmp_path: Path, examples: int) -> None:
    definition = json.loads(tiny.byte_tokenizer()._parsing.to_str())
    definition["model"]["vocab"] = {"a": 0, "b": 1, "ab": 2, "<|end|>": 3}
    definition["model"]["merges"] = [["a", "b"]]
    definition["added_tokens"] = [{**definition["added_tokens"][0], "content": "<|end|>", "id": 3}]
    build(definition)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": "x"}))
    (tmp_path / "config.json").write_bytes((MODEL / "config.json").read_bytes())

    check = opened_or_refused(tmp_path / "tokenizer.json", lambda: Tokenizer.load(tmp_path))
    tried(examples, altered(definition) | damaged(json.dumps(definition).encode()), check)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", [PacketFile, Adapter], ids=lambda kind: kind.__name__)
def test_damaged_packets_and_adapters(tmp_path: Path, kind: type[PacketFile | Adapter], examples: int) -> None:
    path = tmp_path / "a.safetensors"
    ones = np.ones((1, 2, 4), np.float32)
    if kind is PacketFile:
        save_file({"header": ones[0], "trailer": ones[0]}, path, {"format": PACKET})
    else:
        about = {"format": ADAPTER, "lora": json.dumps({"rank": 2, "alpha": 4})}
        save_file({"qkv.a": ones, "qkv.b": ones.swapaxes(1, 2).copy()}, path, about)
    kind.load(path)
    whole = path.read_bytes()
    head = header_of(whole)

    def framed(header: bytes) -> bytes:
        return len(header).to_bytes(8, "little") + header + whole[head:]

    check = opened_or_refused(path, lambda: kind.load(path))
    tried(examples, damaged(whole) | altered(json.loads(whole[8:head])).map(framed), check)
