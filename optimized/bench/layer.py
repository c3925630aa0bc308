"""One layer alone: how often the next token is among the slots of one node, measured, predicted, and at best.

All slots are kept, so that nothing is lost to pruning: this compares the rules themselves (docs/acceptance.md). At each
context the measurement draws trees of one level and walks them with the batched code; the prediction is the closed
form on the same laws. Both see the law of the target on the draft's support and one token that stands for all others:
no rule tells those apart, since none of them is ever offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.bench.contexts import CommonContexts, choose_positions, support_mass
from optimized.bench.methods import PLAIN, Method
from optimized.bench.questions import Question, QuestionSet, first_prompts
from optimized.bench.randomness import derived_seed
from optimized.bench.running import MethodRunner
from optimized.decoder import RheoDecoder
from optimized.growth import grow_trees
from optimized.randomness import StepRandomness
from optimized.sampling_params import SamplingParams
from optimized.slots import rank_logits
from optimized.trees import LevelNodes, TreeBatch
from optimized.verification import verify_trees
from reference.acceptance import LayerRule, optimal_transport, single_layer
from reference.api import DraftLaw, RheoConfig, is_greedy
from reference.tree import root_only

RULES: tuple[LayerRule, ...] = ("topk", "rrsw", "rheo")


@dataclass(frozen=True)
class LayerPlan:
    """What is to be measured.

    Attributes:
        sets: of questions, already cut to those wanted; first turns are asked.
        temperatures: above the greedy cut-off, where no rule differs from another.
        branchings, lead_tokens: K and m of the slots; m counts for "rrsw" and "rheo" alone, below K.
        draft_support: of the slots.
        supports: whose coverage is taken.
        contexts: positions per text.
        walks: per context and rule.
        max_new_tokens: of the texts.
        seed: of everything.
    """

    sets: tuple[QuestionSet, ...]
    temperatures: tuple[float, ...]
    branchings: tuple[int, ...]
    lead_tokens: tuple[int, ...]
    draft_support: int
    supports: tuple[int, ...]
    contexts: int
    walks: int
    max_new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if any(is_greedy(temperature) for temperature in self.temperatures):
            raise ValueError("a greedy request has no probes, so that all rules are top-K; name temperatures above 0")
        narrow = [k for k in self.branchings if k <= min(self.lead_tokens)]
        if narrow:
            raise ValueError(
                f"{narrow[0]} slots are taken by {min(self.lead_tokens)} leads, and all rules are top-K; give fewer "
                "leads or more slots"
            )

    def variants(self) -> list[tuple[LayerRule, int, int | None]]:
        """(rule, K, m): "topk" once per K, the others for each m below it."""
        return [
            (rule, branching, leads)
            for branching in self.branchings
            for rule in RULES
            for leads in ([None] if rule == "topk" else [m for m in self.lead_tokens if m < branching])
        ]


@dataclass(frozen=True)
class LayerRow:
    """One rule at one context.

    Attributes:
        set_name, question_id, position, temperature: the context; position i is behind token i of the text.
        rule: "topk", "rrsw" or "rheo".
        branching, lead_tokens: K and m; m is None for "topk".
        draft_support: of the law.
        walks: how many were made.
        measured: share of them that went down.
        predicted: the closed form.
        bound: what no lossless verification of the same slots exceeds.
    """

    set_name: str
    question_id: str
    position: int
    temperature: float
    rule: str
    branching: int
    lead_tokens: int | None
    draft_support: int
    walks: int
    measured: float
    predicted: float
    bound: float


@dataclass(frozen=True)
class CoverageRow:
    """One support at one context.

    Attributes:
        set_name, question_id, position, temperature: the context.
        support: how many of the draft's tokens are kept.
        draft_mass: of the draft's full law on them, at temperature 1.
        target_mass: of the target's law on them, at the request's temperature.
    """

    set_name: str
    question_id: str
    position: int
    temperature: float
    support: int
    draft_mass: float
    target_mass: float


def measure_layers(
    decoder: RheoDecoder, plan: LayerPlan, progress: Callable[[str], None] = lambda what: None
) -> tuple[list[LayerRow], list[CoverageRow]]:
    """Measure a plan; ``progress`` is called once per question and temperature.

    Raises:
        ValueError: there is no draft; and see ``first_prompts``.
    """
    if decoder.drafter is None:
        raise ValueError("a layer needs a draft, and there is none")
    questions = [question for one in plan.sets for question in one.questions]
    prompts = first_prompts(decoder, questions)
    layers: list[LayerRow] = []
    coverage: list[CoverageRow] = []
    for question, prompt in zip(questions, prompts, strict=True):
        for temperature in plan.temperatures:
            for position, logits, law, seed in _laws(decoder, plan, question, prompt, temperature):
                where = (question.set_name, question.question_id, position, temperature)
                vocab_map = decoder.drafter.vocab_map
                coverage += [CoverageRow(*where, s, *_masses(logits, law, s, vocab_map)) for s in plan.supports]
                small_logits, small_law = on_support(logits, law, plan.draft_support, vocab_map)
                for rule, branching, leads in plan.variants():
                    m = branching if leads is None else leads
                    measured = measured_rate(small_logits, small_law, branching, m, rule, temperature, plan, seed)
                    predicted, bound = predicted_rate(small_logits, small_law, branching, m, rule, temperature)
                    shape = (branching, leads, plan.draft_support, plan.walks)
                    layers.append(LayerRow(*where, rule, *shape, measured, predicted, bound))
            progress(f"{question.set_name} {question.question_id}")
    return layers, coverage


def _laws(
    decoder: RheoDecoder, plan: LayerPlan, question: Question, prompt: Sequence[int], temperature: float
) -> Iterator[tuple[int, Tensor, Tensor, int]]:
    """(position, the draft's logits, the target's law, a seed) at every context of a question's plain text."""
    drafter = decoder.drafter
    assert drafter is not None
    seed = derived_seed(plan.seed, question.set_name, question.question_id, 1)
    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=plan.max_new_tokens)
    text = MethodRunner(decoder).run(Method(PLAIN), prompt, params).token_ids
    positions = choose_positions(len(text), plan.contexts, derived_seed(seed, "positions"))
    if not positions:
        return
    contexts = CommonContexts(decoder.target, prompt, text, positions, temperature, drafter.feature_layers)
    roots = TreeBatch.from_trees([root_only()] * len(positions), decoder.target.device)
    laws = contexts.laws(roots)(torch.zeros(len(positions), dtype=torch.long, device=decoder.target.device))
    logits = contexts.draft_logits(drafter)
    for place, position in enumerate(positions):
        yield position, logits[place], laws[place], derived_seed(seed, "layer", position)


def on_support(logits: Tensor, law: Tensor, support: int, vocab_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draft logits and target law of one context on the draft's support and one token for all the rest.

    Args:
        logits: [draft vocab] of the draft.
        law: [vocab] float64 of the target.
        support: S, how many logits are kept.
        vocab_map: [draft vocab] target ids, increasing; None for the identity.

    Returns:
        [n + 1] float32 logits, the last -inf, and [n + 1] float64 law, the last one what is left; n = min(S, vocab).
        The order is that of the token ids, so that ties are decided as they were.
    """
    ids = rank_logits(logits.unsqueeze(0), support)[1][0].sort().values
    kept = law[ids if vocab_map is None else vocab_map[ids]]
    rest = (1 - kept.sum()).clamp(min=0).unsqueeze(0)
    return torch.nn.functional.pad(logits[ids].float(), (0, 1), value=-torch.inf), torch.cat([kept, rest])


def measured_rate(
    logits: Tensor,
    law: Tensor,
    branching: int,
    lead_tokens: int,
    rule: LayerRule,
    temperature: float,
    plan: LayerPlan,
    seed: int,
) -> float:
    """Share of ``plan.walks`` walks that go down, each on a one-level tree of its own.

    Args:
        logits, law: as ``on_support`` gives them.
        branching, lead_tokens, rule: of the slots and of the walk.
        temperature: of the probes.
        plan: says how many walks.
        seed: of their random numbers; every rule gets the same.
    """
    walks, device = plan.walks, logits.device
    config = RheoConfig(
        lead_tokens=lead_tokens,
        branching=branching,
        depth=1,
        tree_size=branching,
        beam=1,
        draft_support=len(logits),
        proposal="topk" if rule == "topk" else "rheo",
        verification="rrsw" if rule == "rrsw" else "rheo",
    )
    noise = StepRandomness([seed] * walks, 1, 1, branching + 1, device).at(torch.arange(walks, device=device))
    temperatures = torch.full((walks,), temperature, dtype=torch.float64, device=device)
    trees = grow_trees(config, logits.expand(walks, -1), _no_further_level, temperatures, noise.probe_uniforms)
    # Behind the layer it does not matter what is drawn, so every row has the same law.
    walk = verify_trees(trees, lambda rows: law.expand(walks, -1), noise, config.verification)
    return float((walk.counts > 1).double().mean())


def predicted_rate(
    logits: Tensor, law: Tensor, branching: int, lead_tokens: int, rule: LayerRule, temperature: float
) -> tuple[float, float]:
    """The closed form and the transport bound; arguments as for ``measured_rate``."""
    draft = DraftLaw.from_logits(logits.cpu().numpy(), temperature, len(logits))
    p = (law / law.sum()).cpu().numpy()
    slots = (draft.construction, p, branching, lead_tokens)
    return (
        float(single_layer(*slots, rule=rule, sampling=draft.sampling)),
        float(optimal_transport(*slots, sampling=draft.sampling)),
    )


def _no_further_level(nodes: LevelNodes) -> Tensor:
    raise AssertionError(f"a tree of one level has no level {nodes.depth + 1}")


def _masses(logits: Tensor, law: Tensor, support: int, vocab_map: Tensor | None) -> tuple[float, float]:
    ids = rank_logits(logits.unsqueeze(0), support)[1][0]
    of_target = law[ids if vocab_map is None else vocab_map[ids]].sum()
    return float(support_mass(logits, support)), float(of_target)


def variants_of(rows: Sequence[LayerRow]) -> list[tuple[float, str, int, int | None]]:
    """(temperature, rule, K, m) of the rows, in their order."""
    return list(dict.fromkeys((row.temperature, row.rule, row.branching, row.lead_tokens) for row in rows))
