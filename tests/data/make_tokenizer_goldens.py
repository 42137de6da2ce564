"""Make tokenizer_goldens.json: token ids by llama.cpp, in an environment of its own, for the same vocabularies.

The packaged model's vocabulary is used whole, and cut down to a few hundred tokens under each pre-tokenizer.

python tests/data/make_tokenizer_goldens.py SMOLLM2.gguf QWEN2.gguf PYTHON_WITH_LLAMA_CPP
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from ragjax.models.gguf import read_gguf

TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\t\n \n\n  x",
    "Hello world",
    " Hello, world!",
    "The quick brown fox can't jump; it's over THE lazy dog's 27 fences, they'Ll say.",
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2  # π·r²\n\n\nclass A(B):\n\tpass\n",
    "if (a[i] != '\\0' && b->next) { x += 0x7f; } // done\r\n#include <stdio.h>",
    "0 1 12 123 1234 12345 1234567890 3.5e-10 1,000,000 ½ ² Ⅷ ١٢٣",
    "нещо на Български, Ελληνικά, עברית, العربية, हिन्दी, ไทย",
    "我想在apple工作1314151天～ 日本語のテキスト、한국어 문장",
    "🦙🚀 family: 👨‍👩‍👧‍👦 flag: 🇫🇮 skin: 👍🏽 heart: ❤️",
    "Zażółć gęślą jaźń — naïve café, Straße, ångström",
    "https://example.org/a?b=c&d=%20#e  user_name@mail.example",
    "...!!!???---===```'''\"\"\"   $<=>^~|+",
    "a\u00a0b\u2003c\u200bd\u3000e",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "x<|im_end|>y <|im_end|> <|endoftext|><|im_start|>",
    "<s>[INST] Hi [/INST] there</s> and <unk> more</s>",
    "almost special: <|im_start <|im_end| <s [INST",
]

WORKER = """
import json, sys
from llama_cpp import Llama
texts = json.loads(sys.stdin.read())
model = Llama(sys.argv[1], vocab_only=True, verbose=False)
def ids(text, special):
    return model.tokenize(text.encode(), add_bos=False, special=special)
print(json.dumps([[ids(t, True), ids(t, False)] for t in texts]))
"""

MERGES = 500
MORE = ["1 2", "12 3", "3 4", "5 6", "< |"]  # merges of digits and signs, which pre-tokenizers allow or prevent
WORD = "Hello"  # a token that no merge makes


def byte_level(metadata: Mapping[str, Any], pre: str) -> dict[str, Any]:
    """Bytes and the first merges of the packaged model, as GGUF metadata."""
    tokens, rules = metadata["tokenizer.ggml.tokens"], [*metadata["tokenizer.ggml.merges"][:MERGES], *MORE]
    letters = sorted(token for token in tokens if len(token) == 1)
    merged = dict.fromkeys(rule.replace(" ", "") for rule in rules)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, *merged, WORD]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(names) - 3),
        "tokenizer.ggml.merges": rules,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece(metadata: Mapping[str, Any], space_prefix: bool) -> dict[str, Any]:
    """The same merges as SentencePiece pieces with falling scores, single characters and all bytes."""
    rules = [r for r in metadata["tokenizer.ggml.merges"][:MERGES] if r.replace("Ġ", "").isascii()]
    pieces = dict.fromkeys(rule.replace(" ", "").replace("Ġ", "▁") for rule in rules)
    letters = dict.fromkeys(["▁", *"".join(pieces), *"żółćнещо我日"])
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    head = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    names = [*head, *pieces, *(letter for letter in letters if letter not in pieces)]
    rest = len(names) - len(head)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": [0.0] * len(head) + [float(-rank) for rank in range(rest)],
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 3, *[6] * 256, *[1] * rest],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def write_vocabulary(path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reference(python: str, model: Path, texts: Sequence[str]) -> list[list[list[int]]]:
    """For each text, llama.cpp's ids with special tokens parsed, and without."""
    command = [python, "-c", WORKER, str(model)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    ids: list[list[list[int]]] = json.loads(done.stdout)
    return ids


def make_tokenizer_goldens(smollm2: Path, qwen: Path, python: str, out: Path) -> None:
    """Write the goldens that tests/test_tokenizer.py reads."""
    metadata, _ = read_gguf(smollm2)
    tiny = {pre: byte_level(metadata, pre) for pre in ("default", "gpt-2", "smollm", "llama-bpe", "qwen2")}
    tiny |= {"sentencepiece": sentencepiece(metadata, True), "sentencepiece-no-prefix": sentencepiece(metadata, False)}
    goldens: dict[str, Any] = {
        "texts": TEXTS,
        "packaged": reference(python, smollm2, TEXTS),
        "qwen": reference(python, qwen, TEXTS),
        "tiny": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, vocabulary in tiny.items():
            path = Path(scratch) / f"{name}.gguf"
            write_vocabulary(path, vocabulary)
            goldens["tiny"][name] = {"metadata": vocabulary, "ids": reference(python, path, TEXTS)}
    out.write_text(json.dumps(goldens, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make_tokenizer_goldens(
        Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(__file__).with_name("tokenizer_goldens.json")
    )
