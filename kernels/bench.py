"""Times of the sampling side on a CUDA device: kernels, Torch, compiled Torch, and the floor of bytes moved.

    python kernels/bench.py --out kernels-bench

Every part of a step is captured in a CUDA graph and replayed, which is what the kernels allow; a decoder today launches
them one by one, and "eager" is that. Times of graphs are medians of Triton's ``do_bench``; a replay costs some
microseconds by itself, measured as the part "nothing". The floor of a part is the bytes of the logits it must read over
the bandwidth of a copy measured in the same run (pure reads can be a little faster than a copy). Unlike the rest of
this folder this script imports ``optimized``, whose paths it compares. Writes ``times.csv``, row by row, and the
pictures beside it.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import triton
from torch import Tensor

from optimized.backends import TORCH, Backend, choose_backend, missing
from optimized.growth import GrowthSteps, grow_trees
from optimized.randomness import StepNoise, StepRandomness
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
        part: "level" (slots and beam of one level), "prune", "verify", "step" (random numbers, 8 levels, pruning,
            ancestors, verification), or "nothing" (a graph with one tiny kernel).
        path: "cupy", "triton", "torch" or "torch.compile".
        batch, vocab: size of the problem.
        microseconds: median of a graph's replay.
        eager_microseconds: mean without a graph, the host's work included: calls one after another, and what the last
            one launched waited for. The logits may come from the cache then.
        floor_microseconds: bytes of the logits over the measured copy bandwidth.
    """

    part: str
    path: str
    batch: int
    vocab: int
    microseconds: float
    eager_microseconds: float
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
        # A level of its own for each, as a draft gives: one for all would come from the cache.
        self.level_logits = [logits(self.batch, beam) for _ in range(self.config.depth - 1)]
        self.target_logits = logits(self.batch, rows)
        params = [SamplingParams(temperature=1.0)] * self.batch
        self.sampling = SamplingBatch.from_params(params, [[0]] * self.batch, self.vocab, (), self.device)
        self.first_step = torch.zeros(self.batch, dtype=torch.long, device=self.device)
        self.noise = self.randomness(TORCH).at(self.first_step)

    def randomness(self, backend: Backend) -> StepRandomness:
        """The batch's random numbers, by the backend's generator."""
        config = self.config
        return StepRandomness(
            range(self.batch), config.depth, config.beam_width, TREE_SIZE + 1, self.device, kernel=backend.uniforms
        )

    def grow(self, steps: GrowthSteps, noise: StepNoise) -> TreeBatch:
        """All levels and the pruning."""

        def expand(nodes: LevelNodes) -> Tensor:
            return self.level_logits[nodes.depth - 1][:, : nodes.token_ids.shape[1]]

        temperatures, uniforms = self.sampling.temperatures, noise.probe_uniforms
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

        recording = GrowthSteps(recording_slots, recording_beam, steps.prune)  # type: ignore[arg-type]
        trees = self.grow(recording, self.noise)
        level_bytes = self.level_logits[0].nbytes
        tree_bytes = self.target_logits.nbytes
        randomness, scores = self.randomness(backend), beams[0].log_scores

        def level() -> object:
            slots = steps.level_slots(config, self.level_logits[0], scores, temperatures, uniforms, None)
            return steps.select_beam(config, slots, 2)

        def verify(of: TreeBatch = trees, noise: StepNoise = self.noise) -> object:
            laws = TargetLaws(self.target_logits, self.sampling, of)
            return backend.verify(of, laws, noise, config.verification)

        def step() -> object:
            noise = randomness.at(self.first_step)
            grown = self.grow(steps, noise)
            return grown.ancestors(), verify(grown, noise)

        yield "level", level, level_bytes
        yield "prune", lambda: steps.prune(config, levels, beams), 0
        yield "verify", verify, tree_bytes
        step_bytes = self.root_logits.nbytes + (config.depth - 1) * level_bytes + tree_bytes
        yield "step", step, step_bytes


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy on the device moves, read and written ones both counted."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    milliseconds = median(lambda: into.copy_(source))
    return 2 * source.nbytes / (milliseconds / 1e3)


def median(run: Callable[[], object]) -> float:
    """Milliseconds."""
    return float(triton.testing.do_bench(run, warmup=10, rep=REPEATS_MS, return_mode="median"))


def eager(run: Callable[[], object], calls: int = 20) -> float:
    """Microseconds of a call that launches its kernels one by one."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


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

    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else what is timed may not be compiled at all

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


def measure(batches: tuple[int, ...], vocabularies: tuple[int, ...], with_compile: bool) -> Iterator[Row]:
    """All times, as they come."""
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    tiny = torch.zeros(1, device=device)
    empty = median(captured(lambda: tiny.add_(1))) * 1e3
    yield Row("nothing", "graph", 1, 1, empty, eager(lambda: tiny.add_(1)), 0.0)
    for vocab in vocabularies:
        for batch in batches:
            problem = Problem(batch, vocab, device)
            for backend in paths(device, with_compile):
                with torch.inference_mode():
                    for part, run, num_bytes in problem.parts(backend):
                        yield Row(
                            part,
                            backend.name,
                            batch,
                            vocab,
                            microseconds=median(captured(run)) * 1e3,
                            eager_microseconds=eager(run),
                            floor_microseconds=num_bytes / bandwidth * 1e6,
                        )
            del problem
            torch.cuda.empty_cache()


def write(rows: Iterator[Row], folder: Path) -> list[Row]:
    """The table as CSV, a row as it comes: whatever stops the run, what was measured is there."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with (folder / "times.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [item.name for item in fields(Row)])
        table.writeheader()
        for row in rows:
            table.writerow(asdict(row))
            file.flush()
            written.append(row)
            size = f"batch {row.batch:3}  vocab {row.vocab:7}"
            print(f"{row.part:8}{row.path:14}{size}  {row.microseconds:10.1f} us", flush=True)
    return written


def draw(rows: list[Row], folder: Path) -> None:
    """A panel per part: time over batch for the largest vocabulary."""
    from matplotlib.figure import Figure

    parts = [part for part in dict.fromkeys(row.part for row in rows) if part != "nothing"]
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
    draw(write(rows, options.out), options.out)


if __name__ == "__main__":
    main()
