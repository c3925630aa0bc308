"""``rheo demo``: from nothing to real text, with the three ways of decoding side by side."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from optimized.cli.console import out, progress_bar
from optimized.cli.options import OUTPUT, PROMPT, SAMPLING, ModelOptions, TreeOptions
from optimized.cli.prompts import chat_message, has_chat_template

if TYPE_CHECKING:
    from optimized.cli.comparison import Method, Sample
    from optimized.decoder import RheoDecoder
    from optimized.sampling_params import SamplingParams

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a whale.",
    "Give me three tips for learning a new language.",
)
WARM_UP_TOKENS = 8
CPU_TREE = TreeOptions(branching=4, depth=2, tree_size="5")  # a processor pays for every row of a tree


def demo(
    models: ModelOptions,
    shape: TreeOptions = CPU_TREE,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="At most so many per text.", rich_help_panel=SAMPLING)
    ] = 64,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", help="Only this one.", show_default="1, then 0", rich_help_panel=SAMPLING),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every text.", rich_help_panel=SAMPLING)] = 0,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help="Prompts in EAGLE's question.jsonl format; first turns are used.",
            exists=True,
            dir_okay=False,
            rich_help_panel=PROMPT,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many prompts.", min=1, rich_help_panel=PROMPT)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Compare plain decoding, top-K trees and RheoSampling on real text: tokens/s, acceptance length, speed-up."""
    from optimized.bench.questions import first_turns
    from optimized.sampling_params import SamplingParams

    if models.no_draft:
        raise ValueError("--no-draft leaves nothing to compare")
    config = shape.config()
    if config.proposal == "topk":
        raise ValueError("--proposal topk: the demo shows other trees beside top-K ones, which are there anyway")
    prompts = (list(PROMPTS) if prompts_file is None else first_turns(prompts_file))[:limit]
    temperatures = (1.0, 0.0) if temperature is None else (temperature,)
    requests = [SamplingParams(temperature=t, seed=seed, max_new_tokens=max_new_tokens) for t in temperatures]

    decoder = models.load(config)
    from optimized.cli.comparison import decoding_methods

    methods = decoding_methods(decoder)
    run_all("warming up", methods, decoder, prompts[0], replace(requests[0], max_new_tokens=WARM_UP_TOKENS))
    if not as_json:
        out.print(Text(setting(decoder), style="dim"))
    sections = []
    for params in requests:
        heading = f"temperature {params.temperature:g}"
        if not as_json:
            out.print(Rule(Text(heading, style="bold")))
        samples: list[Sample] = []
        for number, prompt in enumerate(prompts, 1):
            texts = run_all(f"{heading}, prompt {number} of {len(prompts)}", methods, decoder, prompt, params)
            if not as_json:
                show_texts(texts)
            samples += texts
        if not as_json:
            show_summary(samples, params)
        sections.append(section_record(samples, params))
    if as_json:
        record = {"setting": setting(decoder), "config": asdict(config), "temperatures": sections}
        typer.echo(json.dumps(record, ensure_ascii=False, indent=2))


def run_all(
    what: str, methods: dict[str, Method], decoder: RheoDecoder, prompt: str, params: SamplingParams
) -> list[Sample]:
    """One prompt by every method, right after each other, so that a slow minute slows all of them."""
    ids = chat_message(decoder, prompt) if has_chat_template(decoder) else decoder.tokenizer(prompt)["input_ids"]
    samples = []
    with progress_bar("texts") as bar:
        task = bar.add_task(what, total=len(methods))
        for name, method in methods.items():
            bar.update(task, description=f"{what}: {name}")
            samples.append(method(prompt, ids, params))
            bar.advance(task)
    return samples


def setting(decoder: RheoDecoder) -> str:
    """One line on what runs where."""
    import torch

    config, target = decoder.config, decoder.target
    where = f"{target.device}, {str(target.dtype).removeprefix('torch.')}"
    if target.device.type == "cpu":
        where += f", {torch.get_num_threads()} threads"
    size = "as many as pay, up to " if config.tree_size == "auto" else ""
    return f"{where}; trees of {size}{config.budget} nodes, depth {config.depth}, branching {config.branching}"


def show_texts(samples: list[Sample]) -> None:
    """One prompt's texts below each other."""
    out.print(Text(f"\n> {samples[0].prompt}", style="bold"))
    for sample in samples:
        out.print(Text(f"\n{sample.method}", style="cyan").append(f"  {sample.tokens_per_second:.1f} tokens/s", "dim"))
        out.print(Text(sample.text.strip()))


def show_summary(samples: list[Sample], params: SamplingParams) -> None:
    """The table of one temperature."""
    from optimized.cli.comparison import OWN, same_tokens, summary
    from optimized.cli.metrics import number

    table = Table("method", title=f"\ntemperature {params.temperature:g}", title_justify="left", title_style="bold")
    for column in ("tokens", "tokens/s", "tau", "speed-up"):
        table.add_column(column, justify="right")
    for row in summary(samples):
        tau = "–" if row["tau"] is None else number(row["tau"])
        values = (str(row["tokens"]), number(row["tokens_per_second"], 1), tau, f"{row['speed_up']:.2f} x")
        table.add_row(row["method"], *values, style="bold" if row["method"] in OWN.values() else "")
    out.print(table)
    if params.greedy:
        same = "the same texts" if same_tokens(samples) else "texts that differ where logits nearly tie"
        out.print(f"all methods wrote {same}; without a probe the two trees are alike", style="dim")


def section_record(samples: list[Sample], params: SamplingParams) -> dict[str, Any]:
    """One temperature as plain JSON values."""
    from optimized.cli.comparison import same_tokens, summary

    return {
        "temperature": params.temperature,
        "seed": params.seed,
        "summary": summary(samples),
        "same_tokens": same_tokens(samples) if params.greedy else None,
        "texts": [asdict(sample) for sample in samples],
    }
