"""A model's own answers under full attention, in place of written ones: the text along which distillation compares.

KV Packet (arXiv 2604.13226) distils along what the model itself says. A written answer of a few words is seldom how the
model begins, and what the model says behind such a beginning is not what it will be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ragjax.core import Answer, Message
from ragjax.engine import Engine
from ragjax.prompting.chat import chat_prompt
from train.example import hits_of
from train.sample import Asked, Sample


def answered(engine: Engine, samples: Sequence[Sample], most: int, step: Callable[[], object]) -> list[Sample]:
    """The samples with greedy answers of up to `most` tokens; `step` is called after each sample.

    Questions that the model answers with nothing are left out, and samples without any other.
    """
    made = []
    for sample in samples:
        asked = list(_asked(engine, sample, most))
        if asked:
            (question, answer), *also = asked
            made.append(replace(sample, question=question, answer=answer, also=tuple(also)))
        step()
    return made


def _asked(engine: Engine, sample: Sample, most: int) -> Iterator[Asked]:
    """The sample's questions, each with the model's answer; they share the passages' KV."""
    hits = hits_of(engine.tokenizer, sample.passages)
    prompts = [
        chat_prompt(engine.tokenizer, (*sample.history, Message("user", asked.question)), hits)
        for asked in sample.asked
    ]
    begun = [engine.begin_prompt(prompt, strategy="prefix", max_tokens=most) for prompt in prompts]
    answers: list[Answer] = [each.result() for each in begun]
    for asked, answer in zip(sample.asked, answers, strict=True):
        if answer.text.strip():
            yield Asked(asked.question, answer.text.strip())
