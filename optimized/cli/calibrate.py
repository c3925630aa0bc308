"""``rheo calibrate``: learn what tree nodes are worth for a pair of models, and keep it in a small file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from optimized.cli.bench import Limit, Questions, Threads, numbers
from optimized.cli.console import out, progress_bar
from optimized.cli.options import OUTPUT, SAMPLING, ModelOptions, TreeOptions

TREE_30 = TreeOptions(tree_size="30")  # fewer nodes show less of what fills are worth


def calibrate(
    questions: Questions,
    output: Annotated[Path, typer.Option("--out", help="The JSON file.", rich_help_panel=OUTPUT)],
    models: ModelOptions,
    shape: TreeOptions = TREE_30,
    temperatures: Annotated[str, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = "1,0.6,0",
    limit: Limit = 10,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", "-n", help="Per question and temperature.", min=2, rich_help_panel=SAMPLING),
    ] = 64,
    seed: Annotated[int, typer.Option(help="Of the texts.", min=0, rich_help_panel=SAMPLING)] = 0,
    threads: Threads = None,
) -> None:
    """Decode questions with path scores that learn as they go, and write the curves learned.

    With --weights it goes on from those of a file.
    """
    from optimized.bench.questions import first_prompts, read_sets
    from optimized.bench.randomness import derived_seed
    from optimized.bench.running import with_threads
    from optimized.calibration import Calibrator, prior_weights, save_weights
    from optimized.sampling_params import SamplingParams

    warmth = numbers("--temperatures", temperatures)
    sets = read_sets(questions)
    if output.exists():
        raise ValueError(f"{output} exists already; give --out another name")
    if shape.proposal == "static":
        raise ValueError("a static tree has no weights to calibrate")
    if shape.tree_size == "auto":
        raise ValueError("--tree-size auto keeps what pays; curves are learned best from trees of one size, say 30")
    if models.no_draft:
        raise ValueError("--no-draft leaves nothing to calibrate")
    config = shape.config(prior_weights())
    prior = config.weights
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = models.draft or models.target
    calibrator = Calibrator(prior, f"{models.target} with {draft}")
    asked = [question for one in sets for question in one.questions[:limit]]
    with with_threads(threads):
        decoder = models.load(config, calibrator)
        prompts = first_prompts(decoder, asked)
        with progress_bar("texts") as bar:
            task = bar.add_task("calibrating", total=len(asked) * len(warmth))
            for question, prompt in zip(asked, prompts, strict=True):
                own = derived_seed(seed, question.set_name, question.question_id, 1)
                params = SamplingParams(seed=own, max_new_tokens=max_new_tokens)
                for temperature in warmth:
                    decoder.generate([prompt], replace(params, temperature=temperature))
                    bar.advance(task)
    provenance = {
        "target": models.target,
        "draft": draft,
        "dtype": str(decoder.target.dtype).removeprefix("torch."),
        "questions": ", ".join(f"{one.name} {one.digest} ({len(one.questions[:limit])})" for one in sets),
        "trees": f"m {config.lead_tokens}, {config.probes} probes, K {config.branching}, {config.depth} levels, "
        f"{config.budget} nodes, support {config.draft_support}",
        "temperatures": temperatures,
        "max_new_tokens": str(max_new_tokens),
        "seed": str(seed),
        "began_with": calibrator.prior.source,
    }
    save_weights(calibrator.weights(), output, provenance)
    out.print(f"wrote {output}: {calibrator.points} points", markup=False)
