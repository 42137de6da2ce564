"""What config.json of Gemma 2 says beside the fields that all families have.

Source: transformers' Gemma2Config, whose defaults hold where the file is silent; arXiv 2408.00118, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragjax.models.fields import check, flag, integer, number

FIELDS = frozenset(
    {
        *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "hidden_activation"),
        *("cache_implementation", "use_bidirectional_attention"),
    }
)
"""Fields that are read here, or say nothing of the computation."""

HEAD_DIM, WINDOW = 256, 4096
ATTENTION_CAP, LOGIT_CAP = 50.0, 30.0


def read_gemma(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig`. Raises ConfigError that names the field which cannot be honoured."""
    activation = mapping.get("hidden_activation") or "gelu_pytorch_tanh"
    check(activation == "gelu_pytorch_tanh", "hidden_activation", activation, "'gelu_pytorch_tanh'")
    both_ways = flag(mapping, "use_bidirectional_attention")
    check(not both_ways, "use_bidirectional_attention", both_ways, "false")
    return {
        "activation": "gelu",
        "post_norms": True,
        "embedding_scale": integer(mapping, "hidden_size") ** 0.5,
        "query_scalar": number(mapping, "query_pre_attn_scalar", HEAD_DIM),
        "attention_cap": _cap(mapping, "attn_logit_softcapping", ATTENTION_CAP),
        "logit_cap": _cap(mapping, "final_logit_softcapping", LOGIT_CAP),
        "tie_embeddings": mapping.get("tie_word_embeddings") is None or flag(mapping, "tie_word_embeddings"),
    }


def _cap(mapping: Mapping[str, Any], key: str, default: float) -> float | None:
    """A cap; None if the file says null, the default if it says nothing."""
    return None if key in mapping and mapping[key] is None else number(mapping, key, default)
