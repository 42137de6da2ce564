"""Real model sizes, and what is run on them without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ragjax.core import Grid, RowShape
from ragjax.models.config import ModelConfig

PAGE = 64
CHUNK, QUESTION = 512, 32
DECODED = 32


def _config(
    family: Any, heads: int, kv: int, layers: int, hidden: int, mlp: int, vocab: int, bias: bool
) -> ModelConfig:
    return ModelConfig(
        family=family, vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp, num_layers=layers, num_heads=heads,
        num_kv_heads=kv, head_dim=hidden // heads, rope_theta=500000.0, rope_scaling=None, norm_eps=1e-5,
        tie_embeddings=False, qkv_bias=bias, qk_norm=False, context_length=32768 + 256, eos_ids=(2,), bos_id=None,
    )  # fmt: skip


LLAMA = _config("llama", 32, 8, 32, 4096, 14336, 128256, False)
QWEN = _config("qwen2", 28, 4, 28, 3584, 18944, 152064, True)
TINY = replace(_config("llama", 8, 2, 4, 64, 96, 320, False), context_length=1024)


@dataclass(frozen=True)
class Setting:
    """What is run. rows: buckets; entries: of every step, and pages of the pool."""

    models: Mapping[str, ModelConfig]
    contexts: tuple[int, ...]
    chunk: int
    question: int
    page: int
    dtype: str
    rows: tuple[int, ...]
    entries: int
    batch_context: int
    runs: int
    decoded: int

    def grid(self, config: ModelConfig) -> Grid:
        """Row buckets that fit the passes measured here; one entry bucket, to compile few programs."""
        # with its padded group a block fills the 128 rows of a kernel
        block = 128 // (1 << (config.num_groups - 1).bit_length())
        rows = (RowShape(8, 1), *(RowShape(n, block) for n in self.rows))
        return Grid(rows=rows, entries=(self.entries,), logits=(1, 8))


FULL = Setting(
    models={"llama-3-8b": LLAMA, "qwen2.5-7b": QWEN},
    contexts=(32768, 16384, 27648, 8192, 4096),
    chunk=CHUNK,
    question=QUESTION,
    page=PAGE,
    dtype="bfloat16",
    rows=(64, 1280, 2560, 4096, 5120),
    entries=640,
    batch_context=4096,
    runs=3,
    decoded=DECODED,
)
REHEARSAL = Setting(
    models={"tiny": TINY},
    contexts=(128,),
    chunk=32,
    question=8,
    page=16,
    dtype="float32",
    rows=(32, 64),
    entries=24,
    batch_context=32,
    runs=1,
    decoded=4,
)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The shapes under transformers' names."""
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.context_length, "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm_eps,
    }  # fmt: skip
