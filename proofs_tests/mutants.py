"""Deliberately wrong variants of growth and verification, and the exact bias of each.

A test of losslessness that no wrong algorithm fails proves nothing. *Mutants* replace one piece of the algorithm
(``proofs_tests.variants``) by a wrong one (``proofs_tests.wrong_pieces``); *twins* look as suspicious and are lossless
by the theorem (docs/generalisations.md). A mutant is told from the algorithm by a total variation other than 0.

    python -m proofs_tests.mutants        prints docs/_generated/mutants.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from optimized.evidence.cases import HARD_CASES_BY_NAME, Case, law, tempered
from optimized.evidence.markov import MarkovModel, block_counts, block_law, sample_blocks
from optimized.randomness import StepNoise
from optimized.sampling_params import SamplingParams
from proofs_tests.statistics import SUITE_ALPHA
from proofs_tests.variants import RHEO, RRSW, Law3, Path, Variant, bias, entered_before_the_probe
from proofs_tests.wrong_pieces import (
    above_one,
    at_most_on_the_grid,
    below_a_likely_best,
    below_a_likely_level,
    below_on_the_grid,
    better_ranked_mate,
    bonus_from_the_draft,
    children_by_token,
    construction_law,
    discounted_fills,
    draw_at_temperature_one,
    draw_two_probes,
    draw_with_replacement,
    drop_the_repeat,
    drop_unlikely_probes,
    fills_first,
    fills_that_may_repeat_the_probe,
    half_if_shallow,
    law_not_renormalised,
    leads_in_slot_order,
    leads_leave_a_gap,
    leads_share_what_the_probe_leaves,
    leads_stay,
    learned_within_the_step,
    likely_ones,
    own_probability,
    probe_in_the_last_slot,
    probes_own_uniform,
    proxy_for_probability,
    repeat_its_token,
    residual_not_normalised,
    residual_of_the_construction_law,
    reweighed,
    row_of_the_parent,
    sampling_law_with_leads,
    score_threshold,
    sorted_probes,
    stop_after_an_odd_probe,
    stop_before_an_odd_probe,
    target_itself,
    target_law_itself,
    ties_by_token,
    top_k_as_if_sampled,
    two_probes,
    uncapped,
    weight_without_the_own_token,
    with_ancestors,
    worse_ranked_mate,
)
from reference.api import Proposal, RheoConfig
from reference.statistics import Comparison, compare


def _by_last_token(name: str, q: Sequence[Law3], p: Sequence[Law3], power: int = 1) -> Case:
    """Laws at the root, and after each token; the last given one goes for the remaining tokens."""

    def at(laws: Sequence[Law3], path: Path) -> Law3:
        return laws[min(path[-1] + 1 if path else 0, len(laws) - 1)]

    return Case(
        name, lambda path: at(q, path), lambda path: at(p, path), len(q[0]), lambda path, q_: tempered(q_, power)
    )


PEAK, FLAT = law(98, 1, 1), law(1, 1, 1)
CASES = (
    HARD_CASES_BY_NAME["p equals q"],
    HARD_CASES_BY_NAME["opposite rankings"],
    HARD_CASES_BY_NAME["uniform draft, all ties"],
    HARD_CASES_BY_NAME["cold sampling law"],
    HARD_CASES_BY_NAME["hot sampling law"],
    _by_last_token("certain target", [law(2, 1, 1)], [law(1, 0, 0)], power=2),
    _by_last_token("two tied, cold", [law(3, 3, 1)], [law(3, 1, 3)], power=2),
    _by_last_token(
        "steep, cold, turning", [law(1, 3, 5), law(5, 3, 1), law(3, 8, 1)], [law(3, 5, 1), law(1, 0, 4)], power=3
    ),
    Case("hot draft", lambda path: law(5, 3, 1), lambda path: law(0, 1, 1), 3, lambda path, q: law(1, 1, 1)),
    _by_last_token("peaked after 1, flat after 2", [law(4, 3, 3), FLAT, PEAK, FLAT], [law(0, 1, 1)]),
    _by_last_token("the same, other target", [law(4, 3, 3), FLAT, PEAK, FLAT], [law(1, 1, 0)]),
)
CERTAIN = tuple(case for case in CASES if case.name == "certain target")
CONFIGS = [
    RheoConfig(lead_tokens, branching, depth, tree_size, beam)
    for lead_tokens, branching, depth, tree_size, beam in (
        (0, 2, 1, 2, 1),
        (0, 3, 1, 1, 1),
        (1, 2, 1, 1, 1),
        (1, 2, 1, 2, 1),
        (1, 3, 1, 2, 1),
        (2, 3, 1, 3, 1),
        (0, 2, 2, 2, 1),
        (1, 2, 2, 2, 1),
        (1, 2, 2, 3, 2),
        (0, 2, 2, 6, 2),
        (0, 3, 2, 2, 1),
        (1, 3, 2, 2, 1),
        (0, 3, 2, 4, 1),
        (1, 3, 2, 3, 2),
        (2, 3, 2, 4, 1),
    )
]
# A worse-ranked mate takes three levels to tell; a weight above one wants the draft to turn with the path.
THREE_LEVELS = (
    _by_last_token(
        "three levels",
        [law(8, 2, 1), law(8, 1, 8), law(8, 5, 2), law(1, 1, 3)],
        [law(1, 3, 1), law(1, 8, 1), law(8, 2, 1), law(1, 0, 1)],
    ),
    RheoConfig(1, 3, 3, 3, 2),
)
TWO_A_LEVEL = (THREE_LEVELS[0], RheoConfig(0, 2, 3, 5, 2))
TURNING = (
    _by_last_token("turning", [law(3, 0, 1), law(0, 3, 8), law(4, 4, 1), law(1, 8, 3)], [law(8, 2, 3), law(1, 1, 8)]),
    RheoConfig(0, 2, 2, 2, 2),
)


@dataclass(frozen=True, eq=False)
class Mutant:
    """A variant with a bug, or a twin without one.

    Attributes:
        name: what the bug is called.
        breaks: the assumption of docs/theory.md that it gives up; for a twin, why it does not give up any.
        variant: the algorithm with the bug.
        known: the total variation of another case, found before these tests were written, if any.
        tailored: a case beside ``CASES`` and ``CONFIGS``.
        proposal, probes: of the configurations it is tried on.
        cases: what takes the place of ``CASES``.
    """

    name: str
    breaks: str
    variant: Variant
    known: str = ""
    tailored: tuple[Case, RheoConfig] | None = None
    proposal: Proposal = "rheo"
    probes: int = 1
    cases: Sequence[Case] = CASES

    def trials(self) -> Iterator[tuple[Case, RheoConfig]]:
        """What it is tried on."""
        roomy = [
            config for config in CONFIGS if config.branching - config.lead_tokens >= self.probes or self.probes == 1
        ]
        configs = [replace(config, proposal=self.proposal, probes=self.probes) for config in roomy]
        cases = [case for case in self.cases if self.probes == 1 or case.vocab_size == 3]  # four have too many outcomes
        yield from ((case, config) for case in cases for config in configs)
        if self.tailored:
            yield self.tailored


@dataclass(frozen=True)
class Finding:
    """The largest bias of a variant and where it was found."""

    tv: Fraction
    case: str
    config: RheoConfig


@cache
def worst_case(mutant: Mutant) -> Finding:
    """The trial of the largest bias; the first one among equals."""
    findings = (Finding(bias(mutant.variant, config, case), case.name, config) for case, config in mutant.trials())
    return max(findings, key=lambda finding: finding.tv)


TWO = Variant(draws=draw_two_probes, slots=two_probes(second_first=False))
UNCAPPED = Variant(slots=reweighed(uncapped))

MUTANTS = [
    Mutant("true q as the proxy", "A2", Variant(slots=reweighed(own_probability)), "0.24"),
    Mutant("ties broken by token id", "A1", Variant(order=ties_by_token), "0.24"),
    Mutant("leads share what the probe leaves of q", "A2",
           Variant(slots=reweighed(leads_share_what_the_probe_leaves)), "0.25"),
    Mutant("fills ranked before the probe", "A2", Variant(slots=probe_in_the_last_slot), "0.19"),
    Mutant("second probe ranked above the first", "A2", replace(TWO, slots=two_probes(second_first=True)), "0.56"),
    Mutant("several probes verified in rank order, not as drawn", "A3", Variant(slots=sorted_probes), probes=2),
    Mutant("second probe's weight without its own token", "A2",
           Variant(slots=reweighed(weight_without_the_own_token)), probes=2),
    Mutant("second probe verified with q~ not renormalised", "A4", Variant(law_left=law_not_renormalised), probes=2),
    Mutant("second probe tested against p, not the residual", "lemma 4",
           Variant(tested_against=target_law_itself), probes=2),
    Mutant("probes drawn with replacement, verified as without", "A4",
           Variant(draws=draw_with_replacement, slots=repeat_its_token), probes=2),
    Mutant("weight that depends on a worse-ranked beam mate", "A2", Variant(slots=reweighed(worse_ranked_mate)),
           "0.14", THREE_LEVELS),
    Mutant("weights above 1", "A1", Variant(slots=reweighed(above_one), keep=with_ancestors), "0.18", TURNING),
    Mutant("stopping before an odd probe", "no stopping time", Variant(keep=stop_before_an_odd_probe), "0.26"),
    Mutant("half the budget when the finished tree is shallow", "no stopping time",
           Variant(keep=half_if_shallow), "0.17"),
    Mutant("no level below one that adds up to little", "depends on worse-ranked mates",
           Variant(expand=below_a_likely_level), tailored=TWO_A_LEVEL),
    Mutant("weights learned from this step's probes", "A2", Variant(slots=reweighed(learned_within_the_step)),
           tailored=THREE_LEVELS),
    Mutant("unlikely probes pruned", "A2", Variant(keep=drop_unlikely_probes)),
    Mutant("fill equal to the probe, children found by token", "A3",
           Variant(slots=fills_that_may_repeat_the_probe, step=children_by_token)),
    Mutant("verified with q instead of q~", "A4", Variant(verified_with=construction_law), "0.59"),
    Mutant("verified with q_T, leads not removed", "A4", Variant(verified_with=sampling_law_with_leads)),
    Mutant("verified with the proxy", "A4", Variant(verified_with=proxy_for_probability)),
    Mutant("probe drawn at temperature 1, verified at T", "A4", Variant(draws=draw_at_temperature_one)),
    Mutant("residual from p instead of max(0, p - q~)", "lemma 4", Variant(residual=target_itself)),
    Mutant("residual max(0, p - q) of the construction law", "A4", Variant(residual=residual_of_the_construction_law)),
    Mutant("residual not normalised", "lemma 4", Variant(residual=residual_not_normalised)),
    Mutant("probe's uniform used again to accept it", "A5", Variant(accept=probes_own_uniform)),
    Mutant("accept u q~ <= p, u on the grid of 2^-24", "lemma 4", Variant(accept=at_most_on_the_grid), cases=CERTAIN),
    Mutant("fills drawn for before the probe is tested", "A6", Variant(before_probe=fills_first)),
    Mutant("rrsw in slot order, probe ranked above a lead", "A6",
           replace(UNCAPPED, before_probe=leads_in_slot_order), "0.25"),
    Mutant("rrsw tests the probe against p, leads not taken out", "lemma 4", replace(RRSW, without=leads_stay)),
    Mutant("rrsw takes the leads out and does not normalise", "lemma 4", replace(RRSW, without=leads_leave_a_gap)),
    Mutant("bonus token at a leaf drawn from the draft", "lemma 4", Variant(last_draw=bonus_from_the_draft)),
    Mutant("children verified by the parent's row of the target", "lemma 4", Variant(target_row=row_of_the_parent)),
    Mutant("top-K children accepted with p/q as if sampled", "A4", Variant(step=top_k_as_if_sampled), proposal="topk"),
]  # fmt: skip

TWINS = [
    Mutant("the algorithm, rheo", "Theorem 1", RHEO, tailored=THREE_LEVELS),
    Mutant("the algorithm, rrsw", "Theorem 1", RRSW, tailored=THREE_LEVELS),
    Mutant("the algorithm without probes", "Theorem 1", RHEO, proposal="topk"),
    Mutant("the algorithm with two probes, rheo", "Theorem 1", RHEO, probes=2),
    Mutant("the algorithm with three probes, rrsw", "Theorem 1", RRSW, probes=3),
    Mutant("the algorithm, u on the grid of 2^-24", "p / q~ is 0 or at least 1, so the grid is fine enough",
           Variant(accept=below_on_the_grid), cases=CERTAIN),
    Mutant("uncapped proxy, above the leads, rheo", "known before the probe's token", UNCAPPED),
    Mutant("uncapped proxy, above the leads, rrsw in order of entry", "verified in the total order",
           replace(UNCAPPED, before_probe=entered_before_the_probe)),
    Mutant("two probes in drawing order", "the second is drawn and verified after the first", TWO),
    Mutant("probes drawn with replacement, repeats dropped", "whether there is a second is known before its token",
           Variant(draws=draw_with_replacement, slots=drop_the_repeat), probes=2),
    Mutant("stopping after an odd probe", "a stopping time", Variant(keep=stop_after_an_odd_probe)),
    Mutant("threshold tree", "a stopping time", Variant(keep=score_threshold)),
    Mutant("no level below one whose best node is unlikely", "the best of a level is revealed first",
           Variant(expand=below_a_likely_best), tailored=TWO_A_LEVEL),
    Mutant("only likely nodes expanded", "a score depends on the path alone", Variant(expand=likely_ones),
           tailored=TWO_A_LEVEL),
    Mutant("fills discounted by half", "known before the fills", Variant(slots=reweighed(discounted_fills))),
    Mutant("weight that depends on a better-ranked beam mate", "revealed before the weight is needed",
           Variant(slots=reweighed(better_ranked_mate)), tailored=THREE_LEVELS),
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class NoiseMutant:
    """The batched path with its randomness misused; told from the law by frequencies, as ``test_chi_square`` does."""

    name: str
    with_noise: Callable[[StepNoise], StepNoise] = lambda noise: noise
    step_counter: Callable[[int], int] = lambda step: step


NOISE_MUTANTS = [
    NoiseMutant("step counter that never advances", step_counter=lambda step: 1),
    NoiseMutant("accept and residual uniforms share their bits",
                lambda noise: replace(noise, residual_uniforms=noise.accept_uniforms)),
    NoiseMutant("one accept uniform for the whole walk",
                lambda noise: replace(noise, accept_uniforms=_first_everywhere(noise.accept_uniforms))),
    NoiseMutant("one probe uniform for the whole tree",
                lambda noise: replace(noise, probe_uniforms=_first_everywhere(noise.probe_uniforms))),
]  # fmt: skip
SOUND_NOISE = NoiseMutant("the noise as it is")
NOISE_DRAWS = 40_000
NOISE_CONFIG = RheoConfig(lead_tokens=0, branching=3, depth=3, tree_size=3, beam=1)


def _first_everywhere(uniforms: Tensor) -> Tensor:
    first = uniforms.flatten(1)[:, 0]
    return first.view(-1, *[1] * (uniforms.ndim - 1)).expand_as(uniforms).contiguous()


@cache
def noise_comparison(mutant: NoiseMutant) -> Comparison:
    """Blocks of three tokens under this noise, compared with the target's law."""
    target = 1.5 * torch.randn((8, 8), generator=torch.Generator().manual_seed(7))
    draft = torch.tensor([2.0, 6.0, 0.1, 4.0, *[0.1] * 4]).log()  # after every token; the best is not the lowest id
    model = MarkovModel(target, draft.repeat(8, 1))
    params = SamplingParams(temperature=0.8)
    blocks = sample_blocks(
        model,
        NOISE_CONFIG,
        [params],
        range(NOISE_DRAWS),
        with_noise=mutant.with_noise,
        step_counter=mutant.step_counter,
    )
    return compare(block_counts(blocks, model.vocab_size), block_law(model, params), alpha=SUITE_ALPHA)


def mutants_table() -> str:
    """The mutants and their twins as Markdown: the largest total variation found, and where."""
    lines = [
        "Found by exact enumeration. *Known* is the bias of another case, found before these tests were written; m, K, "
        "depth, R and beam are the settings of the worst case.",
        "",
        "| mutant | breaks | total variation | known | worst case | m, K, depth, R, beam |",
        "|---|---|---|---|---|---|",
    ]
    for mutant in MUTANTS:
        found = worst_case(mutant)
        shape = found.config
        numbers = (shape.lead_tokens, shape.branching, shape.depth, shape.tree_size, shape.beam_width)
        lines.append(
            f"| {mutant.name} | {mutant.breaks} | {_readable(found.tv)} | {mutant.known} | {found.case} | "
            f"{', '.join(map(str, numbers))} |"
        )
    lines += [
        "",
        f"Found by frequencies: the batched code with misused randomness (A5), {NOISE_DRAWS:,} blocks of three tokens.",
        "",
        "| mutant | p-value |",
        "|---|---|",
    ]
    for tampered in [*NOISE_MUTANTS, SOUND_NOISE]:
        p_value = noise_comparison(tampered).p_value
        lines.append(f"| {tampered.name} | {f'{p_value:.2g}' if p_value else 'below 1e-300'} |")
    lines += [
        "",
        "Twins: just as suspicious, and lossless. They show that the enumeration does not simply reject every change.",
        "",
        "| twin | total variation | why it is lossless |",
        "|---|---|---|",
    ]
    lines += [f"| {twin.name} | {_readable(worst_case(twin).tv)} | {twin.breaks} |" for twin in TWINS]
    return "\n".join(lines) + "\n"


def _readable(tv: Fraction) -> str:
    if tv == 0:
        return "exactly 0"
    return f"{float(tv):.3f}" if tv > Fraction(1, 1000) else f"{float(tv):.2g}"


if __name__ == "__main__":
    print(mutants_table(), end="")
