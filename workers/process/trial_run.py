"""One trial on a profiler process: its replies, its deadline, its memory, and how the process ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bexp.explorer.cost_model.components import Component
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome, PhaseSeconds
from bexp.explorer.records.trial import TrialTask
from bexp.workers.process.child import ProcessEndedError, ProfilerProcess
from bexp.workers.process.exit_status import classify_exit, count_kernel_oom_kills, is_unexplained, name_ended
from bexp.workers.process.protocol import ComponentMeasured, ComponentStarted, RankLost, Reply, RunTrial, TrialFinished

TICK_SECONDS = 0.025
END_GRACE_SECONDS = 1.0
RESIDENT_SLACK_BYTES = 64 << 20
"""The amount by which a process may exceed its memory limit before it is ended."""


@dataclass(frozen=True, slots=True)
class MemoryCeiling:
    """The resident memory in bytes above which a process is ended: what it had as the job began, and its limit."""

    baseline_bytes: int
    limit_bytes: int

    def is_exceeded(self, process: ProfilerProcess) -> bool:
        """Whether the process holds more."""
        return process.private_bytes() > self.baseline_bytes + self.limit_bytes + RESIDENT_SLACK_BYTES


class UnexpectedReplyError(Exception):
    """The process sent a reply that does not answer the command."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        super().__init__(reply.type)


class TrialRun:
    """Follows a trial to its end. A crash, a hang or too much memory is the trial's outcome.

    Args:
        process: what runs the trial.
        task: the trial.
        allowed_seconds: after this time the trial has timed out.
        ceiling: None where the device's allocator keeps the limit.
        replace: ends the process, which gets this many seconds to end by itself; returns its exit status.
        check_interrupted: raises if the profiler was interrupted.

    `was_killed` says, after the end, that the process or that of a custom target was killed, and that nothing says why.
    """

    def __init__(
        self,
        process: ProfilerProcess,
        task: TrialTask,
        *,
        allowed_seconds: float,
        ceiling: MemoryCeiling | None,
        replace: Callable[[float], int],
        check_interrupted: Callable[[], None],
    ) -> None:
        self._process = process
        self._task = task
        self._allowed_seconds = allowed_seconds
        self._ceiling = ceiling
        self._replace = replace
        self._check_interrupted = check_interrupted
        self._components: list[ComponentMeasurement] = []
        self._current: Component | None = None
        self._lost_rank: RankLost | None = None
        self.was_killed = False

    def follow(self) -> tuple[Measurement, float | None]:
        """Run the trial; returns its measurement and the process's own seconds, None if these were lost with it.

        Raises:
            UnexpectedReplyError: the process did not keep to the protocol.
        """
        kernel_kills = count_kernel_oom_kills()
        deadline = time.monotonic() + self._allowed_seconds
        try:
            self._process.send(RunTrial(task=self._task))
            while True:
                reply = self._process.receive(TICK_SECONDS)
                self._check_interrupted()
                if isinstance(reply, TrialFinished):
                    if reply.poisoned:
                        self._replace(0.0)
                    self.was_killed = reply.target_killed
                    return reply.measurement, reply.seconds
                if reply is not None:
                    self._note(reply)
                failure = self._exceeded_limit(deadline)
                if failure is not None:
                    self._replace(0.0)
                    return failure, None
        except ProcessEndedError:
            self._check_interrupted()
            name, status = name_ended(self._replace(END_GRACE_SECONDS), self._lost_rank)
            by_kernel = count_kernel_oom_kills() > kernel_kills
            output = self._process.last_output()
            outcome, reason = classify_exit(name, status, output, by_kernel)
            self.was_killed = is_unexplained(status, outcome, output)
            return self._failure(outcome, reason), None

    def _note(self, reply: Reply) -> None:
        if isinstance(reply, ComponentStarted):
            self._current = reply.component
        elif isinstance(reply, ComponentMeasured):
            self._components.append(reply.measurement)
            self._current = None
        elif isinstance(reply, RankLost):
            self._lost_rank = reply
            raise ProcessEndedError("a rank has ended")
        else:
            raise UnexpectedReplyError(reply)

    def _exceeded_limit(self, deadline: float) -> Measurement | None:
        if time.monotonic() >= deadline:
            return self._failure(Outcome.TIMED_OUT, f"no result within {self._allowed_seconds:g} s")
        if self._ceiling is not None and self._ceiling.is_exceeded(self._process):
            limit = self._ceiling.limit_bytes / 2**30
            return self._failure(Outcome.OUT_OF_MEMORY, f"the process exceeded its memory limit of {limit:.2f} GiB")
        return None

    def _failure(self, outcome: Outcome, reason: str) -> Measurement:
        return Measurement(
            candidate=self._task.candidate,
            outcome=outcome,
            reason=reason,
            components=tuple(self._components),
            failed_component=self._current,
            phases=PhaseSeconds(),
        )
