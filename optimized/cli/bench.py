"""``rheo bench``: sets of questions by several methods, one row each, into a CSV file that can be continued."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from optimized.cli.console import err, out
from optimized.cli.options import MODEL, OUTPUT, PROMPT, SAMPLING, TREE, ModelOptions
from reference.api import RheoConfig

if TYPE_CHECKING:
    from optimized.bench.methods import Grid
    from optimized.bench.rows import RunSettings
    from optimized.decoder import RheoDecoder

METHODS = "plain,generate,topk,rheo"
LINE_EVERY = 60.0  # seconds between lines of progress where standard error is no terminal

Questions = Annotated[
    list[Path], typer.Argument(help="Files in EAGLE's question.jsonl format, or their folders.", show_default=False)
]
Limit = Annotated[
    int | None, typer.Option(help="At most so many questions per set, spread over it.", min=1, rich_help_panel=PROMPT)
]
Threads = Annotated[
    int | None, typer.Option(help="For torch.", show_default="torch's choice", min=1, rich_help_panel=MODEL)
]


def bench(
    questions: Questions,
    output: Annotated[
        Path, typer.Option("--out", help="The CSV file; continued if it exists.", rich_help_panel=OUTPUT)
    ],
    models: ModelOptions,
    methods: Annotated[
        str,
        typer.Option(
            help="Of plain, generate, topk, rheo, rrsw, calibrated, auto-m, auto, chain, static.",
            rich_help_panel=TREE,
        ),
    ] = METHODS,
    temperatures: Annotated[str, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = "1",
    seeds: Annotated[int, typer.Option(help="How many texts per question.", min=1, rich_help_panel=SAMPLING)] = 1,
    lead_tokens: Annotated[
        str, typer.Option("--lead-tokens", "-m", help="Of rheo, rrsw and calibrated.", rich_help_panel=TREE)
    ] = str(RheoConfig.lead_tokens),
    probes: Annotated[str, typer.Option(help="Per node; of all with probes.", rich_help_panel=TREE)] = str(
        RheoConfig.probes
    ),
    branchings: Annotated[str, typer.Option(help="Slots of a node.", rich_help_panel=TREE)] = str(RheoConfig.branching),
    depths: Annotated[str, typer.Option(help="Levels drafted; the length of a chain.", rich_help_panel=TREE)] = str(
        RheoConfig.depth
    ),
    tree_sizes: Annotated[str, typer.Option(help="Draft nodes kept per step.", rich_help_panel=TREE)] = str(
        RheoConfig.tree_size
    ),
    supports: Annotated[
        str, typer.Option(help="Draft logits kept per node; full: all of them.", rich_help_panel=TREE)
    ] = str(RheoConfig.draft_support),
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of rheo calibrate, of calibrated, auto-m and auto; repeat for several.",
            rich_help_panel=TREE,
        ),
    ] = None,
    topology: Annotated[
        list[Path] | None, typer.Option(help="JSON file of a static tree; repeat for several.", rich_help_panel=TREE)
    ] = None,
    limit: Limit = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="At most so many per turn.", min=1, rich_help_panel=SAMPLING)
    ] = 64,
    min_new_tokens: Annotated[
        int,
        typer.Option(
            help="At least so many per turn, so that texts are equally long.", min=0, rich_help_panel=SAMPLING
        ),
    ] = 0,
    contexts: Annotated[
        int,
        typer.Option(help="Positions per text for the expected tau; 0: none.", min=0, rich_help_panel=OUTPUT),
    ] = 4,
    no_texts: Annotated[
        bool, typer.Option("--no-texts", help="Only the expected tau; nothing is timed.", rich_help_panel=OUTPUT)
    ] = False,
    batch_size: Annotated[
        int,
        typer.Option(help="Questions of a set side by side; not for generate.", min=1, rich_help_panel=SAMPLING),
    ] = 1,
    threads: Threads = None,
) -> None:
    """Measure methods on sets of questions: acceptance length, sampled and expected, and time.

    Options in the plural take lists: --tree-sizes 16,60. Every method goes through all combinations of the settings
    that it has. Stopped or killed, the same command goes on where it was.
    """
    from optimized.bench.methods import Grid, methods_of, topology_text, weights_text
    from optimized.bench.questions import read_sets
    from optimized.static_trees import read_topology

    names = [part.strip() for part in methods.split(",")]
    grid = Grid(
        lead_tokens=integers("--lead-tokens", lead_tokens),
        probes=integers("--probes", probes),
        branching=integers("--branchings", branchings),
        depth=integers("--depths", depths),
        tree_size=integers("--tree-sizes", tree_sizes),
        draft_support=(1,),
        topology=tuple(topology_text(read_topology(path)) for path in topology or ()),
        weights=tuple(map(weights_text, weights or ())),
    )
    wanted_supports = support_sizes(supports)
    warmth = numbers("--temperatures", temperatures)
    if min_new_tokens > max_new_tokens:
        raise ValueError(f"--min-new-tokens {min_new_tokens} is more than --max-new-tokens {max_new_tokens}")
    if no_texts and not contexts:
        raise ValueError("--no-texts leaves nothing to measure without --contexts")
    found = methods_of(names, grid)  # refuses before the models are loaded
    for setting, given in (("weights", weights), ("topology", topology)):
        if given and all(getattr(method, setting) is None for method in found):
            raise ValueError(f"--{setting}: none of {', '.join(names)} has a use for it")
    if batch_size > 1 and "generate" in names:
        raise ValueError("--batch-size: generate takes one request at a time; plain is the same without a draft")
    if no_texts and any(method.name == "auto" for method in found):
        raise ValueError("auto sizes its trees by what steps take; --no-texts takes none. auto-m has fixed sizes")
    sets = read_sets(questions)
    sets = [replace(one, questions=one.questions[:limit]) for one in sets]
    uneven = next((one for one in sets if len(one.questions) % batch_size), None)
    if uneven is not None:
        count = len(uneven.questions)
        fitting = f"; take --limit {count - count % batch_size}" if count >= batch_size else ""
        raise ValueError(
            f"--batch-size {batch_size}: set {uneven.name} has {count} questions, and the last would be asked in a "
            f"smaller batch{fitting}"
        )

    from optimized.bench.running import with_threads

    with with_threads(threads):
        decoder = load(models, names, grid)
        from optimized.bench.provenance import Provenance
        from optimized.bench.run import Bench, Plan
        from optimized.bench.store import RowStore

        grid = replace(grid, draft_support=resolved(wanted_supports, decoder))
        methods_here = tuple(methods_of(names, grid))
        plan = Plan(
            tuple(sets), methods_here, warmth, tuple(range(seeds)), max_new_tokens, contexts, batch_size, min_new_tokens
        )
        texts = "none" if no_texts else "timed"
        settings = run_settings(decoder, models, max_new_tokens, contexts, texts, batch_size, min_new_tokens)
        provenance = Provenance.here()
        measuring = Bench(decoder, plan, settings, provenance)
        with RowStore(output, settings, {one.name: one.digest for one in sets}) as store:
            for commit in sorted(store.commits - {provenance.commit}):
                err.print(f"note: {output} has rows of commit {commit or '(none)'}; this is {provenance.commit}")
            backends = {measuring.backend_of(method) for method in methods_here} - {""}
            for backend in sorted(store.backends - backends):
                err.print(f"note: {output} has rows of backend {backend}; here it is {', '.join(sorted(backends))}")
            keys = plan.keys()
            missing = sum(key not in store.done for key in keys)
            out.print(Text(f"{missing} rows to do of {len(keys)}; {settings.machine}, {settings.dtype}", "dim"))
            with row_progress(missing) as progress:
                written = measuring.run(store, progress)
    out.print(f"wrote {written} rows to {output}", markup=False)


def load(models: ModelOptions, names: list[str], grid: Grid) -> RheoDecoder:
    """The models; without a draft where none of the methods drafts.

    Raises:
        ValueError: --no-draft, and a method that drafts.
    """
    from optimized.bench.methods import methods_of
    from optimized.bench.run import needs_draft

    drafting = needs_draft(methods_of(names, grid))
    if models.no_draft and drafting:
        raise ValueError("--no-draft leaves plain and generate only; name them with --methods")
    if not drafting and models.draft is None:
        models = replace(models, no_draft=True)
    return models.load(RheoConfig())


def run_settings(
    decoder: RheoDecoder,
    models: ModelOptions,
    max_new_tokens: int,
    contexts: int,
    texts: str = "timed",
    batch_size: int = 1,
    min_new_tokens: int = 0,
) -> RunSettings:
    """What all rows of this run share."""
    import torch

    from optimized.bench.provenance import machine, weights_digest
    from optimized.bench.rows import RunSettings
    from optimized.models import CausalDrafter
    from optimized.models.eagle3 import Eagle3Drafter

    drafter, draft = decoder.drafter, ""
    if isinstance(drafter, Eagle3Drafter | CausalDrafter):
        module = drafter.head if isinstance(drafter, Eagle3Drafter) else drafter.model
        draft = f"{models.draft or models.target}#{weights_digest(module)}"
    return RunSettings(
        target=f"{models.target}#{weights_digest(decoder.target.model)}",
        draft=draft,
        dtype=str(decoder.target.dtype).removeprefix("torch."),
        device=decoder.target.device.type,
        threads=torch.get_num_threads(),
        machine=machine(decoder.target.device),
        max_new_tokens=max_new_tokens,
        contexts=contexts,
        texts=texts,
        batch_size=batch_size,
        min_new_tokens=min_new_tokens,
    )


def integers(option: str, text: str) -> tuple[int, ...]:
    """A list of integers, "1,2,3", none twice.

    Raises:
        ValueError: something else.
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} {text}: integers with commas are wanted, as in {option} 1,2") from None


def numbers(option: str, text: str) -> tuple[float, ...]:
    """A list of numbers, "0,0.5,1".

    Raises:
        ValueError: something else, or a number that is negative or not finite.
    """
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text}: numbers with commas are wanted, as in {option} 0,0.5,1") from None
    if not all(0 <= value < float("inf") for value in values):
        raise ValueError(f"{option} {text}: numbers from 0 on are wanted")
    return tuple(dict.fromkeys(values))


def support_sizes(text: str) -> tuple[int | None, ...]:
    """A list of supports, None for "full".

    Raises:
        ValueError: something else, or a support below 1.
    """
    sizes: list[int | None] = []
    for part in text.split(","):
        size = None if part.strip() == "full" else integers("--supports", part)[0]
        if size is not None and size < 1:
            raise ValueError(f"--supports {text}: a support is at least 1, or full")
        sizes.append(size)
    return tuple(sizes)


def resolved(sizes: tuple[int | None, ...], decoder: RheoDecoder) -> tuple[int, ...]:
    """Supports with "full", and what exceeds it, replaced by the draft's vocabulary, none twice."""
    full = 1 if decoder.drafter is None else decoder.drafter.vocab_size
    return tuple(dict.fromkeys(full if size is None else min(size, full) for size in sizes))


@contextmanager
def row_progress(total: int, unit: str = "rows") -> Iterator[Callable[[str], None]]:
    """A bar with the time that is left, judged by the rows measured in this run alone; where standard error is no
    terminal, a line now and then. Yields what to call after each row.
    """
    start = time.monotonic()
    done, said = 0, start
    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn(unit), TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}", markup=False), console=err, transient=True, redirect_stdout=False,
        disable=not err.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("warming up", total=total, left="")

        def advance(what: str) -> None:
            nonlocal done, said
            done += 1
            now = time.monotonic()
            left = f"{duration((now - start) / done * (total - done))} left"
            bar.update(task, advance=1, description=what, left=left)
            if not err.is_terminal and now - said >= LINE_EVERY:
                err.print(f"{done} of {total} {unit}, {left}")
                said = now

        yield advance


def duration(seconds: float) -> str:
    """Rounded up to what a person reads: "45 s", "12 min", "3 h 05 min"."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = -(-whole // 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
