"""One set's questions, answered by every strategy from KV that is warm, beside full attention.

Knowledge is computed without a tenant: chunks by themselves (`naive`), chunks behind their neighbours
(`ragjax preprocess`), and Cache-Craft's variants by past requests. Each measured request is a tenant of its own: it
reads all of that, and what it leaves behind serves no other, so that no setting profits from another's work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from benchmarks.quality import choice, score
from benchmarks.quality.choice import Choice
from benchmarks.quality.dataset import Question, QuestionSet
from benchmarks.quality.similarity import Similarity
from ragjax.core import Answer, Chunk, Hit, Kind, Message, Prompt, Segment, Tokens
from ragjax.engine import Engine
from ragjax.engine.preprocessing import Job, fuse_all
from ragjax.prompting.chat import chat_prompt
from ragjax.quality.report import divergence
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.knowledge import TextEncoder

FORCED = 12  # tokens of the reference answer over which distributions are compared
FUSED = frozenset({"fusion", "fusion+blend", "fusion+craft", "anchor"})
"""Strategies that use preprocessed chunks."""

RECORDED = frozenset({"fusion+craft"})  # strategies that need what preprocessing records besides KV
TAUGHT: Mapping[str, str] = {
    **dict.fromkeys(("craft", "craft-focus", "craft-nobeta", "craft-nocci", "craft-unmoved"), "craft"),
    "set-cache": "set-cache",
}
"""Strategies that live off past requests, and the one by which those are answered."""

PAST_QUESTION = "What do these passages say?"


@dataclass(frozen=True)
class Setting:
    """What is measured on a question. neighbours: how many its chunks were computed behind (0: they stood alone)."""

    strategy: str
    ratio: float | None = None
    neighbours: int = 0

    @property
    def key(self) -> str:
        return f"{self.strategy}/{self.ratio}/{self.neighbours}"


FULL, NAIVE = Setting("full"), Setting("naive")


@dataclass(frozen=True)
class Style:
    """What all requests share."""

    instruction: str | None = None  # system message; None: ragjax's own
    max_tokens: int = 24


class Evaluation:
    """Answers the questions of one set on one engine."""

    def __init__(
        self,
        engine: Engine,
        questions: QuestionSet,
        limit: int,
        encoder: TextEncoder,
        style: Style,
        *,
        whole_corpus: bool = True,
        chunk_tokens: int = 192,
        choices: Mapping[str, Choice] | None = None,
    ):
        """Take the first `limit` questions whose prompt and answer fit the engine's context.

        whole_corpus: whether neighbours come from the whole corpus of the set, or from the passages of the questions
        taken. chunk_tokens: most tokens of a chunk. choices: by question id, what is to be chosen from besides.
        """
        self.engine, self.style, self.name = engine, style, questions.name
        self._choices = choices or {}
        encode = partial(engine.tokenizer.encode, special=False, continued=True)
        self._chunker = Chunker(encode, chunk_tokens)
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        self._behind: dict[tuple[str, int], bytes] = {}
        self.left_out = 0
        self.questions = tuple(self._fitting(questions.questions, limit))
        passages = {p.id: p for question in self.questions for p in question.passages}
        corpus = questions.corpus if whole_corpus else passages
        chunks = [chunk for document in corpus.values() for chunk in self._cut(document.id, corpus)]
        self.similarity = Similarity.of(chunks, encoder)

    # ----------------------------------------------------------------------------------- prompts

    def _fitting(self, questions: Sequence[Question], limit: int) -> Iterator[Question]:
        taken = 0
        for question in questions:
            if taken == limit:
                return
            for passage in question.passages:
                self._cut(passage.id, {passage.id: passage})
            if len(self.prompt(question)) + max(self.style.max_tokens, FORCED) > self.engine.context_length:
                self.left_out += 1
                continue
            taken += 1
            yield question

    def _cut(self, key: str, documents: Mapping[str, Any]) -> tuple[Chunk, ...]:
        if key not in self._chunks:
            self._chunks[key] = self._chunker.chunks(documents[key])
        return self._chunks[key]

    def chunks(self, question: Question) -> list[Chunk]:
        return [chunk for passage in question.passages for chunk in self._chunks[passage.id]]

    def prompt(self, question: Question, neighbours: int = 0) -> Prompt:
        """The prompt as the engine makes it of a chat.

        neighbours: chunks that were preprocessed behind so many are marked as such.
        """
        chunks = self.chunks(question)
        marked = [replace(chunk, behind=self._behind.get((chunk.id, neighbours), b"")) for chunk in chunks]
        return self.chat(question.text, marked)

    def chat(self, text: str, chunks: Sequence[Chunk]) -> Prompt:
        """The prompt of any question over any chunks, with the marks that these have."""
        own = () if self.style.instruction is None else (Message("system", self.style.instruction),)
        prompt = chat_prompt(self.engine.tokenizer, (*own, Message("user", text)), [Hit(c, 1.0) for c in chunks])
        behind = {chunk.id: chunk.behind for chunk in chunks}
        return Prompt(tuple(replace(s, behind=behind.get(s.id, b"")) for s in prompt.segments))

    def continuation(self, question: Question) -> Tokens:
        """The first tokens of the first reference answer, as they would follow the prompt."""
        return self.engine.tokenizer.encode(question.answers[0], special=False, continued=True)[:FORCED]

    @cached_property
    def _system(self) -> Segment:
        return self.chat(PAST_QUESTION, ()).segments[0]

    # --------------------------------------------------------------------------------- knowledge

    def teach(self, strategies: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Past requests, for the strategies that live off them; yields (answered, in all) after each."""
        teachers = list(dict.fromkeys(TAUGHT[name] for name in strategies if name in TAUGHT))
        needed = list(dict.fromkeys(chunk.id for question in self.questions for chunk in self.chunks(question)))
        requests = list(self.similarity.past_requests(needed)) if teachers else []
        for done, chunks in enumerate(requests, 1):
            prompt = self.chat(PAST_QUESTION, chunks)
            for teacher in teachers:
                self.engine.answer_prompt(prompt, strategy=teacher, max_tokens=1)
            yield done, len(requests)

    def prepare(self, question: Question, settings: Sequence[Setting]) -> None:
        """Have everything that the settings read computed and on the device: isolated and fused chunks."""
        record = any(s.strategy in RECORDED for s in settings)
        for n in sorted({s.neighbours for s in settings} - {0}):
            self._preprocess(question, n, record)
        self.engine.answer_prompt(self.prompt(question), strategy="naive", max_tokens=1)

    def _preprocess(self, question: Question, n: int, record: bool) -> None:
        chunks = [chunk for chunk in self.chunks(question) if (chunk.id, n) not in self._behind]
        if not chunks:
            return
        jobs = [
            Job(self._system, _segment(chunk), tuple(map(_segment, self.similarity.neighbours(chunk.id, n))))
            for chunk in chunks
        ]
        for chunk, behind in zip(chunks, fuse_all(self.engine, jobs, record=record), strict=True):
            self._behind[chunk.id, n] = behind

    # ------------------------------------------------------------------------------- measurement

    def ask(self, question: Question, setting: Setting, tenant: str = "") -> Answer:
        return self.engine.answer_prompt(
            self.prompt(question, setting.neighbours), strategy=setting.strategy,
            recompute_ratio=setting.ratio, continuation=self.continuation(question), max_tokens=self.style.max_tokens,
            tenant=tenant + self._tenant(question, setting),
        )  # fmt: skip

    def warm_up(self, settings: Sequence[Setting]) -> None:
        """Run every setting once, untimed: what runs first pays for what is lazy."""
        question = self.questions[0]
        self.prepare(question, settings)
        for setting in settings:
            self.ask(question, setting, tenant="first/")

    def measure(self, question: Question, settings: Sequence[Setting]) -> Iterator[tuple[Setting, dict[str, Any]]]:
        """The sample of each setting on a question, full attention's own first."""
        self.prepare(question, [*settings, NAIVE])
        full, chosen = self._answered(question, FULL)
        yield FULL, sample(question, full, full) | chosen
        for setting in settings:
            if setting != FULL:
                answer, chosen = self._answered(question, setting)
                yield setting, sample(question, answer, full) | chosen

    def _answered(self, question: Question, setting: Setting) -> tuple[Answer, dict[str, Any]]:
        """The answer, and what is measured of the question's choice; the prompt is computed once for both."""
        asked = self._choices.get(question.id)
        if asked is None:
            return self.ask(question, setting), {}
        engine = self.engine
        with engine.compute_kv(
            self.prompt(question, setting.neighbours),
            strategy=setting.strategy,
            recompute_ratio=setting.ratio,
            tenant=self._tenant(question, setting),
        ) as kv:
            answer = engine.generate_with_depkv(
                kv, continuation=self.continuation(question), max_tokens=self.style.max_tokens
            )
            scores = []
            for option in asked.options:
                tokens = engine.tokenizer.encode(option, special=False, continued=True)
                logits_NV = engine.generate_with_depkv(kv, continuation=tokens, max_tokens=1).scores
                assert logits_NV is not None
                scores.append(choice.token_scores(logits_NV, tokens))
        return replace(answer, timings=kv.timings, segments=kv.reports), choice.judged(scores, asked.right)

    def _tenant(self, question: Question, setting: Setting) -> str:
        return f"{self.name}/{question.id}/{setting.key}"


def _segment(chunk: Chunk) -> Segment:
    return Segment(chunk.id, Kind.CHUNK, chunk.tokens, chunk.title)


def sample(question: Question, answer: Answer, full: Answer) -> dict[str, Any]:
    """Everything that is measured on one answer, `full` being full attention's."""
    assert answer.scores is not None and full.scores is not None
    seen = divergence(full.scores, answer.scores)
    if not math.isfinite(seen.kl):
        raise ArithmeticError(f"logits of {question.id} are not finite")
    return {
        "kl": seen.kl, "top1": seen.top1, "em": score.exact_match(answer.text, question.answers),
        "f1": score.f1(answer.text, question.answers), "answered": score.answered(answer.text, question.answers),
        "grounded": score.grounded(answer.text, [f"{p.title} {p.text}" for p in question.passages]),
        "rougeL": score.rouge_l(answer.text, question.answers),
        "rougeL_vs_full": score.rouge_l(answer.text, [full.text]),
        "jaccard_vs_full": score.jaccard(answer.text, full.text), "recomputed_share": recomputed_share(answer),
        "ttft_ms": answer.timings.ttft, "load_ms": answer.timings.load, "prompt_tokens": answer.prompt_tokens,
        "text": answer.text, "notices": list(answer.notices),
    }  # fmt: skip


def recomputed_share(answer: Answer) -> float:
    """Share of the chunks' tokens that were computed in the request."""
    chunks = [report for report in answer.segments if report.score is not None]
    return sum(report.recomputed for report in chunks) / max(1, sum(report.tokens for report in chunks))
