"""What a pass of the embedded target takes, by rows and by the length of the text behind them.

    python docs/figures/pass_times.py float32

Printed are medians in milliseconds, with keys shared by the heads' groups as a decoder does it and, in brackets, as
transformers does it: by a copy of all keys and values (``optimized/models/grouped_attention.py``). The two take turns.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from statistics import median

import torch

from optimized.models import TargetModel
from optimized.models.grouped_attention import grouped
from optimized.models.loading import load_target

LENGTHS, ROWS, TURNS = (128, 800, 1900), (1, 6, 16, 61), 15


def milliseconds(target: TargetModel, rows: int) -> tuple[float, float]:
    """Of a pass over a root and its children: shared, copied."""
    tokens, depths = torch.arange(rows)[None] + 50, torch.arange(rows).clamp(max=1)[None]
    ancestors = torch.eye(rows, dtype=torch.bool)[None]
    ancestors[:, :, 0] = True
    times: tuple[list[float], list[float]] = [], []
    for _ in range(TURNS):
        for seconds, attention in zip(times, (grouped, nullcontext), strict=True):
            target._runner._attention = attention
            start = time.perf_counter()
            target.forward_tree(tokens, depths, ancestors)
            seconds.append(time.perf_counter() - start)
    shared, copied = (1e3 * median(seconds[1:]) for seconds in times)
    return shared, copied


def main() -> None:
    target = load_target("embedded", dtype=getattr(torch, sys.argv[1]))
    for length in LENGTHS:
        target.prefill([[place % 1000 for place in range(length)]])
        found = [
            f"{rows} rows {shared:.1f} ({copied:.1f})"
            for rows in ROWS
            for shared, copied in [milliseconds(target, rows)]
        ]
        print(f"behind {length} tokens: " + ", ".join(found), flush=True)


if __name__ == "__main__":
    main()
