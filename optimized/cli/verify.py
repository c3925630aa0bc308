"""``rheo verify``: evidence that the output is lossless, made anew on this machine; the exit code tells."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from optimized.cli.command import FAILURE
from optimized.cli.console import out, progress_bar
from optimized.cli.demo import CPU_TREE, setting
from optimized.cli.options import MODEL, OUTPUT, LawOptions, ModelOptions, TreeOptions
from optimized.cli.prompts import PromptOptions

if TYPE_CHECKING:
    from optimized.evidence.batched import BatchedCheck
    from optimized.evidence.exact import ExactSummary
    from optimized.evidence.judgement import Judgement
    from optimized.evidence.pair import PairCheck
    from reference.statistics import Block

EVIDENCE = "Evidence"
ALPHA, TOKENS = 1e-6, 2
TOY_DRAWS, PAIR_DRAWS = 120_000, 1_000
DEFAULT_PROMPT = "Write a short story about a lighthouse keeper and a whale."
SHOWN_BLOCKS = 12


@dataclass(frozen=True)
class PairOptions(ModelOptions):
    """The models of one's own; without a target, laws and models that are built in."""

    target: Annotated[
        str,
        typer.Option(
            help="Test this folder, Hugging Face name or the embedded one.",
            show_default="none: built-in laws",
            rich_help_panel=MODEL,
        ),
    ] = ""


def verify(
    prompt: PromptOptions,
    law: LawOptions,
    models: PairOptions,
    shape: TreeOptions = CPU_TREE,
    draws: Annotated[
        int | None,
        typer.Option(
            help="Texts to sample; without --target: blocks of three tokens, for each rule.",
            show_default=f"{PAIR_DRAWS}; {TOY_DRAWS} without --target",
            rich_help_panel=EVIDENCE,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Of each text, so many first tokens are compared.", rich_help_panel=EVIDENCE)
    ] = TOKENS,
    alpha: Annotated[
        float, typer.Option(help="Probability that a lossless decoder fails.", rich_help_panel=EVIDENCE)
    ] = ALPHA,
    seed: Annotated[
        int, typer.Option(help="The first text's; the verdict follows from it.", rich_help_panel=EVIDENCE)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Test that the output is lossless. Exit code 0: every law agrees; 1: one differs, or nothing was tested.

    Without --target: the exact law of the output on built-in rational laws, then the decoder's parts on toy models.
    With --target: the first tokens of texts by these models, against the target's own probabilities.
    """
    from optimized.evidence.judgement import check_alpha
    from optimized.sampling_params import SamplingParams

    check_alpha(alpha)
    SamplingParams(seed=seed)  # refuses what is no seed
    if draws is None:
        draws = PAIR_DRAWS if models.target else TOY_DRAWS
    if models.target:
        record, problems = verify_pair(prompt, law, models, shape, draws, tokens, seed, alpha, as_json)
    else:
        refuse_without_target(prompt, law, models, shape, tokens)
        record, problems = verify_built_in(draws, seed, alpha, as_json)
    if as_json:
        record = {"agrees": not problems, "problems": problems, "alpha": alpha, "seed": seed, **record}
        typer.echo(json.dumps(record, ensure_ascii=False, indent=2))
    elif problems:
        for problem in problems:
            out.print(Text("FAILED  ", style="bold red").append(problem, style="not bold red"))
    else:
        out.print(
            Text("passed", style="bold green").append("  every law agrees, down to the bias seen", style="not bold")
        )
    if problems:
        raise typer.Exit(FAILURE)


def refuse_without_target(
    prompt: PromptOptions, law: LawOptions, models: PairOptions, shape: TreeOptions, tokens: int
) -> None:
    """Options that the built-in laws have no use for.

    Raises:
        ValueError: one of them was given.
    """
    groups: list[tuple[Any, Any]] = [(prompt, PromptOptions()), (law, LawOptions()), (models, PairOptions())]
    for given, default in [*groups, (shape, CPU_TREE)]:
        for item in fields(given):
            if getattr(given, item.name) != getattr(default, item.name):
                raise ValueError(f"{item.name.replace('_', ' ')} is for models, and --target names none")
    if tokens != TOKENS:
        raise ValueError("--tokens is for models, and --target names none")


def verify_built_in(draws: int, seed: int, alpha: float, as_json: bool) -> tuple[dict[str, Any], list[str]]:
    """The exact and the batched tier: what is to be written as JSON, and what is wrong."""
    from optimized.evidence.batched import check_batched, check_draws
    from optimized.evidence.exact import RULES, check_exactly, exact_grid, summarise

    check_draws(draws)
    grid = list(exact_grid())
    with counting("exact laws", "laws", len(grid)) as advance:
        checks = []
        for place in grid:
            checks.append(check_exactly(*place))
            advance(1)
    exact = summarise(checks)
    if not as_json:
        show_exact(exact)
    with counting("sampling toy models", "blocks", draws * len(RULES)) as advance:
        batched = check_batched(draws, seed, alpha, advance)
    if not as_json:
        show_batched(batched, alpha)
    problems = [
        f"{summary.rule}: the law of the output is at total variation {summary.distance} from the target's "
        f"({summary.worst.case}; {summary.worst.config})"
        for summary in exact
        if summary.worst is not None
    ]
    for check in batched:
        if not check.agrees:
            problems.append(f"{check.rule}, {check.case}: {why(check)}")
    record = {"exact": [exact_record(summary) for summary in exact], "batched": [batched_record(c) for c in batched]}
    return record, problems


def verify_pair(
    prompt: PromptOptions,
    law: LawOptions,
    models: PairOptions,
    shape: TreeOptions,
    draws: int,
    tokens: int,
    seed: int,
    alpha: float,
    as_json: bool,
) -> tuple[dict[str, Any], list[str]]:
    """The models' own tier: what is to be written as JSON, and what is wrong."""
    if models.no_draft:
        raise ValueError("--no-draft leaves nothing to test")
    config, params = shape.config(), law.params()
    given = prompt.prompt is not None or prompt.more_prompts or prompt.file is not None
    text = prompt.single() if given else DEFAULT_PROMPT
    decoder = models.load(config)
    from optimized.evidence.pair import check_pair

    encoded = prompt.encode(decoder, [text])[0]
    ids = decoder.tokenizer(encoded)["input_ids"] if isinstance(encoded, str) else encoded
    with counting("sampling texts", "texts", draws) as advance:
        check = check_pair(decoder, ids, params, draws=draws, tokens=tokens, seed=seed, alpha=alpha, progress=advance)

    def text_of(block: Block) -> str:
        return "".join("…" if token < 0 else decoder.tokenizer.decode([token]) for token in block)

    problems = check.problems
    dtype = str(decoder.target.dtype).removeprefix("torch.")
    if problems and dtype != "float32" and check.accepted:
        problems.append(f"in {dtype} rounding alone moves the target's law; --dtype float32 tells whether it is that")
    if not as_json:
        out.print(Text(f"{setting(decoder)}; {config.proposal}, {config.verification}", style="dim"))
        show_pair(check, text, text_of)
    return pair_record(check, text, text_of), problems


@contextmanager
def counting(what: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time that is left; yields what moves it."""
    with progress_bar(unit, remaining=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)


def show_exact(summaries: list[ExactSummary]) -> None:
    """The exact tier as a table."""
    table = titled("Exact: the law of the output against the target's, in rationals", "rule", "m")
    for column in ("laws", "classes of trees", "sequences", "total variation"):
        table.add_column(column, justify="right")
    for summary in summaries:
        distance = Text("0 exactly", "green") if summary.agrees else Text(f"{float(summary.distance):.3g}", "bold red")
        numbers = (summary.laws, summary.classes, summary.sequences)
        leads = "–" if summary.lead_tokens is None else str(summary.lead_tokens)
        table.add_row(summary.rule, leads, *map(str, numbers), distance)
    out.print(table)
    out.print()


def show_batched(checks: list[BatchedCheck], alpha: float) -> None:
    """The batched tier as a table."""
    from optimized.evidence.batched import EVERYTHING

    table = titled("Sampled: three tokens of toy models against the exact law", "rule", "case")
    table.columns[1].no_wrap = True
    for column in ("blocks", "cells", "accepted", "bias seen", "p-value"):
        table.add_column(column, justify="right")
    for check in checks:
        cells = "–" if check.judgement.comparison is None else str(check.judgement.comparison.cells)
        values = (str(check.draws), cells, f"{check.accepted:.2f}", bias(check.judgement))
        style = "bold" if check.case == EVERYTHING else ""
        table.add_row(check.rule, check.case, *values, p_value(check.judgement, check.agrees), style=style)
    out.print(table)
    out.print("accepted: draft tokens per step; topk grows trees without a probe", style="dim")
    out.print(power_note(alpha), style="dim")
    out.print()


def show_pair(check: PairCheck, prompt: str, text_of: Callable[[Block], str]) -> None:
    """The most likely blocks with what was seen of them, and the test of all of them."""
    out.print(Text(f"\n> {' '.join(prompt.split())}", style="bold", overflow="ellipsis", no_wrap=True))
    table = titled(f"The first {check.tokens} tokens of {check.draws} texts", "block")
    for column in ("probability", "expected", "seen"):
        table.add_column(column, justify="right")
    likely = sorted(check.law, key=lambda block: -check.law[block])
    for block in likely[:SHOWN_BLOCKS]:
        probability = check.law[block]
        seen = str(check.counts.get(block, 0))
        table.add_row(repr(text_of(block)), f"{probability:.4f}", f"{check.draws * probability:.1f}", seen)
    if len(likely) > SHOWN_BLOCKS:
        rest = likely[SHOWN_BLOCKS:]
        probability = sum(check.law[block] for block in rest)
        seen = str(sum(check.counts.get(block, 0) for block in rest))
        values = (f"{probability:.4f}", f"{check.draws * probability:.1f}", seen)
        table.add_row(f"{len(rest)} more", *values, style="dim")
    out.print(table)
    out.print("… stands for any token not named at its place", style="dim")
    metrics = check.metrics
    facts = titled("The test")
    facts.show_header = False
    rates = metrics.acceptance_rates
    passes = f"{check.accepted} of {metrics.target_passes} passes accepted a draft token"
    facts.add_row("accepted", passes, f"{100 * rates[0]:.0f} %" if rates else "–")
    facts.add_row("probes", "accepted, of those on the walk", f"{metrics.probe_accepted} of {metrics.probe_offered}")
    cells = "–" if check.judgement.comparison is None else str(check.judgement.comparison.cells)
    facts.add_row("cells", f"named blocks hold {100 * check.named_mass:.0f} % of the mass", cells)
    facts.add_row("bias seen", "smallest total variation between cells", bias(check.judgement))
    agrees = check.judgement.p_value > check.alpha
    facts.add_row("p-value", f"fails at {check.alpha:g} or less", p_value(check.judgement, agrees))
    out.print(facts)
    out.print(power_note(check.alpha), style="dim")
    out.print()


def titled(title: str, *columns: str) -> Table:
    """A table in the style of the others."""
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=None)


def power_note(alpha: float) -> str:
    """What the columns of a statistical table mean."""
    from reference.statistics import POWER

    return f"bias seen: total variation found with probability {POWER}, at {alpha:g} false alarms in all"


def why(check: BatchedCheck) -> str:
    """What speaks against a check that does not agree."""
    if check.judgement.impossible is not None:
        return "a block came up that the target gives probability 0"
    if check.rejected:
        return f"the blocks' law is not the target's (p-value {check.judgement.p_value:.2g})"
    return "no draft token was accepted, so nothing was tested"


def bias(judgement: Judgement) -> str:
    """The detectable bias, a dash where there is none."""
    return "–" if judgement.detectable_tv is None else f"{judgement.detectable_tv:.3f}"


def p_value(judgement: Judgement, agrees: bool) -> Text:
    """The p-value, red where it speaks against the law."""
    return Text(f"{judgement.p_value:.2g}", "green" if agrees else "bold red")


def exact_record(summary: ExactSummary) -> dict[str, Any]:
    """One row of the exact table as plain JSON values."""
    worst = summary.worst and {"case": summary.worst.case, "config": asdict(summary.worst.config)}
    return {
        "rule": summary.rule,
        "lead_tokens": summary.lead_tokens,
        "laws": summary.laws,
        "classes": summary.classes,
        "sequences": summary.sequences,
        "total_variation": str(summary.distance),
        "worst": worst,
    }


def judgement_record(judgement: Judgement) -> dict[str, Any]:
    """One test as plain JSON values."""
    comparison = judgement.comparison
    return {
        "p_value": judgement.p_value,
        "detectable_tv": judgement.detectable_tv,
        "cells": None if comparison is None else comparison.cells,
        "impossible": None if judgement.impossible is None else str(judgement.impossible),
    }


def batched_record(check: BatchedCheck) -> dict[str, Any]:
    """One row of the batched table as plain JSON values."""
    return {
        "rule": check.rule,
        "case": check.case,
        "agrees": check.agrees,
        "draws": check.draws,
        "accepted_per_step": check.accepted,
        **judgement_record(check.judgement),
    }


def pair_record(check: PairCheck, prompt: str, text_of: Callable[[Block], str]) -> dict[str, Any]:
    """The models' test as plain JSON values."""
    from optimized.cli.metrics import metrics_json

    blocks = sorted(check.law.keys() | check.counts.keys(), key=lambda block: -check.law.get(block, 0.0))
    return {
        "prompt": prompt,
        "prompt_tokens": len(check.prompt_token_ids),
        "tokens": check.tokens,
        "draws": check.draws,
        **judgement_record(check.judgement),
        "accepted": check.accepted,
        "named_mass": check.named_mass,
        "blocks": [
            {
                "token_ids": list(block),
                "text": text_of(block),
                "probability": check.law.get(block, 0.0),
                "seen": check.counts.get(block, 0),
            }
            for block in blocks
        ],
        "metrics": metrics_json(check.metrics),
    }
