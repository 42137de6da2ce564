"""Make goldens of sentence encoders by sentence-transformers, in an environment of its own with torch.

PYTHONPATH=. python tests/data/make_encoder_goldens.py MODEL_DIRECTORY

encoder_goldens.npz is of the packaged encoder; encoder_styles.npz of the random ones of tests/support/encoders.py.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from tests.support.encoders import write_encoder

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


def vectors(model: SentenceTransformer, how: str) -> np.ndarray:
    return np.stack([getattr(model, how)(text, convert_to_numpy=True) for text in TEXTS]).astype(np.float32)


if __name__ == "__main__":
    here = Path(__file__).parent
    packaged = SentenceTransformer(sys.argv[1], device="cpu")
    found = vectors(packaged, "encode")
    np.savez_compressed(here / "encoder_goldens.npz", texts=np.array(TEXTS), embeddings=found)
    made = {"texts": np.array(TEXTS)}
    for style in ("bert", "xlm-roberta"):
        for pooling in ("mean", "cls"):
            with tempfile.TemporaryDirectory() as folder:
                model = SentenceTransformer(
                    str(write_encoder(Path(folder), style, pooling, prompts=True)), device="cpu"
                )
                for how in ("encode", "encode_query", "encode_document"):
                    made[f"{style} {pooling} {how}"] = vectors(model, how)
    np.savez_compressed(here / "encoder_styles.npz", **made)
