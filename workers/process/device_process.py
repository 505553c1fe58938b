"""The one profiler process of a device or a group: the lock that it needs, its start, its replies, and its end.

A process imports torch and more before it takes the device, which takes seconds. A spare is a process that has imported
them and waits, without the device's memory and its lock. The spare takes over when the process before it has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TypeVar

from bexp.workers.devices.lock import DeviceLocks
from bexp.workers.process.child import ProcessEndedError, ProfilerProcess
from bexp.workers.process.exit_status import describe_status, name_ended
from bexp.workers.process.interface import ProfilerError, ProfilerInterruptedError, ProfilerStartError
from bexp.workers.process.protocol import (
    Begin,
    Command,
    HardwareReply,
    Hello,
    RankLost,
    Refused,
    Reply,
    ReportReply,
)
from bexp.workers.process.start import StartedProcess
from bexp.workers.process.trial_run import (
    END_GRACE_SECONDS,
    TICK_SECONDS,
    CommandRun,
    MemoryCeiling,
    UnexpectedReplyError,
)

R = TypeVar("R", Hello, HardwareReply)


class DeviceProcess:
    """The locks of devices, and at most one process on these devices with a spare.

    Args:
        devices: the devices as a profiler process names them.
        locks: of these devices; the process gets them when it opens the devices.
        environment: of the process.
        on_wait: called once, with the reason, if another profiler holds a device.
        lock_timeout_seconds: how long to wait for the devices; None: as long as it takes.
        start_timeout_seconds: how long to wait for the reply to each command before a trial.
        started: a process that was started in advance, by a thread that stays; the first spare.
    """

    def __init__(
        self,
        devices: Sequence[str],
        locks: DeviceLocks,
        *,
        environment: Mapping[str, str],
        on_wait: Callable[[str], None] | None,
        lock_timeout_seconds: float | None,
        start_timeout_seconds: float,
        started: StartedProcess | None = None,
    ) -> None:
        self.name = devices[0] if len(devices) == 1 else f"{{{', '.join(devices)}}}"
        self.restarts = 0
        self.locks = locks
        self.current: ProfilerProcess | None = None
        self.interrupted = threading.Event()
        self._devices = tuple(devices)
        self._environment = environment
        self._on_wait = on_wait
        self._lock_timeout_seconds = lock_timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._start_seconds = 0.0
        self._spare = None if started is None else ProfilerProcess(started)
        # The kernel ends the process with the thread that started it (PR_SET_PDEATHSIG), so that thread must stay.
        self._starter: ThreadPoolExecutor | None = None

    def ensure(self) -> ProfilerProcess:
        """Return the process, started if there is none.

        Raises:
            ProfilerStartError: it was killed before it was ready.
            ProfilerError: it has no such device, or cannot run at all.
            DeviceBusyError: the device was not free in time.
            ProfilerInterruptedError: `interrupt()` was called.
        """
        self.check_interrupted()
        if self.current is not None:
            if self.current.alive:
                return self.current
            self.replace()  # it ended while it had nothing to do
        if not self.locks.acquire(
            timeout_seconds=self._lock_timeout_seconds, on_wait=self._on_wait, cancelled=self.interrupted.is_set
        ):
            raise ProfilerInterruptedError("interrupted while waiting for the device")
        started = time.perf_counter()
        process = self._take_spare() or self._spawn()
        self.current = process
        self.check_interrupted()
        try:
            process.open(self.locks.descriptors)
        except ProcessEndedError as error:
            raise self._ended_early(process) from error
        process.greet(self._receive(process, Hello))
        self.check_interrupted()
        self._start_seconds += time.perf_counter() - started
        return process

    def start_spare(self) -> None:
        """Start the next process in advance, without waiting for it. `ensure` takes it once there is no process.

        Nothing happens if there is a spare already. One that cannot be started is left to `ensure`.
        """
        if self._spare is None or not self._spare.alive:
            self._drop_spare()
            with suppress(ProfilerStartError):
                self._spare = self._spawn()

    def ask(self, process: ProfilerProcess, command: Command, kind: type[R]) -> R:
        """Return the reply to a command that prepares a trial. Raises as `ensure` does."""
        started = time.perf_counter()
        try:
            process.send(command)
        except ProcessEndedError as error:
            raise self._ended_early(process) from error
        reply = self._receive(process, kind)
        self._start_seconds += time.perf_counter() - started
        return reply

    def begin(self, process: ProfilerProcess, command: Begin) -> ReportReply:
        """Announce a job to a process that is ready; return its reply.

        Raises:
            CommandFailedError: it hung, crashed or took all of the device's memory; it has been ended.
            ProfilerError: it did not keep to the protocol.
            ProfilerInterruptedError: `interrupt()` was called.
        """
        started = time.perf_counter()
        on_cpu = self._devices[0] == "cpu"
        limit = command.hardware.memory_limit_bytes  # the job's own limit holds from its first trial on
        run = CommandRun(
            process,
            allowed_seconds=self._start_timeout_seconds,
            ceiling=MemoryCeiling(process.private_bytes(), limit) if on_cpu else None,
            replace=self.replace,
            check_interrupted=self.check_interrupted,
        )
        try:
            return run.follow(command, _report_of)
        except UnexpectedReplyError as error:
            raise self.unexpected(error.reply) from error
        finally:
            self._start_seconds += time.perf_counter() - started

    def take_start_seconds(self) -> float:
        """Return the seconds that starting and preparing processes took since the last call."""
        seconds, self._start_seconds = self._start_seconds, 0.0
        return seconds

    def interrupt(self) -> None:
        """End the process at once, from any thread; running and later calls raise until `resume`."""
        self.interrupted.set()
        process = self.current
        if process is not None:
            process.kill()

    def resume(self) -> None:
        """Clear an interruption."""
        if self.interrupted.is_set():
            self.end()
            self.interrupted.clear()

    def check_interrupted(self) -> None:
        """Raise ProfilerInterruptedError if `interrupt` was called."""
        if self.interrupted.is_set():
            self.end()
            raise ProfilerInterruptedError(f"the profiler of {self.name} was interrupted")

    def replace(self, grace_seconds: float = 0.0) -> int:
        """End a process that a candidate has spoilt. `ensure` starts another."""
        self.restarts += 1
        return self.end(grace_seconds)

    def end(self, grace_seconds: float = 0.0) -> int:
        """End the process if there is one; return its exit status, see `ProfilerProcess.end`."""
        process, self.current = self.current, None
        return 0 if process is None else _end(process, grace_seconds)

    def give_back(self) -> None:
        """End the process and give the devices back. The spare stays.

        A process that does not end keeps the devices, because it has their locks as well.

        Raises:
            ProfilerError: the process does not end.
        """
        try:
            self.end()
        finally:
            self.locks.release()

    def close(self) -> None:
        """End the spare and the process, and give the devices back, even if one of the processes does not end.

        Raises:
            ProfilerError: a process does not end.
        """
        with ExitStack() as last_first:
            last_first.callback(self._end_starter)
            last_first.callback(self.give_back)
            last_first.callback(self._drop_spare)

    def unexpected(self, reply: Reply) -> ProfilerError:
        """End the process; return the error for a reply that does not answer the command."""
        self.end()
        return ProfilerError(f"the profiler process of {self.name} sent a reply that was not asked for: {reply.type}")

    def _spawn(self) -> ProfilerProcess:
        if self._starter is None:
            self._starter = ThreadPoolExecutor(1, thread_name_prefix=f"profiler-starter-{self.name}")

        def start() -> ProfilerProcess:
            return ProfilerProcess(StartedProcess(self._devices, self._environment))

        try:
            return self._starter.submit(start).result()
        except OSError as error:
            raise ProfilerStartError(f"the profiler process cannot be started: {error}") from error

    def _end_starter(self) -> None:
        starter, self._starter = self._starter, None
        if starter is not None:
            starter.shutdown()

    def _take_spare(self) -> ProfilerProcess | None:
        if self._spare is not None and not self._spare.alive:
            self._drop_spare()
        spare, self._spare = self._spare, None
        return spare

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            _end(spare)

    def _receive(self, process: ProfilerProcess, kind: type[R]) -> R:
        deadline = time.monotonic() + self._start_timeout_seconds
        while True:
            try:
                reply = process.receive(TICK_SECONDS)
            except ProcessEndedError as error:
                self.check_interrupted()
                raise self._ended_early(process) from error
            self.check_interrupted()
            if isinstance(reply, kind):
                return reply
            if isinstance(reply, Refused):
                self.end()
                raise ProfilerError(reply.reason)
            if isinstance(reply, RankLost):
                raise self._ended_early(process, reply)
            if reply is not None:
                raise self.unexpected(reply)
            if time.monotonic() >= deadline:
                self.end()
                raise ProfilerError(
                    f"the profiler of {self.name} did not answer within {self._start_timeout_seconds:g} s"
                )

    def _ended_early(self, process: ProfilerProcess, lost: RankLost | None = None) -> ProfilerError:
        """Return the error for a process that ended before it was ready. A signal is no fault of the installation."""
        name, status = name_ended(self.end(END_GRACE_SECONDS), lost)
        output = process.last_output()
        ended = f"{name} of {self.name} {describe_status(status)}"
        message = f"{ended}: {output}" if output else ended
        return ProfilerStartError(message) if status < 0 else ProfilerError(message)


def _report_of(reply: Reply) -> ReportReply:
    if not isinstance(reply, ReportReply):
        raise UnexpectedReplyError(reply)
    return reply


def _end(process: ProfilerProcess, grace_seconds: float = 0.0) -> int:
    try:
        return process.end(grace_seconds)
    except TimeoutError as error:
        raise ProfilerError(str(error)) from error
