"""Everything that only a GPU can show, in one command under five minutes: ``make gpu-check``.

1. the differential tests and the graph capture on the device;
2. compute-sanitizer's memcheck and racecheck over the CUDA kernels;
3. the times (``kernels/bench.py``), written to ``kernels-bench/``.

Stops at the first step that fails. ``python kernels/gpu_check.py exercise`` is what the sanitizer runs.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [
    "test_backends.py",
    "test_triton_philox.py",
    "test_triton_slots.py",
    "test_triton_rows.py",
    "test_cuda_tree.py",
]
KERNELS = ("select_beam", "prune_tree", "walk")


def sanitizer() -> str:
    """The path of compute-sanitizer: CUDA's own, or that of the package nvidia-cuda-sanitizer-api."""
    found = shutil.which("compute-sanitizer")
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for path in sorted(Path(folder).rglob("compute-sanitizer")):
            if found is None and path.is_file():
                path.chmod(path.stat().st_mode | 0o111)  # wheels lose the executable bit
                found = str(path)
    if found is None:
        raise SystemExit("compute-sanitizer is missing: install CUDA's, or pip install nvidia-cuda-sanitizer-api")
    return found


def exercise() -> None:
    """Every CUDA kernel on batches of small and large trees, with ties and with padding."""
    import torch

    from optimized.backends import choose_backend
    from optimized.growth import grow_trees
    from optimized.kernels import tree
    from optimized.randomness import StepRandomness
    from reference.api import RheoConfig

    device = torch.device("cuda")
    for config, vocab in (
        (RheoConfig(), 4096),
        (RheoConfig(branching=2, depth=2, tree_size=60), 3),
        (RheoConfig(branching=32, depth=4, tree_size=1000, verification="rrsw"), 200),
    ):
        steps = choose_backend("cupy", device, config).growth
        generator = torch.Generator(device).manual_seed(vocab)
        table = torch.randn(64, vocab, device=device, generator=generator).round().bfloat16()
        randomness = StepRandomness(range(5), config.depth, config.beam_width, config.tree_size + 1, device)
        noise = randomness.at(torch.zeros(5, dtype=torch.long, device=device))
        temperatures = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64, device=device)
        trees = grow_trees(
            config,
            table[:5],
            lambda nodes, table=table: table[nodes.token_ids % 64],  # type: ignore[misc]
            temperatures,
            noise.probe_uniforms,
            steps=steps,
        )
        for rule in ("rheo", "rrsw"):
            accepts = noise.accept_uniforms[:, : trees.rows] < 0.5
            drawn = trees.token_ids.roll(-1, dims=1).clamp(min=0).contiguous()
            tree.walk(
                trees.token_ids, trees.parents, trees.probe_rows(), accepts, drawn, drawn, depth=trees.depth, rule=rule
            )
    torch.cuda.synchronize()
    print("every kernel ran")


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; `make test` runs the kernels without one")
    python = sys.executable
    kernels = [option for name in KERNELS for option in ("--kernel-name", f"kernel_substring={name}")]
    checked = [sanitizer(), "--error-exitcode", "9", *kernels, "--tool"]
    exercised = [python, __file__, "exercise"]
    tests = [str(ROOT / "proofs_tests" / name) for name in [*TESTS, "test_graph_capture.py"]]
    steps = {
        "tests on the device": [python, "-m", "pytest", "-q", *tests],
        "memcheck": [*checked, "memcheck", *exercised],
        "racecheck": [*checked, "racecheck", *exercised],
        "times": [python, str(ROOT / "kernels" / "bench.py"), "--out", str(ROOT / "kernels-bench")],
    }
    for name, command in steps.items():
        begin = time.perf_counter()
        print(f"== {name}", flush=True)
        code = subprocess.run(command, cwd=ROOT).returncode
        print(
            f"== {name}: {'passed' if code == 0 else f'failed ({code})'} in {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        if code:
            raise SystemExit(code)


if __name__ == "__main__":
    exercise() if sys.argv[1:] == ["exercise"] else main()
