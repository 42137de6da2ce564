"""`ragjax gate`: measures every setting on the bundled questions, and says which a budget picks.

Cached KV is warm, but was made in other prompts: before a question is measured, its chunks are asked for in reversed
order. Each setting is a tenant of its own. For strategies that take preprocessed chunks the documents are preprocessed
first, as the server's must be for their figures to hold. Divergence is over the positions that predict the reference
answer. `moved` is measured on conversations: each question's passages as text, in their order, behind a header and a
history that they have not stood behind before. An answer that is labelled exact and is not, and logits that are no
finite numbers, mean that the cache is broken: no report is written then. Each question is also asked with its best
chunk alone, where isolated chunks are exact.

Exit codes: 0, or 1 if no setting lies inside the budget or an exact one is wrong, or 2 if it cannot run as asked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ragjax import core
from ragjax.commands.flags import DEMO, Parser, add_engine_flags, engine_options, exit_code, integer, knowledge
from ragjax.core.registry import meant, strategy_named
from ragjax.engine import Engine
from ragjax.engine.measurement import report_path
from ragjax.engine.preprocessing import preprocess
from ragjax.engine.replay import recomputed_share
from ragjax.prompting.chat import chat_prompt
from ragjax.quality.report import EXACT, MOVED, PREFIX, Budget, Measurement, Report, Setting, divergence
from ragjax.reuse import DEPENDENCY, strategies
from ragjax.reuse.base import Strategy
from ragjax.reuse.naive import PACKET

RATIOS = (0.0, 0.05, 0.15, 0.3)  # recompute ratios measured of selective strategies, besides their own choice
LEAST = 2  # questions of a report
ALONE = 16  # questions that are also asked with one chunk alone
BUNDLED = DEMO / "questions.jsonl"  # questions on the packaged documents
REFERENCE = 16  # most tokens of a reference answer


HOST_GB = 8.0
"""Host memory for KV, of 2^30 bytes; taken as it is needed."""

NEEDED = {PACKET: "an adapter of python -m train.packet as --model"}
"""What a model lacks that these strategies do not serve."""


class BrokenCache(core.RagjaxError):
    """An answer that is labelled exact differs from full attention's, or one's logits are no finite numbers."""


@dataclass(frozen=True)
class Question:
    """A question: its prompt, and tokens of the answer it should get, int32 [n].

    before: what is asked first (None: the same with its chunks reversed).
    """

    prompt: core.Prompt
    reference: core.Tokens
    before: core.Prompt | None = None

    @property
    def turned(self) -> core.Prompt:
        if self.before is not None:
            return self.before
        chunks = [segment for segment in self.prompt.segments if segment.kind is core.Kind.CHUNK]
        return core.Prompt(tuple(chunks.pop() if s.kind is core.Kind.CHUNK else s for s in self.prompt.segments))

    @property
    def alone(self) -> Question:
        chunks = [segment for segment in self.prompt.segments if segment.kind is core.Kind.CHUNK]
        kept = [s for s in self.prompt.segments if s.kind is not core.Kind.CHUNK or s is chunks[0]]
        return replace(self, prompt=core.Prompt(tuple(kept)))


def demo_questions(engine: Engine, limit: int | None = None, file: Path = BUNDLED) -> tuple[Question, ...]:
    def made(text: str, answer: str) -> Question:
        message = core.Message("user", text)
        prompt = chat_prompt(engine.tokenizer, (message,), engine.search(text), public=engine.share_knowledge)
        return Question(prompt, _reference(engine, answer))

    return tuple(made(*entry) for entry in _entries(file, limit))


def conversations(engine: Engine, limit: int | None = None, file: Path = BUNDLED) -> tuple[Question, ...]:
    """Each question as a turn: its passages as text with another question, then behind a header and a history."""

    def made(number: int, earlier: tuple[str, str], entry: tuple[str, str]) -> Question:
        texts = [hit.chunk.text for hit in engine.search(entry[0])]
        before = (core.Message("user", "\n\n".join((*texts, earlier[0]))),)
        header = core.Message("system", f"This is request {number} of the day.")
        history = (core.Message("user", earlier[0]), core.Message("assistant", earlier[1]))
        turn = (header, *history, core.Message("user", "\n\n".join((*texts, entry[0]))))
        prompt, first = (chat_prompt(engine.tokenizer, messages, None) for messages in (turn, before))
        return Question(prompt, _reference(engine, entry[1]), first)

    entries = _entries(file, limit)
    return tuple(made(number, entries[number - 1], entry) for number, entry in enumerate(entries))


def _reference(engine: Engine, answer: str) -> core.Tokens:
    return engine.tokenizer.encode(answer, special=False)[:REFERENCE]


def _entries(file: Path, limit: int | None) -> list[tuple[str, str]]:
    """Questions and their first answers."""
    try:
        entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:limit]]
        for entry in entries:
            answers = entry["answers"]
            if not isinstance(answers, list) or not all(isinstance(one, str) and one.strip() for one in answers):
                raise ValueError("answers must be a list of texts that are not empty")
        return [(str(entry["question"]), entry["answers"][0]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        shape = '{"question": "…", "answers": ["…"]}'
        raise core.ConfigError(f"{file}: each line must be {shape}: {error!r}") from error


def settings_of(
    known: Mapping[str, Strategy], names: Sequence[str] | None = None, ratios: Sequence[float] = RATIOS
) -> tuple[Setting, ...]:
    """Settings to measure of the named strategies (None: all but those of graphs), except `full`, the reference."""
    names = None if names is None else [strategy_named(name) for name in names]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise core.ConfigError(f"unknown strategy {unknown[0]!r}; {meant(unknown[0], known)}")
    chosen = [known[name] for name in names or known if name != "full" and (names or name not in DEPENDENCY)]
    if not chosen:
        raise core.ConfigError("only full is to be measured; name another strategy")
    return tuple(
        Setting(strategy.name, ratio)
        for strategy in chosen
        for ratio in ((None, *ratios) if strategy.selective else (None,))
    )


def measure(
    engine: Engine, questions: Sequence[Question], settings: Sequence[Setting], step: Callable[[], object]
) -> tuple[Measurement, ...]:
    """Measure all settings on all questions; `step` is called after each of `count_answers(...)` answers.

    Raises:
        BrokenCache: if an answer that is labelled exact is not, or logits are no finite numbers.
    """
    seen: dict[Setting, list[core.Divergence]] = {setting: [] for setting in settings}
    ttft_ms: dict[Setting, list[float]] = {setting: [] for setting in settings}
    shares: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for question in questions:
        for setting in _first_of_each(settings):
            _ask(engine, question, setting, turned=True)
            step()
        full = _ask(engine, question, Setting("full"))
        step()
        for setting in settings:
            answer = _ask(engine, question, setting)
            seen[setting].append(_compare(engine, setting, answer, full))
            ttft_ms[setting].append(answer.timings.ttft)
            shares[setting].append(recomputed_share(question.prompt, answer))
            step()
    # with one chunk alone the isolated KV that was made and used so far has to be exact
    for question in [question.alone for question in questions[:ALONE] if question.before is None]:
        full = _ask(engine, question, Setting("full"))
        step()
        for setting in settings:
            _compare(engine, setting, _ask(engine, question, setting), full)
            step()
    return tuple(Measurement.of(one, seen[one], ttft_ms[one], shares[one]) for one in settings)


def count_answers(questions: int, settings: Sequence[Setting]) -> int:
    each = 1 + len(settings)
    return questions * (each + len(_first_of_each(settings))) + min(questions, ALONE) * each


def _first_of_each(settings: Sequence[Setting]) -> list[Setting]:
    return list({setting.strategy: setting for setting in reversed(settings)}.values())


def _ask(engine: Engine, question: Question, setting: Setting, turned: bool = False) -> core.Answer:
    return engine.answer_prompt(
        question.turned if turned else question.prompt,
        strategy=setting.strategy,
        recompute_ratio=setting.ratio,
        continuation=None if turned else question.reference,
        max_tokens=1,
        tenant="" if turned and question.before is None else str(setting),
    )


def _compare(engine: Engine, setting: Setting, answer: core.Answer, full: core.Answer) -> core.Divergence:
    assert answer.scores is not None and full.scores is not None
    found = divergence(full.scores, answer.scores)
    if not np.isfinite(full.scores).all():
        raise core.ConfigError("logits of full attention are no finite numbers: nothing can be compared with them")
    if not np.isfinite(answer.scores).all():
        raise BrokenCache(f"logits of an answer of {setting} are no finite numbers; no report is written")
    if answer.exact_to == "full" and found.kl > EXACT[engine.dtype]:
        raise BrokenCache(
            f"an answer of {setting} is labelled exact, but differs from full attention (KL {found.kl:.3g}); "
            "no report is written"
        )
    return found


def digest(questions: Sequence[Question]) -> str:
    whole = hashlib.sha256()
    for question in questions:
        for tokens in (question.prompt.tokens, question.reference):
            whole.update(len(tokens).to_bytes(8, "little") + np.asarray(tokens, "<i4").tobytes())
    return whole.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("ragjax gate", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    options = _options(argv)
    try:
        report = _measured(options)
    except BrokenCache as error:
        print(f"ragjax gate: THE CACHE IS BROKEN: {error}", file=sys.stderr)
        return 1
    chosen = report.cheapest(options.budget)
    for line in _table(report, options.budget, chosen):
        print(line)
    if options.json is not None:
        document = {**asdict(report), "budget": str(options.budget), "chosen": chosen and asdict(chosen)}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if chosen else 1


def _measured(options: argparse.Namespace) -> Report:
    known = strategies(wrapper=core.Wrapper.of(0, 1, 1))
    settings = settings_of(known, options.strategies)
    storage = core.StorageOptions(host_gb=HOST_GB)  # for KV, fused and isolated, that the device has no room for
    with Engine.load(engine_options(options), knowledge=knowledge(options.knowledge), storage=storage) as engine:
        lacking = [setting.strategy for setting in settings if setting.strategy not in engine.strategies]
        if lacking and options.strategies is not None:
            raise core.ConfigError(f"{lacking[0]} needs {NEEDED[lacking[0]]}")
        settings = tuple(setting for setting in settings if setting.strategy not in lacking)
        names = {setting.strategy for setting in settings}
        if any(known[name].preprocessed for name in names):
            lost = preprocess(engine, record="fusion+craft" in names).lost
            if lost:  # nothing that is measured without them would hold
                raise core.ConfigError(
                    f"the KV of {lost} preprocessed chunks has no room, not in {HOST_GB:g} GiB of host memory either: "
                    "raise --device-cache-gb"
                )
        questions = demo_questions(engine, options.limit, options.questions)
        if len(questions) < LEAST:
            raise core.ConfigError(
                f"{options.questions}: a report takes at least {LEAST} questions, not {len(questions)}"
            )
        talks = conversations(engine, options.limit, options.questions) if MOVED in settings else ()
        settings = tuple(setting for setting in settings if setting != MOVED)
        total = count_answers(len(questions), settings) + 3 * len(talks)
        with tqdm(total=total, desc="measuring", unit="answer") as bar:
            measurements = measure(engine, questions, settings, bar.update)
            moved = measure(engine, talks, (MOVED,), bar.update) if talks else (None,)
        report = Report(
            identity=engine.identity.hex(),
            model=engine.model_name,
            dtype=engine.dtype,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            questions=digest(questions),
            top_k=engine.top_k,
            measurements=measurements,
            conversations=moved[0],
        )
        report.save(report_path(engine.identity))
        return report


def _table(report: Report, budget: Budget, chosen: Setting | None) -> Iterator[str]:
    measured = [*report.measurements, *filter(None, [report.conversations])]
    yield f"{report.model}, {report.dtype}, {measured[0].n} questions of {report.top_k} chunks"
    yield f"{'setting':24} {'KL':>9} {'at most':>9} {'top-1':>6} {'at least':>8} {'TTFT ms':>8} {'share':>6}"
    for one in sorted(measured, key=lambda one: one.ttft_ms):
        mark = "  <- chosen" if one.setting == chosen else ""
        yield (
            f"{one.setting!s:24} {one.kl:9.2e} {one.kl_hi:9.2e} {one.top1:6.3f} {one.top1_lo:8.3f} "
            f"{one.ttft_ms:8.1f} {one.share:6.3f}{mark}"
        )
    yield f"the budget {budget} picks {chosen}" if chosen else f"nothing lies inside the budget {budget}"
    if (said := report.conversations) is not None:
        yield f"conversations get {MOVED if budget.holds(said.kl_hi, said.top1_lo) else PREFIX}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("ragjax gate", "Measure every strategy against full attention on the bundled questions.")
    flag = parser.add_argument
    add_engine_flags(parser, ("model", "dtype", "top_k", "device_cache_gb", "tensor_parallel"))
    flag("--budget", required=True, help='what the server may be off: "KL=0.05", "TOP1=0.95", or both')
    flag("--knowledge", metavar="PATH", help="documents of your own (default: the packaged ones)")
    flag("--questions", type=Path, metavar="FILE", help="questions on them, JSONL of question and answers")
    flag("--strategies", help="measure these alone, with commas between (default: all)")
    flag("--limit", type=integer(LEAST), help="questions (default: all)")
    flag("--json", type=Path, metavar="FILE", help="write the report and the choice there, too")
    options = parser.parse_args(argv)
    if not options.top_k:
        raise core.ConfigError("--top-k must be at least 1: chunks are what the strategies differ in")
    if (options.knowledge is None) != (options.questions is None):
        raise core.ConfigError("give --knowledge and --questions together")
    options.knowledge, options.questions = options.knowledge or "demo", options.questions or BUNDLED
    options.budget = Budget.parse(options.budget)
    if options.strategies is not None:
        options.strategies = tuple(dict.fromkeys(part.strip() for part in options.strategies.split(",")))
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise core.ConfigError(f"--json: {options.json} cannot be written: name a file in a folder that exists")
    return options
