"""The corpus on disk: ``corpus.json`` and one safetensors file per shard. Writing it goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from optimized.files import read_json_object, write_json, write_whole
from optimized.models.target import TargetModel
from optimized.training.conversations import conversation_format, write_conversations
from optimized.training.settings import CorpusSettings, check_same, plain


@dataclass(frozen=True)
class Corpus:
    """Conversations of equal length.

    Attributes:
        tokens: [conversations, length] long.
        in_answer: [conversations, length] bool, whether a token belongs to an answer.
        temperatures: [conversations] float32, of the answers.
        held_out: [conversations] bool, kept from training.
        about: what ``corpus.json`` says: the settings, the target's name.
    """

    tokens: Tensor
    in_answer: Tensor
    temperatures: Tensor
    held_out: Tensor
    about: dict[str, Any]

    @property
    def training_tokens(self) -> Tensor:
        """[conversations, length] long, without those held out."""
        return self.tokens[~self.held_out]


def write_corpus(
    directory: Path,
    target: TargetModel,
    tokenizer: Any,
    settings: CorpusSettings,
    target_name: str = "",
    report: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Write the shards that are missing, and read the whole.

    Args:
        directory: where ``corpus.json`` and the shards go.
        target: writes the conversations; any causal language model that ``TargetModel`` takes.
        tokenizer: of the target; its chat template says what stands between the turns.
        settings: how they are written.
        target_name: kept in ``corpus.json``.
        report: called as the work goes on, with tokens done and tokens in all.

    Raises:
        ValueError: the directory holds a corpus of other settings, or damaged files.
    """
    about = {"target": target_name, "vocab_size": target.vocab_size, **plain(settings)}
    if (directory / "corpus.json").is_file():
        check_same(f"the corpus in {directory}", read_json_object(directory / "corpus.json"), about)
    layout = conversation_format(tokenizer, target.eos_token_ids)
    write_json(directory / "corpus.json", about)
    for shard in range(settings.shards):
        path = _shard_path(directory, shard)
        size = min(settings.batch, settings.conversations - shard * settings.batch)
        done = shard * settings.batch * settings.length

        def told(tokens: int, done: int = done, size: int = size) -> None:
            if report:
                report(done + tokens * size, settings.conversations * settings.length)

        if not path.is_file():
            tokens, in_answer, temperatures = write_conversations(target, layout, settings, shard, told)
            tensors = {"tokens": tokens.int(), "in_answer": in_answer, "temperatures": temperatures}
            write_whole(path, lambda scratch, tensors=tensors: save_file(tensors, scratch))  # type: ignore[misc]
        told(settings.length)
    return load_corpus(directory)


def load_corpus(directory: Path | str) -> Corpus:
    """Read a complete corpus.

    Raises:
        ValueError: there is none, it is not complete, or one of its files is damaged.
    """
    directory = Path(directory)
    if not (directory / "corpus.json").is_file():
        raise ValueError(f"{directory} holds no corpus: it has no corpus.json")
    about = read_json_object(directory / "corpus.json")
    missing = [name for name in CorpusSettings.__dataclass_fields__ if name not in about]
    if missing:
        raise ValueError(f"{directory / 'corpus.json'} does not say {', '.join(missing)}")
    known = {name: about[name] for name in CorpusSettings.__dataclass_fields__}
    settings = CorpusSettings(**known | {"answer_temperatures": tuple(known["answer_temperatures"])})
    shards = [_read_shard(_shard_path(directory, shard), shard, settings) for shard in range(settings.shards)]
    # The first ones, so that a corpus of more conversations holds out the same.
    held_out = torch.arange(settings.conversations) < settings.held_out
    return Corpus(
        torch.cat([shard["tokens"] for shard in shards]).long(),
        torch.cat([shard["in_answer"] for shard in shards]),
        torch.cat([shard["temperatures"] for shard in shards]),
        held_out,
        about,
    )


def _shard_path(directory: Path, shard: int) -> Path:
    return directory / f"shard-{shard:05}.safetensors"


def _read_shard(path: Path, shard: int, settings: CorpusSettings) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"the corpus is not complete: {path} is missing; write it to its end first")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and it is written again") from error
    shape = (min(settings.batch, settings.conversations - shard * settings.batch), settings.length)
    expected = {"tokens": shape, "in_answer": shape, "temperatures": shape[:1]}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != expected:
        raise ValueError(f"{path} is not a shard of {shape[0]} conversations of {shape[1]} tokens; delete it")
    return tensors
