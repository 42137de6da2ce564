"""Folders of small random sentence encoders, laid out as sentence-transformers does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

Style = Literal["bert", "xlm-roberta"]
HIDDEN, INNER, LAYERS, HEADS, POSITIONS = 24, 40, 2, 4, 40
ALPHABET = "abcdefghijklmnopqrstuvwxyzäéñ水東京приветмир0123456789.,?!:-"
WORDS = ("the", "river", "query", "passage", "keeper", "lamp", "wort", "##ing", "##s", "▁the", "▁river", "▁keeper")
PROMPTS = {"query": "query: ", "document": "passage: "}


def write_encoder(folder: Path, style: Style, pooling: str = "mean", prompts: bool = False, seed: int = 0) -> Path:
    """Write an encoder of random weights. Its folder is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = bert_tokenizer() if style == "bert" else xlm_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": style,
        "architectures": ["BertModel" if style == "bert" else "XLMRobertaModel"],
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS if style == "bert" else POSITIONS + 2,
        "type_vocab_size": 2 if style == "bert" else 1,
        "layer_norm_eps": 1e-12 if style == "bert" else 1e-5,
        "hidden_act": "gelu",
        "pad_token_id": 0 if style == "bert" else 1,
    }
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if style == "bert" else ("<pad>", "<unk>", "<s>", "</s>")
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), names, strict=True))
    modes = {f"pooling_mode_{name}": False for name in ("cls_token", "mean_tokens", "max_tokens")}
    modes[f"pooling_mode_{pooling}_token" + ("s" if pooling == "mean" else "")] = True
    module = "sentence_transformers.models."
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    _write(folder / "config.json", config)
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": POSITIONS, "do_lower_case": False})
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, **modes})
    _write(
        folder / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": module + name} for i, (path, name) in enumerate(parts)],
    )
    if prompts:
        _write(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    rng = np.random.default_rng(seed)
    shapes = encoder_shapes(config)
    save_file({name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    return folder


def encoder_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of an encoder's tensors, in the order in which random numbers are drawn."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
        "embeddings.position_ids": (1, config["max_position_embeddings"]),
        "pooler.dense.weight": (hidden, hidden),
        "pooler.dense.bias": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        for name, n_out, n_in in (
            ("attention.self.query", hidden, hidden),
            ("attention.self.key", hidden, hidden),
            ("attention.self.value", hidden, hidden),
            ("attention.output.dense", hidden, hidden),
            ("intermediate.dense", inner, hidden),
            ("output.dense", hidden, inner),
        ):
            shapes[f"encoder.layer.{i}.{name}.weight"] = (n_out, n_in)
            shapes[f"encoder.layer.{i}.{name}.bias"] = (n_out,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"encoder.layer.{i}.{name}.weight"] = shapes[f"encoder.layer.{i}.{name}.bias"] = (hidden,)
    return shapes


def bert_tokenizer() -> Tokenizer:
    """WordPiece of letters and a few words."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *ALPHABET, *(f"##{one}" for one in ALPHABET), *WORDS[:9]]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return made


def xlm_tokenizer() -> Tokenizer:
    """Unigrams of letters and a few words, as SentencePiece cuts them."""
    pieces = dict.fromkeys(["▁", *ALPHABET, *WORDS[9:]])
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    made = Tokenizer(models.Unigram([*special, *((piece, -1.0 - i / 100) for i, piece in enumerate(pieces))], unk_id=3))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    ends = [("<s>", 0), ("</s>", 2)]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return made


def _write(path: Path, given: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(given))
