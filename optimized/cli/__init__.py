"""The command line, ``rheo``. Commands import the heavy libraries when they run, so that help comes at once."""

import typer

from optimized.cli.bench import bench
from optimized.cli.calibrate import calibrate
from optimized.cli.chat import chat
from optimized.cli.command import command
from optimized.cli.demo import demo
from optimized.cli.generate import generate
from optimized.cli.info import info
from optimized.cli.layer import layer
from optimized.cli.report import report
from optimized.cli.train import evaluate_head, train_head
from optimized.cli.tree import tree
from optimized.cli.verify import verify

app = typer.Typer(
    name="rheo",
    help="RheoSampling: lossless speculative decoding with stochastic dynamic trees.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

for function in (demo, generate, chat, tree, verify, calibrate, bench, report, layer, info):
    command(app, function.__name__)(function)
command(app, "train-head")(train_head)
command(app, "evaluate-head")(evaluate_head)

__all__ = ["app"]
