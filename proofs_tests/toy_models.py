"""A target and a drafter for ``RheoDecoder`` whose logits are pure functions of the whole text: no batch, no rounding.

They keep the committed texts themselves and check that the decoder commits what it emits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from optimized.decoder import RheoDecoder
from optimized.sampling_params import SamplingParams
from optimized.trees import LevelNodes
from proofs_tests.toy import Logits, random_logits


class PathTarget:
    """Stands in for ``TargetModel``; ``logits`` maps a whole text (prompt included) to the next token's logits.

    Its feature at a position is (a hash of) the text up to there, so that a drafter can check what it is fed.
    """

    def __init__(
        self,
        vocab_size: int,
        logits: Logits | None = None,
        eos: Sequence[int] = (),
        max_positions: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.eos_token_ids = tuple(eos)
        self.device, self.dtype = torch.device(device), torch.float32
        self.feature_layers: tuple[int, ...] = ()
        self.logits = logits or random_logits(1, vocab_size, "normal")
        self.texts: list[tuple[int, ...]] = []  # committed: everything but the next root
        self.passes = 0
        self._rows: list[list[tuple[int, ...]]] = []

    def check_prompt(self, index: int, prompt: Sequence[int]) -> None:
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty; it needs at least one token")

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        self.texts = [tuple(prompt) for prompt in prompts]
        longest = max(map(len, self.texts))
        features = torch.zeros(len(prompts), longest, 1)
        for b, text in enumerate(self.texts):
            features[b, : len(text), 0] = torch.tensor([fingerprint(text[: i + 1]) for i in range(len(text))])
        return torch.stack([self._answer(text) for text in self.texts]).to(self.device), features.to(self.device)

    def forward_tree(
        self,
        token_ids: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        counts: Tensor | None = None,
        contain_nan: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self.passes += 1
        self._rows = [
            [
                (*text, *(int(token) for token, seen in zip(tokens, reach, strict=True) if seen))
                for reach in ancestors[b].tolist()
            ]
            for b, (text, tokens) in enumerate(zip(self.texts, token_ids.tolist(), strict=True))
        ]
        for b, paths in enumerate(self._rows):
            for row, path in enumerate(paths):
                assert depths[b, row] == 0 or len(path) - len(self.texts[b]) - 1 == depths[b, row]
        logits = torch.stack([torch.stack([self._answer(path) for path in paths]) for paths in self._rows])
        features = torch.tensor([[[fingerprint(path)] for path in paths] for paths in self._rows])
        return logits.to(self.device), features.to(self.device)

    def commit(self, rows: Tensor, counts: Tensor) -> None:
        for b, count in enumerate(counts.tolist()):
            kept = [self._rows[b][row] for row in rows[b, :count].tolist()]
            assert [len(path) for path in kept] == [len(self.texts[b]) + i + 1 for i in range(count)]
            self.texts[b] = kept[-1]

    def select(self, keep: Tensor) -> None:
        self.texts = [self.texts[b] for b in keep.tolist()]

    def _answer(self, path: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(self.logits(path))


class PathDrafter:
    """Stands in for ``Eagle3Drafter``; checks that the features it is given belong to the tokens before."""

    feature_layers = (0,)
    max_positions = None

    def __init__(self, vocab_size: int, logits: Logits | None = None, vocab_map: Tensor | None = None) -> None:
        self.vocab_size, self.vocab_map = vocab_size, vocab_map
        self.logits = logits or random_logits(2, vocab_size, "normal")
        self.texts: list[tuple[int, ...]] = []
        self._beam: list[list[tuple[int, ...]]] = []

    def reset(self, first_tokens: Tensor) -> None:
        self.texts = [(token,) for token in first_tokens.tolist()]

    def advance(self, token_ids: Tensor, counts: Tensor, features: Tensor | None) -> Tensor:
        assert features is not None
        for b, count in enumerate(counts.tolist()):
            for i, token in enumerate(token_ids[b, :count].tolist()):
                assert float(features[b, i, 0]) == fingerprint(self.texts[b])
                self.texts[b] = (*self.texts[b], token)
        self._beam = [[text] for text in self.texts]
        return torch.stack([torch.from_numpy(self.logits(text)) for text in self.texts]).to(features.device)

    def expand(self, level: LevelNodes) -> Tensor:
        token_ids, parents = level.token_ids.tolist(), level.parents.tolist()
        self._beam = [
            [(*beam[parent], token) for token, parent in zip(token_ids[b], parents[b], strict=True)]
            for b, beam in enumerate(self._beam)
        ]
        logits = [torch.stack([torch.from_numpy(self.logits(path)) for path in beam]) for beam in self._beam]
        return torch.stack(logits).to(level.token_ids.device)

    def select(self, keep: Tensor) -> None:
        self.texts = [self.texts[b] for b in keep.tolist()]


def fingerprint(text: Sequence[int]) -> float:
    """A number that tells texts apart and that float32 holds exactly."""
    value = 0
    for token in text:
        value = (value * 31 + token + 1) % 2**24
    return float(value)


def text_counts(decoder: RheoDecoder, requests: int, distinct_seeds: bool = True) -> np.ndarray:
    """How often each text of three tokens comes behind the prompt [1], at T = 1; with one seed for all if wanted."""
    vocab = decoder.target.vocab_size
    seeds = range(10**9, 10**9 + requests) if distinct_seeds else [3] * requests
    params = [SamplingParams(seed=seed, max_new_tokens=3) for seed in seeds]
    counts = np.zeros(vocab**3, dtype=np.int64)
    for result in decoder.generate([[1]] * requests, params):
        counts[np.dot(result.token_ids, [vocab**2, vocab, 1])] += 1
    return counts


def text_law(target: PathTarget) -> np.ndarray:
    """The law that ``text_counts`` should follow."""
    vocab, law = target.vocab_size, np.ones(1)
    for length in range(3):
        logits = np.array([target.logits((1, *text)) for text in np.ndindex(*(vocab,) * length)], dtype=np.float64)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        law = (law[:, None] * odds / odds.sum(axis=1, keepdims=True)).ravel()
    return law
