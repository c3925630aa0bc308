"""Times of the sampling side on a CUDA device: kernels, Torch, compiled Torch, and the floor of bytes moved.

    python kernels/bench.py --out kernels-bench

Every part of a step is captured in a CUDA graph and replayed; times are medians of Triton's ``do_bench``. The floor of
a part is the bytes of the logits it must read over the bandwidth of a copy measured in the same run. Unlike the rest of
this folder this script imports ``optimized``, whose paths it compares. Writes ``times.csv``, ``times.png`` and
``times.svg``.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from optimized.backends import TORCH, Backend, choose_backend, missing
from optimized.growth import GrowthSteps, grow_trees
from optimized.randomness import StepRandomness
from optimized.sampling_params import SamplingParams
from optimized.target_laws import SamplingBatch, TargetLaws
from optimized.trees import LevelNodes, TreeBatch
from reference.api import RheoConfig

BATCHES = (1, 8, 64)
VOCABULARIES = (32_000, 128_256, 151_936)
TREE_SIZE = 60  # 61 rows with the root
REPEATS_MS = 60  # how long do_bench replays each graph


@dataclass(frozen=True)
class Row:
    """One measured time.

    Attributes:
        part: "level" (slots and beam of one level), "prune", "verify", or "step" (8 levels, pruning and verification).
        path: "cupy", "triton", "torch" or "torch.compile".
        batch, vocab: size of the problem.
        microseconds: median of a graph's replay.
        floor_microseconds: bytes of the logits over the measured copy bandwidth.
    """

    part: str
    path: str
    batch: int
    vocab: int
    microseconds: float
    floor_microseconds: float


@dataclass
class Problem:
    """Inputs of one step at their full size: bf16 logits as a model leaves them, noise, parameters."""

    batch: int
    vocab: int
    device: torch.device

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.batch * 1_000_003 + self.vocab)
        self.config = RheoConfig(tree_size=TREE_SIZE)
        beam, rows = self.config.beam_width, TREE_SIZE + 1

        def logits(*shape: int) -> Tensor:
            values = torch.empty(*shape, self.vocab, dtype=torch.bfloat16, device=self.device)
            return values.normal_(0, 3, generator=generator)

        self.root_logits = logits(self.batch)
        self.level_logits = logits(self.batch, beam)
        self.target_logits = logits(self.batch, rows)
        params = [SamplingParams(temperature=1.0)] * self.batch
        self.sampling = SamplingBatch.from_params(params, [[0]] * self.batch, self.vocab, (), self.device)
        randomness = StepRandomness(range(self.batch), self.config.depth, beam, rows, self.device)
        self.noise = randomness.at(torch.zeros(self.batch, dtype=torch.long, device=self.device))
        self.scores = torch.zeros(self.batch, beam, dtype=torch.float64, device=self.device)

    def grow(self, steps: GrowthSteps) -> TreeBatch:
        """All levels and the pruning; the draft answers with the same logits at every level."""

        def expand(nodes: LevelNodes) -> Tensor:
            return self.level_logits[:, : nodes.token_ids.shape[1]]

        temperatures, uniforms = self.sampling.temperatures, self.noise.probe_uniforms
        return grow_trees(self.config, self.root_logits, expand, temperatures, uniforms, None, steps)

    def parts(self, backend: Backend) -> Iterator[tuple[str, Callable[[], object], int]]:
        """Name, what to run, and the bytes of logits that it must read."""
        steps, config = backend.growth, self.config
        temperatures, uniforms = self.sampling.temperatures, self.noise.probe_uniforms[:, 1]
        levels, beams = [], []

        def recording_slots(*arguments: object) -> object:
            levels.append(steps.level_slots(*arguments))  # type: ignore[arg-type]
            return levels[-1]

        def recording_beam(*arguments: object) -> object:
            beams.append(steps.select_beam(*arguments))  # type: ignore[arg-type]
            return beams[-1]

        trees = self.grow(GrowthSteps(recording_slots, recording_beam, steps.prune))  # type: ignore[arg-type]
        level_bytes = self.level_logits.nbytes
        tree_bytes = self.target_logits.nbytes

        def level() -> object:
            slots = steps.level_slots(config, self.level_logits, self.scores, temperatures, uniforms, None)
            return steps.select_beam(config, slots, 2)

        def verify(of: TreeBatch = trees) -> object:
            laws = TargetLaws(self.target_logits, self.sampling, of)
            return backend.verify(of, laws, self.noise, config.verification)

        yield "level", level, level_bytes
        yield "prune", lambda: steps.prune(config, levels, beams), 0
        yield "verify", verify, tree_bytes
        step_bytes = self.root_logits.nbytes + (config.depth - 1) * level_bytes + tree_bytes
        yield "step", lambda: verify(self.grow(steps)), step_bytes


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy on the device moves, read and written ones both counted."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    milliseconds = median(lambda: into.copy_(source))
    return 2 * source.nbytes / (milliseconds / 1e3)


def median(run: Callable[[], object]) -> float:
    """Milliseconds."""
    return float(triton.testing.do_bench(run, warmup=10, rep=REPEATS_MS, return_mode="median"))


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """A replay of what ``run`` launches, as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def compiled(backend: Backend) -> Backend:
    """The same code through ``torch.compile``, compiled once for all shapes."""
    steps = backend.growth

    def compile_(function: Callable[..., object]) -> Callable[..., object]:
        return torch.compile(function, dynamic=True)

    growth = GrowthSteps(compile_(steps.level_slots), compile_(steps.select_beam), compile_(steps.prune))  # type: ignore[arg-type]
    return Backend("torch.compile", growth, compile_(backend.verify))  # type: ignore[arg-type]


def paths(device: torch.device, with_compile: bool) -> list[Backend]:
    """The backends to compare; one that cannot run is an error, for a comparison without it would mislead."""
    for name in ("triton", "cupy"):
        lacks = missing(name, device)
        if lacks:
            raise SystemExit(f"the backend {name} cannot run here: {'; '.join(lacks)}")
    config = RheoConfig(tree_size=TREE_SIZE)
    found = [choose_backend("cupy", device, config), choose_backend("triton", device, config), TORCH]
    return [*found, compiled(TORCH)] if with_compile else found


def measure(batches: tuple[int, ...], vocabularies: tuple[int, ...], with_compile: bool) -> list[Row]:
    """All times; printed as they come."""
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for vocab in vocabularies:
        for batch in batches:
            problem = Problem(batch, vocab, device)
            for backend in paths(device, with_compile):
                with torch.inference_mode():
                    for part, run, num_bytes in problem.parts(backend):
                        micro = median(captured(run)) * 1e3
                        rows.append(Row(part, backend.name, batch, vocab, micro, num_bytes / bandwidth * 1e6))
                        print(
                            f"{part:7}{backend.name:14}batch {batch:3}  vocab {vocab:7}  {micro:10.1f} us", flush=True
                        )
            del problem
            torch.cuda.empty_cache()
    return rows


def write(rows: list[Row], folder: Path) -> None:
    """The table as CSV, and a plot: one panel per part, time over batch for the largest vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "times.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(asdict(rows[0])))
        table.writeheader()
        table.writerows(asdict(row) for row in rows)

    from matplotlib.figure import Figure

    parts = list(dict.fromkeys(row.part for row in rows))
    vocab = max(row.vocab for row in rows)
    figure = Figure(figsize=(4 * len(parts), 3.6), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        of_part = [row for row in rows if row.part == part and row.vocab == vocab]
        for path in dict.fromkeys(row.path for row in of_part):
            line = [row for row in of_part if row.path == path]
            axes.plot([row.batch for row in line], [row.microseconds for row in line], marker="o", label=path)
        floor = {row.batch: row.floor_microseconds for row in of_part}
        if any(floor.values()):
            axes.plot(list(floor), list(floor.values()), color="black", linestyle=":", label="floor")
        axes.set(xscale="log", yscale="log", xlabel="batch", title=f"{part}, vocabulary {vocab}")
    figure.axes[0].set_ylabel("microseconds")
    figure.axes[-1].legend()
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"times.{suffix}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("kernels-bench"), help="folder for the table and the plot")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes minutes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device to measure; the tests run the kernels without one")
    rows = measure(tuple(options.batches), tuple(options.vocabularies), not options.no_compile)
    write(rows, options.out)


if __name__ == "__main__":
    main()
