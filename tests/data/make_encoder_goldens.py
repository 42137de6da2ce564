"""Make encoder_goldens.npz: reference embeddings by transformers, in an environment of its own with torch.

python tests/data/make_encoder_goldens.py MODEL_DIRECTORY
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

TEXTS = [
    "What is the capital of France?",
    "Wer hat den Leuchtturm gebaut?",
    "",
    "Keys and values are computed once and reused at any position.\nThey are never rewritten.",
    "def f(x):\n    return x ** 2 + 3.14  # a comment",
    "東京は日本の首都です。 Привет, мир! مرحبا 🙂👩\u200d👩\u200d👧",
    "[CLS] an odd text with [SEP] special tokens [MASK]",
    "The expedition wintered in the bay. " * 6,
    "The expedition wintered in the bay. " * 20,
    "Each night the keeper climbed 212 steps, trimmed the wick, and wrote the weather in a blue ledger. " * 30,
]

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModel.from_pretrained(sys.argv[1], attn_implementation="eager").eval()
rows = []
for text in TEXTS:
    batch = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state[0]
    rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
np.savez_compressed(
    Path(__file__).with_name("encoder_goldens.npz"),
    texts=np.array(TEXTS),
    embeddings=np.stack(rows).astype(np.float32),
)
