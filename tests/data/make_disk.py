"""Make `disk/`: entries of the disk tier as commit 3d7027d wrote them, raw and int8, with the tokenizer they are of.

Run with a checkout of that commit as working directory: python …/tests/data/make_disk.py
`tests/store/test_format.py` asks today's code the same questions.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

from ragjax import Engine, Kind, Prompt, Segment, StorageOptions

DATA = Path(__file__).parent
HOME = DATA / "disk"
ENCODINGS = ("raw", "int8")


def model(folder: Path) -> Path:
    """The tiny Llama with a tokenizer of single characters."""
    folder.mkdir(parents=True)
    for source in (DATA / "tiny_llama", HOME / "tokenizer"):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def write_tokenizer() -> None:
    """A tokenizer of the 95 printable ASCII characters, and two special tokens before them."""
    special = [{"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False} for i, text in enumerate(("<s>", "</s>"))]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {"<s>": 0, "</s>": 1, "Ġ": 2} | {chr(33 + i): 3 + i for i in range(94)}
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
           "merges": []}  # fmt: skip
    definition = {"version": "1.0", "added_tokens": special, "normalizer": None, "pre_tokenizer": level,
                  "post_processor": None, "decoder": level, "model": bpe}  # fmt: skip
    template = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    config = {"eos_token": "</s>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = HOME / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def prompts() -> list[tuple[str, str, Prompt]]:
    """(strategy, tenant, prompt) of every entry: causal, isolated, and dependency nodes; one of a tenant's own."""
    random = np.random.default_rng(7)

    def tokens(n: int) -> np.ndarray:
        return random.integers(2, 97, n).astype(np.int32)

    def segment(name: str, kind: Kind, n: int) -> Segment:
        return Segment(name, kind, tokens(n), title=name)

    system, question = segment("system", Kind.SYSTEM, 9), segment("question", Kind.JOIN, 7)
    chunks = (segment("a", Kind.CHUNK, 17), segment("b", Kind.CHUNK, 12))
    nodes: list[Segment] = []
    for tree in "xy":  # a root after the system, and two branches of it
        root = 1 + len(nodes)
        nodes += [
            Segment(tree, Kind.NODE, tokens(n), title=tree, depends=on)
            for n, on in ((6, None), (4, (root,)), (5, (root,)))
        ]
    linear = Prompt((system, *chunks, question))
    return [
        ("prefix", "", linear),
        ("naive", "", linear),
        ("prefix", "acme", Prompt((system, question))),
        ("dependency", "", Prompt((system, *nodes, question))),
    ]


def ask(folder: Path, disk: Path | None, encoding: str) -> list[object]:
    """Every prompt's answer, by an engine of the model in `folder` over entries in `disk`."""
    storage = StorageOptions(disk=disk, disk_gb=1.0, at_rest=encoding)
    with Engine.load(
        folder, knowledge=None, dtype="float32", device_cache_gb=0.01, compile=False, progress=False, storage=storage
    ) as engine:
        return [
            engine.answer_prompt(prompt, strategy=strategy, tenant=tenant, max_tokens=1, want_logits=True)
            for strategy, tenant, prompt in prompts()
        ]


if __name__ == "__main__":
    write_tokenizer()
    with tempfile.TemporaryDirectory() as scratch:
        made = model(Path(scratch) / "tiny")
        for encoding in ENCODINGS:
            shutil.rmtree(HOME / encoding, ignore_errors=True)
            ask(made, HOME / encoding, encoding)
