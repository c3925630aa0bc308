"""A target and a draft of one's own: the joint law of the first tokens of a text against the target's probabilities.

The decoder's texts are counted over seeds. What they should be comes from the target alone, in plain forward passes
over whole texts: no tree, no cache, no verification.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimized.decoder import RheoDecoder
from optimized.evidence.judgement import Judgement, check_alpha, judge
from optimized.outputs import Metrics
from optimized.sampling_params import SEED_BITS, SamplingParams
from optimized.target_laws import SamplingBatch, TargetLaws
from reference.statistics import MIN_EXPECTED, Block

OTHER = -1  # in a block: any token that is not named at this place
LEAST_DRAWS = 100


@dataclass(frozen=True)
class PairCheck:
    """The texts' first tokens against the target's law.

    Attributes:
        prompt_token_ids: the prompt.
        tokens: how many tokens a block has; texts that end earlier are blocks of their own.
        law: block -> probability; ``OTHER`` at the end of a block stands for every token not named there.
        counts: block -> how often it came up.
        judgement: of the test.
        metrics: of all texts together.
        alpha: the level that decides.
    """

    prompt_token_ids: tuple[int, ...]
    tokens: int
    law: dict[Block, float]
    counts: dict[Block, int]
    judgement: Judgement
    metrics: Metrics
    alpha: float

    @property
    def draws(self) -> int:
        """How many texts were sampled."""
        return sum(self.counts.values())

    @property
    def named_mass(self) -> float:
        """The probability of the blocks whose every token is named."""
        return sum(probability for block, probability in self.law.items() if OTHER not in block)

    @property
    def accepted(self) -> int:
        """How many draft tokens were accepted that stand in a block, at least: one for each pass that accepted any."""
        return sum(self.metrics.accepted_per_level[:1])

    @property
    def problems(self) -> list[str]:
        """Why this is no evidence of losslessness; empty when it is."""
        found = []
        if self.judgement.impossible is not None:
            found.append("a text came up that the target gives probability 0")
        elif self.judgement.p_value <= self.alpha:
            found.append("the texts' law is not the target's")
        if self.accepted == 0:
            found.append("no draft token was accepted, so nothing was tested")
        if self.judgement.impossible is None and self.judgement.detectable_tv is None and len(self.law) > 1:
            found.append(
                "nearly all texts begin alike, so there is nothing to compare: take more draws or another prompt"
            )
        return found


def check_pair(
    decoder: RheoDecoder,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    draws: int,
    tokens: int,
    seed: int,
    alpha: float,
    progress: Callable[[int], None],
) -> PairCheck:
    """Sample texts and compare their first tokens with the target's law.

    Args:
        decoder: the pair and the trees' shape.
        prompt: token ids.
        params: temperature, filters, penalty; length, stops and seed are set here.
        draws: how many texts.
        tokens: how many tokens of each. The first comes from the prompt's pass; drafts begin with the second.
        seed: the first text's; the i-th has ``seed + i``, modulo 2**64.
        alpha: the probability of a false alarm.
        progress: told how many texts were finished since it was last told.

    Raises:
        ValueError: a decoder that drafts nothing, a number out of its range, or a prompt that is unusable or too long.
        GenerationError: the models failed at some texts.
    """
    check_alpha(alpha)
    if decoder.drafter is None:
        raise ValueError("without a draft there is nothing to test")
    if tokens < 2:
        raise ValueError(f"tokens must be at least 2 (the first comes from the prompt alone), got {tokens}")
    if draws < LEAST_DRAWS:
        raise ValueError(f"draws must be at least {LEAST_DRAWS}, got {draws}")
    decoder.target.check_prompt(0, prompt)
    limit = decoder.target.max_positions
    if limit is not None and len(prompt) + tokens > limit:
        raise ValueError(f"the prompt has {len(prompt)} tokens; with {tokens} more that exceeds the context of {limit}")
    params = replace(params, max_new_tokens=tokens, min_new_tokens=0, stop=(), ignore_eos=False, logprobs=None)
    law = block_law(decoder, prompt, params, tokens=tokens, draws=draws)
    names = {block[:length] for block in law for length in range(1, len(block) + 1)}
    requests = [replace(params, seed=(seed + index) % 2**SEED_BITS) for index in range(draws)]
    counts: Counter[Block] = Counter()
    metrics = []
    for event in decoder.stream([list(prompt)] * draws, requests):
        if event.result is not None:
            counts[named(event.result.token_ids, names)] += 1
            metrics.append(event.result.metrics)
            progress(1)
    merged = Metrics.merge(metrics)
    return PairCheck(tuple(prompt), tokens, law, dict(counts), judge([(counts, law)], alpha), merged, alpha)


def block_law(
    decoder: RheoDecoder, prompt: Sequence[int], params: SamplingParams, *, tokens: int, draws: int
) -> dict[Block, float]:
    """The target's law of the next tokens.

    At every place the tokens that are expected often enough to be a cell (``MIN_EXPECTED`` of all draws) are named,
    all others are ``OTHER``, and so is whatever follows them. This looks at the law and at ``draws``, never at texts.

    Returns:
        Block -> positive probability. A block ends after ``tokens`` tokens, with an end-of-sequence token, or with
        ``OTHER``.
    """
    law: dict[Block, float] = {}
    open_blocks: dict[Block, float] = {(): 1.0}
    ends = {*decoder.target.eos_token_ids, *params.stop_token_ids}
    for place in range(tokens):
        laws = plain_laws(decoder, [[*prompt, *block] for block in open_blocks], params)
        continued: dict[Block, float] = {}
        for (block, mass), row in zip(open_blocks.items(), laws, strict=True):
            often = row * mass * draws >= MIN_EXPECTED
            for token in often.nonzero().squeeze(1).tolist():
                kept = law if place == tokens - 1 or token in ends else continued
                kept[*block, token] = mass * float(row[token])
            rest = mass * float(row[~often].sum())
            if rest > 0:
                law[*block, OTHER] = rest
        open_blocks = continued
        if not open_blocks:
            break
    return law


@torch.inference_mode()
def plain_laws(decoder: RheoDecoder, texts: Sequence[Sequence[int]], params: SamplingParams) -> Tensor:
    """The target's law after each text, processed as requests are, from the model's own forward pass.

    Args:
        decoder: whose target is asked.
        texts: [n][length] token ids, prompt included, all of one length.
        params: the request's.

    Returns:
        [n, vocab_size] float64 on the CPU.

    Raises:
        ValueError: the logits are NaN or +inf, or no token is left.
    """
    target = decoder.target
    laws = []
    for first in range(0, len(texts), decoder.max_batch_size):
        part = texts[first : first + decoder.max_batch_size]
        ids = torch.tensor([list(text) for text in part], device=target.device)
        logits = target.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1:]
        sampling = SamplingBatch.from_params([params] * len(part), part, target.vocab_size, device=target.device)
        processed = TargetLaws(logits, sampling)
        laws.append(processed(torch.zeros(len(part), dtype=torch.long, device=target.device)).cpu())
        if processed.bad.any():
            raise ValueError("the target's logits are NaN or +inf, or no token is left after processing")
    return torch.cat(laws)


def named(token_ids: Sequence[int], names: set[Block]) -> Block:
    """The block that a text belongs to: its longest named beginning, and ``OTHER`` where it goes on."""
    for length in range(1, len(token_ids) + 1):
        if tuple(token_ids[:length]) not in names:
            return (*token_ids[: length - 1], OTHER)
    return tuple(token_ids)
