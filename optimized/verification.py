"""The verification walk of a batch; ``reference.verification`` on tensors.

All requests walk together, one level per iteration, and only the rows where somebody stands are ever normalised: a row
the walk does not reach costs nothing. On an accelerator the number of iterations is fixed and nothing is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from optimized.ranges import arange
from optimized.trees import TreeBatch
from reference.api import Verification

# Rows [batch] long -> the law at each request's row, [batch, vocab] float64, the caller's to write into.
TargetLaw = Callable[[Tensor], Tensor]


class WalkNoise(Protocol):
    """What the walk needs of the noise: uniforms [batch, rows], by the row where the walk stands.

    ``accept_uniforms`` may be [batch, rows, probes], a number for each of a node's probes in drawing order.
    """

    @property
    def accept_uniforms(self) -> Tensor: ...
    @property
    def residual_uniforms(self) -> Tensor: ...
    @property
    def lead_uniforms(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class VerifyBatch:
    """What the walks emitted.

    Attributes:
        token_ids: [batch, depth + 1] long, accepted tokens and then the bonus token; -1 behind it.
        rows: [batch, depth + 1] long, the tree rows walked through, the root first; -1 behind the last.
        counts: [batch] long, emitted tokens; also the number of ``rows`` in use.
        probes_offered: [batch, depth + 1] bool, whether a probe stood in the tree at the i-th row of the walk.
        probes_accepted: [batch, depth + 1] bool, whether the walk went on through one.
    """

    token_ids: Tensor
    rows: Tensor
    counts: Tensor
    probes_offered: Tensor
    probes_accepted: Tensor


def verify_trees(
    trees: TreeBatch, target_probs: Tensor | TargetLaw, noise: WalkNoise, rule: Verification = "rheo"
) -> VerifyBatch:
    """Walk every tree (docs/algorithm.md, "Verification").

    Args:
        trees: the draft trees.
        target_probs: [batch, rows, vocab] the target's laws, rows summing to one; or a function that gives the law at
            one row of every request, [batch] long -> [batch, vocab] float64, called once per level of the walk.
        noise: uniforms [batch, rows] each; for trees of several probes, ``accept_uniforms`` [batch, rows, probes].
        rule: "rheo" or "rrsw".

    Raises:
        ValueError: shapes that do not fit together, or an unknown rule.
    """
    law_at = check_walk(trees, target_probs, noise, rule)
    return walk_trees(trees, lambda row: _step(trees, row, law_at(row), noise, rule))


def check_walk(trees: TreeBatch, target_probs: Tensor | TargetLaw, noise: WalkNoise, rule: Verification) -> TargetLaw:
    """The target's law as a function, once the arguments of ``verify_trees`` fit together; it raises what that does."""
    if rule not in get_args(Verification):
        raise ValueError(f"rule must be one of {get_args(Verification)}, got {rule!r}")
    for name in ("accept_uniforms", "residual_uniforms", "lead_uniforms"):
        shape = getattr(noise, name).shape
        by_probe = name == "accept_uniforms" and (len(shape) == 3 or trees.probes > 1)
        fits = len(shape) == 2 + by_probe and shape[0] == trees.batch_size and shape[1] >= trees.rows
        if not fits or (by_probe and shape[2] < trees.probes):
            least = [trees.batch_size, trees.rows, *([trees.probes] if by_probe else [])]
            raise ValueError(f"{name} must be at least {least}, got {list(shape)}")
    return _rows_of(trees, target_probs) if isinstance(target_probs, Tensor) else target_probs


def walk_trees(trees: TreeBatch, step_at: Callable[[Tensor], Step]) -> VerifyBatch:
    """Walk every tree from its root until a token has no child to go down to.

    Args:
        trees: the draft trees.
        step_at: what happens at one row of every request, [batch] long; called once per level of the walk.
    """
    device = trees.token_ids.device
    row = torch.zeros(trees.batch_size, dtype=torch.long, device=device)
    walking = torch.ones(trees.batch_size, dtype=torch.bool, device=device)
    width = trees.depth + 1
    steps, rows, walks = [], [], []
    for _ in range(width):
        step = step_at(row)
        steps.append(step)
        rows.append(row)
        walks.append(walking)
        walking = walking & (step.child > 0)
        row = torch.where(walking, step.child, row)
        if device.type == "cpu" and not walking.any():
            break
    walks += [walking] * (width - len(walks))  # nobody

    def columns(values: list[Tensor]) -> Tensor:
        return torch.stack(values + values[-1:] * (width - len(values)), dim=1)

    walked = columns(walks)
    return VerifyBatch(
        token_ids=columns([step.token for step in steps]).masked_fill_(~walked, -1),
        rows=columns(rows).masked_fill_(~walked, -1),
        counts=walked.sum(dim=1),
        probes_offered=columns([step.probe_offered for step in steps]) & walked,
        probes_accepted=columns([step.probe_accepted for step in steps]) & walked,
    )


@dataclass(frozen=True, eq=False)
class Step:
    """One node of every walk, [batch] each: the emitted token, the child it leads to (0: none), the probes' fate."""

    token: Tensor
    child: Tensor
    probe_offered: Tensor
    probe_accepted: Tensor


def _step(trees: TreeBatch, row: Tensor, law: Tensor, noise: WalkNoise, rule: Verification) -> Step:
    here = row.unsqueeze(1)
    is_child = trees.parents == here
    is_probe = is_child & trees.is_probe
    probe = _first(is_probe)
    has_probe = probe > 0

    if rule == "rrsw":
        is_lead = is_child & has_probe & (arange(trees.rows, row.device) < probe)
        lead_token = inverse_cdf(law, noise.lead_uniforms.gather(1, here))
        lead = child_with(trees, is_lead, lead_token)
        law = torch.where(is_lead.any(dim=1, keepdim=True), _without(law, trees.token_ids, is_lead), law)

    residual: Tensor | None = law
    through, accepted, accepted_token = has_probe, probe, here
    if row.device.type != "cpu" or has_probe.any():  # on a CPU a look costs less than the passes that it saves
        through, accepted, accepted_token, residual = _try_probes(trees, here, law, noise, is_probe, probe)
    child, token = accepted.squeeze(1), accepted_token.squeeze(1)
    probe_accepted = through.squeeze(1)
    if residual is not None:
        drawn = inverse_cdf(residual, noise.residual_uniforms.gather(1, here))
        child = torch.where(probe_accepted, child, child_with(trees, is_child & ~is_probe, drawn))
        token = torch.where(probe_accepted, token, drawn)
    if rule == "rrsw":
        goes_to_lead = lead > 0
        child, token = torch.where(goes_to_lead, lead, child), torch.where(goes_to_lead, lead_token, token)
        probe_accepted = probe_accepted & ~goes_to_lead
    return Step(token, child, has_probe.squeeze(1), probe_accepted)


def _try_probes(
    trees: TreeBatch, here: Tensor, law: Tensor, noise: WalkNoise, is_probe: Tensor, probe: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Test the probes of the rows where the walks stand, one after the other.

    Args:
        trees: the draft trees.
        here: [batch, 1] the rows.
        law: [batch, vocab] float64, the target's law there.
        noise: uniforms.
        is_probe: [batch, rows] bool, the probes below those rows.
        probe: [batch, 1] the first of them; 0 where there is none.

    Returns:
        Whether a probe was accepted, its row and its token, [batch, 1] each, and the law that it left where none was;
        on a CPU None when nobody needs that.
    """
    looks = here.device.type == "cpu"
    waiting, tested = is_probe, probe > 0
    which = trees.law_index.gather(1, here).clamp(min=0).unsqueeze(2).expand(-1, -1, trees.probe_laws.shape[2])
    probe_ids = trees.probe_law_ids.gather(1, which).squeeze(1)
    probe_law = trees.probe_laws.gather(1, which).squeeze(1) * tested
    for draw in range(trees.probes):
        token = trees.token_ids.gather(1, probe).clamp(min=0)
        q_probe = (probe_law * (probe_ids == token)).sum(dim=1, keepdim=True)
        accepts = tested & (_accept_uniforms(noise, here, draw) * q_probe < law.gather(1, token))
        if draw == 0:
            accepted, accepted_token, through = probe, token, accepts
        else:
            accepted = torch.where(accepts, probe, accepted)
            accepted_token = torch.where(accepts, token, accepted_token)
            through = through | accepts
        if looks and through.all():
            return through, accepted, accepted_token, None
        rest = law.scatter_add(1, probe_ids, -probe_law).clamp_(min=0)  # padding repeats an id, with q~ = 0
        total = rest.sum(dim=1, keepdim=True)
        if draw + 1 == trees.probes:
            law = rest if looks and (total > 0).all() else torch.where(total > 0, rest, law)
            break
        law = torch.where(tested & (total > 0), rest / total, law)
        waiting = waiting & (arange(trees.rows, here.device) != probe) & ~accepts
        tested = waiting.any(dim=1, keepdim=True)
        if looks and not tested.any():
            break
        probe = _first(waiting)
        probe_law = probe_law.masked_fill((probe_ids == token) | ~tested, 0.0)
        left = probe_law.sum(dim=1, keepdim=True)
        probe_law = torch.where(left > 0, probe_law / left, probe_law)
    return through, accepted, accepted_token, law


def _first(marked: Tensor) -> Tensor:
    """[batch, 1] the first marked row of each tree; 0 where none is marked, since the root never is."""
    return marked.int().argmax(dim=1, keepdim=True)


def _accept_uniforms(noise: WalkNoise, here: Tensor, draw: int) -> Tensor:
    """[batch, 1] the uniforms that accept the probe ``draw`` of the rows where the walks stand."""
    uniforms = noise.accept_uniforms
    return (uniforms if uniforms.ndim == 2 else uniforms[:, :, draw]).gather(1, here)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw by inverse CDF in ascending token id: the first index whose cumulative weight exceeds ``uniform * total``.

    Args:
        weights: [batch, vocab] float64, not negative, each row with some mass.
        uniforms: [batch, 1] in [0, 1).

    Returns:
        [batch] long; where rounding leaves no such index, the last one with positive weight.
    """
    cumulative = weights.cumsum(dim=1)
    index = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    if weights.device.type != "cpu":
        # A device's cumulative sum may fall by its rounding, and a search then stop at a token without weight.
        places = arange(weights.shape[1], weights.device)
        later = torch.where((weights > 0) & (places >= index), places, weights.shape[1])
        index = later.amin(dim=1, keepdim=True)
    if weights.device.type != "cpu" or (index == weights.shape[1]).any():
        last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(dim=1, keepdim=True)
        index = torch.minimum(index, last)
    return index.squeeze(1)


def child_with(trees: TreeBatch, among: Tensor, token: Tensor) -> Tensor:
    """[batch] the row among the marked ones that holds the token; 0 where there is none."""
    return _first(among & (trees.token_ids == token.unsqueeze(1))).squeeze(1)


def _without(law: Tensor, token_ids: Tensor, gone: Tensor) -> Tensor:
    """The law without the marked rows' tokens, normalised; the law itself where nothing would be left."""
    keep = torch.ones_like(law).scatter_reduce(1, token_ids.clamp(min=0), (~gone).to(law.dtype), "prod")
    rest = law * keep
    total = rest.sum(dim=1, keepdim=True)
    return torch.where(total > 0, rest / total, law)


def _rows_of(trees: TreeBatch, target_probs: Tensor) -> TargetLaw:
    if target_probs.ndim != 3 or target_probs.shape[:2] != (trees.batch_size, trees.rows):
        shape = list(target_probs.shape)
        raise ValueError(f"target_probs must be [{trees.batch_size}, {trees.rows}, vocab], got {shape}")
    probabilities = target_probs.double()
    return lambda rows: probabilities.take_along_dim(rows.view(-1, 1, 1), dim=1).squeeze(1)
