"""``rheo layer``: how often one layer accepts, measured and by the closed forms, and what a support covers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from optimized.cli.bench import Limit, Questions, Threads, integers, numbers, resolved, row_progress, support_sizes
from optimized.cli.console import out
from optimized.cli.options import OUTPUT, SAMPLING, TREE, ModelOptions
from reference.api import RheoConfig


def layer(
    questions: Questions,
    folder: Annotated[Path, typer.Option("--out", help="Where to write.", file_okay=False, rich_help_panel=OUTPUT)],
    models: ModelOptions,
    branchings: Annotated[str, typer.Option(help="Slots of the node.", rich_help_panel=TREE)] = str(
        RheoConfig.branching
    ),
    lead_tokens: Annotated[
        str, typer.Option("--lead-tokens", "-m", help="Of rheo and rrsw.", rich_help_panel=TREE)
    ] = str(RheoConfig.lead_tokens),
    support: Annotated[
        str, typer.Option(help="Draft logits that make the node's law; full: all.", rich_help_panel=TREE)
    ] = str(RheoConfig.draft_support),
    supports: Annotated[
        str, typer.Option(help="Whose coverage is taken.", rich_help_panel=TREE)
    ] = "32,128,256,1024,full",
    temperatures: Annotated[str, typer.Option(help="Above 0.", rich_help_panel=SAMPLING)] = "1",
    seed: Annotated[int, typer.Option(help="Of texts, contexts and walks.", min=0, rich_help_panel=SAMPLING)] = 0,
    limit: Limit = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Of the texts.", min=2, rich_help_panel=SAMPLING)
    ] = 64,
    contexts: Annotated[int, typer.Option(help="Positions per text.", min=1, rich_help_panel=OUTPUT)] = 4,
    threads: Threads = None,
    walks: Annotated[int, typer.Option(help="Per context and rule.", min=1, rich_help_panel=OUTPUT)] = 1000,
) -> None:
    """Compare top-K, RRSw and Rheo at one node with all slots kept: measured, predicted by the closed forms, at best.

    The contexts are positions of the target's own answers to the first turns.
    """
    from optimized.bench.questions import read_sets

    k, m, warmth = (
        integers("--branchings", branchings),
        integers("--lead-tokens", lead_tokens),
        numbers("--temperatures", temperatures),
    )
    for branching in k:  # refuses before the models are loaded
        for leads in m:
            RheoConfig(lead_tokens=leads, branching=branching, depth=1, tree_size=branching)
    own, covered = support_sizes(support), support_sizes(supports)
    if len(own) != 1:
        raise ValueError(f"--support {support}: one support is wanted; --supports takes several")
    if models.no_draft:
        raise ValueError("--no-draft leaves nothing to measure")
    asked = tuple(replace(one, questions=one.questions[:limit]) for one in read_sets(questions))

    from optimized.bench.running import with_threads

    with with_threads(threads):
        decoder = models.load(RheoConfig())
        from optimized.bench.layer import LayerPlan, measure_layers
        from optimized.bench.layer_report import write_layers

        [own_size], sizes = resolved(own, decoder), resolved(covered, decoder)
        plan = LayerPlan(asked, warmth, k, m, own_size, sizes, contexts, walks, max_new_tokens, seed)
        with row_progress(sum(len(one.questions) for one in asked) * len(warmth), "questions") as progress:
            layers, coverage = measure_layers(decoder, plan, progress)
    dtype = str(decoder.target.dtype).removeprefix("torch.")
    heading = (
        f"# A single layer\n\n{models.target}, {dtype}; support {own_size}; {contexts} contexts of each text of at "
        f"most {max_new_tokens} tokens, {walks} walks each; seed {seed}.\n"
    )
    for table in write_layers(layers, coverage, folder, heading):
        typer.echo(table.markdown())
    out.print(f"wrote layers.md, layers.csv and coverage.csv to {folder}", markup=False)
