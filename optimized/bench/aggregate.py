"""From rows to numbers per question, per set and on average, and paired differences with bootstrap intervals.

The unit of everything statistical is the question: its turns and seeds are one value, so that standard errors and
intervals speak of other questions of the same kind. The average over sets gives every set the same weight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from optimized.bench.methods import GENERATE, PLAIN, SETTINGS, Method
from optimized.bench.rows import Row

AVERAGE = "average"
Question = tuple[str, str]  # set, question_id
Place = tuple[str, str, int, int]  # set, question_id, turn, seed: what two methods are compared at
Values = dict[Question, float]
Measure = Callable[[Sequence[Row]], float]  # of some rows; NaN where they do not tell


def tau(rows: Sequence[Row]) -> float:
    """Sampled acceptance length: emitted tokens over passes."""
    return _ratio(sum(row.emitted or 0 for row in rows), sum(row.passes or 0 for row in rows))


def expected_tau(rows: Sequence[Row]) -> float:
    """Expected acceptance length, the mean over all contexts."""
    with_contexts = [row for row in rows if row.expected_tau is not None]
    total = sum((row.expected_tau or 0.0) * row.contexts_used for row in with_contexts)
    return _ratio(total, sum(row.contexts_used for row in with_contexts))


def tokens_per_second(rows: Sequence[Row]) -> float:
    """Generated tokens over seconds, the prompt's pass included."""
    return _ratio(sum(row.tokens for row in rows), sum(row.seconds for row in rows))


MEASURES: dict[str, Measure] = {"expected_tau": expected_tau, "tau": tau, "tokens_per_second": tokens_per_second}


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error.

    Attributes:
        mean: NaN where there is nothing.
        standard_error: NaN for a single question.
        questions: how many.
    """

    mean: float
    standard_error: float
    questions: int


@dataclass(frozen=True)
class Difference:
    """A mean paired difference.

    Attributes:
        estimate: over questions.
        low, high: 95 % bootstrap interval, see ``bootstrap``; NaN below two questions in a set.
    """

    estimate: Estimate
    low: float
    high: float


class Results:
    """The rows of a file, by method and temperature.

    Args:
        rows: of one file.

    Attributes:
        methods: in the order of the file.
        temperatures: ascending.
        sets: in the order of the file.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        by_place: defaultdict[tuple[Method, float], dict[Place, Row]] = defaultdict(dict)
        for row in rows:
            place = (row.set_name, row.question_id, row.turn, row.seed)
            by_place[row.of_method, row.temperature][place] = row
        self._by_place = dict(by_place)
        names = {name: index for index, name in enumerate(SETTINGS)}
        found = dict.fromkeys(row.of_method for row in rows)
        self.methods = sorted(found, key=lambda method: (names[method.name], *map(_sortable, method.settings.values())))
        self.temperatures = sorted({row.temperature for row in rows})
        self.sets = list(dict.fromkeys(row.set_name for row in rows))

    def baseline(self, temperature: float) -> Method | None:
        """What speed-ups at a temperature are over: ``generate``, else ``plain``; None when neither was measured."""
        return next((m for m in (Method(GENERATE), Method(PLAIN)) if (m, temperature) in self._by_place), None)

    def baselines(self) -> list[str]:
        """The names of what speed-ups are over, at any temperature."""
        found = [self.baseline(temperature) for temperature in self.temperatures]
        return list(dict.fromkeys(method.name for method in found if method is not None))

    def of(self, method: Method, temperature: float) -> list[Row]:
        """All rows of one method at one temperature."""
        return list(self._by_place.get((method, temperature), {}).values())

    def values(self, measure: Measure, method: Method, temperature: float) -> Values:
        """A measure per question."""
        return _per_question(measure, self._by_place.get((method, temperature), {}))

    def speed_ups(self, method: Method, temperature: float) -> Values:
        """Tokens per second over the baseline's, per question, on the turns and seeds that both have."""
        baseline = self.baseline(temperature)
        if baseline is None:
            return {}
        mine, theirs = self._common(method, baseline, temperature)
        fast, slow = _per_question(tokens_per_second, mine), _per_question(tokens_per_second, theirs)
        return {question: fast[question] / slow[question] for question in fast if slow.get(question)}

    def differences(self, measure: Measure, method: Method, other: Method, temperature: float) -> Values:
        """``method`` minus ``other``, per question, on the turns and seeds that both have."""
        mine, theirs = self._common(method, other, temperature)
        first, second = _per_question(measure, mine), _per_question(measure, theirs)
        return {question: first[question] - second[question] for question in first if question in second}

    def partner(self, method: Method, name: str) -> Method | str:
        """The method of that name with the same settings, as far as it has them; or why there is none."""
        shared = [setting for setting in SETTINGS[name] if setting in SETTINGS[method.name]]
        wanted = {setting: getattr(method, setting) for setting in shared}
        found = [
            other
            for other in self.methods
            if other.name == name and all(getattr(other, setting) == value for setting, value in wanted.items())
        ]
        if len(found) == 1:
            return found[0]
        return f"{len(found)} variants of {name} have its settings" if found else f"no {name} has its settings"

    def _common(self, method: Method, other: Method, temperature: float) -> tuple[dict[Place, Row], dict[Place, Row]]:
        mine = self._by_place.get((method, temperature), {})
        theirs = self._by_place.get((other, temperature), {})
        places = mine.keys() & theirs.keys()
        return tuple({place: row for place, row in rows.items() if place in places} for rows in (mine, theirs))  # type: ignore[return-value]


def estimates(values: Values, sets: Sequence[str]) -> dict[str, Estimate]:
    """Mean and standard error per set, and on average over the sets if all of them have values.

    The average's standard error adds those of the sets, which are of different questions and hence independent.
    """
    found = {name: _estimate(part) for name, part in _by_set(values).items()}
    if found and all(name in found for name in sets):
        parts = [found[name] for name in sets]
        found[AVERAGE] = Estimate(
            mean=float(np.mean([part.mean for part in parts])),
            standard_error=math.sqrt(sum(part.standard_error**2 for part in parts)) / len(parts),
            questions=sum(part.questions for part in parts),
        )
    return found


def bootstrap(values: Values, sets: Sequence[str], resamples: int, seed: int) -> dict[str, Difference]:
    """Paired differences per set and on average, with 95 % percentile intervals.

    A mean of n resampled values varies too little by sqrt((n - 1) / n), and its spread is not known but estimated, so
    deviations from the estimate are enlarged by sqrt(n / (n - 1)) in every set, and then by what Student's t has over
    the normal law, with Welch and Satterthwaite's degrees of freedom.

    Args:
        values: a difference per question.
        sets: all sets there are; the average is given if every one has values.
        resamples: how often the questions of every set are drawn anew, with replacement.
        seed: the same one gives the same intervals.
    """
    by_set = _by_set(values)
    rng = np.random.default_rng(seed)
    deviations: dict[str, np.ndarray] = {}
    for name in sets:
        if name in by_set:
            values_here, count = by_set[name], len(by_set[name])
            drawn = values_here[rng.integers(count, size=(resamples, count))].mean(axis=1)
            deviations[name] = (drawn - values_here.mean()) * math.sqrt(count / max(count - 1, 1))
    if len(deviations) == len(sets):
        deviations[AVERAGE] = np.mean([deviations[name] for name in sets], axis=0)
    lonely = {name for name, part in by_set.items() if len(part) < 2}
    found = estimates(values, sets)
    differences = {}
    for name, estimate in found.items():
        if name in lonely or (name == AVERAGE and lonely):
            differences[name] = Difference(estimate, math.nan, math.nan)
            continue
        wider = _student([found[one] for one in (sets if name == AVERAGE else [name])])
        low, high = estimate.mean + wider * np.quantile(deviations[name], [0.025, 0.975])
        differences[name] = Difference(estimate, float(low), float(high))
    return differences


def _student(parts: Sequence[Estimate]) -> float:
    """How much wider a 95 % interval of the parts' sum is than if their spreads were known."""
    variances = [part.standard_error**2 for part in parts]
    if not sum(variances):
        return 1.0
    freedom = sum(variances) ** 2 / sum(v**2 / (part.questions - 1) for v, part in zip(variances, parts, strict=True))
    return float(stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975))


def _estimate(values: np.ndarray) -> Estimate:
    count = len(values)
    error = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Estimate(float(values.mean()), error, count)


def _by_set(values: Values) -> dict[str, np.ndarray]:
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for (name, _), value in sorted(values.items()):
        parts[name].append(value)
    return {name: np.array(part) for name, part in parts.items()}


def _per_question(measure: Measure, rows: Mapping[Place, Row]) -> Values:
    parts: defaultdict[Question, list[Row]] = defaultdict(list)
    for (set_name, question_id, _, _), row in sorted(rows.items()):
        parts[set_name, question_id].append(row)
    values = {question: measure(part) for question, part in parts.items()}
    return {question: value for question, value in values.items() if not math.isnan(value)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _sortable(value: int | str) -> tuple[int, int, str]:
    return (0, value, "") if isinstance(value, int) else (1, 0, value)


def pooled_levels(rows: Iterable[Row]) -> list[float]:
    """[depth] of all passes, the share that accepted a node at level l."""
    rows = list(rows)
    passes = sum(row.passes or 0 for row in rows)
    depth = max((len(row.accepted_per_level) for row in rows), default=0)
    if not passes:
        return []
    return [
        sum(row.accepted_per_level[level] for row in rows if level < len(row.accepted_per_level)) / passes
        for level in range(depth)
    ]


PHASES = ("target", "draft", "sampling", "other")


def milliseconds_per_pass(rows: Iterable[Row]) -> dict[str, float] | None:
    """Where a step's time goes, the target's pass over the prompt left out; None where no pass was timed.

    The time until the first token is taken off the target's share; the drawing of that token is in it and is small. The
    draft reads the prompt behind the first token, and that stays in its share.
    """
    rows = [row for row in rows if row.passes and row.target_seconds is not None]
    passes = sum(row.passes or 0 for row in rows)
    if not passes:
        return None
    sums = {phase: sum(getattr(row, f"{phase}_seconds") or 0.0 for row in rows) for phase in PHASES}
    sums["target"] = max(sums["target"] - sum(row.prompt_seconds for row in rows), 0.0)
    return {phase: 1e3 * seconds / passes for phase, seconds in sums.items()}


def coverage(rows: Iterable[Row]) -> float:
    """Mass of the draft's full law on the support, mean over contexts; NaN without a draft."""
    known = [row for row in rows if row.coverage is not None]
    return _ratio(
        sum((row.coverage or 0.0) * row.contexts_used for row in known), sum(row.contexts_used for row in known)
    )
