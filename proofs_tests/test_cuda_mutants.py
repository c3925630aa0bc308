"""What the tests of the tree kernels notice: a missing barrier under ThreadSanitizer, a wrong line by its results."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from optimized.kernels.tree import SOURCE
from proofs_tests.cuda_cases import random_offers
from proofs_tests.cuda_checks import Executor, check_walk, run_beam, run_case, run_prune, run_signed_zeros
from proofs_tests.cuda_shim import SanitizedShim, Shim, compile_kernels
from reference import RheoConfig


@pytest.fixture(scope="session")
def sanitized_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("-O1", "-g", "-fsanitize=thread", "-DSHIM_HOST_THREADS")
    return compile_kernels(tmp_path_factory.mktemp("sanitized"), "tree", *options)


def barrier_lines() -> list[int]:
    lines = SOURCE.read_text().splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.strip() == "__syncthreads();"]


def run_sanitized(program: Path, skipped_line: int, fewer_threads: int) -> tuple[str, bool]:
    """Every kernel once, on two requests; what ThreadSanitizer reports, and whether the results are right."""
    launch = SanitizedShim(program, skipped_line, fewer_threads)
    rng = torch.Generator().manual_seed(7)  # the second beam is not simply the first nodes
    config = RheoConfig(lead_tokens=1, branching=9, depth=4, beam=4, tree_size=70, verification="rrsw")
    offers = random_offers(config, 2, rng)
    wrong = 0
    for run in (
        lambda: run_beam(offers, 3, launch, "cpu"),
        lambda: run_prune(offers, launch, "cpu"),
        lambda: check_walk(offers, rng, launch, "cpu"),
    ):
        try:
            run()
        except AssertionError:
            wrong += 1
    return "".join(launch.reports), wrong == 0


@pytest.mark.parametrize("fewer_threads", [1, 4])
def test_no_race_is_found(sanitized_program: Path, fewer_threads: int) -> None:
    """Host threads with a real barrier, under ThreadSanitizer; two requests, so shared memory is used again."""
    report, right = run_sanitized(sanitized_program, 0, fewer_threads)
    assert report == ""
    assert right


@pytest.mark.parametrize("line", barrier_lines())
def test_every_barrier_is_needed(sanitized_program: Path, line: int) -> None:
    """Left out one by one, each leaves a race that the test above would have reported."""
    report, _ = run_sanitized(sanitized_program, line, 1)
    assert "WARNING: ThreadSanitizer: data race" in report, SOURCE.read_text().splitlines()[line - 1]


def compile_bounded(folder: Path, source: str | None = None) -> Path:
    options = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DSHIM_HOST_THREADS")
    return compile_kernels(folder, "tree", *options, source=source)


def test_nothing_out_of_bounds_is_touched(tmp_path: Path) -> None:
    """Every array in memory of its own, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    program = compile_bounded(tmp_path)
    for branching, depth, beam, tree_size in ((10, 3, 10, 60), (3, 1, 3, 3), (1, 20, 1, 64), (20, 2, 16, 500)):
        launch = SanitizedShim(program, 0, fewer_threads=8)
        rng = torch.Generator().manual_seed(branching)
        config = RheoConfig(branching=branching, depth=depth, beam=beam, tree_size=tree_size)
        offers = random_offers(config, 2, rng, torch.float64 if depth == 1 else torch.float32)
        run_beam(offers, depth, launch, "cpu")
        run_prune(offers, launch, "cpu")
        check_walk(offers, rng, launch, "cpu")
        assert set(launch.reports) == {""}


def test_a_row_too_many_is_noticed(tmp_path: Path) -> None:
    right = "const int rows = size + 1, expanded_count"
    source = SOURCE.read_text()
    assert right in source
    program = compile_bounded(tmp_path, source.replace(right, right.replace("1", "2")))
    offers = random_offers(RheoConfig(branching=3, depth=2, tree_size=4), 1, torch.Generator().manual_seed(0))
    with pytest.raises(pytest.fail.Exception, match="AddressSanitizer: heap-buffer-overflow"):
        run_prune(offers, SanitizedShim(program), "cpu")


def test_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the compiler, or without the runtime of ThreadSanitizer, fails and does not pass unseen."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=r"g\+\+ is missing, .*: install the compiler .*apt install g\+\+"):
        compile_kernels(tmp_path, "tree.so")
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'ld: cannot find libtsan_preinit.o' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(pytest.fail.Exception, match="The runtime of -fsanitize=thread is missing: install"):
        compile_kernels(tmp_path, "tree", "-fsanitize=thread")


MUTANTS = {
    "ties to the later node in the beam": (
        "tables.keys[other] == key && other < place",
        "tables.keys[other] == key && other > place",
    ),
    "ties at the cut to the later node": ("keys[k] == cut && tied < room", "keys[k] == cut && tied >= room"),
    "one too few at the cut": ("const int room = size - above;", "const int room = size - above - (above > 0);"),
    "NaN last": ("if (score != score) return NAN_KEY;", "if (score != score) return 1;"),
    "-0 behind +0": ("if ((bits << 1) == 0) bits = 0;", ""),
    "probes of all rows at the root": ("tables.probe[parent] = row;", "tables.probe[0] = row;"),
    "a parent's own level": ("tables.row_of[place.first_above * branching +", "tables.row_of["),
    "failures of nodes that are not there": (
        "fails = fails || (key > Order<Score>::LOWEST && key != Order<Score>::NAN_KEY);",
        "fails = true; (void)key;",
    ),
    "ancestors without the node itself": ("int step = row; step > 0", "int step = tables.parent[row]; step > 0"),
    "the probe before a lead": (
        "lead[row] ? lead[row] : probe && accepts[row] ? probe : match[row]",
        "probe && accepts[row] ? probe : lead[row] ? lead[row] : match[row]",
    ),
    "the drawn token may be the probe": ("child != probe && token == drawn", "token == drawn"),
    "fills among the leads": ("leads_first && child < probe", "leads_first && child != probe && probe"),
}


CAUGHT = 10


def hunt(library: Path) -> None:
    """Run a mutant in a process of its own, which it may crash; ends with ``CAUGHT`` when a comparison fails."""
    faulthandler.disable()
    torch.set_num_threads(1)
    executor = Executor(Shim(library))
    try:
        run_signed_zeros(executor)
        for seed in range(60):
            run_case(seed, executor)
    except AssertionError:
        os._exit(CAUGHT)


def hunt_apart(library: Path) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=hunt, args=(library,))
    process.start()
    process.join()
    return process.exitcode


def test_the_hunt_lets_the_kernels_pass(tmp_path: Path) -> None:
    assert hunt_apart(compile_kernels(tmp_path, "kernels.so", "-O0")) == 0


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, tmp_path: Path) -> None:
    """A wrong order, number or walk does not pass the cases above: a comparison fails, or a wrong index crashes."""
    right, wrong = MUTANTS[name]
    source = SOURCE.read_text()
    assert right in source, f"{right!r} is not in {SOURCE}"
    library = compile_kernels(tmp_path, "mutant.so", "-O0", source=source.replace(right, wrong))
    assert hunt_apart(library) in (CAUGHT, -signal.SIGSEGV, -signal.SIGABRT)
