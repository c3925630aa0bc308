"""Break the real code, one edit at a time, and see which test notices.

    python -m proofs_tests.break_real_code [--only WORDS]

Mutants (``proofs_tests.mutants``) are variants of the algorithm; this breaks the code itself. Every edit is made in a
temporary copy of the tree, the fast tests run there, and the first test of each file that goes red is printed. It
fails when an edit no longer applies, when the copy is red without any edit, and when an edit survives. Takes a few
minutes and is not collected by pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("conftest.py", "reference", "optimized", "kernels", "proofs_tests", "pyproject.toml")
SUITES = {
    "exact": ["proofs_tests/test_exact_law.py", "proofs_tests/test_several_probes.py"],
    "same noise": ["proofs_tests/test_differential.py"],
    "edge uniforms": [
        *("proofs_tests/test_chi_square.py", "proofs_tests/test_numba_kernels.py"),
        *("-k", "uniform_of_zero or draws_are_the_references"),
    ],
    "frequencies": ["proofs_tests/test_mutants.py", "-k", "noise_as_it_is"],
}


@dataclass(frozen=True)
class Edit:
    """One way to break a file: every ``old`` must be there exactly once."""

    bug: str
    file: str
    changes: tuple[tuple[str, str], ...]

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        for old, new in self.changes:
            if text.count(old) != 1:
                raise SystemExit(
                    f"{self.bug}, {self.file}: {text.count(old)} places read {old!r}; bring the edit up to date"
                )
            text = text.replace(old, new)
        path.write_text(text)


EDITS = [
    Edit("ranking ties by token id", "reference/growth.py", ((
        "return (-node.score, node.level, node.parent_rank, node.slot)",
        "return (-node.score, node.path[-1], node.level, node.parent_rank, node.slot)"),)),
    Edit("a fill before the probe", "reference/slots.py", ((
        "return [*leads, *probes, *fills][: self.num_slots]",
        "return [*leads, *fills[:1], *probes, *fills[1:]][: self.num_slots]"),)),
    Edit("q for q~", "reference/growth.py", ((
        "probe_laws[path] = plan.probe_law",
        'probe_laws[path] = (plan.tokens, __import__("numpy").array(plan.weights))'),)),
    Edit("residual sampled from p", "reference/verification.py", ((
        "law, probe_law = residual(law, probe_law), law_without(probe_law, token)",
        "probe_law = law_without(probe_law, token)"),)),
    Edit("accept with <=", "reference/verification.py", ((
        "accept_uniform * draft_prob < target_prob",
        "accept_uniform * draft_prob <= target_prob"),)),
    Edit("ranking ties by token id", "optimized/growth.py", ((
        "size = min(config.budget, count)\n    ranking = offered.sort(dim=1, descending=True, stable=True)",
        "size = min(config.budget, count)\n"
        "    ranking = (offered - 1e-13 * torch.cat([slots.token_ids.flatten(1) for slots in levels], dim=1))"
        ".sort(dim=1, descending=True, stable=True)"),)),
    Edit("a fill before the probe", "optimized/slots.py", ((
        "others = torch.where(between(m, branching, branching, logits.device), behind, schedule)",
        "others = torch.where(between(m, branching, branching, logits.device), behind[..., [m + 1 if k == m and "
        "m + 1 < branching else k for k in range(branching)]], schedule)"), (
        "is_probe = in_slots(drawn.exists) & between(m, m + draws, branching, logits.device)",
        "at = m + int(draws == 1 and m + 1 < branching)\n"
        "        is_probe = in_slots(drawn.exists) & between(at, at + draws, branching, logits.device)"))),
    Edit("q for q~", "optimized/slots.py", ((
        "        law=law,\n",
        "        law=torch.where(law.sum(-1, keepdim=True) > 0, q, law),\n"),)),
    Edit("residual sampled from p", "optimized/verification.py", ((
        "rest = law.scatter_add(1, probe_ids, -probe_law).clamp_(min=0)",
        "rest = law"),)),
    Edit("accept with <=", "optimized/verification.py", ((
        "* q_probe < law.gather(1, token))",
        "* q_probe <= law.gather(1, token))"),)),
    Edit("ranking ties by token id", "kernels/cpu/tree.py", ((
        "kept = np.empty((batch, size), np.int64)",
        "log_scores = log_scores - 1e-13 * token_ids\n    kept = np.empty((batch, size), np.int64)"),)),
    Edit("a fill before the probe", "kernels/cpu/slots.py", ((
        "    following = m\n",
        "    following = m\n    order = np.arange(num_slots)\n    if drawn == 1 and m + 1 < num_slots:\n"
        "        order[m], order[m + 1] = m + 1, m\n"), (
        "    for slot in range(num_slots):\n        if slot < m or drawn == 0:",
        "    for number in range(num_slots):\n        slot = order[number]\n        if slot < m or drawn == 0:"), (
        "slots.is_probe[b, node, slot] = True",
        "slots.is_probe[b, node, number] = True"), (
        "slots.token_ids[b, node, slot] = ids[place]",
        "slots.token_ids[b, node, number] = ids[place]"), (
        "slots.log_scores[b, node, slot] = reached",
        "slots.log_scores[b, node, number] = reached"))),
    Edit("q for q~", "kernels/cpu/slots.py", ((
        "softmax(kept, m, ranked, divisor, law)",
        "softmax(kept, m, ranked, 1.0, law)"),)),
    Edit("residual sampled from p", "kernels/cpu/walk.py", ((
        "max(law[probe_ids[place]] - left[place], 0.0)",
        "law[probe_ids[place]]"),)),
    Edit("accept with <=", "kernels/cpu/walk.py", ((
        "mass_of(token, probe_ids, left) < law[token]",
        "mass_of(token, probe_ids, left) <= law[token]"),)),
    Edit("second probe's q~ not renormalised", "kernels/cpu/walk.py", ((
        "return left / total if total > 0 else left",
        "return left"),)),
    Edit("probes drawn with replacement", "kernels/cpu/slots.py", ((
        "        left[places[drawn]] = 0.0\n",
        ""),)),
    Edit("a tile's end taken for its beginning", "kernels/cpu/walk.py", ((
        "if cumulative + tiles[tile] > point or",
        "if cumulative + tiles[tile] >= point or"),)),
    Edit("second probe's q~ not renormalised", "reference/tree.py", ((
        "return token_ids, left / total if total > 0 else left",
        "return token_ids, left"),)),
    Edit("second probe's q~ not renormalised", "optimized/verification.py", ((
        "probe_law = torch.where(left > 0, probe_law / left, probe_law)",
        "probe_law = probe_law"),)),
    Edit("second probe tested against p", "optimized/verification.py", ((
        "law = torch.where(tested & (total > 0), rest / total, law)",
        "law = law"),)),
    Edit("probes drawn with replacement", "optimized/slots.py", ((
        "law, proxies = law.masked_fill(taken, 0.0), proxies.masked_fill(taken, 0.0)",
        "proxies = proxies.masked_fill(taken, 0.0)"),)),
    Edit("a missing child lets the next rank move up", "optimized/growth.py", ((
        "log_scores = offered.gather(1, offers)\n",
        "log_scores = offered.gather(1, offers)\n"
        "        offers = offers.gather(1, (log_scores == -torch.inf).int().argsort(dim=1, stable=True))\n"
        "        log_scores = offered.gather(1, offers)\n"),)),
]  # fmt: skip


def copy_tree(to: Path, kernels: Path | None = None) -> None:
    """Copy what is tested, with the kernels below the name by which they are imported, or with those of another copy,
    which need not be compiled again.
    """
    to.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)
    (to / "optimized" / "kernels").symlink_to(kernels or to / "kernels")


def red_tests(root: Path, suites: list[str]) -> dict[str, str]:
    """The first test of each suite that fails in the copy."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    where = [sys.executable, "-c", "import reference, optimized; print(reference.__file__, optimized.__file__)"]
    found = subprocess.run(where, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout.split()
    if not all(Path(file).is_relative_to(root) for file in found):
        raise SystemExit(f"the copy's tests would run on other code: {found}")
    red: dict[str, str] = {}
    for suite in suites:
        command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", "-q", "-x"]
        result = subprocess.run(
            [*command, "-m", "not deep", *SUITES[suite]], cwd=root, env=environment, capture_output=True, text=True
        )
        if result.returncode == 1:
            failed = re.search(r"^(?:FAILED|ERROR) .*?::(.*?)(?: - |$)", result.stdout, re.MULTILINE)
            red[suite] = failed.group(1) if failed else "?"
        elif result.returncode != 0:
            raise SystemExit(f"pytest could not run {suite}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return red


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="edits whose bug or file contains this")
    only = parser.parse_args().only
    survivors = []
    with tempfile.TemporaryDirectory() as scratch:
        clean = Path(scratch) / "clean"
        copy_tree(clean)
        for edit in EDITS:  # before anything takes time
            edit.apply(_copied(clean, Path(scratch) / "check" / edit.file, edit.file))
        if not only:
            red = red_tests(clean, list(SUITES))
            if red:
                raise SystemExit(f"red without any edit: {red}")
            print("without an edit: green", flush=True)
        for number, edit in enumerate(EDITS):
            if only not in f"{edit.bug} {edit.file}":
                continue
            broken = Path(scratch) / f"broken{number}"
            copy_tree(broken, None if edit.file.startswith("kernels") else clean / "kernels")
            edit.apply(broken)
            suites = [suite for suite in SUITES if suite != "exact" or edit.file.startswith("reference")]
            red = red_tests(broken, suites)
            print(f"{edit.bug}, {edit.file}:", flush=True)
            for suite in suites:
                print(f"    {suite:13} {red.get(suite, '-')}", flush=True)
            if not red:
                survivors.append(f"{edit.bug}, {edit.file}")
            shutil.rmtree(broken)
    if survivors:
        raise SystemExit(f"nothing went red: {survivors}")


def _copied(clean: Path, to: Path, file: str) -> Path:
    """A root that holds a copy of one file."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(clean / file, to)
    return to.parents[len(Path(file).parts) - 1]


if __name__ == "__main__":
    main()
