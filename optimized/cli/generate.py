"""``rheo generate``: continue or answer one prompt, or several as a batch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.rule import Rule
from rich.text import Text

from optimized.cli.console import err, out, progress_bar
from optimized.cli.options import OUTPUT, ModelOptions, SamplingOptions, TreeOptions
from optimized.cli.prompts import PromptOptions

if TYPE_CHECKING:
    from optimized.outputs import GenerationResult, StreamEvent


def generate(
    prompt: PromptOptions,
    sampling: SamplingOptions,
    shape: TreeOptions,
    models: ModelOptions,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Show acceptance and time afterwards.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one line of JSON per prompt instead.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Generate text. One prompt is streamed as it is decoded; several are decoded as one batch."""
    config, params, prompts = shape.config(), sampling.params(), prompt.read()
    decoder = models.load(config)
    events = decoder.stream(prompt.encode(decoder, prompts), params)

    results: dict[int, GenerationResult] = {}
    if len(prompts) == 1 and not as_json:
        results[0] = show_stream(events)
    else:
        try:
            for event in with_progress(events, len(prompts) * params.max_new_tokens):
                if event.result is not None:
                    results[event.index] = event.result
        finally:  # when a request fails, the others' texts are not lost
            for index, result in sorted(results.items()):
                show_json(prompts[index], result) if as_json else show_text(index, prompts[index], result)
    if metrics and not as_json:
        show_metrics([results[index] for index in sorted(results)], decoder.max_batch_size)


def show_stream(events: Iterable[StreamEvent]) -> GenerationResult:
    """Write one request's text as it comes; returns its result."""
    result = None
    for event in events:
        typer.echo(event.text, nl=False)
        result = event.result
    typer.echo()
    assert result is not None  # the last event carries it
    return result


def with_progress(events: Iterable[StreamEvent], total: int) -> Iterable[StreamEvent]:
    """The same events, with a bar that counts their tokens."""
    with progress_bar("tokens") as bar:
        task = bar.add_task("decoding", total=total)
        for event in events:
            bar.advance(task, len(event.token_ids))
            yield event


def show_text(index: int, prompt: str, result: GenerationResult) -> None:
    """One text of a batch, under a line with its prompt."""
    heading = Text(f"{index + 1}. {' '.join(prompt.split())}", style="bold", no_wrap=True, overflow="ellipsis")
    out.print(Rule(heading, align="left", style="dim"))
    typer.echo(result.text)


def show_json(prompt: str, result: GenerationResult) -> None:
    """One result as a line of JSON."""
    from optimized.cli.metrics import result_json

    typer.echo(json.dumps({"prompt": prompt, **result_json(result)}, ensure_ascii=False))


def show_metrics(results: list[GenerationResult], batch_size: int) -> None:
    """One table for all results, on standard error: the text stays alone on standard output."""
    from optimized.cli.metrics import metrics_table
    from optimized.outputs import Metrics

    measured = [result.metrics for result in results]
    groups = (measured[first : first + batch_size] for first in range(0, len(measured), batch_size))
    err.print()
    err.print(metrics_table(Metrics.merge(Metrics.merge(group, concurrent=True) for group in groups)))
    if len(results) == 1:
        err.print(f"{results[0].finish_reason}; seed {results[0].seed}", style="dim")
