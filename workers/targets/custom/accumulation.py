"""The check whether accumulation changes the gradients of a training command, for `bexp check-accumulation`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bexp.explorer.records.measurement import Outcome
from bexp.measure.device_names import parse_devices
from bexp.workers.instruments.failures import TargetKilledError, TrialFailedError
from bexp.workers.targets.custom.command import NO_SIZE, TRAINER, CommandProcess
from bexp.workers.targets.custom.training_command import SIZE_FIELD, TrainingCommand

MOST_SECONDS = 1800.0
AGREES, DIFFERS, USAGE, FAILED = 0, 1, 2, 3
"""Exit statuses."""
OTHER_LOOP = (
    "its loop is not transformers' Trainer: bexp.check_accumulation checks any other loop, from Python (docs/tune.md)"
)


class CheckedCommand(CommandProcess):
    """A training command whose gradients are compared."""

    def check(self, batch_size: int | None, micro_batch_size: int | None) -> dict[str, Any]:
        """Return the document of an `AccumulationCheck`, or `refused` with the reason why there is none.

        Raises:
            TrialFailedError: the training failed, hung or crashed.
            TargetKilledError: it was killed for no known reason.
        """
        until = time.monotonic() + MOST_SECONDS
        try:
            self._start(micro_batch_size if self._command.has_size else None, until)
        except TrialFailedError as error:
            if str(error) == NO_SIZE:
                return {"refused": OTHER_LOOP}
            raise
        if self._hello["kind"] != TRAINER:
            return {"refused": OTHER_LOOP}
        self._line.send({"command": "check", "batch_size": batch_size, "micro_batch_size": micro_batch_size})
        reply = self._receive(until)
        outcome = Outcome(reply.pop("outcome"))
        if outcome is not Outcome.OK:
            raise TrialFailedError(outcome, reply["reason"])
        return reply


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the command of the arguments, and print the verdict; return the exit status."""
    parser = argparse.ArgumentParser(prog="bexp check-accumulation")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--device", type=parse_devices, default="cuda:0")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    command = TrainingCommand(tuple(options.command), str(Path.cwd()), {}, options.batch_size, devices=options.device)
    if command.has_size and options.micro_batch_size is None:
        return _fail(USAGE, f"--micro-batch-size has to say what {SIZE_FIELD} is in the command")
    process = CheckedCommand(command)
    try:
        reply = process.check(options.batch_size, options.micro_batch_size)
    except (TrialFailedError, TargetKilledError) as error:
        unsupported = isinstance(error, TrialFailedError) and error.outcome is Outcome.UNSUPPORTED
        return _fail(USAGE if unsupported else FAILED, str(error))
    finally:
        process.end()
    if "refused" in reply:
        return _fail(USAGE, reply["refused"])
    sys.stdout.write(f"{json.dumps(reply, indent=2) if options.json else reply['text']}\n")
    return AGREES if reply["agrees"] else DIFFERS


def _fail(status: int, reason: str) -> int:
    sys.stderr.write(f"bexp: {reason}\n")
    return status


def _raise(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for signal_number in (signal.SIGTERM, signal.SIGHUP):  # so that the command's children are ended as well
        signal.signal(signal_number, _raise)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
