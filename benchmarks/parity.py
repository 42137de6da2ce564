"""Logits against the reference implementation (transformers, float32), with the same weights.

    python -m benchmarks.parity --check                  our logits against fresh reference logits
    python -m benchmarks.parity --make tests/data        write the stored goldens anew, tiny models included
    python -m benchmarks.parity --make-tokenizer FILE    write the token ids of transformers' tokenizer

The reference runs in an environment and a process of its own, and reads the checkpoint by itself. Checked are the
packaged model on real English text, tiny random models of all families, and, where RAGJAX_QWEN_GGUF names one, a
Qwen2 checkpoint. The exit code is 1 where the logits differ by more than 2e-3 or a likeliest token differs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import envs
from benchmarks.common.machine import cores
from benchmarks.common.report import MODEL, Benchmark, Parser, Session
from benchmarks.latency.prompt import TEXTS
from ragjax.models import hub
from ragjax.models.config import GLM
from ragjax.models.huggingface import GLM4_NAMES, read_config
from ragjax.models.tensors import expected_shapes
from ragjax.models.weights import open_checkpoint
from tests.support.forward import dense_logits

PROMPTS = {"austen": 50, "lincoln": 150, "melville": 400, "carroll": 800, "jefferson": 1500}
"""Text and length in tokens of each prompt."""

TOLERANCE = 2e-3
SAMPLED_IDS = 64  # vocabulary ids whose logits the goldens keep at every position
TINY_TOKENS = 160  # beyond the tiny Llama's original context, so that its RoPE scaling matters

TINY_VOCABULARY = 97

_TINY_COMMON = {
    "vocab_size": TINY_VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip
TINY: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"], "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0, "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "qwen3": {  # heads wider together than the residual stream, as in the larger of the family
        "architectures": ["Qwen3ForCausalLM"], "rope_theta": 1000000.0, "use_sliding_window": False,
        "num_attention_heads": 6, "intermediate_size": 32, "tie_word_embeddings": True,
    },
    "phi3": {  # as Phi-4-mini: three quarters of a head are turned, by LongRoPE
        "architectures": ["Phi3ForCausalLM"], "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 256,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        },
        "pad_token_id": 2, "sliding_window": None, "tie_word_embeddings": True,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "rope_theta": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0, "sliding_window": 256, "pad_token_id": 2,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "rope_theta": 1000000.0, "sliding_window": None,
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24, "tie_word_embeddings": False,
    },
    "qwen3_moe": {  # weights of a token's experts that do not add up to one
        "architectures": ["Qwen3MoeForCausalLM"], "rope_theta": 1000000.0, "use_sliding_window": False,
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    },
    "glm": {  # half of a head is turned, neighbours together
        "architectures": ["GlmForCausalLM"], "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "attention_bias": True, "pad_token_id": 2, "tie_word_embeddings": False,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"], "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "attention_bias": False, "pad_token_id": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What Phi-3 stores as one tensor, and GLM-4 the second of them."""
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

# Without ½, ² or Ⅷ behind a space: from GGUF transformers leaves out the pre-tokenizer that splits them off.
TOKENIZER_TEXTS = [
    "Hello, world! It's the keeper's 3rd lamp; she'll trim it at 04:30.",
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2  # π·r²\n\n\tpass\n",
    "SELECT name, COUNT(*) FROM visits WHERE year >= 1998 GROUP BY name; -- 100%",
    "1 12 123 1234 12345 3.5e-10 1,000,000 0x7f",
    "Маяк стоит на скале. Φάρος. המגדלור. المنارة. प्रकाशस्तंभ ประภาคาร",
    "灯台は岬に立つ。灯塔在岬角上。등대는 곶에 있다.",
    "🦙🚀 👨‍👩‍👧‍👦 🇫🇮 👍🏽 ❤️ naïve café Straße jaźń",
    "  leading,   inner   and trailing spaces   \n\n\n\t\r\nlines",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "almost special: <|im_start <|im_end| and <|endoftext|> at once",
]

Logits = Callable[[Sequence[int]], NDArray[np.float32]]
"""From the tokens of a prompt to the logits of every position, float32 [T, V]."""


@contextmanager
def reference_worker() -> Iterator[envs.Worker]:
    with envs.Worker([envs.python("transformers"), envs.WORKERS / "transformers_worker.py"]) as worker:
        yield worker


def reference(worker: envs.Worker, model: Path, scratch: Path) -> Logits:
    """The reference's logits in float32, by way of files in `scratch`."""
    worker.ask({"op": "load", "model": str(model), "dtype": "float32", "threads": cores()})

    def logits(tokens: Sequence[int]) -> NDArray[np.float32]:
        out = scratch / "logits.npy"
        worker.ask({"op": "logits", "tokens": [int(t) for t in tokens], "out": str(out)})
        found: NDArray[np.float32] = np.load(out, mmap_mode="r")
        out.unlink()  # the mapping stays
        return found

    return logits


def ours(model: Path) -> Logits:
    import jax.numpy as jnp

    from ragjax.models.decoder import Decoder

    checkpoint = open_checkpoint(model)
    decoder = Decoder.from_tensors(checkpoint.config, checkpoint.tensors, jnp.dtype("float32"))
    return lambda tokens: np.asarray(dense_logits(decoder, jnp.asarray(tokens, jnp.int32)))


def encoded_prompts(worker: envs.Worker, model: Path) -> dict[str, list[int]]:
    texts = [(TEXTS / f"{name}.txt").read_text() for name in PROMPTS]
    found = worker.ask({"op": "encode", "model": str(model), "texts": texts})["ids"]
    return {name: ids[:length] for (name, length), ids in zip(PROMPTS.items(), found, strict=True)}


def tiny_tokens(family: str) -> list[int]:
    """A prompt for the tiny model of a family: random ids, as its vocabulary means nothing."""
    return [int(t) for t in _rng(family).integers(0, TINY_VOCABULARY, TINY_TOKENS)]


def _rng(family: str) -> np.random.Generator:
    return np.random.default_rng(list(TINY).index(family))


def tiny_directory(data: Path, family: str) -> Path:
    return data / f"tiny_{family}"


def write_tiny(data: Path, family: str) -> Path:
    """Write a random model as a Hugging Face directory; attention and norms are far from trivial."""
    from safetensors.numpy import save_file

    config = {**_TINY_COMMON, **TINY[family], "model_type": family}
    rng = _rng(family)
    tensors = {name: _random_tensor(rng, name, shape) for name, shape in expected_shapes(read_config(config)).items()}
    if family in ("phi3", *GLM):
        tensors = _fused(tensors, FUSED if family == "phi3" else {"gate_up_proj": FUSED["gate_up_proj"]})
    if family == "glm4":
        theirs = {ours: name for name, ours in GLM4_NAMES.items()}
        tensors = {re.sub(r"\w+_layernorm", lambda m: theirs.get(m[0], m[0]), n): t for n, t in tensors.items()}
    if family in ("mixtral", "qwen3_moe"):
        tensors = dict(_apart(tensors, family))
    directory = tiny_directory(data, family)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _apart(tensors: Mapping[str, NDArray[np.float32]], family: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors with those of each expert by themselves."""
    for name, value in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else name
        before, experts, part = name.partition(".experts.")
        for i, one in enumerate(value) if experts else ():
            module = part.removesuffix(".weight")
            yield f"{before}.experts.{i}.{MIXTRAL[module] if family == 'mixtral' else module}.weight", one.copy()
        if not experts:
            yield name, value


def _fused(
    tensors: Mapping[str, NDArray[np.float32]], fused: Mapping[str, Sequence[str]]
) -> dict[str, NDArray[np.float32]]:
    """The tensors of which some are stored behind one another."""
    whole = {part: fused_name for fused_name, parts in fused.items() for part in parts}
    stored: dict[str, list[NDArray[np.float32]]] = {}
    for name, value in tensors.items():
        module = name.split(".")[-2]
        stored.setdefault(name.replace(module, whole.get(module, module)), []).append(value)
    return {name: np.concatenate(values) for name, values in stored.items()}


def _random_tensor(rng: np.random.Generator, name: str, shape: Sequence[int]) -> NDArray[np.float32]:
    noise = rng.standard_normal(shape)
    if "norm" in name:
        value = 1.0 + 0.2 * noise
    elif name.endswith("bias"):
        value = 0.5 * noise
    elif "embed_tokens" in name:
        value = noise
    else:
        gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
        value = gain * noise / np.sqrt(shape[-1])
    return value.astype(np.float32)


def make(data: Path) -> None:
    model = hub.resolve(MODEL).path
    data.mkdir(parents=True, exist_ok=True)
    with reference_worker() as worker, tempfile.TemporaryDirectory() as scratch:
        tiny: dict[str, NDArray[Any]] = {}
        for family in TINY:
            tokens = tiny_tokens(family)
            logits = reference(worker, write_tiny(data, family), Path(scratch))
            tiny |= {f"{family}/tokens": np.asarray(tokens, np.int32), f"{family}/logits": logits(tokens)}
        np.savez_compressed(data / "parity_tiny.npz", allow_pickle=False, **tiny)
        packaged = packaged_goldens(reference(worker, model, Path(scratch)), encoded_prompts(worker, model))
        np.savez_compressed(data / f"parity_{MODEL}.npz", allow_pickle=False, **packaged)


def packaged_goldens(logits: Logits, prompts: Mapping[str, Sequence[int]]) -> dict[str, NDArray[Any]]:
    """What is kept of the reference: at every position the likeliest token, its logit, the log-sum-exp of all logits
    and those of fixed ids; of the last position everything.
    """
    goldens: dict[str, NDArray[Any]] = {}
    for name, tokens in prompts.items():
        found_TV = logits(tokens)
        ids = np.sort(np.random.default_rng(0).choice(found_TV.shape[1], SAMPLED_IDS, replace=False))
        goldens |= {
            "ids": ids.astype(np.int32),
            f"{name}/tokens": np.asarray(tokens, np.int32),
            f"{name}/last": np.array(found_TV[-1]),
        }
        goldens |= {f"{name}/{key}": value for key, value in summary(found_TV, ids).items()}
    return goldens


def summary(logits_TV: NDArray[np.float32], ids: NDArray[np.integer]) -> dict[str, NDArray[Any]]:
    """`top` int32 [T], `top_logit`, `logsumexp` float32 [T], and `sampled` float32 [T, ids]."""
    top_logit = logits_TV.max(-1)
    log_sum = np.log(np.exp(logits_TV.astype(np.float64) - top_logit[:, None]).sum(-1)) + top_logit
    return {
        "top": logits_TV.argmax(-1).astype(np.int32), "top_logit": top_logit, "logsumexp": log_sum.astype(np.float32),
        "sampled": logits_TV[:, ids],
    }  # fmt: skip


def make_tokenizer(file: Path) -> None:
    """Write texts and the ids that transformers' tokenizer of the packaged model gives them."""
    model = hub.resolve(MODEL).path
    with reference_worker() as worker:
        found = worker.ask({"op": "encode", "model": str(model), "texts": TOKENIZER_TEXTS})
    document = {"texts": TOKENIZER_TEXTS, "ids": found["ids"]}
    file.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Case:
    """A model and the prompts to compare on; None stands for the English prompts."""

    name: str
    path: Path
    prompts: Mapping[str, Sequence[int]] | None = None


def cases(scratch: Path) -> Iterator[Case]:
    """Every model there is on this machine, small ones first."""
    for family in TINY:
        yield Case(f"tiny-{family}", write_tiny(scratch, family), {"random": tiny_tokens(family)})
    yield Case(MODEL, hub.resolve(MODEL).path)
    if os.environ.get("RAGJAX_QWEN_GGUF"):
        yield Case("qwen2", Path(os.environ["RAGJAX_QWEN_GGUF"]))


def check(chosen: Namespace, _: Session) -> list[dict[str, Any]]:
    """One row a prompt: the greatest difference over all positions and tokens, and the share of equal top tokens."""
    rows = []
    with reference_worker() as worker, tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for case in cases(scratch):
            prompts = case.prompts or encoded_prompts(worker, case.path)
            theirs, mine = reference(worker, case.path, scratch), ours(case.path)
            for name, tokens in prompts.items():
                if chosen.quick and len(tokens) > PROMPTS["melville"]:
                    continue
                rows.append({"model": case.name, "prompt": name, **compare(theirs(tokens), mine(tokens))})
                print(rows[-1], file=sys.stderr)
    return rows


def compare(theirs_TV: NDArray[np.float32], mine_TV: NDArray[np.float32]) -> dict[str, Any]:
    """Greatest absolute difference, and share of positions with the same likeliest token."""
    return {
        "tokens": len(theirs_TV),
        "max_abs_diff": max(float(np.abs(a - b).max()) for a, b in zip(theirs_TV, mine_TV, strict=True)),
        "top1": float(np.mean(theirs_TV.argmax(-1) == mine_TV.argmax(-1))),
    }


def options(flags: Parser) -> None:
    task = flags.add_mutually_exclusive_group()
    task.add_argument("--check", action="store_true", help="compare with fresh reference logits (the default)")
    task.add_argument("--make", type=Path, metavar="DIR", help="write the goldens to DIR instead")
    task.add_argument("--make-tokenizer", type=Path, metavar="FILE", help="write the tokenizer's goldens instead")


def refuse(flags: Parser, chosen: Namespace) -> None:
    if (chosen.make or chosen.make_tokenizer) and (chosen.quick or chosen.json):
        flags.error("--quick and --json go with --check")


def differs(rows: Sequence[Mapping[str, Any]], _: Namespace) -> bool:
    return any(row["max_abs_diff"] > TOLERANCE or row["top1"] < 1.0 for row in rows)


COLUMNS = ("model", "prompt", "tokens", "max_abs_diff", "top1")
BENCHMARK = Benchmark("parity", __doc__, COLUMNS, check, options, check=refuse, show=differs)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = BENCHMARK.parse(arguments)
    if chosen.make:
        make(chosen.make)
    elif chosen.make_tokenizer:
        make_tokenizer(chosen.make_tokenizer)
    else:
        return BENCHMARK.main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
