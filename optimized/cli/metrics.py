"""Results and measurements as tables and as JSON."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from optimized.outputs import GenerationResult, Metrics


def metrics_table(metrics: Metrics) -> Table:
    """Acceptance and time of one request, or of several merged."""
    table = Table(title="Metrics", title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("tokens", str(metrics.generated_tokens), f"in {metrics.total_seconds:.2f} s")
    table.add_row("speed", f"{number(metrics.tokens_per_second, 1)}", "tokens/s")
    table.add_row("tau", number(metrics.tau), f"tokens per target pass, {metrics.target_passes} passes")
    levels = zip(metrics.acceptance_rates, metrics.accepted_per_level, metrics.offered_per_level, strict=True)
    for level, (rate, accepted, offered) in enumerate(levels, 1):
        table.add_row(f"level {level}", percent(rate), f"accepted, {accepted} of {offered} passes")
    table.add_row(
        "probes",
        percent(metrics.probe_acceptance_rate),
        f"accepted, {metrics.probe_accepted} of {metrics.probe_offered}",
    )
    for name in ("draft", "target", "sampling"):
        seconds = getattr(metrics, f"{name}_seconds")
        share = seconds / metrics.total_seconds if metrics.total_seconds else math.nan
        table.add_row(name, percent(share), f"of the time, {seconds:.2f} s")
    return table


def number(value: float, digits: int = 2) -> str:
    """Fixed digits, a dash for what was not measured."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def percent(value: float) -> str:
    """A share in percent, a dash for what was not measured."""
    return "–" if math.isnan(value) else f"{100 * value:.0f} %"


def result_json(result: GenerationResult) -> dict[str, Any]:
    """A result as plain JSON values."""
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "prompt_tokens": len(result.prompt_token_ids),
        "metrics": metrics_json(result.metrics),
    }


def metrics_json(metrics: Metrics) -> dict[str, Any]:
    """What was counted and what follows from it; null where nothing was measured."""
    derived = {
        "tau": metrics.tau,
        "tokens_per_second": metrics.tokens_per_second,
        "probe_acceptance_rate": metrics.probe_acceptance_rate,
    }
    rates = [_finite(rate) for rate in metrics.acceptance_rates]
    return {**vars(metrics), **{name: _finite(value) for name, value in derived.items()}, "acceptance_rates": rates}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
