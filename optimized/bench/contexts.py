"""Common contexts: positions of one text at which every method drafts a tree, so that their differences are paired.

At a context the committed text is the prompt and the first i tokens of the common text, the last of them being the
root. A method's expected acceptance length there is computed: one tree is drafted, the target scores it, and the walk's
expectation follows from both, with most of the probes' randomness taken out (``reference.lengths``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.growth import grow_trees
from optimized.models.drafter import Drafter
from optimized.models.kv_cache import causal
from optimized.models.target import TargetModel
from optimized.randomness import StepRandomness
from optimized.sampling_params import SamplingParams
from optimized.target_laws import SamplingBatch, TargetLaws
from optimized.trees import TreeBatch
from reference.api import RheoConfig
from reference.lengths import smoothed_acceptance_length


@dataclass(frozen=True)
class ContextValues:
    """What one method gives at the contexts.

    Attributes:
        expected_lengths: [contexts] smoothed acceptance length of the tree drafted there.
        coverage: [contexts] mass of the draft's full law, at temperature 1, on the support at the root.
    """

    expected_lengths: tuple[float, ...]
    coverage: tuple[float, ...]


def choose_positions(length: int, count: int, seed: int) -> list[int]:
    """Spread positions over a text of ``length`` tokens: one in each of ``count`` equal parts.

    Position i is the context whose root is token i; behind the last token nothing is drafted, so i runs from 1 to
    ``length - 1``. A text with fewer positions gives all it has.

    Args:
        length: tokens of the text, the end-of-sequence token included.
        count: how many are wanted.
        seed: in [0, 2**64); its share of that range is where in its part each position lies.
    """
    available = length - 1
    count = min(count, available)
    return [1 + (part * 2**64 + seed) * available // (count * 2**64) for part in range(count)]


class CommonContexts:
    """Several contexts of one text, scored by one target pass and kept in the target's cache until the next generation.

    Args:
        target: is taken over, as by a generation; a generation in between ends this.
        prompt: token ids.
        text: token ids that follow it.
        positions: 1 or more, each at most ``len(text)``; see ``choose_positions``.
        temperature: of the target's laws and of the probes.
        feature_layers: of the drafter that will be asked; () for none.
        min_new_tokens: of the request that writes the text: before so many no end of text is drawn.

    Raises:
        ValueError: no position, or one outside the text.
    """

    @torch.no_grad()
    def __init__(
        self,
        target: TargetModel,
        prompt: Sequence[int],
        text: Sequence[int],
        positions: Sequence[int],
        temperature: float,
        feature_layers: tuple[int, ...] = (),
        min_new_tokens: int = 0,
    ) -> None:
        if not positions or not all(1 <= place <= len(text) for place in positions):
            raise ValueError(f"positions must lie in 1..{len(text)} and be at least one, got {list(positions)}")
        self.target, self.prompt, self.positions = target, tuple(prompt), tuple(positions)
        self.text = tuple(text[: max(positions)])
        self.params = SamplingParams(
            temperature=temperature, min_new_tokens=min_new_tokens, max_new_tokens=max(min_new_tokens, len(text))
        )
        device = target.device
        target.owner = self
        target.feature_layers = feature_layers
        _, of_prompt = target.prefill([self.prompt])
        chain = torch.tensor([self.text], device=device)
        steps = torch.arange(len(self.text), device=device)
        _, of_text = target.forward_tree(chain, steps.unsqueeze(0), causal(1, len(self.text), device))
        # One pass scored the text; now every context gets a copy of it, cut before its own root.
        target.select(torch.zeros(len(self.positions), dtype=torch.long, device=device))
        self._roots = torch.tensor(self.positions, device=device)
        target.commit(steps.expand(len(self.positions), -1), self._roots - 1)
        self._features: tuple[Tensor, Tensor] | None = None
        if of_prompt is not None and of_text is not None:
            before_text = torch.cat([of_prompt[:, len(self.prompt) - 1 : len(self.prompt)], of_text[:, :-1]], dim=1)
            self._features = of_prompt[:, : len(self.prompt) - 1], before_text

    @property
    def temperatures(self) -> Tensor:
        """[contexts] float64."""
        return torch.full(
            (len(self.positions),), self.params.temperature, dtype=torch.float64, device=self.target.device
        )

    def sampling(self) -> SamplingBatch:
        """The requests' parameters, one per context."""
        texts = [(*self.prompt, *self.text[:place]) for place in self.positions]
        batch = SamplingBatch.from_params(
            [self.params] * len(texts), texts, self.target.vocab_size, self.target.eos_token_ids, self.target.device
        )
        batch.generated += self._roots
        return batch

    @torch.no_grad()
    def draft_logits(self, drafter: Drafter) -> Tensor:
        """[contexts, draft vocab] the draft's logits behind every root; afterwards ``drafter.expand`` may follow."""
        count, device = len(self.positions), self.target.device
        drafter.owner = self
        copies = torch.zeros(count, dtype=torch.long, device=device)
        of_prompt, of_text = (None, None) if self._features is None else self._features
        prompt = torch.tensor(self.prompt, device=device)
        if len(prompt) > 1:  # read once, then copied
            drafter.reset(prompt[:1])
            drafter.advance(prompt[None, 1:], torch.tensor([len(prompt) - 1], device=device), of_prompt)
            drafter.select(copies)
        else:
            drafter.reset(prompt[copies])
        text = torch.tensor(self.text, device=device).expand(count, -1)
        features = None if of_text is None else of_text.expand(count, -1, -1)
        return drafter.advance(text, self._roots, features)

    @torch.no_grad()
    def draft(self, drafter: Drafter, config: RheoConfig, seed: int) -> tuple[TreeBatch, Tensor]:
        """One tree per context; the probes' uniforms follow from the seed and the position alone.

        Returns:
            The trees, and the draft's logits at the roots, [contexts, draft vocab].
        """
        count, device = len(self.positions), self.target.device
        size = (config.depth, config.beam_width, config.budget + 1)
        noise = StepRandomness([seed] * count, *size, device, config.probes).at(self._roots)
        root_logits = self.draft_logits(drafter)
        trees = grow_trees(
            config, root_logits, drafter.expand, self.temperatures, noise.probe_uniforms, drafter.vocab_map
        )
        return trees, root_logits

    @torch.no_grad()
    def laws(self, trees: TreeBatch) -> TargetLaws:
        """The target's laws at every row of the trees.

        Raises:
            RuntimeError: a generation has taken over the target since.
        """
        if self.target.owner is not self:
            raise RuntimeError("another generation was started on the target model that these contexts need")
        roots = torch.tensor([[self.text[place - 1]] for place in self.positions], device=self.target.device)
        token_ids = torch.cat([roots, trees.token_ids[:, 1:]], dim=1)
        logits, _ = self.target.forward_tree(token_ids, trees.depths, trees.ancestors())
        return TargetLaws(logits, self.sampling(), trees)

    @torch.no_grad()
    def measure(self, drafter: Drafter, config: RheoConfig, seed: int) -> ContextValues:
        """One method at every context; 1 token at those where the draft's context has no room for a tree.

        Args:
            drafter: has the feature layers that this was made with.
            config: the method's.
            seed: of the probes.

        Raises:
            ValueError: the draft's or the target's logits were NaN.
        """
        trees, root_logits = self.draft(drafter, config, seed)
        laws = self.laws(trees)
        by_row = all_laws(laws, trees)
        if bool(trees.draft_failed.any()) or bool(laws.bad.any()):
            raise ValueError("the draft's or the target's logits were NaN at a context")
        lengths, room = [], drafter.max_positions
        for context, place in enumerate(self.positions):
            if room is not None and len(self.prompt) + place + config.depth > room:  # as ``Drafting`` has it
                lengths.append(1.0)
                continue
            tree = trees.to_tree(context)
            probs = [law[context].cpu().numpy() for law in by_row[: len(tree)]]
            lengths.append(float(smoothed_acceptance_length(tree, probs, config.verification)))
        return ContextValues(tuple(lengths), tuple(support_mass(root_logits, config.draft_support).tolist()))


def all_laws(laws: TargetLaws, trees: TreeBatch) -> list[Tensor]:
    """The laws at every row: one [batch, vocab] float64 per row; padding repeats a tree's last node."""
    last = trees.num_nodes - 1
    return [laws(torch.full_like(last, row).minimum(last)) for row in range(trees.rows)]


def support_mass(logits: Tensor, support: int) -> Tensor:
    """[...] mass that the softmax of [..., draft vocab] logits has on its ``support`` largest."""
    logits = logits.double()
    kept = logits.topk(min(support, logits.shape[-1]), dim=-1).values
    return (kept.logsumexp(-1) - logits.logsumexp(-1)).exp().clamp(max=1.0)
