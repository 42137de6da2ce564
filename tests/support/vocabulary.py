"""Tiny tokenizers over the vocabularies of the stored goldens, with a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ragjax.core import Message
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.tokenizer_files import TOKEN_FLAGS

GOLDENS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_goldens.json").read_text("utf-8"))
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{{ '<<SYS>>' + message['content'].strip() + '<</SYS>>' }}{% continue %}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
{% else %}
{% generation %}{{ ' ' + message.content.split('</think>')[-1].strip('\n') + ' ' + eos_token }}{% endgeneration %}
{% endif %}{% endfor %}"""


def tiny(name: str = "smollm", template: str | None = CHATML, **changes: Any) -> Tokenizer:
    metadata = GOLDENS["tiny"][name]["metadata"] | changes
    return Tokenizer.from_gguf(metadata if template is None else metadata | {"tokenizer.chat_template": template})


def gapped() -> Tokenizer:
    """Three tokens whose ids leave a gap, as those of Phi-4-mini do: "a" 0, the end 1, "b" 700."""
    form = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    parts = {"normalizer": None, "pre_tokenizer": form, "post_processor": None, "decoder": form}
    model = {"type": "BPE", "vocab": {"a": 0, "<|end|>": 1, "b": 700}, "merges": []}
    definition = {
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "<|end|>", **TOKEN_FLAGS}],
        **parts,
        "model": model,
    }
    return Tokenizer(definition, special={}, eos_ids=(1,), add_bos=False, chat_template=None)


def user(text: str) -> list[Message]:
    return [Message("user", text)]
