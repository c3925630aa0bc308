"""Toy Markov models for the batched path: a target and a draft whose logits are tables over the last tokens.

``sample_blocks`` runs the decoder's own parts on them - growth, target laws, verification, Philox - for thousands of
requests at once, step after step. ``block_law`` is the law its blocks must have, from the definitions, in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimized.backends import BackendName, choose_backend
from optimized.growth import grow_trees
from optimized.randomness import StepNoise, StepRandomness
from optimized.sampling_params import SamplingParams
from optimized.target_laws import SamplingBatch, TargetLaws
from optimized.trees import LevelNodes, TreeBatch
from optimized.verification import VerifyBatch
from reference.api import RheoConfig

BLOCK = 3  # tokens whose joint law is compared


@dataclass(frozen=True, eq=False)
class MarkovModel:
    """Next-token logits that depend on the last ``order`` tokens.

    A *context* is the number of the last tokens in base ``vocab_size``, the newest the lowest digit.

    Attributes:
        target_logits: [vocab_size ** order, vocab_size] float32.
        draft_logits: [vocab_size ** order, draft vocab] float32 or bfloat16.
        order: how many tokens count, 1 or 2.
        vocab_map: [draft vocab] long, increasing target ids; None for the identity.
        root_context: where every block starts.
    """

    target_logits: Tensor
    draft_logits: Tensor
    order: int = 1
    vocab_map: Tensor | None = None
    root_context: int = 0

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.target_logits.shape[1]

    def follow(self, contexts: Tensor, token_ids: Tensor) -> Tensor:
        """The contexts after one more token."""
        return (contexts * self.vocab_size + token_ids) % self.target_logits.shape[0]

    def drafter(self, roots: Tensor) -> Callable[[LevelNodes], Tensor]:
        """``expand`` of ``grow_trees``; padding gets NaN, which nobody may read."""
        beams = [roots.unsqueeze(1)]

        def expand(nodes: LevelNodes) -> Tensor:
            contexts = self.follow(beams[-1].gather(1, nodes.parents), nodes.token_ids)
            beams.append(contexts)
            return self.draft_logits[contexts].masked_fill(~nodes.valid.unsqueeze(2), torch.nan)

        return expand

    def tree_contexts(self, trees: TreeBatch, roots: Tensor) -> Tensor:
        """[batch, rows] the context after each row's path."""
        contexts = roots.unsqueeze(1).expand(-1, trees.rows)
        for depth in range(1, trees.depth + 1):
            below = self.follow(contexts.gather(1, trees.parents.clamp(min=0)), trees.token_ids)
            contexts = torch.where(trees.depths == depth, below, contexts)
        return contexts


def _unchanged(noise: StepNoise) -> StepNoise:
    return noise


def _own_steps(step: int) -> int:
    return step


def sample_blocks(
    model: MarkovModel,
    config: RheoConfig,
    params: Sequence[SamplingParams],
    seeds: range,
    *,
    with_noise: Callable[[StepNoise], StepNoise] = _unchanged,
    step_counter: Callable[[int], int] = _own_steps,
    on_walks: Callable[[VerifyBatch], None] | None = None,
    backend: BackendName = "auto",
) -> NDArray[np.int64]:
    """The first ``BLOCK`` tokens of one request per seed, all in one batch; request b has ``params[b % len(params)]``.

    Args:
        model: target and draft.
        config: the trees' shape and the rule.
        params: what the requests ask for, in turn.
        seeds: one request each.
        with_noise, step_counter: for deliberately wrong variants, which tamper with the noise or with its counter.
        on_walks: is shown every step's walks.
        backend: who grows and verifies; as of ``RheoDecoder``.

    Returns:
        [requests, BLOCK] token ids.
    """
    batch = len(seeds)
    device = torch.device("cpu")
    steps = choose_backend(backend, device, config)
    rows = config.budget + 1
    randomness = StepRandomness(list(seeds), config.depth, config.beam_width, rows, probes=config.probes)
    asked = [params[b % len(params)] for b in range(batch)]
    laws_of = SamplingBatch.from_params(asked, [()] * batch, model.vocab_size, device=device)
    blocks = torch.full((batch, BLOCK + config.depth + 1), -1)
    lengths = torch.zeros(batch, dtype=torch.long)
    contexts = torch.full((batch,), model.root_context)
    here = torch.arange(batch)  # the requests that are not done, by their place among all
    for step in range(1, BLOCK + 1):  # every step emits a token at least
        noise = with_noise(randomness.at(torch.full((len(here),), step_counter(step))))
        roots = contexts[here]
        trees = grow_trees(
            config,
            model.draft_logits[roots],
            model.drafter(roots),
            laws_of.temperatures,
            noise.probe_uniforms,
            model.vocab_map,
            steps.growth,
        )
        assert not trees.draft_failed.any()
        logits = model.target_logits[model.tree_contexts(trees, roots)]
        laws = TargetLaws(logits, laws_of, trees)
        walks = steps.verify(trees, laws, noise, config.verification)
        assert not laws.bad.any()
        if on_walks is not None:
            on_walks(walks)
        for place in range(int(walks.counts.max())):
            emitted = walks.counts > place
            tokens = walks.token_ids[emitted, place]
            owner = here[emitted]
            blocks[owner, lengths[owner]] = tokens
            lengths[owner] += 1
            contexts[owner] = model.follow(contexts[owner], tokens)
        unfinished = (lengths[here] < BLOCK).nonzero().squeeze(1)
        if len(unfinished) == 0:
            break
        here = here[unfinished]
        laws_of.select(unfinished.tolist())
        randomness.select(unfinished)
    return blocks[:, :BLOCK].numpy()


def block_counts(blocks: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """[vocab_size ** BLOCK] how often each block came up, in lexicographic order."""
    index = blocks @ vocab_size ** np.arange(BLOCK - 1, -1, -1)
    return np.bincount(index, minlength=vocab_size**BLOCK)


def block_law(model: MarkovModel, params: SamplingParams) -> NDArray[np.float64]:
    """[vocab_size ** BLOCK] the exact law of ``BLOCK`` tokens sampled from the target, from the definitions."""
    logits = model.target_logits.double().numpy()
    laws = np.array([target_law(row, params) for row in logits])
    contexts, vocab = laws.shape
    mass = np.ones(1)
    context = np.array([model.root_context])
    for _ in range(BLOCK):
        mass = (mass[:, None] * laws[context]).ravel()
        context = (context[:, None] * vocab + np.arange(vocab)).ravel() % contexts
    return mass


def target_law(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """The target's law from its logits, one token at a time, as transformers' warpers define it.

    Temperature, then top-k (ties with the k-th stay), top-p (from the least likely: drop while the mass dropped stays
    within 1 - p), min-p (drop below ``min_p`` times the largest).
    """
    vocab = len(logits)
    if params.temperature < 1e-5:
        best = min(token for token in range(vocab) if logits[token] == logits.max())
        return np.eye(vocab)[best]
    scores = [float(value) / params.temperature for value in logits]
    if params.top_k:
        kth = sorted(scores, reverse=True)[min(params.top_k, vocab) - 1]
        scores = [score if score >= kth else -math.inf for score in scores]
    if params.top_p < 1:
        law = _softmax(scores)
        dropped = 0.0
        for token in sorted(range(vocab), key=lambda token: (law[token], -token))[:-1]:
            dropped += law[token]
            if dropped <= 1 - params.top_p:
                scores[token] = -math.inf
    if params.min_p > 0:
        law = _softmax(scores)
        scores = [score if law[t] >= params.min_p * max(law) else -math.inf for t, score in enumerate(scores)]
    return np.array(_softmax(scores))


def _softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
