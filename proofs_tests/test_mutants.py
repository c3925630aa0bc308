"""Every bias that the theory warns of has a mutant, and every mutant is caught; the algorithm itself is not.

``pytest proofs_tests -k mutants`` prints the table.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from optimized.evidence.cases import HARD_CASES_BY_NAME
from proofs_tests.mutants import (
    MUTANTS,
    NOISE_DRAWS,
    NOISE_MUTANTS,
    SOUND_NOISE,
    TWINS,
    mutants_table,
    noise_comparison,
    worst_case,
)
from proofs_tests.statistics import Family
from proofs_tests.variants import RHEO, RRSW, emitted_on, merged_trees, sampled_on, tree_key
from reference.api import RheoConfig
from reference.exact import tree_classes, tree_output_law

BY_NAME = {variant.name: variant for variant in [*MUTANTS, *TWINS]}


@pytest.mark.lossless
@pytest.mark.parametrize("name", [twin.name for twin in TWINS])
def test_twin_has_no_bias_at_all(name):
    """Also the algorithm itself, in the same pieces: total variation exactly 0 wherever the mutants are tried."""
    assert worst_case(BY_NAME[name]).tv == 0


@pytest.mark.lossless
@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_mutant_is_caught(name):
    mutant = BY_NAME[name]
    found = worst_case(mutant)
    assert found.tv > 0, f"{name} survives every case"
    if "2^-24" in name:
        assert found.tv == Fraction(1, 2**24), (
            "the probe of probability 0 is accepted by the uniform 0, and by no other"
        )
    else:
        assert found.tv > Fraction(1, 20)
    if mutant.known:  # of the same order as what was found before, in another case
        assert Fraction(2, 3) < found.tv / Fraction(mutant.known) < 2


def test_mutants_are_enough_and_told_apart():
    assert len(BY_NAME) == len(MUTANTS) + len(TWINS)
    assert len(MUTANTS) >= 16


@pytest.mark.parametrize("rule", ["rheo", "rrsw"])
@pytest.mark.parametrize("name", ["opposite rankings", "uniform draft, all ties", "sampling law with holes"])
@pytest.mark.parametrize(
    ("shape", "probes"),
    [((0, 2, 2, 4, 2), 1), ((1, 3, 2, 5, 2), 1), ((1, 2, 3, 6, 1), 1), ((0, 3, 2, 5, 1), 2), ((1, 4, 1, 4, 1), 3)],
)
def test_the_pieces_of_the_mutants_are_the_algorithm(name, rule, shape, probes):
    """The same classes of trees with the same probabilities, and on each of them the same law of the output."""
    case, variant = HARD_CASES_BY_NAME[name], {"rheo": RHEO, "rrsw": RRSW}[rule]
    config = RheoConfig(*shape, verification=rule, probes=probes)
    horizon = config.depth + 1
    classes = {tree.key: (tree, probability) for tree, probability in tree_classes(config, case.draft())}
    seen: Counter = Counter()
    for nodes, probability in merged_trees(variant, config, case).values():
        key = tree_key(nodes)
        seen[key] += probability
        emitted = sampled_on(emitted_on(variant, nodes, config, case), case, horizon)
        assert emitted == tree_output_law(classes[key][0], case.target, horizon, rule)
    assert dict(seen) == {key: probability for key, (_, probability) in classes.items()}


@pytest.mark.lossless
def test_noise_as_it_is_passes_and_noise_mutants_are_caught():
    with Family("statistical mutants", 1) as family:
        sound = noise_comparison(SOUND_NOISE)
        family.add(SOUND_NOISE.name, sound.p_value)
    assert sound.draws == NOISE_DRAWS
    for mutant in NOISE_MUTANTS:
        p_value = noise_comparison(mutant).p_value
        assert p_value < family.test_alpha, f"{mutant.name} survives: p = {p_value}"


def test_mutants_table(capsys):
    table, committed = mutants_table(), (Path(__file__).parents[1] / "docs/_generated/mutants.md").read_text()
    for variant in [*MUTANTS, *NOISE_MUTANTS, *TWINS]:
        assert f"| {variant.name} |" in table
        assert f"| {variant.name} |" in committed, "docs/_generated/mutants.md is old: run `make mutants`"
    assert table.count("exactly 0") == len(TWINS)
    with capsys.disabled():
        print(f"\n{table}")
