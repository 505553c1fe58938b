"""The work of a ready profiler process for a job: its replies, its deadline, its memory, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bexp.explorer.cost.components import Component
from bexp.explorer.model.base import Frozen
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome, PhaseSeconds
from bexp.explorer.records.trial import TrialTask
from bexp.workers.process.child import ProcessEndedError, ProfilerProcess
from bexp.workers.process.exit_status import classify_exit, count_kernel_oom_kills, is_unexplained, name_ended
from bexp.workers.process.protocol import ComponentMeasured, ComponentStarted, RankLost, Reply, RunTrial, TrialFinished

T = TypeVar("T")

TICK_SECONDS = 0.025
END_GRACE_SECONDS = 1.0
RESIDENT_SLACK_BYTES = 64 << 20
"""The amount by which a process may exceed its memory limit before it is ended."""


@dataclass(frozen=True, slots=True)
class MemoryCeiling:
    """The resident memory in bytes above which a process is ended: its memory as the job began, and its limit."""

    baseline_bytes: int
    limit_bytes: int

    def is_exceeded(self, process: ProfilerProcess) -> bool:
        """Return whether the process holds more."""
        return process.private_bytes() > self.baseline_bytes + self.limit_bytes + RESIDENT_SLACK_BYTES


class UnexpectedReplyError(Exception):
    """The process sent a reply that does not answer the command."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        super().__init__(reply.type)


class CommandFailedError(Exception):
    """A ready process did not carry out a command; the message says why.

    `was_killed` says that the process was killed for no known reason.
    """

    def __init__(self, outcome: Outcome, reason: str, *, was_killed: bool = False) -> None:
        self.outcome = outcome
        self.was_killed = was_killed
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class CommandRun:
    """A command of a job, followed to its end.

    Attributes:
        process: carries the command out.
        allowed_seconds: after this time the command has timed out.
        ceiling: None where the device's allocator keeps the limit.
        replace: ends the process, which gets this many seconds to end by itself; returns its exit status.
        check_interrupted: raises if the profiler was interrupted.
    """

    process: ProfilerProcess
    allowed_seconds: float
    ceiling: MemoryCeiling | None
    replace: Callable[[float], int]
    check_interrupted: Callable[[], None]

    def follow(self, command: Frozen, take: Callable[[Reply], T | None]) -> T:
        """Send a command; return the first result of `take` for a reply that is not None.

        Raises:
            CommandFailedError: the process crashed, hung or took too much memory. It has been ended.
        """
        kernel_kills = count_kernel_oom_kills()
        deadline = time.monotonic() + self.allowed_seconds
        lost_rank: RankLost | None = None
        try:
            self.process.send(command)
            while True:
                reply = self.process.receive(TICK_SECONDS)
                self.check_interrupted()
                if isinstance(reply, RankLost):
                    lost_rank = reply
                    break
                if reply is not None and (taken := take(reply)) is not None:
                    return taken
                failure = self._exceeded_limit(deadline)
                if failure is not None:
                    self.replace(0.0)
                    raise failure
        except ProcessEndedError:
            self.check_interrupted()
        name, status = name_ended(self.replace(END_GRACE_SECONDS), lost_rank)
        by_kernel = count_kernel_oom_kills() > kernel_kills
        output = self.process.last_output()
        outcome, reason = classify_exit(name, status, output, by_kernel)
        raise CommandFailedError(outcome, reason, was_killed=is_unexplained(status, outcome, output))

    def _exceeded_limit(self, deadline: float) -> CommandFailedError | None:
        if time.monotonic() >= deadline:
            return CommandFailedError(Outcome.TIMED_OUT, f"no result within {self.allowed_seconds:g} s")
        if self.ceiling is not None and self.ceiling.is_exceeded(self.process):
            limit = self.ceiling.limit_bytes / 2**30
            return CommandFailedError(
                Outcome.OUT_OF_MEMORY, f"the process exceeded its memory limit of {limit:.2f} GiB"
            )
        return None


class TrialRun:
    """A trial, followed to its end. A crash, a hang or too much memory is the trial's outcome.

    `was_killed` says, after the end, that the process or that of a custom target was killed for no known reason.
    """

    def __init__(self, run: CommandRun, task: TrialTask) -> None:
        self._run = run
        self._task = task
        self._components: list[ComponentMeasurement] = []
        self._current: Component | None = None
        self.was_killed = False

    def follow(self) -> tuple[Measurement, float | None]:
        """Run the trial; return its measurement and the process's own seconds, None if these were lost with it.

        Raises:
            UnexpectedReplyError: the process did not keep to the protocol.
        """
        try:
            finished = self._run.follow(RunTrial(task=self._task), self._take)
        except CommandFailedError as error:
            self.was_killed = error.was_killed
            return self._failure(error), None
        if finished.poisoned:
            self._run.replace(0.0)
        self.was_killed = finished.target_killed
        return finished.measurement, finished.seconds

    def _take(self, reply: Reply) -> TrialFinished | None:
        if isinstance(reply, TrialFinished):
            return reply
        if isinstance(reply, ComponentStarted):
            self._current = reply.component
        elif isinstance(reply, ComponentMeasured):
            self._components.append(reply.measurement)
            self._current = None
        else:
            raise UnexpectedReplyError(reply)
        return None

    def _failure(self, error: CommandFailedError) -> Measurement:
        return Measurement(
            candidate=self._task.candidate,
            outcome=error.outcome,
            reason=str(error),
            components=tuple(self._components),
            failed_component=self._current,
            phases=PhaseSeconds(),
        )
