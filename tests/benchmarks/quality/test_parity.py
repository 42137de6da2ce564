"""Our logits and tokens against stored ones of transformers (float32), which `benchmarks.parity` makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import parity
from ragjax.models.decoder import Decoder
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.weights import open_checkpoint
from tests.support.forward import dense_logits
from tests.support.matrix import few

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[2] / "data"

Goldens = Mapping[str, NDArray[Any]]


def load(name: str) -> dict[str, NDArray[Any]]:
    with np.load(DATA / name) as file:
        return dict(file)


@pytest.fixture(scope="module")
def tiny() -> Goldens:
    return load("parity_tiny.npz")


@pytest.fixture(scope="module")
def packaged() -> Goldens:
    return load(f"parity_{parity.MODEL}.npz")


@pytest.fixture(scope="module")
def decoder(smollm_path: Path) -> Decoder:
    checkpoint = open_checkpoint(smollm_path)
    return Decoder.from_tensors(checkpoint.config, checkpoint.tensors, jnp.dtype("float32"))


@pytest.mark.parametrize("family", parity.TINY)
def test_every_family_gives_the_reference_logits(family: str, tiny: Goldens) -> None:
    logits = parity.ours(parity.tiny_directory(DATA, family))
    found = parity.compare(tiny[f"{family}/logits"], logits(tiny[f"{family}/tokens"].tolist()))
    assert found["tokens"] == parity.TINY_TOKENS
    assert found["max_abs_diff"] < 2e-4  # far inside the tolerance: models this small round little
    assert found["top1"] == 1.0


@pytest.mark.parametrize("family", parity.TINY)
def test_tiny_models_are_the_ones_the_script_makes(family: str, tmp_path: Path) -> None:
    made, kept = parity.write_tiny(tmp_path, family), parity.tiny_directory(DATA, family)
    assert {p.name: p.read_bytes() for p in made.iterdir()} == {p.name: p.read_bytes() for p in kept.iterdir()}


@pytest.mark.parametrize("prompt", few(parity.PROMPTS, ["lincoln"]))
def test_packaged_model_gives_the_reference_logits(prompt: str, decoder: Decoder, packaged: Goldens) -> None:
    tokens = packaged[f"{prompt}/tokens"]
    assert len(tokens) == parity.PROMPTS[prompt]
    logits_TV = np.asarray(dense_logits(decoder, jnp.asarray(tokens)))
    np.testing.assert_allclose(logits_TV[-1], packaged[f"{prompt}/last"], rtol=0, atol=parity.TOLERANCE)
    for key, mine in parity.summary(logits_TV, packaged["ids"]).items():
        atol = 0 if key == "top" else parity.TOLERANCE
        np.testing.assert_allclose(mine, packaged[f"{prompt}/{key}"], rtol=0, atol=atol, err_msg=key)


def test_packaged_prompts_are_the_stored_texts(smollm_path: Path, packaged: Goldens) -> None:
    tokenizer = Tokenizer.load(smollm_path)
    for name, length in parity.PROMPTS.items():
        text = (parity.TEXTS / f"{name}.txt").read_text()
        assert packaged[f"{name}/tokens"].tolist() == tokenizer.encode(text, special=False).tolist()[:length]


def test_tokenizer_equals_transformers(smollm_path: Path) -> None:
    goldens = json.loads((DATA / "parity_tokenizer.json").read_text("utf-8"))
    tokenizer = Tokenizer.load(smollm_path)
    assert goldens["texts"] == parity.TOKENIZER_TEXTS
    for text, ids in zip(goldens["texts"], goldens["ids"], strict=True):
        assert tokenizer.encode(text, special=True).tolist() == ids, text


def test_comparison_sees_one_wrong_logit() -> None:
    theirs_TV = np.arange(12, dtype=np.float32).reshape(3, 4)
    mine_TV = theirs_TV.copy()
    mine_TV[1, 0] = 100.0
    found = parity.compare(theirs_TV, mine_TV)
    assert found == {"tokens": 3, "max_abs_diff": 96.0, "top1": pytest.approx(2 / 3)}
