"""The processes of a training command, which answer the profiler like the process of a custom target.

The command is run unchanged. Each of its Python processes loads `bexp.tune`, which sets sizes, times steps, and speaks
over a Unix socket. If the size of a loop cannot be set, it stands in the command as `{micro_batch_size}`. The command
is then started anew for each size, and so is a loop of several processes without a Trainer.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bexp.explorer.model.spelling import shortened
from bexp.explorer.records.measurement import Outcome
from bexp.tune.agreement_text import Cause, in_short
from bexp.tune.environment import temporary_folder
from bexp.tune.link import BRACES, CHOICE, SCRATCH, SIZE, SOCKET, STEPS
from bexp.tune.placeholders import APPLY
from bexp.tune.waiting import note
from bexp.workers.devices.lock import DeviceBusyError
from bexp.workers.instruments.failures import TargetKilledError, TrialFailedError
from bexp.workers.process.exit_status import classify_exit, count_kernel_oom_kills, is_unexplained
from bexp.workers.targets.custom.group_end import cause_of, forget_failures, started_with
from bexp.workers.targets.custom.process import last_lines, last_output
from bexp.workers.targets.custom.training_command import OtherBatchError, TrainingCommand, environment_of, locks_of
from bexp.workers.targets.custom.training_line import TrainingLine

TAIL_LINES, LAST_LINES = 100, 6
MAX_BYTES = 1 << 62
"""The memory of a device of which nothing is known."""
MOST_SAMPLES = 64
"""Of a batch, for the comparison of its gradients."""
EVALUATION_SECONDS = 60.0
"""How long one evaluation batch may take, so that its failure leaves time for the training."""
END_SECONDS = 10.0
MOST_TEXT = 997
"""Characters of a text that may have 1,000: `shortened` adds three dots."""
FIRST_SIZE = 4
TRAINER, OWN_LOOP = "transformers' Trainer", "a loop of its own"
NO_STEP, TOO_FEW_STEPS = "it ended before its first optimizer step", "it ended before its steps could be timed"
NO_SIZE = (
    "its loop is none of transformers' Trainer, Lightning's and accelerate's, so its size cannot be set: put "
    "{micro_batch_size} where the command takes it, and {grad_accum_steps} if it accumulates; --batch-size N keeps the "
    "batch at N"
)

NO_APPLY = "--apply is for transformers' Trainer, and needs a size that does not stand in the command"


PASSES = 12
"""About so many times the samples of a comparison of gradients run: in both shapes, in two orders, and for causes."""
MOST_TIMES = 3
"""A comparison that takes this many times what it should is ended."""
SILENT_SECONDS = 20.0
"""A start that takes longer until its training describes itself is said to."""
STARTS = 1.5
"""Another start may take this many times the last one."""


def _not_compared(reason: str) -> dict[str, Any]:
    text = shortened(f"whether the size changes the gradients was not compared, because {reason}", MOST_TEXT)
    return {"agrees": None, "text": text}


class CommandProcess:
    """The processes of the command: one start for all sizes, or one for each.

    A start that has failed is ended for good.
    """

    def __init__(self, command: TrainingCommand) -> None:
        self._command = command
        self._popen: subprocess.Popen[bytes] | None = None
        self._choice: dict[str, Any] = {}
        self._devices = command.devices
        self._hello: dict[str, Any] = {}
        self._figures: dict[int, dict[str, Any]] = {}
        self._coming: int | None = None  # the size whose figures this start will send
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader: threading.Thread | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="bexp-tune-", dir=command.own_folder or temporary_folder()))
        self._line = TrainingLine(self._folder / "socket")
        self._kills = 0  # by the kernel, before the present wait
        self._data: dict[str, Any] = {}  # of the texts and the processes, as the measured size reports them
        self._most_bytes, self._compare_seconds = MAX_BYTES, 0.0
        self._started_at = 0.0
        self._start_seconds = 0.0  # of the last start, until the training described itself
        self._has_ended = False
        self._has_begun = self._has_served = False  # this start has described itself, and has sent figures
        self._said_at = math.inf  # when to say that this start takes long

    @property
    def pid(self) -> int:
        """The id of the command's first process."""
        assert self._popen is not None, "it was started"
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether sizes can be asked for."""
        if self._has_ended:
            return False
        return self._restarts or (self._popen is not None and self._popen.poll() is None)

    @property
    def _restarts(self) -> bool:
        """Whether each size has a start of its own."""
        return self._command.has_size or not self._hello.get("takes_sizes")

    def ask(self, command: str, timeout_seconds: float, **arguments: Any) -> dict[str, Any]:
        """Return the reply to a command, like a custom target's process.

        Raises:
            TrialFailedError: the training failed, hung or crashed; its processes have been ended.
            TargetKilledError: it was killed for no known reason.
        """
        until = time.monotonic() + timeout_seconds
        try:
            if command == "open":
                return self._open(until, **arguments)
            if command == "describe":
                return self._describe(until)
            return self._measure(int(arguments["micro_batch_size"]), until)
        except TrialFailedError:
            self.end()
            raise

    def prepare(self, size: int, timeout_seconds: float) -> None:
        """Start the command for a size, if each size has a start of its own; errors are those of `ask`."""
        if not self._restarts or size in self._figures or self._coming == size:
            return
        try:
            self._start(size, time.monotonic() + timeout_seconds)
        except TrialFailedError:
            self.end()
            raise

    def end(self) -> None:
        """Kill the command with all that it has started, and wait for it."""
        self._has_ended = True
        self._stop()
        self._line.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(
        self,
        until: float,
        *,
        device: str,
        choice: Mapping[str, Any] | None,
        memory_limit_bytes: int = MAX_BYTES,
        context_bytes: int = 0,
        compare_seconds: float = 0.0,
        **_: Any,
    ) -> dict[str, Any]:
        self._compare_seconds = compare_seconds
        self._most_bytes = memory_limit_bytes - context_bytes
        first = {name: values[0] for name, values in self._command.tries.items()}
        self._choice = dict(choice or first)
        self._devices = self._command.devices or (device,)
        try:
            locks_of(tuple(each for each in self._devices if each not in (device, "cpu"))).acquire(
                timeout_seconds=until - time.monotonic()
            )
        except DeviceBusyError as error:
            raise TrialFailedError(Outcome.UNSUPPORTED, str(error)) from error
        if not self._command.has_size:
            self._start(None, until)
        found = dict(self._command.tries)
        if APPLY in found and choice is None:
            found[APPLY] = self._applicable()
        return {"dimensions": found}

    def _applicable(self) -> list[str]:
        """Return the values of APPLY that the model of this command can have."""
        values: list[str] | None = self._hello.get(APPLY)
        if values is None:
            raise TrialFailedError(Outcome.UNSUPPORTED, NO_APPLY)
        if values == ["none"]:
            raise TrialFailedError(Outcome.UNSUPPORTED, f"bexp.apply can do nothing for {self._hello['class_name']}")
        return values

    def _describe(self, until: float) -> dict[str, Any]:
        own = self._measure_first(self._coming or int(self._hello.get("micro_batch_size") or self._first_size), until)
        found, lengths = self._hello, self._hello.get("lengths") or {}
        samples = lengths.get("samples")
        length = max(1, round(lengths.get("mean") or 1))
        size, accumulation = found.get("micro_batch_size"), self._accumulation or 1
        batch = self._command.batch_size or (size * accumulation if size and not self._command.has_size else None)
        return {
            "class_name": found["class_name"],
            "dtype": found["dtype"],
            "num_parameters": found["num_parameters"],
            "parameter_bytes": found["parameter_bytes"],
            "trainable_bytes": found["trainable_bytes"],
            "seq_length": length,
            "saved_bytes": length,
            "seconds_per_token": self._figures[own]["micro_step_seconds"] / (own * length),
            "batch_size": batch,
            "micro_batch_size": own,
            "num_steps": found.get("num_steps"),
            "samples": samples | {"tail": self._data["tail"]} if samples and self._data["ran_longest"] else None,
            "processes": self._data["processes"],
            "evaluation": self._evaluate(until),
            "gradients": self._compare_gradients(own, until),
            "switched_off": [shortened(each, 197) for each in found.get("switched_off", ())[:64]],  # 200 with dots
        }

    @property
    def _first_size(self) -> int:
        """Return the size to measure first if the command has none of its own:

        smaller ones take long, and show less.
        """
        return math.gcd(FIRST_SIZE, self._command.batch_size or FIRST_SIZE)

    def _evaluate(self, until: float) -> dict[str, Any] | None:
        """Return the memory of the Trainer's evaluation, or why it failed; None if there is none to run.

        A failure of it is none of the training.
        """
        batch = self._hello.get("evaluation")
        if batch is None or self._popen is None:
            return None
        self._line.send({"command": "evaluate", "most_bytes": self._most_bytes})
        try:
            reply = self._receive(min(until, time.monotonic() + EVALUATION_SECONDS))
            outcome = Outcome(reply.pop("outcome"))
        except TrialFailedError as error:
            reply, outcome = {"reason": str(error)}, error.outcome
        outcome, reason = self._explained(outcome, reply.pop("reason", ""))
        if outcome is not Outcome.OK:
            self._start(None, until)
        if outcome not in (Outcome.OK, Outcome.OUT_OF_MEMORY):
            reply["failure"] = shortened(f"{outcome}: {reason}", MOST_TEXT)
        return {"peak_bytes": None, **batch, **reply}

    def _compare_gradients(self, size: int, until: float) -> dict[str, Any]:
        """Whether the size may change: by the gradients of one batch in large and in small micro-batches.

        A batch is cut to as many samples as can be compared in that time.
        """
        if self._hello["kind"] != TRAINER:
            kind = self._hello["kind"]
            return _not_compared(f"the command has {kind}: bexp.check_accumulation compares those, from Python")
        if self._popen is None:
            return _not_compared("the size stands in the command: `bexp check-accumulation` compares them")
        one = self._figures[size]["micro_step_seconds"] / size
        left = until - time.monotonic() - STARTS * self._start_seconds  # a comparison that fails needs another start
        seconds = max(0.0, min(self._compare_seconds, left / MOST_TIMES))
        number = min(size * (self._accumulation or 1), MOST_SAMPLES, int(seconds / (PASSES * one)))
        number -= number % size if number > size else 0
        if number < 2:
            is_one = seconds > 2 * PASSES * one
            return _not_compared("a batch has one sample" if is_one else "that takes too long")
        self._line.send({"command": "check", "batch_size": number})
        try:
            reply = self._receive(min(until, time.monotonic() + MOST_TIMES * seconds))
            reason = None if reply["outcome"] == Outcome.OK else reply["reason"]
        except TrialFailedError as error:
            reply, reason = {}, str(error)
        if reason is not None:
            self._start(None, until)
        if reason is not None or "refused" in reply:
            return _not_compared(reason or reply["refused"])
        keeps = reply["cause"] == Cause.TOGETHER and size == self._hello["micro_batch_size"]
        return {"agrees": reply["agrees"], "keeps_size": keeps, "text": in_short(reply, size if keeps else None)}

    def _measure_first(self, size: int, until: float) -> int:
        """Measure the command's own size, then half of it and so on, until one fits the memory; return the size.

        The first trial of this size takes these figures. If the command trains with another batch than the stated one,
        the size is tried next with which it would train with the stated batch.
        """
        other: OtherBatchError | None = None
        while True:
            try:
                self._figures[size] = self._measure(size, until)
            except TrialFailedError as error:
                other = error if other is None and isinstance(error, OtherBatchError) else other
                if other is error and other.size is not None:
                    size = other.size
                elif other is not None:
                    way = f"say --batch-size {other.batch_size}, or put {{grad_accum_steps}} where the command takes it"
                    raise TrialFailedError(other.outcome, f"{other}: {way}") from error
                elif error.outcome is Outcome.OUT_OF_MEMORY and size > 1:
                    size //= 2
                    if not self._restarts:
                        self._start(None, until)
                else:
                    raise
            else:
                return size

    def _measure(self, size: int, until: float) -> dict[str, Any]:
        if size in self._figures:
            return self._figures.pop(size)
        self._command.expect(self._choice, size)
        if self._restarts and self._coming != size:
            self._start(size, until)
        reply = self._figures_of(size, until)
        outcome = Outcome(reply.pop("outcome"))
        if outcome is not Outcome.OK:
            raise TrialFailedError(*self._explained(outcome, reply["reason"]))
        self._data = reply.pop("data")
        self._has_served = True
        if self._restarts:
            self._stop()
        self._check_batch(size)
        return reply | {"grad_accum_steps": self._accumulation}

    def _check_batch(self, size: int) -> None:
        """Raise TrialFailedError if a command with its size in braces trains with another batch than the stated one."""
        own, steps = self._hello.get("micro_batch_size"), self._accumulation
        if self._command.has_size and own not in (None, size):
            what = f"with {size} for {{micro_batch_size}}, {self._hello['kind']} has a size of {own}"
            raise TrialFailedError(Outcome.UNSUPPORTED, f"{what}: put it where the command takes the size")
        if steps is not None:
            self._command.count(self._choice, size, steps)

    @property
    def _accumulation(self) -> int | None:
        """The accumulation steps of the command, as they were counted, without those that a trial has set."""
        counted: int | None = self._data.get("accumulation")
        own: int | None = self._hello.get("grad_accum_steps")
        given: int | None = self._data.get("accumulation_given")
        if counted is None or given is None or own is None:
            return counted if own is None else own
        return max(1, round(counted / given)) * own

    def _steps(self, size: int) -> int | None:
        """Return the accumulation steps that keep the batch with this size; None if the command has its own."""
        own, steps = self._hello.get("micro_batch_size"), self._hello.get("grad_accum_steps")
        batch = self._command.batch_size or (own * steps if own and steps else None)
        return None if batch is None or self._command.has_size else -(-batch // size)

    def _figures_of(self, size: int, until: float) -> dict[str, Any]:
        """Ask for the figures of a size. A loop that has ended by itself after other sizes is started once more."""
        if self._hello["takes_sizes"]:  # even if its size stands in the command, the loop waits to be asked
            self._line.send({"command": "measure", "micro_batch_size": size, "accumulation": self._steps(size)})
        try:
            return self._receive(until)
        except TrialFailedError:
            if not self._has_served or self._popen is None or self._popen.returncode != 0:
                raise
        self._start(None, until)
        return self._figures_of(size, until)

    def _start(self, size: int | None, until: float) -> None:
        """Start the command, and wait until its training describes itself."""
        self._stop()
        self._tail = deque(maxlen=TAIL_LINES)  # a reader that is still alive fills the last one
        self._has_begun = self._has_served = False
        forget_failures(self._folder)
        arguments, left = self._command.filled(self._choice, size)
        scratch = self._folder / "scratch"
        scratch.mkdir(exist_ok=True)
        own = {
            SOCKET: str(self._line.path),
            CHOICE: json.dumps(left),
            SCRATCH: str(scratch),
        }
        if size is not None:
            own |= {SIZE: str(size), STEPS: str(self._command.steps(size))}
            own |= {BRACES: "1"} if self._command.has_size else {}
        try:
            self._popen = subprocess.Popen(
                arguments,
                cwd=self._command.folder,
                env=environment_of(self._devices) | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            reason = f"'{arguments[0]}' cannot be started: {error.strerror or error}"
            raise TrialFailedError(Outcome.UNSUPPORTED, reason) from error
        self._reader = threading.Thread(target=self._read_output, args=(self._popen,), name="command", daemon=True)
        self._reader.start()
        self._started_at = time.monotonic()
        self._said_at = self._started_at + SILENT_SECONDS
        self._hello = self._receive(until)
        self._said_at = math.inf
        self._start_seconds = time.monotonic() - self._started_at
        self._has_begun = True
        if self._hello["event"] == "refused":
            raise TrialFailedError(Outcome.UNSUPPORTED, self._hello["reason"])
        if size is None and self._hello["kind"] == OWN_LOOP:
            raise TrialFailedError(Outcome.UNSUPPORTED, NO_SIZE)
        if self._restarts:
            self._coming = size or int(self._hello["micro_batch_size"])

    def _receive(self, until: float) -> dict[str, Any]:
        """Return the next message of the training, while its process is watched."""
        self._kills = count_kernel_oom_kills()
        while (message := self._line.take()) is None:
            if time.monotonic() >= until:
                ran = f": it ran for {time.monotonic() - self._started_at:.0f} s and made no optimizer step"
                late = "" if self._has_begun else ran
                what = f"the command did not answer in time{late}{last_output(self._tail)}"
                raise TrialFailedError(Outcome.TIMED_OUT, what)
            if time.monotonic() >= self._said_at:
                self._say_wait()
            if not self._line.read() and self._popen is not None and self._popen.poll() is not None:
                self._fail(self._popen.returncode)
        return message

    def _say_wait(self) -> None:
        """Say once that this start has taken long, and what it printed last."""
        self._said_at = math.inf
        if self._command.own_folder is not None:
            printed = "".join(f"; its last output: {shortened(line)}" for line in last_lines(self._tail, 1))
            waits = f"the command has run for {SILENT_SECONDS:g} s and made no optimizer step yet"
            note(Path(self._command.own_folder), f"{waits}{printed}")

    def _explained(self, outcome: Outcome, reason: str) -> tuple[Outcome, str]:
        """Return the outcome and the reason that the first process gives, unless another process is the cause."""
        if self._hello["num_devices"] == 1 or outcome is not Outcome.CRASHED or self._popen is None:
            return outcome, reason
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_SECONDS)  # a launcher then says which process has ended
        return self._cause() or (outcome, reason)

    def _cause(self) -> tuple[Outcome, str] | None:
        """Return the outcome and the reason of the process that caused the end of its group;

        None if that is not known.
        """
        if self._reader is not None:
            self._reader.join(END_SECONDS)
        return cause_of(self._folder, list(self._tail), kernel_killed=count_kernel_oom_kills() > self._kills)

    def _fail(self, status: int) -> None:
        """Raise the error that the end of the command means."""
        if (cause := self._cause()) is not None:
            raise TrialFailedError(*cause)
        output = " | ".join(last_lines(self._tail, LAST_LINES))
        if status == 0:
            why = TOO_FEW_STEPS if self._has_begun else NO_STEP
            raise TrialFailedError(Outcome.UNSUPPORTED, f"the command does not train: {why}{last_output(self._tail)}")
        ended = classify_exit("the command", status, output, count_kernel_oom_kills() > self._kills)
        raise (TargetKilledError if is_unexplained(status, ended[0], output) else TrialFailedError)(*ended)

    def _stop(self) -> None:
        popen, self._popen, self._coming = self._popen, None, None
        self._line.hang_up()
        if popen is None:
            return
        others = started_with(str(self._line.path))
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        for other in others:  # they may have a session of their own
            with suppress(psutil.NoSuchProcess):
                other.kill()
        popen.kill()
        popen.wait(END_SECONDS)
        psutil.wait_procs(others, END_SECONDS)  # the next trial needs their memory and devices
        if self._reader is not None:
            self._reader.join(END_SECONDS)
            if popen.stdout is not None and not self._reader.is_alive():  # else somebody else holds the other end
                popen.stdout.close()

    def _read_output(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        tail = self._tail
        with suppress(ValueError):  # it was closed
            for line in iter(lambda: popen.stdout.readline(1 << 16) if popen.stdout else b"", b""):
                tail.append(shortened(line.decode(errors="replace").rstrip(), 400))
