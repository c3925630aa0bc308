"""``rheo calibrate``: learn what tree nodes are worth for a pair of models, and keep it in a small file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from optimized.cli.bench import Questions, numbers
from optimized.cli.console import out, progress_bar
from optimized.cli.options import OUTPUT, PROMPT, SAMPLING, ModelOptions, TreeOptions

TREE_30 = TreeOptions(tree_size=30)  # fewer nodes show less of what fills are worth


def calibrate(
    questions: Questions,
    output: Annotated[Path, typer.Option("--out", help="The JSON file.", rich_help_panel=OUTPUT)],
    models: ModelOptions,
    shape: TreeOptions = TREE_30,
    temperatures: Annotated[str, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = "1,0.6,0",
    limit: Annotated[int, typer.Option(help="Questions per set, spread over it.", min=1, rich_help_panel=PROMPT)] = 10,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Per question and temperature.", rich_help_panel=SAMPLING)
    ] = 64,
    seed: Annotated[int, typer.Option(help="Of the texts.", rich_help_panel=SAMPLING)] = 0,
) -> None:
    """Decode questions with path scores that learn as they go, and write the curves learned."""
    from optimized.bench.questions import read_sets
    from optimized.calibration import Calibrator, save_weights
    from optimized.decoder import RheoDecoder
    from optimized.sampling_params import SamplingParams

    warmth = numbers("--temperatures", temperatures)
    sets = read_sets(questions)
    if output.exists():
        raise ValueError(f"{output} exists already; give --out another name")
    loaded = models.load(shape.config())
    if loaded.drafter is None:
        raise ValueError("--no-draft leaves nothing to calibrate")
    calibrator = Calibrator(source=f"{models.target} with {models.draft or models.target}")
    decoder = RheoDecoder(loaded.target, loaded.drafter, loaded.tokenizer, loaded.config, calibrator=calibrator)
    asked = [question for one in sets for question in one.questions[:limit]]
    with progress_bar("texts") as bar:
        task = bar.add_task("calibrating", total=len(asked) * len(warmth))
        for question in asked:
            prompt = decoder.chat_prompt([{"role": "user", "content": question.turns[0]}])
            for temperature in warmth:
                params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
                decoder.generate([prompt], replace(params, seed=seed))
                bar.advance(task)
    provenance = {
        "target": models.target,
        "draft": models.draft or models.target,
        "dtype": str(loaded.target.dtype).removeprefix("torch."),
        "questions": ", ".join(f"{one.name} {one.digest} ({min(limit, len(one.questions))})" for one in sets),
        "temperatures": temperatures,
        "max_new_tokens": str(max_new_tokens),
        "seed": str(seed),
    }
    save_weights(calibrator.weights(), output, provenance)
    out.print(f"wrote {output}: {calibrator.points} points", markup=False)
