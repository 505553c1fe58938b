"""`bexp check-accumulation`: whether accumulation changes the gradients of a training command that works."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from bexp.api.cli import options
from bexp.api.cli.arguments import AsJson, Command
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.child_process import module_command, safe_environment

BatchSize = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="The sequences on each device whose gradients are compared.",
        show_default="those of the command's optimizer step, 64 at most",
    ),
]
MicroBatchSize = Annotated[
    int | None,
    typer.Option(
        min=1, help="The micro-batch that is accumulated.", show_default="the command's own, or a smaller one"
    ),
]
Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="cpu or cuda:0.", show_default="the first GPU, else the CPU")
]


def check_accumulation(
    command: Command,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Check that accumulation does not change the gradients of a training command.

    The gradients of one batch are computed in one micro-batch and in several, and in two orders of its samples.
    transformers' Trainer and its children can be checked. Nothing is trained or saved.

    Exit codes: 0 the gradients agree, 1 they do not, 2 they cannot be compared, 3 the command failed.

    Example: bexp check-accumulation -- accelerate launch train.py
    """
    if options.device_kind(device) is None and device is not None:
        raise CommandError(ExitCode.USAGE, "--device is cpu or cuda:0: a recording has no gradients")
    given = {"--batch-size": batch_size, "--micro-batch-size": micro_batch_size, "--device": device}
    valued = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    flags = ["--json"] if as_json else []
    run = module_command("bexp.workers.targets.custom.accumulation", *valued, *flags, "--", *command)
    say("one batch is run at least four times: this may take some minutes")
    os.execve(sys.executable, run, safe_environment(os.environ))  # noqa: S606 - the interpreter that runs, for a module of ours
