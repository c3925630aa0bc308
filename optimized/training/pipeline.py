"""All stages, one after another: corpus, vocabulary, training, measurement, record; each goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from optimized.files import write_json
from optimized.models.loading import default_feature_layers
from optimized.models.target import TargetModel
from optimized.training.corpus import Corpus, write_corpus
from optimized.training.evaluation import OverlapReport, any_counted, held_out_texts, measure_overlap
from optimized.training.export import write_head
from optimized.training.journal import Row, check_plotting, plot_training, read_journal
from optimized.training.settings import CorpusSettings, TrainSettings
from optimized.training.student import Student, new_student, read_student
from optimized.training.trainer import train
from optimized.training.unroll import rows_of
from optimized.training.vocabulary import choose_vocabulary, membership

DRAFT_VOCABULARY = 8192
OBJECTIVES = {  # in the record's words
    "cross-entropy": "soft cross-entropy",
    "acceptance": "-log of the overlap",
    "hybrid": "soft cross-entropy and, the more the better the head, 1 - overlap,",
}
Report = Callable[[str, int, int, str], None]  # stage, done, of how many, a few words


def train_head(
    directory: Path,
    target: TargetModel,
    tokenizer: Any,
    corpus_settings: CorpusSettings | None = None,
    train_settings: TrainSettings | None = None,
    *,
    target_name: str = "",
    draft_vocab_size: int = DRAFT_VOCABULARY,
    feature_layers: tuple[int, int, int] | None = None,
    init: Path | None = None,
    dtype: torch.dtype = torch.float32,
    plot: bool = True,
    report: Report | None = None,
) -> Path:
    """Train a head for a target, from nothing but the target.

    Args:
        directory: everything goes there: ``corpus/``, ``log.csv``, ``held_out.csv``, ``checkpoint.pt``, ``loss.svg``,
            ``loss.png``, ``overlap.json`` and, at the end, ``head/``.
        target: any causal language model that ``TargetModel`` takes.
        tokenizer: of the target.
        corpus_settings, train_settings: None: the first stage of the embedded head's recipe.
        target_name: for the record.
        draft_vocab_size: at most; a target of fewer tokens keeps them all.
        feature_layers: None is what the config.json of ``init`` says, or else (2, n // 2, n - 3).
        init: a head's directory to go on from, with its vocabulary; None: a fresh head.
        dtype: of the head's matrix products.
        plot: draw the loss plot; needs matplotlib.
        report: told what is being done.

    Returns:
        The head's directory, for ``load_drafter``.

    Raises:
        ValueError: settings out of their range, or the directory holds work of other settings.
        ModuleNotFoundError: a plot is wanted, and matplotlib is missing.
    """
    if plot:
        check_plotting()
    tell = report or (lambda stage, done, total, words: None)
    corpus_settings, train_settings = corpus_settings or CorpusSettings(), train_settings or TrainSettings()
    size = min(draft_vocab_size, target.vocab_size)
    _check_before(corpus_settings, train_settings, target, size)
    student = None if init is None else read_student(init, target, feature_layers)
    if init is None:
        feature_layers = feature_layers or default_feature_layers(target.num_layers)
    corpus = write_corpus(
        directory / "corpus",
        target,
        tokenizer,
        corpus_settings,
        target_name,
        lambda done, total: tell("corpus", done, total, ""),
    )
    if student is None:
        chosen = choose_vocabulary(corpus.training_tokens, target.vocab_size, size, target.eos_token_ids)
        student = new_student(target, chosen.ids, feature_layers, train_settings.seed)
    held_out = held_out_texts(corpus)

    def told(row: Row) -> None:
        words = f"loss {row['loss']:.3f}, overlap {row['overlap_1']:.3f}"
        tell("training", int(row["step"]), train_settings.steps, words)

    train(directory, target, student, corpus.training_tokens, train_settings, held_out, dtype, told)
    if plot:
        plot_training(directory)
    # What is measured is what is shipped: the rounded weights of the checkpoint.
    write_head(directory / "head", student, "")
    shipped = replace(read_student(directory / "head", target), origin=student.origin)
    measured = {}
    for name, texts in (("all tokens", held_out), ("answers", held_out_texts(corpus, answers_only=True))):
        if any_counted(texts):
            tell("measuring", 0, len(texts), name)
            measured[name] = measure_overlap(target, shipped, texts, train_settings.unroll, dtype)
    write_json(directory / "overlap.json", {name: found.as_json() for name, found in measured.items()})
    start = next((row for row in read_journal(directory / "held_out.csv") if row["step"] == 0), None)
    record = training_record(corpus, train_settings, shipped, measured, start, dtype, target_name)
    write_head(directory / "head", shipped, record)
    return directory / "head"


def _check_before(corpus: CorpusSettings, training: TrainSettings, target: TargetModel, vocabulary: int) -> None:
    """Refuse what can be refused before hours are spent on a corpus."""
    texts = corpus.conversations - corpus.held_out
    if training.batch > texts:
        raise ValueError(f"batch={training.batch}, but only {texts} texts to train on")
    rows_of(corpus.length, training.unroll)
    if vocabulary < len(target.eos_token_ids) or vocabulary < 1:
        least = max(1, len(target.eos_token_ids))
        raise ValueError(f"a draft vocabulary of {vocabulary} tokens; {least} to {target.vocab_size} are possible")


def coverage(corpus: Corpus, student: Student) -> float:
    """Share of the corpus's training tokens that the head can draft."""
    if student.vocab_map is None:
        return 1.0
    known = membership(student.vocab_map.cpu(), student.raw["vocab_size"])
    return float(known[corpus.training_tokens].double().mean())


def training_record(
    corpus: Corpus,
    settings: TrainSettings,
    student: Student,
    measured: dict[str, OverlapReport],
    start: Row | None,
    dtype: torch.dtype,
    target_name: str,
) -> str:
    """The README.md of a head: how it was made and what was measured."""
    about, count = corpus.about, int((~corpus.held_out).sum())
    length, size = corpus.tokens.shape[1], student.head.lm_head.out_features
    numbers = sum(parameter.numel() for parameter in student.head.parameters())
    warm = ", ".join(f"{value:g}" for value in about["answer_temperatures"])
    rows = {
        "features": f"hidden states entering layers {', '.join(map(str, student.feature_layers))} of the target",
        "draft vocabulary": f"{size:,} tokens, {coverage(corpus, student):.1%} of the corpus",
        "corpus": f"{count:,} conversations of {length} tokens, written by the target itself; temperatures {warm} for "
        f"answers, {about['user_temperature']:g} for user turns, top-{about['top_k'] or 'all'}; "
        f"{int(corpus.held_out.sum())} more held out; seed {about['seed']}",
        "training target": "the target's full next-token law on the draft vocabulary",
        "start": student.origin,
        "training": f"{OBJECTIVES[settings.objective]} over {settings.unroll} unrolled steps with weights "
        f"{settings.decay:g}^j; "
        f"AdamW, {settings.learning_rate:g}, {settings.warmup} steps of warm-up, cosine, gradient norm cut to "
        f"{settings.clip:g}; batch {settings.batch} x {length}; {settings.steps:,} steps, "
        f"{settings.steps * settings.batch * length / 1e6:.2f} M tokens; products in "
        f"{str(dtype).removeprefix('torch.')}; seed {settings.seed}",
    }
    for name, found in measured.items():
        pairs = zip(found.means, found.standard_errors, strict=True)
        rows[f"held-out overlap, {name}"] = ", ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in pairs)
    if start is not None:
        before = ", ".join(f"{value:.3f}" for key, value in start.items() if key.startswith("overlap_"))
        rows["before training, all tokens"] = before
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return (
        f"# EAGLE-3 head for {target_name or 'a target'}\n\nOfficial EAGLE-3 layout; {numbers / 1e6:.1f} M parameters. "
        "Overlaps, 1 - TV(p, q), are per unrolled step, ± standard error over conversations.\n\n| | |\n|---|---|\n"
        + table
        + "\n"
    )
