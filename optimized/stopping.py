"""When a request's text ends, and what of it may be shown already. Host-side, one ``TextStream`` per request.

Three views of one text must agree at the end: the token ids, the text, and the log-probabilities (one per id).

- EOS or a stop token ends the text. It is the last of ``token_ids`` and adds nothing to the text.
- A stop string ends the text. ``token_ids`` ends with the token that completed it; the text ends before it.
- ``max_new_tokens`` or the context limit ends the text after that token.

Tokens that a step emitted beyond the end are dropped: a speculative step may run past it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from optimized.sampling_params import SamplingParams

FinishReason = Literal["eos", "stop", "length"]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for bytes that are not, or not yet, a character


class Detokenizer:
    """Text of a growing list of tokens, released as soon as later tokens cannot change it.

    Decoding a token alone loses what depends on its neighbours (leading spaces, characters split over tokens), and
    decoding everything each time is quadratic. So only a short window is decoded: the tokens since the last but one
    place where the text was complete. Trailing U+FFFD are held back, since the next token may complete the character.
    The pieces joined, ``flush`` included, are ``tokenizer.decode(all ids, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)``. (One exception, of the tokenizers' making: where a byte-fallback vocabulary
    spells an invalid byte right after a character spelled in bytes, a full decode garbles that character as well.)
    Tokens that show no text, or invalid bytes without end, keep the window growing; otherwise a token costs O(1).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # the window: two places where the text was complete
        self._read = 0
        self._shown = 0  # characters of the window's text that were released

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain."""
        self._ids.append(token_id)
        text = self._decode(self._start, len(self._ids))
        certain = text.rstrip(INCOMPLETE)
        piece = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if piece and len(certain) == len(text):
            self._start, self._read = self._read, len(self._ids)
            self._shown = len(self._decode(self._start, self._read))
        return piece

    def flush(self) -> str:
        """Return what is still held back: characters that no token will complete any more."""
        text = self._decode(self._start, len(self._ids))
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return piece

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class TextStream:
    """One request's output: takes the emitted tokens, cuts them where the text ends, gives out text as it is decided.

    Attributes:
        token_ids: the tokens kept so far.
        finish_reason: "eos", "stop" (stop string or stop token), "length" (``max_new_tokens`` or the context is full),
            or None while the request goes on. If several apply at one token, the first of these.
        kept: how many tokens of the latest ``push`` were kept.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        params: SamplingParams,
        eos_token_ids: Sequence[int] = (),
        prompt_length: int = 0,
        max_length: int | None = None,
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: a transformers tokenizer; None: no text is made.
            params: the request's; stop conditions are read from it.
            eos_token_ids: the model's.
            prompt_length: tokens of the prompt.
            max_length: how many tokens prompt and output may have together; None for no limit.

        Raises:
            ValueError: stop strings without a tokenizer, or a prompt that leaves no room for a token.
        """
        if params.stop_strings and tokenizer is None:
            raise ValueError(f"stop strings {list(params.stop_strings)} need a tokenizer to be found; there is none")
        if max_length is not None and prompt_length >= max_length:
            raise ValueError(
                f"the prompt has {prompt_length} tokens; it must be shorter than the context, {max_length}"
            )
        room = params.max_new_tokens if max_length is None else max_length - prompt_length
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.kept = 0
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._limit = min(params.max_new_tokens, room)
        self._min_new_tokens = params.min_new_tokens
        self._eos = frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._stops = params.stop_strings
        self._longest_stop = max(map(len, self._stops), default=0)
        self._pieces: list[str] = []  # given out
        self._held = ""  # certain text that may be the start of a stop string

    @property
    def text(self) -> str:
        """The text given out so far; once finished, the whole text."""
        return "".join(self._pieces)

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None

    @property
    def remaining(self) -> int:
        """How many tokens may still be kept."""
        return 0 if self.finished else self._limit - len(self.token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the tokens a step emitted, up to the one that ends the text.

        Args:
            token_ids: in the order of the text.

        Returns:
            The text that is now decided, possibly empty: never half a character, never what may become a stop string.
        """
        shown = len(self._pieces)
        self.kept = 0
        for token_id in token_ids:
            if self.finished:
                break
            self._push_one(int(token_id))
            self.kept += 1
        return "".join(self._pieces[shown:])

    def finish(self, reason: FinishReason) -> str:
        """End the text here, if it has not ended; returns the text that was held back until now."""
        shown = len(self._pieces)
        if not self.finished:
            if self._detokenizer is not None:
                self._held += self._detokenizer.flush()
            self._give_out(len(self._held))
            self.finish_reason = reason
        return "".join(self._pieces[shown:])

    def _push_one(self, token_id: int) -> None:
        may_end = len(self.token_ids) >= self._min_new_tokens  # without this token
        self.token_ids.append(token_id)
        if may_end and token_id in self._eos:
            self.finish("eos")
        elif may_end and token_id in self._stop_ids:
            self.finish("stop")
        else:
            if self._detokenizer is not None:
                self._take_text(self._detokenizer.push(token_id))
            if len(self.token_ids) >= self._limit:
                self.finish("length")

    def _take_text(self, piece: str) -> None:
        if not piece:
            return
        before = len(self._held)
        self._held += piece
        if self._stops and len(self.token_ids) >= self._min_new_tokens:
            place = self._first_stop(before)
            if place is not None:
                self._held = self._held[:place]
                self._give_out(len(self._held))
                self.finish_reason = "stop"
                return
        self._give_out(len(self._held) - self._undecided())

    def _first_stop(self, before: int) -> int | None:
        """Where in the held text the stop string starts that this piece completed; ``before``: the text's old length.

        Of several the one that ends first, so that the text does not depend on how it is cut into tokens; of those
        the longest.
        """
        places = [(self._held.find(stop, max(0, before - len(stop) + 1)), len(stop)) for stop in self._stops]
        ends = [(start + length, start) for start, length in places if start >= 0]
        return min(ends)[1] if ends else None

    def _undecided(self) -> int:
        """Length of the longest end of the held text that starts a stop string without completing it."""
        for length in range(min(len(self._held), self._longest_stop - 1), 0, -1):
            end = self._held[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _give_out(self, length: int) -> None:
        self._pieces.append(self._held[:length])
        self._held = self._held[length:]
