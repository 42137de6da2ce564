"""The reference implementation as a worker: logits for parity, time to first token and decode speed for `ttft`.

Runs in the environment `transformers`. It reads GGUF by itself, so that it shares nothing with the code it checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from wire import greedy, serve

GGUF_NAMES = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
ROWS = 256  # positions whose logits are held at once


def from_directory(path: Path) -> PreTrainedModel:
    """A float32 model from a Hugging Face directory; every tensor must be there and used."""
    loaded, account = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",  # others leave out the cap of Gemma 2's attention logits
        output_loading_info=True,
    )
    if any(account.values()):
        raise ValueError(f"{path}: {account}")
    return loaded


def from_gguf(path: Path) -> PreTrainedModel:
    """A float32 model with the dequantised weights of a llama or qwen2 GGUF file."""
    reader = gguf.GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    architecture = values["general.architecture"]
    tied = not any(t.name == "output.weight" for t in reader.tensors)
    config = gguf_config(values, architecture, tied, vocab=reader_tensor(reader, "token_embd.weight").shape[1])
    with no_init_weights():  # every weight is replaced below
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: torch.from_numpy(value) for name, value in gguf_weights(reader, config, architecture)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if tied else set()):
        raise ValueError(f"{path}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def gguf_config(values: Mapping[str, Any], architecture: str, tied: bool, vocab: int) -> PretrainedConfig:
    def of(key: str) -> Any:
        return values[f"{architecture}.{key}"]

    return AutoConfig.for_model(
        {"llama": "llama", "qwen2": "qwen2"}[architecture],
        vocab_size=int(vocab),
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_hidden_layers=of("block_count"),
        num_attention_heads=of("attention.head_count"),
        num_key_value_heads=of("attention.head_count_kv"),
        max_position_embeddings=of("context_length"),
        # stored as float32: the shortest decimal that gives it back is what the checkpoint's author wrote
        rms_norm_eps=float(str(np.float32(of("attention.layer_norm_rms_epsilon")))),
        rope_parameters={"rope_type": "default", "rope_theta": float(of("rope.freq_base"))},
        tie_word_embeddings=tied,
    )


def gguf_weights(
    reader: gguf.GGUFReader, config: PretrainedConfig, architecture: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors under Hugging Face names and in that orientation, float32."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    whole["output.weight"] = "lm_head.weight"
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        value = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in whole:
            yield whole[tensor.name], value
            continue
        _, layer, kind = tensor.name.split(".", 2)
        part, _, suffix = kind.rpartition(".")
        if architecture == "llama" and part in heads:
            value = halves_from_pairs(value, heads[part])
        name = GGUF_NAMES.get(kind) or f"{GGUF_NAMES[part]}.{suffix}"
        yield f"model.layers.{layer}.{name}", value


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from GGUF's order (both components of a rotated pair side by side) to first and second half."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(np.swapaxes(pairs, 1, 2)).reshape(weight.shape)


def reader_tensor(reader: gguf.GGUFReader, name: str) -> gguf.ReaderTensor:
    return next(t for t in reader.tensors if t.name == name)


class Worker:
    model: PreTrainedModel

    def load(self, model: str, dtype: str, threads: int) -> Mapping[str, Any]:
        torch.set_num_threads(threads)
        path = Path(model)
        self.model = None
        loaded = from_gguf(path) if path.suffix == ".gguf" else from_directory(path)
        self.model = loaded.to(getattr(torch, dtype)).eval()
        return {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}

    @torch.inference_mode()
    def logits(self, tokens: list[int], out: str) -> Mapping[str, Any]:
        """Write the logits of every position, float32 [T, V], to the .npy file `out`."""
        hidden = self.model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        shape = (len(tokens), self.model.config.vocab_size)
        file = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        for start in range(0, len(tokens), ROWS):
            found = self.model.lm_head(hidden[start : start + ROWS]).float()
            file[start : start + ROWS] = (found if cap is None else cap * torch.tanh(found / cap)).numpy()
        file.flush()
        return {"shape": shape}

    @torch.inference_mode()
    def generate(self, tokens: list[int], new: int) -> Mapping[str, Any]:
        """Greedy tokens after a prompt by the bare loop over the model, which is faster than `generate()`."""
        kept = None

        def following(*ids: int, **more: Any) -> int:
            nonlocal kept
            out = self.model(input_ids=torch.tensor([ids]), past_key_values=kept, use_cache=True, **more)
            kept = out.past_key_values
            return int(out.logits[0, -1].argmax())

        return greedy(new, lambda: following(*tokens, logits_to_keep=1), following)

    def encode(self, model: str, texts: list[str]) -> Mapping[str, Any]:
        """Token ids of each text, by the tokenizer of a .gguf file or a directory; special tokens in it are parsed."""
        path = Path(model)
        where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        tokenizer = AutoTokenizer.from_pretrained(path.parent if where else path, **where)
        return {"ids": [tokenizer.encode(text, add_special_tokens=False) for text in texts]}


if __name__ == "__main__":
    serve(Worker())
