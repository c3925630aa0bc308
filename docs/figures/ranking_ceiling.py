"""What an order of the nodes can be worth: the paper's, the calibrated one, and one that knows the target's laws.

    pip install scikit-learn  # for the last rows; the project itself does not need it
    python docs/figures/ranking_ceiling.py data/*/question.jsonl

At positions of answers of the embedded pair (float32) a tree is grown of all that the beams of eight levels offer,
710 nodes, and the target reads every expanded one. Orders then choose 8, 16, 30 or 60 of the same nodes, with the same
probes, so their differences have little noise; what a choice is worth is the walk's exact expectation. Printed are the
expected acceptance lengths and the gain over the paper's order, +- its standard error over questions, by:

- the curves of the embedded weights;
- boosted trees over everything the draft says at a node and on the way to it, learned on other questions;
- the true chances before the probes are drawn: no order that does not look at drawn probes can do better.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from node_values import Values, read_curve
from numpy.typing import NDArray

from optimized import RheoConfig, RheoDecoder, SamplingParams
from optimized.bench.contexts import CommonContexts, choose_positions
from optimized.bench.questions import read_sets
from optimized.calibration import load_weights
from optimized.trees import TreeBatch

QUESTIONS, POSITIONS, TOKENS, TEMPERATURES = 12, 6, 64, (1.0, 0.6)  # questions of each set
SLOTS, DEPTH, SIZES = 10, 8, (8, 16, 30, 60)
FOLDS = 4


def everything(depth: int) -> RheoConfig:
    """Trees of all that the beams of so many levels offer."""
    size = SLOTS + (depth - 1) * SLOTS**2
    return RheoConfig(branching=SLOTS, depth=depth, tree_size=size, weights=load_weights("embedded"))


@dataclass(frozen=True, eq=False)
class Supertree:
    """The expanded nodes of one position, parents before children, and what each offers.

    Attributes:
        question: whose answer it is in.
        parents: [nodes] int, -1 for the root.
        slots: [nodes] int, which of its parent's slots each is.
        depths: [nodes] int.
        masses: [nodes, support] of the ranked tokens, tempered.
        ranks: [nodes, SLOTS] int, which of them each slot holds: the lead, the probe, fills.
        expected: [nodes, SLOTS] chance that the walk goes on through a slot, before the probe is drawn.
        chances: [nodes, SLOTS] the same, given the probe.
    """

    question: int
    parents: NDArray[np.int64]
    slots: NDArray[np.int64]
    depths: NDArray[np.int64]
    masses: Values
    ranks: NDArray[np.int64]
    expected: Values
    chances: Values

    def offered(self) -> Values:
        """[nodes, SLOTS] the mass of the token in each slot."""
        return np.take_along_axis(self.masses, self.ranks, 1)

    def along(self, weights: Values) -> Values:
        """[nodes] product of the weights [nodes, SLOTS] of the slots on the way to each node."""
        product = np.ones(len(self.parents))
        for node, (parent, slot) in enumerate(zip(self.parents, self.slots, strict=True)):
            if parent >= 0:
                product[node] = product[parent] * weights[parent, slot]
        return product

    def lengths(self, weights: Values) -> Values:
        """[sizes] expected acceptance length of the best nodes by these weights."""
        scores = self.along(weights)[:, None] * weights
        best = np.argsort(-scores, axis=None, kind="stable")
        gained = (self.along(self.chances)[:, None] * self.chances).ravel()[best].cumsum()
        return 1 + gained[np.array(SIZES) - 1]


def supertrees(
    decoder: RheoDecoder,
    prompt: list[int],
    temperature: float,
    question: int,
    positions: int = POSITIONS,
    depth: int = DEPTH,
) -> Iterator[Supertree]:
    """Those of one question's answer."""
    params = SamplingParams(temperature=temperature, seed=1000 + question, max_new_tokens=TOKENS)
    text = list(decoder.generate([prompt], params)[0].token_ids)
    if len(text) <= positions:
        return
    drafter = decoder.drafter
    assert drafter is not None
    places = choose_positions(len(text), positions, (question * 2654435761) % 2**64)
    contexts = CommonContexts(decoder.target, prompt, text, places, temperature, drafter.feature_layers)
    trees, _ = contexts.draft(drafter, everything(depth), seed=question)
    assert trees.law_rows is not None
    assert trees.masses is not None
    rows, order = trees.law_rows.sort(dim=1)
    roots = torch.tensor([[text[place - 1]] for place in places])
    tokens = torch.cat([roots, trees.token_ids[:, 1:]], dim=1).gather(1, rows)
    ancestors = trees.ancestors().take_along_dim(rows[:, :, None], 1).take_along_dim(rows[:, None], 2)
    with torch.no_grad():  # of the expanded nodes alone, whose laws say what becomes of all that is offered
        logits, _ = decoder.target.forward_tree(tokens, trees.depths.gather(1, rows), ancestors)
    target_laws = (logits.double() / temperature).softmax(-1)
    columns = order[:, :, None].expand(-1, -1, trees.masses.shape[2])
    ids, masses = trees.probe_law_ids.gather(1, columns), trees.masses.gather(1, columns)
    for b in range(len(places)):
        probs = target_laws[b].gather(1, ids[b]).numpy()
        yield _supertree(trees, b, rows[b].tolist(), ids[b].numpy(), masses[b].numpy(), probs, question)


def _supertree(
    trees: TreeBatch, b: int, rows: list[int], ids: NDArray[np.int64], masses: Values, probs: Values, question: int
) -> Supertree:
    node_of = {row: node for node, row in enumerate(rows)}
    parents, slots, depths = (getattr(trees, name)[b, rows].numpy() for name in ("parents", "slots", "depths"))
    probe = np.zeros(len(rows), dtype=np.int64)
    for row in trees.is_probe[b].nonzero()[:, 0].tolist():
        node = node_of[int(trees.parents[b, row])]
        probe[node] = int((ids[node] == int(trees.token_ids[b, row])).argmax())
    ranks = np.array([[0, p, *(r for r in range(1, SLOTS) if r != p)][:SLOTS] for p in probe])
    tail = np.where(np.arange(masses.shape[1]) > 0, masses, 0)
    law = tail / tail.sum(axis=1, keepdims=True)
    rest = np.maximum(probs - law, 0)
    overlap, own = np.minimum(probs, law).sum(axis=1), probe[:, None]
    accepted = np.minimum(1, np.take_along_axis(probs, own, 1) / np.take_along_axis(law, own, 1))
    expected = np.take_along_axis(rest, ranks, 1)
    chances = expected * (1 - accepted) / (1 - overlap[:, None])
    expected[:, 1], chances[:, 1] = overlap, accepted[:, 0]
    above = np.array([node_of[parent] if parent >= 0 else -1 for parent in parents.tolist()])
    return Supertree(question, above, slots, depths, masses, ranks, expected, chances)


def capped(weights: Values) -> Values:
    """Fills never above their probe."""
    return np.concatenate([weights[:, :2], np.minimum(weights[:, 2:], weights[:, 1:2])], axis=1)


def paper(temperature: float) -> Callable[[Supertree], Values]:
    def weights(tree: Supertree) -> Values:
        draft = tree.masses**temperature
        draft /= draft.sum(axis=1, keepdims=True)
        found = np.take_along_axis(draft, tree.ranks, 1)
        found[:, 1] = np.maximum(draft[:, 1], np.minimum(draft[:, 0], 1 - draft[:, 0]))
        return capped(found)

    return weights


def calibrated(temperature: float) -> Callable[[Supertree], Values]:
    curves = load_weights("embedded").at(temperature)

    def weights(tree: Supertree) -> Values:
        offered = tree.offered()
        lead, probe = read_curve(curves.lead, offered[:, :1]), read_curve(curves.probe, tree.masses[:, 1:2])
        return capped(np.concatenate([lead, probe, read_curve(curves.fill, offered[:, 2:])], axis=1))

    return weights


def known(tree: Supertree) -> Values:
    return capped(np.maximum(tree.expected, 1e-12))


def features(tree: Supertree) -> Values:
    """[nodes, SLOTS, features] everything that the draft says before the probe is drawn."""
    log = np.log(np.maximum(tree.masses, 1e-9))
    entropy = -(tree.masses * log).sum(axis=1)
    parent = np.maximum(tree.parents, 0)
    offered = np.log(np.maximum(tree.offered(), 1e-9))
    offered[:, 1], ranks = log[:, 1], tree.ranks.copy()
    ranks[:, 1] = 1  # of a probe, only what it may be is known
    path = np.log(np.maximum(tree.along(np.maximum(tree.offered(), 1e-9)), 1e-30))
    node = [tree.depths, entropy, *log[:, :3].T, (tree.masses**2).sum(axis=1), tree.masses[:, :SLOTS].sum(axis=1), path]
    above = [tree.slots, entropy[parent], log[parent, 0], offered[parent, tree.slots]]
    root = [np.full(len(parent), value) for value in (log[0, 0], entropy[0])]
    of_node = np.repeat(np.stack([*node, *above, *root], axis=1)[:, None], SLOTS, axis=1)
    return np.concatenate([of_node, offered[:, :, None], ranks[:, :, None], (offered - log[:, :1])[:, :, None]], axis=2)


def learned(trees: list[Supertree]) -> list[Values]:
    """Weights of every tree by boosted trees that have seen the other questions only."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # type: ignore[import-not-found]

    kinds = (slice(0, 1), slice(1, 2), slice(2, SLOTS))
    inputs, reached = [features(tree) for tree in trees], [tree.along(tree.chances) + 0.01 for tree in trees]
    folds = np.random.default_rng(0).integers(FOLDS, size=1 + max(tree.question for tree in trees))
    weights = [np.empty_like(tree.expected) for tree in trees]
    for fold in range(FOLDS):
        others = [i for i, tree in enumerate(trees) if folds[tree.question] != fold]
        for kind in kinds:
            x = np.concatenate([inputs[i][:, kind].reshape(-1, inputs[i].shape[2]) for i in others])
            y = np.concatenate([trees[i].expected[:, kind].ravel() for i in others])
            importance = np.concatenate([np.repeat(reached[i], kind.stop - kind.start) for i in others])
            model = HistGradientBoostingRegressor(
                learning_rate=0.06, max_iter=150, max_leaf_nodes=12, min_samples_leaf=100, l2_regularization=1.0
            ).fit(x, y, sample_weight=importance)
            for i in set(range(len(trees))) - set(others):
                found = model.predict(inputs[i][:, kind].reshape(-1, inputs[i].shape[2]))
                weights[i][:, kind] = found.reshape(len(inputs[i]), -1).clip(1e-6, 1)
    return [capped(found) for found in weights]


def show(name: str, lengths: Values, base: Values, questions: NDArray[np.int64]) -> None:
    by_question = np.array([(lengths - base)[questions == one].mean() for one in np.unique(questions)])
    error = by_question.std(ddof=1) / len(by_question) ** 0.5
    sizes = ", ".join(f"{value:.3f}" for value in lengths.mean(axis=0))
    gains = ", ".join(f"{100 * value:+.1f}" for value in (lengths - base).mean(axis=0) / base.mean(axis=0))
    print(
        f"  {name}: {sizes}; gain in %: {gains}; all sizes "
        f"{100 * by_question.mean() / base.mean():+.2f} +- {100 * error / base.mean():.2f}"
    )


def main() -> None:
    sets = read_sets([Path(name) for name in sys.argv[1:]])
    decoder = RheoDecoder.from_pretrained(config=RheoConfig(branching=4, depth=2, tree_size=5))
    asked = [question.turns[0] for one in sets for question in one.questions[:QUESTIONS]]
    prompts = [decoder.chat_prompt([{"role": "user", "content": turn}]) for turn in asked]
    for temperature in TEMPERATURES:
        trees = [
            tree for index, prompt in enumerate(prompts) for tree in supertrees(decoder, prompt, temperature, index)
        ]
        questions = np.array([tree.question for tree in trees])
        orders = {name: make(temperature) for name, make in (("paper", paper), ("calibrated", calibrated))}
        lengths = {
            name: np.array([tree.lengths(order(tree)) for tree in trees])
            for name, order in (orders | {"true chances": known}).items()
        }
        lengths["boosted trees"] = np.array(
            [tree.lengths(weights) for tree, weights in zip(trees, learned(trees), strict=True)]
        )
        print(f"T = {temperature}: {len(trees)} positions, {len(set(questions.tolist()))} questions; sizes {SIZES}")
        for name, found in lengths.items():
            show(name, found, lengths["paper"], questions)


if __name__ == "__main__":
    main()
