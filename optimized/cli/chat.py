"""``rheo chat``: a conversation, streamed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from optimized.cli.console import complain, out
from optimized.cli.generate import show_metrics, show_stream
from optimized.cli.options import PROMPT, ModelOptions, SamplingOptions, TreeOptions
from optimized.cli.prompts import has_chat_template
from optimized.outputs import GenerationError

if TYPE_CHECKING:
    from optimized.decoder import RheoDecoder
    from optimized.outputs import GenerationResult
    from optimized.sampling_params import SamplingParams

COMMANDS = "/exit ends, /reset starts over, /metrics shows the last answer's numbers, Ctrl-C stops an answer"


def chat(
    sampling: SamplingOptions,
    shape: TreeOptions,
    models: ModelOptions,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.", rich_help_panel=PROMPT)] = None,
) -> None:
    """Talk with the model. With --seed, the same lines get the same answers, also after /reset."""
    config, params = shape.config(), sampling.params()
    decoder = models.load(config)
    if not has_chat_template(decoder):
        raise ValueError("chat needs a chat template, and the target's tokenizer has none; use rheo generate --raw")
    conversation = Conversation(decoder, params, system)
    out.print(COMMANDS, style="dim")
    while (line := read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                conversation.reset()
                out.print("a new conversation", style="dim")
            case "/metrics" if conversation.last:
                show_metrics([conversation.last], batch_size=1)
            case "/metrics":
                out.print("no answer yet", style="dim")
            case command if command.startswith("/"):
                out.print(f"unknown command {command}; {COMMANDS}", style="dim", markup=False)
            case _:
                conversation.ask(line)


def read_line() -> str | None:
    """The next line typed, None at the end of the input."""
    typer.echo("> ", nl=False)
    line = sys.stdin.readline()
    if not line:
        typer.echo()
    return line.rstrip("\r\n") if line else None


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a conversation's turn: the conversation's own for turn 0, so that the first answer is that of
    ``rheo generate`` with it; after that one of NumPy's ``SeedSequence`` spawned by turn.
    """
    if turn == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(turn,)).generate_state(1, np.uint64)[0])


@dataclass
class Conversation:
    """The messages so far and what the next answer needs.

    Attributes:
        decoder: answers.
        params: of every answer; the seed is the conversation's, see ``turn_seed``.
        system: a first message, or None.
        last: the last complete answer.
    """

    decoder: RheoDecoder
    params: SamplingParams
    system: str | None = None
    last: GenerationResult | None = None
    messages: list[dict[str, str]] = field(init=False)
    seed: int = field(init=False)
    turn: int = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was said. A given seed starts over as well, a drawn one is drawn anew."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.seed, self.turn = self.params.resolved_seed(), 0

    def ask(self, line: str) -> None:
        """Stream the answer to a line; without a complete answer the conversation stays as it was before the line."""
        messages = [*self.messages, {"role": "user", "content": line}]
        params = replace(self.params, seed=turn_seed(self.seed, self.turn))
        try:
            self.last = show_stream(self.decoder.stream([self.decoder.chat_prompt(messages)], params))
        except KeyboardInterrupt:
            out.print("\nstopped", style="dim")
            return
        except ValueError as error:  # say, the conversation has outgrown the context
            complain(f"{error}; /reset starts over")
            return
        except GenerationError as error:
            complain(str(error))
            return
        self.messages = [*messages, {"role": "assistant", "content": self.last.text}]
        self.turn += 1
