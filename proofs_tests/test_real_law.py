"""The embedded model and its head, in float32: the law of the first two tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from optimized import RheoConfig, RheoDecoder, SamplingParams
from proofs_tests.statistics import Family
from reference.api import Proposal


def two_token_law(decoder: RheoDecoder, prompt: list[int], first: int, second: int) -> dict[tuple[int, int], float]:
    """The target's law of two tokens, EOS banned: the ``first`` and ``second`` likeliest by name, -1 for all others."""

    def model(token_ids: torch.Tensor) -> torch.Tensor:
        logits = decoder.target.model(token_ids, logits_to_keep=1).logits[:, -1].double()
        logits[:, list(decoder.target.eos_token_ids)] = -torch.inf
        return logits.softmax(1)

    with torch.inference_mode():
        p1 = model(torch.tensor([prompt]))[0]
        tokens = p1.topk(first).indices
        continued = torch.cat([torch.tensor([prompt]).expand(first, -1), tokens[:, None]], dim=1)
        p2 = model(continued)
    law = {(-1, -1): 1 - float(p1[tokens].sum())}
    for row, token in zip(p2, tokens.tolist(), strict=True):
        named = row.topk(second).indices.tolist()
        law |= {(token, other): float(p1[token] * row[other]) for other in named}
        law[token, -1] = float(p1[token] * (1 - row[named].sum()))
    return law


@pytest.mark.model
@pytest.mark.lossless
def test_the_first_two_tokens_follow_the_targets_law() -> None:
    """Joint counts over seeds against the exact law; the first token comes from the prompt, the second from a tree."""
    decoder = RheoDecoder.from_pretrained()
    draws, prompt = 1536, decoder.tokenizer("The best way to")["input_ids"]
    law = two_token_law(decoder, prompt, first=24, second=12)
    params = [SamplingParams(seed=1000 + i, max_new_tokens=2, min_new_tokens=2) for i in range(draws)]
    proposals: tuple[Proposal, ...] = ("rheo", "topk")
    with Family("real model", tests=len(proposals)) as family:
        for proposal in proposals:
            decoder.config = RheoConfig(branching=3, depth=2, tree_size=4, proposal=proposal)
            counts: Counter[tuple[int, ...]] = Counter()
            accepted = 0
            for result in decoder.generate([prompt] * draws, params):
                first, second = result.token_ids
                named = next(block for block in ((first, second), (first, -1), (-1, -1)) if block in law)
                counts[named] += 1
                accepted += result.metrics.accepted_per_level[0]
            assert accepted > 0.2 * draws  # the second token did come from the tree
            family.compare(proposal, counts, law, min_detectable_tv=0.16)
