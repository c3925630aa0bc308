"""Everything that only a GPU can show, in one command under ten minutes: ``make gpu-check``.

1. the differential tests, a decode per backend and the graph capture on the device;
2. the times (``kernels/bench.py``, without torch.compile, which takes minutes more);
3. compute-sanitizer's memcheck and racecheck over the kernels; racecheck sees shared memory only, not what a block
   leaves in device memory for itself.

Goes on after a step that fails and says so at the end. ``python kernels/gpu_check.py exercise`` is what the sanitizer
runs. Where nothing can be installed, in a checkout: ``PYTHONPATH=. python kernels/gpu_check.py --out FOLDER``.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import shutil
import signal
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
    "test_graph_capture.py",
]
CUDA_KERNELS = ("select_beam", "prune_tree", "walk")
TRITON_KERNELS = ("_tile_candidates", "_row_slots", "_tile_sums", "_row_outcome", "_step_uniforms")
SECONDS = {"tests": 200, "times": 150, "memcheck": 90, "racecheck": 90}


def sanitizer() -> str:
    """The path of compute-sanitizer: CUDA's own, or that of the package nvidia-cuda-sanitizer-api.

    Raises:
        FileNotFoundError: there is neither.
    """
    found = shutil.which("compute-sanitizer") or next(iter(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")), None)
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for path in sorted(Path(folder).rglob("compute-sanitizer")):
            if found is None and path.is_file():
                path.chmod(path.stat().st_mode | 0o111)  # wheels lose the executable bit
                found = str(path)
    if found is None:
        raise FileNotFoundError("compute-sanitizer is missing: install CUDA's, or nvidia-cuda-sanitizer-api with pip")
    return found


def exercise() -> None:
    """Every kernel on batches of small and large trees and vocabularies, with ties and with padding."""
    import torch
    import triton

    from optimized.backends import choose_backend
    from optimized.growth import grow_trees
    from optimized.randomness import StepRandomness
    from optimized.sampling_params import SamplingParams
    from optimized.target_laws import SamplingBatch, TargetLaws
    from reference.api import RheoConfig

    launched: set[str] = set()
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: launched.add(metadata.get()["name"]))
    device = torch.device("cuda")
    for config, vocab in (
        (RheoConfig(), 9001),  # several tiles, the last of them short
        (RheoConfig(), 4096),
        (RheoConfig(branching=2, depth=2, tree_size=60), 3),
        (RheoConfig(branching=32, depth=4, tree_size=1000, verification="rrsw"), 200),
    ):
        backend = choose_backend("cupy", device, config)
        generator = torch.Generator(device).manual_seed(vocab)
        table = torch.randn(64, vocab, device=device, generator=generator).round().bfloat16()
        shape = (config.depth, config.beam_width, config.tree_size + 1)
        randomness = StepRandomness(range(5), *shape, device, kernel=backend.uniforms)
        noise = randomness.at(torch.zeros(5, dtype=torch.long, device=device))
        temperatures = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64, device=device)
        trees = grow_trees(
            config,
            table[:5],
            lambda nodes, table=table: table[nodes.token_ids % 64],  # type: ignore[misc]
            temperatures,
            noise.probe_uniforms,
            steps=backend.growth,
        )
        params = [SamplingParams(temperature=float(t)) for t in temperatures.tolist()]
        sampling = SamplingBatch.from_params(params, [[0]] * 5, vocab, (), device)
        logits = table[torch.arange(5 * trees.rows, device=device).view(5, -1) % 64]
        for rule in ("rheo", "rrsw"):
            backend.verify(trees, TargetLaws(logits, sampling, trees), noise, rule)
    torch.cuda.synchronize()
    idle = [name for name in TRITON_KERNELS if not any(name in found for found in launched)]
    if idle:
        raise RuntimeError(f"these kernels did not run: {', '.join(idle)}")
    print("every kernel ran")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "kernels-bench", help="folder of the times")
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; `make test` runs the kernels without one")
    python = sys.executable
    names = CUDA_KERNELS + TRITON_KERNELS
    kernels = [option for name in names for option in ("--kernel-name", f"kernel_substring={name}")]
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    tests = [str(ROOT / "proofs_tests" / name) for name in TESTS]
    exercised = [python, __file__, "exercise"]
    steps = {
        "tests": [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel, "-k", "not shim", *tests],
        "times": [python, str(ROOT / "kernels" / "bench.py"), "--no-compile", "--out", str(options.out)],
    }
    failed = []
    try:
        checked = [sanitizer(), "--target-processes", "application-only", "--error-exitcode", "9", *kernels]
        steps |= {tool: [*checked, "--tool", tool, *exercised] for tool in ("memcheck", "racecheck")}
    except FileNotFoundError as error:
        print(error, flush=True)
        failed.append("sanitizer")
    # Torch's cache of device memory would hide an access beyond a tensor: it lies in the same allocation.
    uncached = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for name, command in steps.items():
        begin = time.perf_counter()
        print(f"== {name}", flush=True)
        try:
            environment = None if name in ("tests", "times") else uncached
            process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
            code = process.wait(SECONDS[name])
            outcome = "passed" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool's and the tests' own processes, too
            process.wait()
            outcome = f"stopped after {SECONDS[name]} s"
        if outcome != "passed":
            failed.append(name)
        print(f"== {name}: {outcome}, {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return len(failed)


if __name__ == "__main__":
    if sys.argv[1:] == ["exercise"]:
        exercise()
    else:
        sys.exit(main())
