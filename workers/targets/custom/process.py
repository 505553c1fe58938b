"""The process that measures a custom target, seen from the profiler: commands, replies, deadlines, and its end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any

import psutil

from bexp.child_process import module_command, safe_environment
from bexp.explorer.model.spelling import shortened
from bexp.explorer.records.measurement import Outcome
from bexp.workers.instruments.failures import TargetKilledError, TrialFailedError
from bexp.workers.process.exit_status import classify_exit, count_kernel_oom_kills, is_unexplained

TAIL_LINES = 20
LAST_LINES = 3
"""How many lines of a process's last output are reported with its end."""
END_SECONDS = 10.0


class TargetProcess:
    """`python -m bexp.targets.process`. A process that has failed in any way is ended, and answers no more."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            module_command("bexp.targets.process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=safe_environment(os.environ),
        )
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read_replies, name="target-replies", daemon=True),
            threading.Thread(target=self._read_output, name="target-output", daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the process can answer."""
        return self._popen.poll() is None

    def ask(self, command: str, timeout_seconds: float, **arguments: Any) -> dict[str, Any]:
        """Return the reply to a command.

        Raises:
            TrialFailedError: the target failed, hung or crashed; the process has been ended.
            TargetKilledError: the process was killed for no known reason.
        """
        kills = count_kernel_oom_kills()
        with suppress(OSError):  # if it has ended, its output says why
            _input(self._popen).write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            _input(self._popen).flush()
        try:
            line = self._replies.get(timeout=timeout_seconds)
        except queue.Empty:
            self.end()
            reason = f"the target did not answer within {timeout_seconds:.3g} s{last_output(self._tail)}"
            raise TrialFailedError(Outcome.TIMED_OUT, reason) from None
        if line is None:
            status = self._ended_status()
            output = " | ".join(last_lines(self._tail, LAST_LINES))
            ended = classify_exit("the target's process", status, output, count_kernel_oom_kills() > kills)
            raise (TargetKilledError if is_unexplained(status, ended[0], output) else TrialFailedError)(*ended)
        reply: dict[str, Any] = json.loads(line)
        outcome = Outcome(reply.pop("outcome"))
        if outcome is not Outcome.OK:
            self.end()
            raise TrialFailedError(outcome, reply["reason"])
        return reply

    def prepare(self, size: int, timeout_seconds: float) -> None:
        """Do nothing, because the model is built when the process is opened."""

    def end(self) -> None:
        """Kill the process with all that it has started, and wait for it."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self._popen.kill()
        self._popen.wait(END_SECONDS)
        for reader in self._readers:
            reader.join(END_SECONDS)
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            with suppress(OSError):  # nobody reads what was not yet written
                stream and stream.close()

    def _ended_status(self) -> int:
        """Return the exit status of a process that has closed its output."""
        deadline = time.monotonic() + END_SECONDS
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        self.end()
        assert self._popen.returncode is not None, "it was waited for"
        return self._popen.returncode

    def _read_replies(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def _read_output(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self._tail.append(shortened(line.decode(errors="replace").rstrip(), 400))


def last_lines(output: Iterable[str], number: int) -> list[str]:
    """Return the last lines of output; of a traceback of Python's own, its last line is enough."""
    lines = [line for line in output if line]
    return lines[-1:] if lines and "Error" in lines[-1] else lines[-number:]


def last_output(output: Iterable[str]) -> str:
    """Return what a message adds of the last lines of output; nothing if there are none."""
    lines = last_lines(output, LAST_LINES)
    return f"; its last output: {' | '.join(lines)}" if lines else ""


def _input(popen: subprocess.Popen[bytes]) -> IO[bytes]:
    assert popen.stdin is not None
    return popen.stdin
