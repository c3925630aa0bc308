"""Where a step's time goes: seconds per phase, without waiting for the device while the step runs."""

from __future__ import annotations

import time
from typing import Literal

import torch

Phase = Literal["draft", "target", "sampling"]


class PhaseClock:
    """Sums the time spent in each phase.

    On an accelerator the marks are CUDA events, read in ``settle`` once the step's results have been waited for anyway;
    elsewhere they are the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {"draft": 0.0, "target": 0.0, "sampling": 0.0}
        self._device = device
        self._marks: list[tuple[Phase | None, float | torch.cuda.Event]] = []

    def enter(self, phase: Phase | None) -> None:
        """End the current phase and begin another; None begins none."""
        now: float | torch.cuda.Event
        if self._device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
        else:
            now = time.perf_counter()
        self._marks.append((phase, now))

    def settle(self) -> None:
        """Add up the phases that have ended; call it after the device has been waited for."""
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if phase is not None:
                if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                    self.seconds[phase] += begin.elapsed_time(end) / 1e3
                elif isinstance(begin, float) and isinstance(end, float):
                    self.seconds[phase] += end - begin
        del self._marks[:-1]
