"""Random inputs for the tree kernels and what the Torch path makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimized.growth import Beam, prune, select_beam
from optimized.kernels.tree import expanded_widths
from optimized.randomness import StepNoise
from optimized.slots import LevelSlots
from optimized.trees import TreeBatch
from optimized.verification import _without, inverse_cdf
from reference.api import RheoConfig, Verification, VerifyNoise
from reference.numbers import inverse_cdf as draw
from reference.tree import DraftTree
from reference.verification import accepts as probe_accepted
from reference.verification import residual, without_tokens

FAMILIES = ("normal", "coarse", "two values", "uniform", "flat")


@dataclass(frozen=True)
class Offers:
    """Everything offered to a batch of trees, level by level, and which of it the Torch path expands."""

    config: RheoConfig
    levels: list[LevelSlots]
    beams: list[Beam]

    def torch_tree(self) -> TreeBatch:
        """What the Torch path makes of it."""
        return prune(self.config, self.levels, self.beams)

    def arguments(self, device: str) -> dict[str, Any]:
        """The arguments of ``prune_tree``."""

        def side_by_side(parts: list[Tensor]) -> Tensor:
            return torch.cat([part.flatten(1) for part in parts], dim=1).to(device)

        none = torch.zeros(len(self.levels[0].failed), 0, dtype=torch.long)
        return {
            "token_ids": side_by_side([slots.token_ids for slots in self.levels]),
            "log_scores": side_by_side([slots.log_scores for slots in self.levels]),
            "is_probe": side_by_side([slots.is_probe for slots in self.levels]),
            "expanded_offers": side_by_side([none, *(beam.offers for beam in self.beams)]),
            "failed": side_by_side([slots.failed for slots in self.levels]),
            "branching": self.config.branching,
            "beam": self.config.beam_width,
            "depth": self.config.depth,
            "tree_size": self.config.tree_size,
        }


def random_config(rng: torch.Generator) -> RheoConfig:
    """m = 0..K+1, beams below and above K, budgets from one node to more than there are."""

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    branching, depth = (10, 8) if integer(0, 40) == 0 else (integer(1, 7), integer(1, 6))
    return RheoConfig(
        lead_tokens=integer(0, branching + 2),
        branching=branching,
        depth=depth,
        tree_size=integer(1, (2, 12, 40, 200)[integer(0, 4)]),
        beam=[None, 1, 2, branching + 2][integer(0, 4)],
        verification="rheo" if integer(0, 2) else "rrsw",
    )


def random_offers(
    config: RheoConfig, batch: int, rng: torch.Generator, dtype: torch.dtype = torch.float32, not_a_number: bool = False
) -> Offers:
    """Offered nodes whose weights never increase along the schedule, each request of another family.

    * ``normal``: no ties. * ``coarse``: few distinct weights. * ``two values``: whole subtrees tie. * ``uniform``: one
    weight everywhere. * ``flat``: all weights 1, so that children tie with their parents.
    Some nodes have fewer slots than K or none, some fail; in the last level a score may be NaN on request.
    """
    m, branching = config.lead_tokens, config.branching
    vocab = branching + int(torch.randint(2, 9, (), generator=rng))  # beyond m too
    families = torch.randint(0, len(FAMILIES), (batch, 1, 1), generator=rng)
    greedy = torch.rand(batch, 1, 1, generator=rng) < 0.2
    levels: list[LevelSlots] = []
    beams: list[Beam] = []
    parent_scores = torch.zeros(batch, 1, dtype=dtype)
    for level, width in enumerate(expanded_widths(config.depth, config.beam_width, branching), start=1):
        if level > 1:
            beams.append(select_beam(config, levels[-1], level - 1))
            parent_scores = beams[-1].log_scores
        shape = (batch, width, branching)
        noise = torch.rand(shape, generator=rng, dtype=dtype)
        by_family = torch.stack(
            [
                5 * noise,
                (8 * noise).floor() / 2,
                (2 * noise).floor() + 0.5,
                torch.full_like(noise, 1.5),
                torch.zeros_like(noise),
            ]
        )
        weights = -by_family.gather(0, families.expand(shape)[None])[0].sort(dim=2).values
        slots = torch.randint(1, branching * 3, (batch, width, 1), generator=rng)
        failed = torch.rand(batch, width, generator=rng) < 0.05
        slots = torch.where(failed.unsqueeze(2), 0, slots)
        place = torch.arange(branching)
        weights = torch.where(place < slots, weights, -torch.inf)
        tokens = torch.rand(batch, width, vocab, generator=rng).argsort(dim=2)
        is_probe = ((place == m) & (slots > m) & ~greedy).expand(shape).contiguous()
        law = torch.rand(batch, width, vocab, generator=rng, dtype=torch.float64)
        law = law * (torch.rand(law.shape, generator=rng) < 0.7)
        law[..., m] += 0.1  # the probe's own token; the leads' get none
        law = torch.where((torch.arange(vocab) >= m) & is_probe.any(dim=2, keepdim=True), law, 0.0)
        law = law / law.sum(dim=2, keepdim=True).clamp(min=1e-9)
        scores = parent_scores.unsqueeze(2) + weights
        if not_a_number and level == config.depth:
            scores = torch.where(torch.rand(shape, generator=rng) < 0.05, torch.nan, scores)
        levels.append(LevelSlots(tokens[..., :branching], scores, is_probe, tokens, law, failed))
    return Offers(config, levels, beams)


def random_targets(trees: TreeBatch, vocab: int, rng: torch.Generator) -> Tensor:
    """[batch, rows, vocab] target laws: dense, sparse, one-hot on a child or elsewhere, and the probe's own q~."""
    shape = (trees.batch_size, trees.rows, vocab)
    laws = torch.rand(shape, generator=rng, dtype=torch.float64)
    sparse = laws * (torch.rand(shape, generator=rng) < 0.4)
    hot = torch.zeros_like(laws)
    hot.scatter_(2, torch.randint(0, vocab, (*shape[:2], 1), generator=rng), 1.0)
    # A child's token, where there is a child: the last child written wins, whichever it is.
    on_child = hot.clone()
    for row in range(1, trees.rows):
        there = trees.parents[:, row] >= 0
        batch = torch.arange(trees.batch_size)[there]
        on_child[batch, trees.parents[there, row]] = torch.nn.functional.one_hot(
            trees.token_ids[there, row], vocab
        ).double()
    own = torch.zeros_like(laws)
    index = trees.law_index.clamp(min=0).unsqueeze(2).expand(-1, -1, trees.probe_laws.shape[2])
    own.scatter_add_(2, trees.probe_law_ids.gather(1, index), trees.probe_laws.gather(1, index))
    kind = torch.randint(0, 5, (*shape[:2], 1), generator=rng)
    for number, family in ((1, sparse), (2, hot), (3, on_child), (4, own)):
        laws = torch.where((kind == number) & (family.sum(dim=2, keepdim=True) > 0), family, laws)
    return laws / laws.sum(dim=2, keepdim=True)


def random_noise(trees: TreeBatch, rng: torch.Generator) -> StepNoise:
    """Uniforms for a walk; a tenth of them exactly 0."""

    def uniforms() -> Tensor:
        values = torch.rand(trees.batch_size, trees.rows, generator=rng, dtype=torch.float64)
        return values * (torch.rand(values.shape, generator=rng) > 0.1)

    return StepNoise(uniforms(), uniforms(), uniforms(), uniforms())


@dataclass(frozen=True)
class Outcomes:
    """What would happen at every row, whether or not a walk comes there: the inputs of ``walk``, [batch, rows] each."""

    accepts: Tensor
    drawn: Tensor
    lead_drawn: Tensor


def row_outcomes(trees: TreeBatch, laws: Tensor, noise: StepNoise, rule: Verification) -> Outcomes:
    """The decisions of ``optimized.verification`` at every row, in its own arithmetic."""
    accepts, drawn, lead_drawn = [], [], []
    places = torch.arange(trees.rows)
    probes = trees.probe_rows()
    for row in range(trees.rows):
        law, probe = laws[:, row], probes[:, row]
        has_probe = probe > 0
        lead = torch.full_like(probe, -1)
        if rule == "rrsw":
            is_lead = (trees.parents == row) & (places < probe.unsqueeze(1))
            lead = torch.where(has_probe, inverse_cdf(law, noise.lead_uniforms[:, row : row + 1]), -1)
            law = torch.where(is_lead.any(dim=1, keepdim=True), _without(law, trees.token_ids, is_lead), law)
        index = trees.law_index[:, row].clamp(min=0).view(-1, 1, 1).expand(-1, 1, trees.probe_laws.shape[2])
        ids = trees.probe_law_ids.gather(1, index).squeeze(1)
        q = trees.probe_laws.gather(1, index).squeeze(1) * has_probe.unsqueeze(1)
        token = trees.token_ids.gather(1, probe.unsqueeze(1)).clamp(min=0)
        q_token = torch.where(ids == token, q, 0.0).sum(dim=1)
        accepts.append(has_probe & (noise.accept_uniforms[:, row] * q_token < law.gather(1, token).squeeze(1)))
        rest = law.scatter_add(1, ids, -q).clamp(min=0)
        rest = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, law)
        drawn.append(inverse_cdf(rest, noise.residual_uniforms[:, row : row + 1]))
        lead_drawn.append(lead)
    return Outcomes(*(torch.stack(values, dim=1) for values in (accepts, drawn, lead_drawn)))


def reference_outcomes(
    trees: Sequence[DraftTree],
    targets: Sequence[NDArray[np.float64]],
    noises: Sequence[VerifyNoise],
    rule: Verification,
    rows: int,
) -> Outcomes:
    """The same of reference trees, by the reference's own pieces; padding gets what no walk may read."""
    accepts = torch.ones(len(trees), rows, dtype=torch.bool)
    drawn = torch.full((len(trees), rows), -5)
    lead_drawn = torch.full((len(trees), rows), -5)
    for b, (tree, target, noise) in enumerate(zip(trees, targets, noises, strict=True)):
        for row in range(len(tree)):
            law, probe = target[row], tree.probe_child(row)
            accepts[b, row] = False
            if probe is not None:
                if rule == "rrsw":
                    lead_drawn[b, row] = draw(law, noise.lead_uniforms[row])[0]
                    leads = [tree.token_ids[child] for child in tree.children(row) if child < probe]
                    law = without_tokens(law, leads) if leads else law
                ids, q = tree.probe_laws[row]
                token = tree.token_ids[probe]
                q_token = dict(zip(ids, q, strict=True))[token]
                accepts[b, row] = probe_accepted(noise.accept_uniforms[row], q_token, law[token])
                law = residual(law, (ids, q))
            drawn[b, row] = draw(law, noise.residual_uniforms[row])[0]
    return Outcomes(accepts, drawn, lead_drawn)


def arbitrary_outcomes(trees: TreeBatch, rng: torch.Generator) -> Outcomes:
    """Decisions that no laws need to have led to: any token of the tree, the probe's too, or one that is not in it."""
    shape = (trees.batch_size, trees.rows)

    def tokens() -> Tensor:
        children = torch.full((*shape, trees.rows + 1), -1)  # a random child's token is the first that is not -1
        order = torch.rand(shape, generator=rng).argsort(dim=1)
        there = trees.parents.gather(1, order)
        place = torch.arange(trees.rows).expand(shape)
        batch = torch.arange(trees.batch_size).unsqueeze(1).expand(shape)
        kept = there >= 0
        children[batch[kept], there[kept], place[kept]] = trees.token_ids.gather(1, order)[kept]
        first = (children >= 0).int().argmax(dim=2, keepdim=True)
        chosen = children.gather(2, first).squeeze(2)
        return torch.where((chosen >= 0) & (torch.rand(shape, generator=rng) < 0.85), chosen, 999)

    return Outcomes(torch.rand(shape, generator=rng) < 0.5, tokens(), tokens())


def walk_by_hand(trees: TreeBatch, outcomes: Outcomes, rule: Verification, b: int) -> list[tuple[int, int, bool, bool]]:
    """(row, emitted token, probe offered, probe accepted) of every step of a walk, one row after the other."""
    token_ids, parents, probes = trees.token_ids[b].tolist(), trees.parents[b].tolist(), trees.is_probe[b].tolist()
    accepts, drawn, lead_drawn = (
        values[b].tolist() for values in (outcomes.accepts, outcomes.drawn, outcomes.lead_drawn)
    )
    steps = []
    row: int | None = 0
    while row is not None:
        children = [child for child, parent in enumerate(parents) if parent == row]
        probe = next((child for child in children if probes[child]), None)
        leads = [child for child in children if probe is not None and child < probe] if rule == "rrsw" else []
        below = {token_ids[child]: child for child in children if child != probe}
        if lead_drawn[row] in [token_ids[lead] for lead in leads]:
            steps.append((row, lead_drawn[row], probe is not None, False))
            row = below[lead_drawn[row]]
        elif probe is not None and accepts[row]:
            steps.append((row, token_ids[probe], True, True))
            row = probe
        else:
            steps.append((row, drawn[row], probe is not None, False))
            row = below.get(drawn[row])
    return steps
