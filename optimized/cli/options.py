"""The options that commands share, each declared once, and what they turn into.

A command takes a whole group as one parameter (see ``optimized.cli.command``). Defaults are those of the library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from optimized.cli.console import working
from reference.api import Proposal, RheoConfig, Verification

if TYPE_CHECKING:
    from optimized.calibration import Calibrator
    from optimized.decoder import RheoDecoder
    from optimized.sampling_params import SamplingParams
    from reference.weights import Weights

EMBEDDED = "embedded"
DTypeName = Literal["float32", "bfloat16", "float16"]
BackendName = Literal["auto", "torch", "numba", "triton", "cupy"]  # as in optimized.backends, which imports torch

PROMPT, SAMPLING, TREE, MODEL, OUTPUT = "Prompt", "Sampling", "Tree", "Model", "Output"


@dataclass(frozen=True)
class LawOptions:
    """Which law tokens are drawn from; ranges are checked by ``SamplingParams``."""

    temperature: Annotated[float, Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING)] = 1.0
    top_k: Annotated[int, Option(help="Keep the k most likely tokens; 0: all.", rich_help_panel=SAMPLING)] = 0
    top_p: Annotated[float, Option(help="Keep the nucleus of this mass; 1: all.", rich_help_panel=SAMPLING)] = 1.0
    min_p: Annotated[
        float, Option(help="Drop tokens below this share of the likeliest; 0: none.", rich_help_panel=SAMPLING)
    ] = 0.0
    repetition_penalty: Annotated[float, Option(help="1 turns it off.", rich_help_panel=SAMPLING)] = 1.0

    def params(self, **changes: Any) -> SamplingParams:
        """The request's parameters, some of them changed.

        Raises:
            ValueError: a value is out of its range.
        """
        from optimized.sampling_params import SamplingParams

        return SamplingParams(**{**vars(self), **changes})


@dataclass(frozen=True)
class SamplingOptions(LawOptions):
    """What a request asks of the sampler; ranges are checked by ``SamplingParams``."""

    seed: Annotated[
        int | None,
        Option(help="With the prompt it determines the text.", show_default="a fresh one", rich_help_panel=SAMPLING),
    ] = None
    max_new_tokens: Annotated[
        int, Option("--max-new-tokens", "-n", help="At most so many tokens.", rich_help_panel=SAMPLING)
    ] = 128
    min_new_tokens: Annotated[int, Option(help="At least so many tokens.", rich_help_panel=SAMPLING)] = 0
    stop: Annotated[
        list[str] | None, Option(help="End before this string; repeat for several.", rich_help_panel=SAMPLING)
    ] = None
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Go on behind an end of text.", rich_help_panel=SAMPLING)
    ] = False

    def params(self, **changes: Any) -> SamplingParams:
        return super().params(**{"stop": tuple(self.stop or ()), **changes})


@dataclass(frozen=True)
class TreeOptions:
    """How draft trees are grown and verified; ranges are checked by ``RheoConfig``."""

    lead_tokens: Annotated[
        str,
        Option(
            "--lead-tokens",
            "-m",
            help="The rheostat: top tokens before the probe; auto, with --weights: what promises most, node by node.",
            rich_help_panel=TREE,
        ),
    ] = "1"
    branching: Annotated[int, Option(help="Slots of a node.", rich_help_panel=TREE)] = RheoConfig.branching
    depth: Annotated[int, Option(help="Levels drafted.", rich_help_panel=TREE)] = RheoConfig.depth
    tree_size: Annotated[
        str,
        Option(help="Draft nodes kept per step; auto, with --weights: what pays here.", rich_help_panel=TREE),
    ] = str(RheoConfig.tree_size)
    beam: Annotated[
        int | None,
        Option(help="Nodes expanded per level.", show_default="as --branching", rich_help_panel=TREE),
    ] = RheoConfig.beam
    draft_support: Annotated[int, Option("--support", help="Draft logits kept per node.", rich_help_panel=TREE)] = (
        RheoConfig.draft_support
    )
    proposal: Annotated[
        Proposal,
        Option(help="topk never samples a probe (EAGLE-3), static samples every child.", rich_help_panel=TREE),
    ] = RheoConfig.proposal
    verification: Annotated[
        Verification, Option(help="rheo tests the probe first, rrsw in tree order.", rich_help_panel=TREE)
    ] = RheoConfig.verification
    probes: Annotated[int, Option(help="Tokens sampled per node.", rich_help_panel=TREE)] = RheoConfig.probes
    topology: Annotated[
        Path | None,
        Option(
            help="The shape of --proposal static, in place of the others: a JSON list of paths of child ranks, or "
            "embedded-N, the best of N nodes for the embedded pair.",
            rich_help_panel=TREE,
        ),
    ] = None
    weights: Annotated[
        Path | None,
        Option(help="File of rheo calibrate, or embedded: path scores by what nodes are worth.", rich_help_panel=TREE),
    ] = None

    score_threshold: Annotated[float, Option(help="Offer no node with a smaller path score.", rich_help_panel=TREE)] = (
        0.0
    )
    level_threshold: Annotated[
        float, Option(help="Draft no level below one whose best node has a smaller path score.", rich_help_panel=TREE)
    ] = 0.0

    def config(self, default_weights: Weights | None = None) -> RheoConfig:
        """The trees' shape; ``default_weights`` where no file of weights is given.

        Raises:
            ValueError: a value is out of its range, the topology's file holds none, or it and the proposal do not go
                together.
        """
        if (self.topology is None) != (self.proposal != "static"):
            raise ValueError("--proposal static and --topology go together: give both or neither")
        if self.topology is None:
            from optimized.calibration import load_weights

            weights = default_weights if self.weights is None else load_weights(self.weights)
            lead_tokens = _number_or_auto("--lead-tokens", self.lead_tokens)
            tree_size = _number_or_auto("--tree-size", self.tree_size)
            if weights is None and "auto" in (lead_tokens, tree_size):
                raise ValueError(
                    "auto goes by what nodes are worth: give --weights, a file of rheo calibrate, or embedded for the "
                    "embedded pair"
                )
            return RheoConfig(**{**vars(self), "lead_tokens": lead_tokens, "tree_size": tree_size, "weights": weights})
        if self.weights is not None or self.score_threshold or self.level_threshold:
            raise ValueError("--weights and thresholds do not go with --proposal static, which keeps all nodes")
        from optimized.static_trees import read_topology

        return RheoConfig.static(read_topology(self.topology), self.draft_support, self.verification)


def _number_or_auto(option: str, text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.strip().isdecimal():
        raise ValueError(f"{option} {text}: a whole number is wanted, or auto")
    return int(text)


Target = Annotated[str, Option(help="Folder or Hugging Face name; embedded: the built-in one.", rich_help_panel=MODEL)]
Device = Annotated[
    str | None,
    Option(help="cpu, cuda, cuda:1 ...", show_default="cuda if there is one, else cpu", rich_help_panel=MODEL),
]


@dataclass(frozen=True)
class ModelOptions:
    """Which models, and where they run."""

    target: Target = EMBEDDED
    draft: Annotated[
        str | None,
        Option(
            help="EAGLE-3 head or small causal model.",
            show_default="the embedded head, for the embedded target",
            rich_help_panel=MODEL,
        ),
    ] = None
    no_draft: Annotated[bool, Option("--no-draft", help="Plain autoregressive decoding.", rich_help_panel=MODEL)] = (
        False
    )
    dtype: Annotated[
        DTypeName | None,
        Option(help="Of the weights.", show_default="the checkpoint's", rich_help_panel=MODEL),
    ] = None
    device: Device = None
    backend: Annotated[
        BackendName,
        Option(help="Who does the sampling side; auto: the best that runs here.", rich_help_panel=MODEL),
    ] = "auto"

    def load(self, config: RheoConfig, calibrator: Calibrator | None = None) -> RheoDecoder:
        """Load the models.

        Raises:
            ValueError: no such model, options that contradict each other, or a backend that cannot run here.
        """
        check_exists("--target", self.target)
        check_exists("--draft", self.draft)
        draft = self._draft()
        with working("loading the models (the embedded target is converted at its first start, about 20 s)"):
            import torch

            from optimized.decoder import RheoDecoder

            device = begin_loading(self.device)
            dtype = None if self.dtype is None else getattr(torch, self.dtype)
            try:
                return RheoDecoder.from_pretrained(
                    self.target,
                    draft,
                    config,
                    dtype=dtype,
                    device=device,
                    backend=self.backend,
                    calibrator=calibrator,
                )
            except OSError as error:  # what transformers raises for a name it cannot resolve
                raise ValueError(f"cannot load --target {self.target} with --draft {draft}: {error}") from error

    def _draft(self) -> str | None:
        if self.no_draft:
            if self.draft is not None:
                raise ValueError("--draft and --no-draft contradict each other")
            return None
        if self.draft is None and self.target != EMBEDDED:
            raise ValueError(f"which draft goes with --target {self.target}? Give --draft, or --no-draft for none")
        return self.draft or EMBEDDED


def begin_loading(device: str | None) -> str:
    """Keep transformers quiet, and say where models go: where they were asked for, else on a GPU if there is one."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def check_exists(option: str, name: str | None) -> None:
    if name is None or name == EMBEDDED or Path(name).is_dir():
        return
    if Path(name).exists():
        raise ValueError(f"{option} {name} is a file; a model is a folder")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ValueError(f"{option} {name}: no such folder, and no Hugging Face name either")
