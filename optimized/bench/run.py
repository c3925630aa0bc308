"""The run itself: every question by every method, interleaved, row after row into the file."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from optimized.bench.contexts import CommonContexts, ContextValues, choose_positions
from optimized.bench.methods import GENERATE, PLAIN, SETTING_NAMES, Method
from optimized.bench.provenance import Provenance
from optimized.bench.questions import Question, QuestionSet, first_prompts
from optimized.bench.randomness import derived_seed
from optimized.bench.rows import Key, Row, RunSettings, crc, key_of
from optimized.bench.running import Answer, MethodRunner, collector_off
from optimized.bench.store import RowStore
from optimized.decoder import RheoDecoder
from optimized.outputs import GenerationError
from optimized.sampling_params import SamplingParams

WARM_UP_TOKENS = 8
Progress = Callable[[str], None]  # is told what has been measured, once per row that was still to do


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        sets: of questions, already cut to those wanted.
        methods: with their settings.
        temperatures: of the requests.
        seeds: of the run.
        max_new_tokens: per turn.
        contexts: positions of a text for the expected acceptance length; 0 leaves it out.
        batch_size: how many questions of a set are asked side by side.
        min_new_tokens: per turn.
    """

    sets: tuple[QuestionSet, ...]
    methods: tuple[Method, ...]
    temperatures: tuple[float, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int
    contexts: int
    batch_size: int = 1
    min_new_tokens: int = 0

    def conversations(self) -> Iterator[tuple[int, tuple[Question, ...], float, int]]:
        """(turns of their set and temperature before them, questions, temperature, seed): every set's first questions
        before any later ones, so that a run that is stopped has measured all sets about equally far.
        """
        before: Counter[tuple[str, float]] = Counter()
        longest = max(len(one.questions) for one in self.sets)
        for seed in self.seeds:
            for place in range(0, longest, self.batch_size):
                for one in self.sets:
                    if group := one.questions[place : place + self.batch_size]:
                        for temperature in self.temperatures:
                            yield before[one.name, temperature], group, temperature, seed
                            before[one.name, temperature] += _turns(group)

    def keys(self) -> list[Key]:
        """All keys that a finished file has."""
        return [
            key_of(question.set_name, question.question_id, turn, method, temperature, seed)
            for _, group, temperature, seed in self.conversations()
            for question in group
            for turn in range(1, len(question.turns) + 1)
            for method in self.methods
        ]


NOTHING = Answer((), "", "length", 0.0, 0.0, None)  # of a method that was not asked to write


class Bench:
    """Measures a plan.

    Args:
        decoder: holds the models; its own configuration is not used.
        plan: what to measure.
        settings: of the run, as the rows will say them.
        provenance: of this software, likewise.

    Raises:
        ValueError: see ``first_prompts``.
    """

    def __init__(self, decoder: RheoDecoder, plan: Plan, settings: RunSettings, provenance: Provenance) -> None:
        first_prompts(decoder, [question for one in plan.sets for question in one.questions])
        self.decoder, self.plan, self.settings, self.provenance = decoder, plan, settings, provenance
        self.runner = MethodRunner(decoder, plan.batch_size)
        self.timed = settings.texts == "timed"

    def run(self, store: RowStore, progress: Progress = lambda what: None) -> int:
        """Measure every row that the file does not have yet; returns how many these were.

        Raises:
            ValueError: a question that cannot be asked, say because it is longer than the model's context.
            RuntimeError: a model failed at a question.
        """
        written, warm = 0, False
        digests = {one.name: one.digest for one in self.plan.sets}
        with collector_off():
            for before, group, temperature, seed in self.plan.conversations():
                if self.timed and not warm and self._missing(group, 1, temperature, seed, store.done):
                    self.warm_up(max((group for _, group, _, _ in self.plan.conversations()), key=len), temperature)
                    warm = True
                try:
                    for row in self.conversation(before, group, temperature, seed, store.done, progress):
                        store.append(replace(row, questions=digests[row.set_name]))
                        written += 1
                except (ValueError, GenerationError) as error:
                    asked = ", ".join(question.question_id for question in group)
                    what = f"set {group[0].set_name}, question {asked}: {error}"
                    raise (ValueError if isinstance(error, ValueError) else RuntimeError)(what) from error
        return written

    def backend_of(self, method: Method) -> str:
        """What does a method's sampling side in this run, as its rows say it."""
        return self.runner.backend_of(method) if self.timed else "torch"

    def warm_up(self, group: Sequence[Question], temperature: float) -> None:
        """Every method once, for nothing."""
        prompts = [self.decoder.chat_prompt([_said("user", question.turns[0])]) for question in group]
        params = SamplingParams(temperature=temperature, seed=0, max_new_tokens=WARM_UP_TOKENS)
        for method in self.plan.methods:
            self.runner.run_batch(method, prompts, [params] * len(group))

    def conversation(
        self,
        before: int,
        group: Sequence[Question],
        temperature: float,
        seed: int,
        done: set[Key],
        progress: Progress,
    ) -> Iterator[Row]:
        """The missing rows of some conversations side by side, turn by turn; ``before`` turns the methods' order has
        been rotated.
        """
        messages: dict[Question, list[dict[str, str]]] = {question: [] for question in group}
        for turn in range(1, _turns(group) + 1):
            if not self._missing(group, turn, temperature, seed, done):
                return
            asked = [question for question in group if turn <= len(question.turns)]
            prompts, params = [], []
            for question in asked:
                messages[question].append(_said("user", question.turns[turn - 1]))
                prompts.append(self.decoder.chat_prompt(messages[question]))
                own = derived_seed(seed, question.set_name, question.question_id, turn)
                params.append(
                    SamplingParams(
                        temperature=temperature,
                        seed=own,
                        max_new_tokens=self.plan.max_new_tokens,
                        min_new_tokens=self.plan.min_new_tokens,
                    )
                )

            nothing = [NOTHING] * len(asked)
            answers: dict[Method, list[Answer]] = {}
            places: dict[Method, int] = {}
            todo: set[tuple[Method, Question]] = set()
            for place, method in enumerate(rotated(self.plan.methods, before + turn - 1)):
                missing = [
                    question
                    for question in asked
                    if key_of(question.set_name, question.question_id, turn, method, temperature, seed) not in done
                ]
                if missing:
                    gc.collect()  # between the measurements, as it is turned off while they run
                    answers[method] = self.runner.run_batch(method, prompts, params) if self.timed else nothing
                    places[method] = place
                    for question in missing:
                        todo.add((method, question))
                        progress(f"{question.set_name} {question.question_id}, {method.label()}")
            # The common texts: what the contexts lie on, and what the conversations go on with.
            plain = answers.get(Method(PLAIN), nothing)
            needed = self.plan.contexts or any(turn < len(question.turns) for question in asked)
            if needed and plain[0] is NOTHING:
                plain = self.runner.run_batch(Method(PLAIN), prompts, params)
            for index, question in enumerate(asked):
                seed_here = params[index].resolved_seed()
                values = self._at_contexts(list(answers), prompts[index], plain[index], temperature, seed_here)
                for method, given in answers.items():
                    if (method, question) in todo:
                        where = (question, turn, method, temperature, seed)
                        yield self._row(*where, len(prompts[index]), given[index], values[method], places[method])
                messages[question].append(_said("assistant", plain[index].text))

    def _missing(
        self, group: Sequence[Question], first_turn: int, temperature: float, seed: int, done: set[Key]
    ) -> bool:
        """Whether a row of this or of a later turn is still to do."""
        return any(
            key_of(question.set_name, question.question_id, turn, method, temperature, seed) not in done
            for question in group
            for turn in range(first_turn, len(question.turns) + 1)
            for method in self.plan.methods
        )

    def _at_contexts(
        self, methods: Sequence[Method], prompt: Sequence[int], plain: Answer, temperature: float, seed: int
    ) -> dict[Method, ContextValues]:
        """Every method at the common contexts; those without trees emit one token a pass."""
        positions = choose_positions(len(plain.token_ids), self.plan.contexts, derived_seed(seed, "positions"))
        values: dict[Method, ContextValues] = {}
        drafter, contexts = self.decoder.drafter, None
        for method in methods:
            config = method.config()
            if config is None or not positions:
                values[method] = ContextValues((1.0,) * len(positions), ())
                continue
            if config.tree_size == "auto":  # what it keeps goes by a clock, and there is none here
                values[method] = ContextValues((), ())
                continue
            assert drafter is not None  # `rheo bench` loads one where a method drafts
            if contexts is None:
                where = (self.decoder.target, prompt, plain.token_ids, positions, temperature)
                contexts = CommonContexts(*where, drafter.feature_layers, self.plan.min_new_tokens)
            values[method] = contexts.measure(drafter, config, derived_seed(seed, "contexts"))
        return values

    def _row(
        self,
        question: Question,
        turn: int,
        method: Method,
        temperature: float,
        seed: int,
        prompt_tokens: int,
        answer: Answer,
        values: ContextValues,
        place: int,
    ) -> Row:
        counted = answer.metrics
        phases = None if counted is None else (counted.target_seconds, counted.draft_seconds, counted.sampling_seconds)
        passes = None if counted is None else counted.target_passes
        emitted = None if counted is None else counted.emitted_tokens
        return Row(
            set_name=question.set_name,
            question_id=question.question_id,
            turn=turn,
            method=method.name,
            **{name: getattr(method, name) for name in SETTING_NAMES},
            temperature=temperature,
            seed=seed,
            category=question.category,
            prompt_tokens=prompt_tokens,
            tokens=len(answer.token_ids),
            passes=passes,
            emitted=emitted,
            tau=emitted / passes if emitted and passes else None,
            expected_tau=fmean(values.expected_lengths) if values.expected_lengths else None,
            contexts_used=len(values.expected_lengths),
            offered_per_level=() if counted is None else tuple(counted.offered_per_level),
            accepted_per_level=() if counted is None else tuple(counted.accepted_per_level),
            probes_offered=0 if counted is None else counted.probe_offered,
            probes_accepted=0 if counted is None else counted.probe_accepted,
            coverage=fmean(values.coverage) if values.coverage else None,
            seconds=answer.seconds,
            tokens_per_second=len(answer.token_ids) / answer.seconds if answer.seconds else 0.0,
            prompt_seconds=answer.prompt_seconds,
            target_seconds=None if phases is None else phases[0],
            draft_seconds=None if phases is None else phases[1],
            sampling_seconds=None if phases is None else phases[2],
            other_seconds=None if phases is None else answer.seconds - sum(phases),
            finish_reason=answer.finish_reason,
            text_crc=crc(answer.token_ids),
            place=place,
            backend=self.backend_of(method),
            **vars(self.settings),
            questions="",  # the caller knows the file
            version=self.provenance.version,
            commit=self.provenance.commit,
        )


def rotated(methods: Sequence[Method], by: int) -> list[Method]:
    """The methods, another one first each time, so that none always runs on the machine that the same one left."""
    by %= len(methods)
    return [*methods[by:], *methods[:by]]


def needs_draft(methods: Sequence[Method]) -> bool:
    """Whether any of the methods drafts."""
    return any(method.name not in (PLAIN, GENERATE) for method in methods)


def _turns(group: Sequence[Question]) -> int:
    """Of the longest conversation."""
    return max(len(question.turns) for question in group)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
