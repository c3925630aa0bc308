"""Where prompts come from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from optimized.cli.options import PROMPT

if TYPE_CHECKING:
    from optimized.decoder import RheoDecoder


@dataclass(frozen=True)
class PromptOptions:
    """Where the text to continue comes from, and whether it is a chat message."""

    prompt: Annotated[str | None, Argument(help="Text to continue or to answer; - or nothing: standard input.")] = None
    more_prompts: Annotated[
        list[str] | None,
        Option("--prompt", help="Text to continue or to answer; repeat for a batch.", rich_help_panel=PROMPT),
    ] = None
    file: Annotated[
        Path | None,
        Option(help="Read the prompt from a file.", exists=True, dir_okay=False, rich_help_panel=PROMPT),
    ] = None
    chat: Annotated[
        bool | None,
        Option(
            "--chat/--raw",
            help="With or without the tokenizer's chat template.",
            show_default="--chat if there is one",
            rich_help_panel=PROMPT,
        ),
    ] = None

    def read(self) -> list[str]:
        """All prompts given; standard input when none is.

        Raises:
            ValueError: an empty prompt, or nothing but a terminal to read from.
        """
        prompts = list(self.more_prompts or ())
        if self.file is not None:
            prompts.insert(0, self.file.read_text(encoding="utf-8"))
        if self.prompt not in (None, "-"):
            prompts.insert(0, str(self.prompt))
        elif self.prompt == "-" or not prompts:
            if sys.stdin.isatty():
                raise ValueError('no prompt: give one, as in rheo generate "Once upon a time", or pipe one in')
            prompts.insert(0, sys.stdin.read())
        if not all(prompt.strip() for prompt in prompts):
            raise ValueError("the prompt is empty")
        return prompts

    def single(self) -> str:
        """The one prompt given.

        Raises:
            ValueError: none, several, or an empty one.
        """
        prompts = self.read()
        if len(prompts) > 1:
            raise ValueError(f"one prompt is wanted here, got {len(prompts)}")
        return prompts[0]

    def encode(self, decoder: RheoDecoder, prompts: list[str]) -> list[str] | list[list[int]]:
        """What to hand to the decoder: the texts themselves, or the token ids of chat messages.

        Raises:
            ValueError: --chat with a tokenizer that has no chat template.
        """
        if self.chat and not has_chat_template(decoder):
            raise ValueError("--chat needs a chat template, and the target's tokenizer has none; use --raw")
        if self.chat is False or not has_chat_template(decoder):
            return prompts
        return [chat_message(decoder, prompt) for prompt in prompts]


def has_chat_template(decoder: RheoDecoder) -> bool:
    """Whether the target's tokenizer knows how to write a conversation."""
    return bool(getattr(decoder.tokenizer, "chat_template", None))


def chat_message(decoder: RheoDecoder, text: str) -> list[int]:
    """Token ids of a conversation of one message."""
    return decoder.chat_prompt([{"role": "user", "content": text}])
