"""From target logits to the law that verification keeps: every request with its own parameters.

The rules and their order are those of transformers' ``generate`` (its ``LogitsProcessorList``), each skipped where
nobody asked for it:

1. ``logit_bias`` (a sequence bias of length one): added.
2. ``repetition_penalty``: tokens of the prompt, of the output and of the node's own path; z / penalty where z >= 0,
   z * penalty where z < 0.
3. ``min_new_tokens``: EOS and stop tokens get -inf while output plus path is shorter.
4. ``temperature``: z / T. A greedy request takes the largest z here, lowest id on ties, and skips the rest.
5. ``top_k``: tokens below the k-th largest go; tokens tied with it stay.
6. ``top_p``: in ascending order of probability, tokens whose cumulative mass is <= 1 - top_p go, except the last.
   Among tokens of equal probability the higher id goes first, so that the lower one stays, as everywhere here
   (transformers' sort is not stable and leaves this open).
7. ``min_p``: tokens below min_p times the largest probability go.

All of it in float64 and only for the row where each request's walk stands (docs/algorithm.md,
"Verification"). Nothing waits for the device: what must be known to skip a stage is known from the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from optimized.ranges import arange
from optimized.sampling_params import SamplingParams


class TreePaths(Protocol):
    """What is needed of a ``TreeBatch``: tokens, depths and who is whose ancestor."""

    @property
    def token_ids(self) -> Tensor: ...  # [batch, rows] int64, the root's is not read

    @property
    def depths(self) -> Tensor: ...  # [batch, rows] int64, 0 for the root

    def ancestors(self) -> Tensor: ...  # [batch, rows, rows] bool; [b, i, j]: j is i or an ancestor of i


@dataclass(frozen=True)
class _Stage:
    """The requests that asked for one kind of processing, and their parameters."""

    rows: Tensor | None  # [n] int64; None: every request of the batch
    values: Tensor  # [n, 1, 1]

    def apply(self, rows: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``function(rows of those requests, values)`` put in their place; may write into ``rows``."""
        if self.rows is None:
            return function(rows, self.values)
        return rows.index_copy_(0, self.rows, function(rows.index_select(0, self.rows), self.values))


class SamplingBatch:
    """The parameters of a batch of requests as tensors, with what the rules have to remember of each text.

    Attributes:
        params: one per request.
        temperatures: [batch] float64.
        generated: [batch] int64, tokens generated so far, the root's token included.
        seen: [batch, vocab_size + 1] bool, tokens of prompt and output (the last column is a bin for ids outside the
            vocabulary); None when no request has a repetition penalty.
        plain: whether the law of every request is just the softmax of what bias, penalty and minimum length leave.
    """

    def __init__(
        self, params: Sequence[SamplingParams], vocab_size: int, eos_token_ids: Sequence[int], device: torch.device
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.eos_token_ids = tuple(eos_token_ids)
        self.generated = torch.zeros(len(params), dtype=torch.int64, device=device)
        self.seen: Tensor | None = None
        self._set_params(tuple(params))

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """A batch at its start: nothing generated yet.

        Args:
            params: one per request.
            prompts: token ids of each request's prompt, for the repetition penalty.
            vocab_size: width of the target's logits.
            eos_token_ids: what ``min_new_tokens`` forbids, beside each request's ``stop_token_ids``.
            device: where the logits will be.

        Raises:
            ValueError: not one prompt per request, or a parameter names a token outside the vocabulary.
        """
        if len(params) != len(prompts) or not params:
            raise ValueError(f"need one prompt per request and at least one, got {len(params)} and {len(prompts)}")
        for request in params:
            request.check_vocab(vocab_size)
        eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
        batch = cls(params, vocab_size, eos, torch.device(device))
        if any(request.repetition_penalty != 1 for request in params):
            seen = torch.zeros(len(params), vocab_size + 1, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                seen[row, torch.tensor([min(token, vocab_size) for token in prompt], dtype=torch.int64)] = True
            batch.seen = seen.to(batch.device)
        return batch

    def observe(self, token_ids: Tensor, counts: Tensor) -> None:
        """Add the tokens a step emitted.

        Args:
            token_ids: [batch, n] int64; of row b only the first ``counts[b]`` count, whatever stands behind them.
            counts: [batch] int64.
        """
        self.generated += counts
        if self.seen is not None:
            emitted = torch.arange(token_ids.shape[1], device=self.device) < counts[:, None]
            self.seen.scatter_(1, torch.where(emitted, token_ids, self.vocab_size), True)

    def select(self, keep: Sequence[int] | Tensor) -> None:
        """Keep only these requests, in this order. A list costs nothing; a tensor on a device is waited for."""
        rows = [int(row) for row in (keep.tolist() if isinstance(keep, Tensor) else keep)]
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self.generated = self.generated[index]
        self._set_params(tuple(self.params[row] for row in rows))
        penalised = any(request.repetition_penalty != 1 for request in self.params)
        self.seen = self.seen[index] if self.seen is not None and penalised else None

    def _set_params(self, params: tuple[SamplingParams, ...]) -> None:
        self.params = params
        self.temperatures = self._float64([request.temperature for request in params])
        self.greedy = self._stage([1.0 if request.greedy else None for request in params])
        self.all_greedy = self.greedy is not None and self.greedy.rows is None
        sampled = [None if request.greedy else request for request in params]
        self.divisors = self._stage([r.temperature if r and r.temperature != 1 else None for r in sampled])
        self.top_k = self._stage([min(r.top_k, self.vocab_size) if r and r.top_k else None for r in sampled])
        self.max_top_k = max((min(r.top_k, self.vocab_size) for r in sampled if r), default=0)
        self.top_p = self._stage([r.top_p if r and r.top_p < 1 else None for r in sampled])
        self.min_p = self._stage([r.min_p if r and r.min_p > 0 else None for r in sampled])
        self.plain = all(stage is None for stage in (self.greedy, self.divisors, self.top_k, self.top_p, self.min_p))
        self.penalty = self._stage([r.repetition_penalty if r.repetition_penalty != 1 else None for r in params])
        bias = [(b, token, value) for b, r in enumerate(params) for token, value in (r.logit_bias or {}).items()]
        self.bias_places = self._places([entry[:2] for entry in bias])
        self.bias_values = self._float64([entry[2] for entry in bias])
        ends = [
            (b, token)
            for b, r in enumerate(params)
            if r.min_new_tokens > 0
            for token in sorted({*(() if r.ignore_eos else self.eos_token_ids), *r.stop_token_ids})
        ]
        self.end_places = self._places(ends)
        self.changed = bool(bias or ends) or self.penalty is not None
        self.min_new_tokens = torch.tensor([r.min_new_tokens for r in params], dtype=torch.int64, device=self.device)

    def _stage(self, values: Sequence[float | None]) -> _Stage | None:
        rows = [row for row, value in enumerate(values) if value is not None]
        if not rows:
            return None
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        chosen = self._float64([value for value in values if value is not None])[:, None, None]
        return _Stage(None if len(rows) == len(values) else index, chosen)

    def _places(self, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
        if not pairs:
            return None
        index = torch.tensor(pairs, dtype=torch.int64, device=self.device)
        return index[:, 0], index[:, 1]

    def _float64(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)


class TargetLaws:
    """The target's law at any row of every request's tree, made when it is asked for.

    Attributes:
        bad: [batch] bool. True once a row that was asked for held NaN or +inf, or had no token left after processing.
            Such a row's law is one-hot at token 0 so that the batch goes on; the request's text is then worthless.
            Nothing waits for the device until somebody reads it.
        kept: when a list is put here, it receives every law that is asked for.
    """

    def __init__(self, logits: Tensor, batch: SamplingBatch, trees: TreePaths | None = None) -> None:
        """Make the laws of one step; nothing is computed yet.

        Args:
            logits: [batch, rows, vocab_size] floats of any precision, the target's output for every tree row.
            batch: the requests' parameters and history, the root's token included.
            trees: the same step's trees; None when there is only the root.

        Raises:
            ValueError: the shapes do not fit together.
        """
        expected = (len(batch.params), 1 if trees is None else trees.token_ids.shape[1], batch.vocab_size)
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits must be [batch, rows, vocab_size] = {list(expected)}, got {list(logits.shape)}")
        self.logits = logits
        self.batch = batch
        self.trees = trees
        self.kept: list[Tensor] | None = None
        self.bad = torch.zeros(len(batch.params), dtype=torch.bool, device=logits.device)
        self._requests = arange(len(batch.params), logits.device)
        self._first = self._requests * logits.shape[1]
        self._ancestors = trees.ancestors() if trees is not None and batch.penalty is not None else None

    def __call__(self, rows: Tensor) -> Tensor:
        """The law at one row of every request's tree.

        Args:
            rows: [batch] int64, rows that hold a node.

        Returns:
            [batch, vocab_size] float64; not negative, rows sum to one.
        """
        batch = self.batch
        if self.logits.device.type == "cpu" and batch.plain:  # one look at the law saves two passes over the logits
            scores = self._processed(rows[:, None])[:, 0] if batch.changed else self._at(self._first + rows)
            law = scores.softmax(-1, dtype=torch.float64)
            # Softmax makes all of a row NaN where ``_exclude_bad`` would find it bad.
            if not np.isnan(law.numpy()[:, 0]).any():
                return self._keep(law)
        scores = self._processed(rows[:, None])
        top, bad = _exclude_bad(scores)
        self.bad |= bad[:, 0]
        best = scores.argmax(-1, keepdim=True) if batch.greedy is not None else None
        if batch.all_greedy:
            return self._keep(torch.zeros_like(scores).scatter_(-1, _given(best), 1.0)[:, 0])
        # softmax works row by row: the law's bits do not depend on who else is in the batch (exp and sum would).
        law = self._filtered(scores, top).softmax(-1)
        if batch.greedy is not None:
            greedy = _given(batch.greedy.rows)
            law[greedy] = torch.zeros_like(law[greedy]).scatter_(-1, _given(best)[greedy], 1.0)
        return self._keep(law[:, 0])

    def _keep(self, law: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept.append(law.clone())
        return law

    def masked_logits(self) -> Tensor:
        """The logits of all rows, not yet divided by T, with -inf for every token that the parameters exclude.

        What the verification kernels read: softmax(masked / T) is the row's law, for a greedy request the one-hot at
        the largest. Where no parameter asks for a change these are the target's own logits, not copied; otherwise
        float32, made for all rows at once. Rows that are ``bad`` stay so: the kernels report them.

        Returns:
            [batch, rows, vocab_size].
        """
        batch = self.batch
        filtered = batch.top_k is not None or batch.top_p is not None or batch.min_p is not None
        if not batch.changed and not filtered:
            return self.logits
        every = torch.arange(self.logits.shape[1], device=self.logits.device)
        scores = self._processed(every.expand(self.logits.shape[0], -1))
        # A bias may reach further than float32 does. Other rows keep their bits, whatever their batch mates ask for.
        highest = scores.amax(-1, keepdim=True)
        highest = torch.where(highest.abs() > 1e30, highest, 0.0)
        if not filtered:
            return (scores - highest).float()
        kept = scores.clone()
        top, bad = _exclude_bad(kept)
        outside = (self._filtered(kept, top) == -math.inf) & ~bad[..., None]
        return (scores - highest).masked_fill_(outside, -math.inf).float()

    def logprobs(self, rows: Tensor, token_ids: Tensor, alternatives: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities under the target's raw logits, before any processing and at temperature 1 (as vLLM's).

        Args:
            rows: [batch, n] int64, tree rows.
            token_ids: [batch, n] int64, the token emitted at each.
            alternatives: how many of the most likely tokens to report beside it.

        Returns:
            ``(chosen [batch, n], top_ids [batch, n, alternatives], top [batch, n, alternatives])``, most likely first,
            in float64 for float64 logits and in float32 otherwise. The order of tied alternatives is not defined.
        """
        scores = self.logits[self._requests[:, None], rows]
        scores = scores if scores.dtype == torch.float64 else scores.float()
        total = scores.logsumexp(-1, keepdim=True)
        chosen = scores.gather(-1, token_ids[..., None]) - total
        if alternatives == 0:
            empty = chosen[..., :0]
            return chosen[..., 0], empty.to(torch.int64), empty
        top, top_ids = scores.topk(alternatives, dim=-1)
        return chosen[..., 0], top_ids, top - total

    def _filtered(self, scores: Tensor, top: Tensor) -> Tensor:
        """The scores divided by T, their maxima subtracted, -inf where top-k, top-p or min-p exclude a token."""
        batch = self.batch
        if batch.top_k is not None:
            # Before the division: dividing by T keeps the order, and cannot round two neighbours into a tie here.
            scores = batch.top_k.apply(scores, self._keep_top_k)
        scores -= top  # before the division: neither overflow nor lost digits at a small T
        if batch.divisors is not None:
            scores = batch.divisors.apply(scores, Tensor.div_)
        if batch.top_p is not None:
            scores = batch.top_p.apply(scores, _keep_top_p)
        if batch.min_p is not None:
            scores = batch.min_p.apply(scores, _keep_min_p)
        return scores

    def _at(self, places: Tensor) -> Tensor:
        """[..., vocab_size] the logits at places among the rows of all trees, [...] long; a copy."""
        return self.logits.flatten(0, 1).index_select(0, places.flatten()).view(*places.shape, -1)

    def _processed(self, rows: Tensor) -> Tensor:
        """[batch, n, vocab_size] float64: bias, penalty and minimum length applied at ``rows`` [batch, n]; a copy."""
        batch = self.batch
        scores = self._at(self._first[:, None] + rows).double()
        if batch.bias_places is not None:
            requests, tokens = batch.bias_places
            scores[requests, :, tokens] += batch.bias_values[:, None]
        if batch.penalty is not None:
            seen = self._seen(rows)
            seen = seen if batch.penalty.rows is None else seen[batch.penalty.rows]

            def penalise(part: Tensor, penalty: Tensor) -> Tensor:
                return torch.where(seen, torch.where(part < 0, part * penalty, part / penalty), part)

            scores = batch.penalty.apply(scores, penalise)
        if batch.end_places is not None:
            depths = 0 if self.trees is None else self.trees.depths[self._requests[:, None], rows]
            too_short = (batch.generated[:, None] + depths) < batch.min_new_tokens[:, None]
            requests, tokens = batch.end_places
            scores[requests, :, tokens] = torch.where(too_short[requests], -math.inf, scores[requests, :, tokens])
        return scores

    def _seen(self, rows: Tensor) -> Tensor:
        """[batch, n, vocab_size] bool: tokens of the prompt, of the output and of the path below the root."""
        seen = _given(self.batch.seen)[:, None]
        if self.trees is not None:
            on_path = _given(self._ancestors)[self._requests[:, None], rows][..., 1:]
            path = torch.where(on_path, self.trees.token_ids[:, None, 1:], self.batch.vocab_size)
            seen = seen.repeat(1, rows.shape[1], 1).scatter_(-1, path, True)
        return seen[..., :-1]

    def _keep_top_k(self, scores: Tensor, top_k: Tensor) -> Tensor:
        largest = scores.topk(self.batch.max_top_k, dim=-1).values
        kth = top_k.to(torch.int64).expand(-1, scores.shape[1], 1) - 1
        return scores.masked_fill_(scores < largest.gather(-1, kth), -math.inf)


def _exclude_bad(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Make unusable rows one-hot at token 0; return every row's maximum [batch, n, 1] and which were bad [batch, n]."""
    top = scores.amax(-1)  # NaN if there is one, +inf if there is one, -inf if nothing is left
    bad = ~top.isfinite()
    if scores.device.type == "cpu" and not bad.any():  # a look saves a pass over the rows
        return top[..., None], bad
    scores.masked_fill_(bad[..., None], -math.inf)
    scores[..., 0].masked_fill_(bad, 0.0)
    return top.masked_fill_(bad, 0.0)[..., None], bad


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """[..., vocab_size] scores with those outside the nucleus set to -inf; ``top_p`` below 1, broadcast."""
    law = scores.softmax(-1)
    ascending = _sorted_rows(law)
    removed = (ascending.cumsum(-1) <= 1 - top_p).sum(-1, keepdim=True).clamp_(max=law.shape[-1] - 1)
    cut = ascending.gather(-1, removed)  # the smallest probability that is kept
    outside = law < cut
    tied_and_removed = removed - outside.sum(-1, keepdim=True)
    # On a CPU a look costs less than the work that it saves; on a device it would cost a wait.
    if law.device.type != "cpu" or bool(tied_and_removed.any()):
        tied = law == cut
        tied_and_kept = tied.sum(-1, keepdim=True) - tied_and_removed
        outside |= tied & (tied.cumsum(-1) > tied_and_kept)
    return scores.masked_fill_(outside, -math.inf)


def _keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    law = scores.softmax(-1)
    return scores.masked_fill_(law < min_p * law.amax(-1, keepdim=True), -math.inf)


def _sorted_rows(law: Tensor) -> Tensor:
    """Every row ascending. Only values are needed, and NumPy sorts those ten times faster than torch on a CPU."""
    if law.device.type == "cpu":
        return torch.from_numpy(np.sort(law.numpy(), axis=-1))
    return law.sort(dim=-1).values


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("a stage ran without the tensor that it needs; this is a bug")
    return tensor
