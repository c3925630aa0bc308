"""``rheo tree``: one draft tree and what verification made of it, as a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from optimized.cli.console import out, working
from optimized.cli.options import OUTPUT, ModelOptions, SamplingOptions, TreeOptions
from optimized.cli.prompts import PromptOptions
from optimized.drawing import draw_tree, terminal_legend, tree_nodes, tree_svg


def tree(
    prompt: PromptOptions,
    sampling: SamplingOptions,
    shape: TreeOptions,
    models: ModelOptions,
    step: Annotated[
        int, typer.Option(help="Which step's tree to draw, of those with a draft.", rich_help_panel=OUTPUT)
    ] = 1,
    svg: Annotated[
        Path | None, typer.Option(help="Write an SVG file as well.", dir_okay=False, rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Draw one draft tree: roles, weights, the probe's two probabilities, the accepted path and the bonus token."""
    if step < 1:
        raise ValueError(f"--step must be at least 1, got {step}")
    if models.no_draft:
        raise ValueError("--no-draft leaves no tree to draw")
    config, params = shape.config(), sampling.params()
    params = replace(params, seed=params.resolved_seed())
    text = prompt.single()
    decoder = models.load(config)
    with working(f"decoding {step} step{'s' * (step > 1)}"):
        seen = decoder.trace(prompt.encode(decoder, [text])[0], params, steps=step)
    if len(seen) < step:
        raise ValueError(f"the text ends after {len(seen)} steps with a draft; there is no step {step}")
    draft_tree, walk, root = seen[-1]
    picture: dict[str, Any] = {
        "text_of": lambda token: decoder.tokenizer.decode([token]),
        "walk": walk,
        "root_token": root,
    }
    out.print(draw_tree(draft_tree, **picture))
    out.print()
    out.print(terminal_legend(tree_nodes(draft_tree, **picture)))
    out.print(f"seed {params.seed}", style="dim")
    if svg is not None:
        svg.write_text(tree_svg(draft_tree, **picture), encoding="utf-8")
        out.print(f"wrote {svg}", markup=False)
