"""How near to the best trees the rule of ``tree_size="auto"`` comes, where it is known what a step takes.

    python docs/figures/sizing_rule.py data/*/question.jsonl

At positions of answers of the embedded pair all nodes that the beams of four levels offer are there, each with the
chance that the walk comes through it, as in ``ranking_ceiling.py``; calibrated weights order them, at temperature 1.
A ``TreeSizer`` decides about one position after the other, going round them until it has learned; its last round
counts. Printed are tokens per second over plain decoding for it, for the best fixed tree and for the best pair of
fixed thresholds, both found with hindsight at the same positions: no machine's noise is in these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from node_values import Values
from ranking_ceiling import Supertree, calibrated, everything, supertrees

from optimized import RheoConfig, RheoDecoder
from optimized.bench.questions import read_sets
from optimized.sizing import StepCosts, TreeSizer
from optimized.trees import TreeBatch
from optimized.verification import VerifyBatch
from reference.tree import root_only

QUESTIONS, POSITIONS, TEMPERATURE, ROUNDS = 4, 8, 1.0, 20  # questions of each set
DEPTH = 4
LEVELS, SIZES = range(1, DEPTH + 1), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 30, 40, 60)
NODE_THRESHOLDS = (0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
LEVEL_THRESHOLDS = (0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7, 1)
MACHINES = {
    "two cores, bfloat16": StepCosts(plain=0.036, base=0.037, node=0.00075, level=0.0033),
    "two cores, float32": StepCosts(plain=0.099, base=0.116, node=0.0029, level=0.016),
    "rows nearly free": StepCosts(plain=0.020, base=0.0205, node=0.00005, level=0.0015),
    "rows dear": StepCosts(plain=0.060, base=0.062, node=0.017, level=0.007),
}


@dataclass(frozen=True, eq=False)
class Offer:
    """What a position offers, [nodes] each: the level of every node, its score, the chance that the walk takes it."""

    levels: np.ndarray
    scores: Values
    chances: Values

    @classmethod
    def of(cls, tree: Supertree) -> Offer:
        weights = calibrated(TEMPERATURE)(tree)
        scores = tree.along(weights)[:, None] * weights
        chances = tree.along(tree.chances)[:, None] * tree.chances
        return cls(np.repeat(tree.depths + 1, scores.shape[1]), scores.ravel(), chances.ravel())

    def largest(self, levels: int, size: int) -> Values:
        """Which nodes are in the tree of so many: their indices."""
        among = np.flatnonzero(self.levels <= levels)
        return among[np.argsort(-self.scores[among], kind="stable")[:size]]

    def above(self, node: float, level: float) -> tuple[Values, int]:
        """Which nodes reach the one threshold, and how many levels are drafted by the other."""
        levels = 1
        while levels < LEVELS[-1] and self.scores[self.levels == levels].max() >= max(node, level):
            levels += 1
        kept = self.largest(levels, SIZES[-1])
        return kept[self.scores[kept] >= node], levels


Choice = tuple[Values, int]  # nodes, drafted levels


def speed(offers: list[Offer], choices: Iterable[Choice | None], costs: StepCosts) -> float:
    """Tokens per second over plain decoding's; None is a step without a draft."""
    tokens = seconds = 0.0
    for offer, choice in zip(offers, choices, strict=True):
        tokens += 1 if choice is None else 1 + offer.chances[choice[0]].sum()
        seconds += costs.plain if choice is None else costs.seconds(len(choice[0]), choice[1] - 1)
    return tokens / seconds * costs.plain


def decided(offers: list[Offer], costs: StepCosts) -> list[Choice | None]:
    """What a ``TreeSizer`` decides in its last round."""
    sizer = TreeSizer(lambda batch: costs)
    config = replace(everything(DEPTH), tree_size="auto")
    choices: list[Choice | None] = []
    for turn in range(ROUNDS):
        for offer in offers:
            shape = sizer.shape(config, 1)
            choice = None if shape is None else offer.above(float(shape.score_threshold), float(shape.level_threshold))
            learn(sizer, shape, offer, choice, costs)
            if turn + 1 == ROUNDS:
                choices.append(choice)
    return choices


def learn(sizer: TreeSizer, shape: RheoConfig | None, offer: Offer, choice: Choice | None, costs: StepCosts) -> None:
    """Let the sizer observe a step that took what it costs, and that accepted what is expected."""
    nodes, levels = (np.zeros(0, dtype=int), 0) if choice is None else choice
    depths = torch.tensor([[0, *offer.levels[nodes].tolist()]])
    trees = replace(
        TreeBatch.from_trees([root_only()]),
        token_ids=torch.zeros_like(depths),
        parents=(depths > 0).long() - 1,
        depths=depths,
        log_scores=torch.tensor([[1.0, *offer.scores[nodes].tolist()]], dtype=torch.float64).log(),
        depth=levels,
        num_nodes=torch.tensor([1 + len(nodes)]),
    )
    none, count = torch.zeros(1, 1, dtype=torch.bool), torch.tensor([1 + offer.chances[nodes].sum()])
    walk = VerifyBatch(none.long(), none.long(), count, none, none)
    seconds = costs.plain if choice is None else costs.seconds(len(nodes), levels - 1)
    sizer.observe(shape, trees, walk, seconds)


def main() -> None:
    sets = read_sets([Path(name) for name in sys.argv[1:]])
    decoder = RheoDecoder.from_pretrained(config=RheoConfig(branching=4, depth=2, tree_size=5))
    asked = [question.turns[0] for one in sets for question in one.questions[:QUESTIONS]]
    prompts = [decoder.chat_prompt([{"role": "user", "content": turn}]) for turn in asked]
    offers = [
        Offer.of(tree)
        for index, prompt in enumerate(prompts)
        for tree in supertrees(decoder, prompt, TEMPERATURE, index, POSITIONS, DEPTH)
    ]
    print(f"{len(offers)} positions of {len(prompts)} answers")
    for name, costs in MACHINES.items():
        fixed = {
            (levels, size): speed(offers, [(offer.largest(levels, size), levels) for offer in offers], costs)
            for levels in LEVELS
            for size in SIZES
        }
        pairs = {
            (node, level): speed(offers, [offer.above(node, level) for offer in offers], costs)
            for node in NODE_THRESHOLDS
            for level in LEVEL_THRESHOLDS
        }
        tree, pair = max(fixed, key=fixed.__getitem__), max(pairs, key=pairs.__getitem__)
        choices = decided(offers, costs)
        drafted = [choice for choice in choices if choice is not None]
        nodes, levels = (np.mean([(len(kept), levels) for kept, levels in drafted], axis=0)) if drafted else (0, 0)
        print(
            f"{name}: auto {speed(offers, choices, costs):.3f} ({nodes:.1f} nodes, {levels:.2f} levels, "
            f"{len(drafted)} of {len(choices)} steps drafted); best tree {fixed[tree]:.3f} ({tree[1]} nodes, "
            f"{tree[0]} levels); best thresholds {pairs[pair]:.3f} ({pair[0]}, {pair[1]})"
        )


if __name__ == "__main__":
    main()
