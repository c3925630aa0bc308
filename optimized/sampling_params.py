"""What one request asks of the sampler; checked when it is made, so that nothing has to be checked later."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.api import is_greedy

SEED_BITS = 64


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples and when it stops.

    The processing is that of transformers' ``generate``, in its order: logit bias, repetition penalty, minimum length,
    temperature, top-k, top-p, min-p (see ``optimized.target_laws``).

    Attributes:
        temperature: >= 0; below 1e-5 the request is greedy (``reference.api.is_greedy``).
        top_k: keep the k most likely tokens, and whatever ties with the k-th; 0 turns it off.
        top_p: in (0, 1]; keep the smallest set of most likely tokens whose mass reaches it; 1 turns it off.
        min_p: in [0, 1]; drop tokens less likely than ``min_p`` times the most likely one; 0 turns it off.
        repetition_penalty: > 0; logits of tokens seen in the prompt or in the output are divided by it where positive
            and multiplied by it where negative; 1 turns it off.
        logit_bias: target token id -> number added to its logit; -inf bans the token.
        seed: in [0, 2**64); with the prompt it determines the text, unless the decoder learns from what it decodes
            (``RheoDecoder``: a calibrator, ``tree_size="auto"``). None: see ``resolved_seed``.
        max_new_tokens: >= 1; how many tokens at most, the end-of-sequence token included. Zero is refused: a request
            that generates nothing has no result to speak of.
        min_new_tokens: EOS, ``stop_token_ids`` and ``stop`` cannot end the text before this many tokens.
        stop: one string or several; the text ends before the first that is completed. Stored as a tuple.
        stop_token_ids: tokens that end the text as EOS does. Stored as a tuple.
        ignore_eos: go on behind EOS, whose chance stays what it is; stop tokens and strings still count.
        logprobs: None for none, else how many alternatives to report beside each token's own log-probability
            (0: the token's own only).

    Raises:
        ValueError: a value is out of its range or of the wrong type; the message says what would be right.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def store(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        store("temperature", _real("temperature", self.temperature, "a finite number >= 0 (0 is greedy)", low=0.0))
        store("top_k", _count("top_k", self.top_k, 0, "0 turns it off"))
        store(
            "top_p", _real("top_p", self.top_p, "a number in (0, 1] (1 turns it off)", low=0.0, high=1.0, open_low=True)
        )
        store("min_p", _real("min_p", self.min_p, "a number in [0, 1] (0 turns it off)", low=0.0, high=1.0))
        penalty_rule = "a finite number > 0 (1 turns it off)"
        store(
            "repetition_penalty", _real("repetition_penalty", self.repetition_penalty, penalty_rule, 0.0, open_low=True)
        )
        store("logit_bias", _bias(self.logit_bias))
        if self.seed is not None:
            if not _is_int(self.seed) or not 0 <= self.seed < 2**SEED_BITS:
                raise ValueError(f"seed must be None or an integer in [0, 2**{SEED_BITS}), got {self.seed!r}")
            store("seed", int(self.seed))
        store("max_new_tokens", _count("max_new_tokens", self.max_new_tokens, 1, "at least one token is generated"))
        store("min_new_tokens", _count("min_new_tokens", self.min_new_tokens, 0, "0 turns it off"))
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}; "
                "it must be at most as large"
            )
        store("stop", _stop_strings(self.stop))
        store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if self.logprobs is not None:
            store("logprobs", _count("logprobs", self.logprobs, 0, "None turns it off"))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a sample."""
        return is_greedy(self.temperature)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple of non-empty strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def resolved_seed(self) -> int:
        """The request's seed, or one from the operating system's entropy: new at every call, so call it once."""
        return secrets.randbits(SEED_BITS) if self.seed is None else self.seed

    def check_vocab(self, vocab_size: int) -> None:
        """Check what depends on the model: token ids and the number of alternatives.

        Raises:
            ValueError: a token id of ``logit_bias`` or ``stop_token_ids`` is not below ``vocab_size``, or ``logprobs``
                asks for more alternatives than there are tokens.
        """
        for name, ids in (("logit_bias", tuple(self.logit_bias or ())), ("stop_token_ids", self.stop_token_ids)):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise ValueError(f"{name} names token {outside[0]}; the vocabulary's ids are 0..{vocab_size - 1}")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise ValueError(f"logprobs is {self.logprobs}; the vocabulary has only {vocab_size} tokens")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _count(name: str, value: Any, least: int, note: str) -> int:
    if not _is_int(value) or value < least:
        raise ValueError(f"{name} must be an integer >= {least} ({note}), got {value!r}")
    return int(value)


def _real(name: str, value: Any, rule: str, low: float, high: float = math.inf, open_low: bool = False) -> float:
    right_type = isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)
    if not right_type or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return float(value)


def _bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, e.g. {{42: -5.0}}, got {bias!r}")
    _token_ids("logit_bias", tuple(bias))
    for token, value in bias.items():
        right_type = isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)
        if not right_type or math.isnan(value) or value == math.inf:
            raise ValueError(f"logit_bias[{token}] must be a finite number, or -inf to ban the token, got {value!r}")
    return {int(token): float(value) for token, value in bias.items()} or None


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence | np.ndarray):
        raise ValueError(f"{name} must be a sequence of token ids, got {ids!r}")
    for token in ids:
        if not _is_int(token) or token < 0:
            raise ValueError(f"{name} must hold integers >= 0, got {token!r}")
    return tuple(int(token) for token in ids)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if isinstance(strings, bytes) or not isinstance(strings, Sequence):
        raise ValueError(f"stop must be a string or a sequence of strings, got {stop!r}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold non-empty strings, got {string!r}")
    return tuple(strings)
