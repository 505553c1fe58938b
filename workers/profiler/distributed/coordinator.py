"""The start of a group's ranks, and their coordinator: it passes commands on, and merges the replies into one."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bexp.child_process import module_command
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.measurement import ComponentMeasurement, Conditions, Outcome, WholeModelMeasurement
from bexp.explorer.records.trial import TrialTask
from bexp.workers.process.protocol import (
    Begin,
    Command,
    ComponentMeasured,
    ComponentStarted,
    HardwareReply,
    Hello,
    MeasureHardware,
    RankLost,
    Refused,
    ReportReply,
    RunTrial,
    TrialFinished,
)
from bexp.workers.profiler.device import wait_for_open
from bexp.workers.profiler.distributed.message_queue import MessageQueue, host_store, join_store
from bexp.workers.profiler.parent import Parent, end_group

GRACE_SECONDS = 5.0
"""How long a failed trial waits for more replies. If a rank ends, its peers report first, but the rank is the cause."""

R = TypeVar("R", Hello, HardwareReply, ReportReply)


class GroupEndedError(Exception):
    """The group cannot go on, as the parent has been informed."""


class Coordinator:
    """The voice of a group of ranks towards the parent.

    The coordinator decides a trial's outcome from the ranks' replies: all succeeded, or one failed. The ranks do not
    learn the outcome. After a failure in a trial of several ranks the group must be replaced, because some ranks may
    wait for others amid an operation. There is one exception: memory ran out on all ranks, in a block that each
    computes without the others.
    """

    def __init__(self, message_queue: MessageQueue, devices: Sequence[str], send: Callable[[Frozen], None]) -> None:
        self._message_queue = message_queue
        self._devices = devices
        self._send = send
        self.idle = threading.Event()

    def serve(self, commands: queue.SimpleQueue[Command]) -> NoReturn:
        """Answer commands. Only GroupEndedError ends this."""
        hellos = self._collect(Hello)
        ranks = tuple(hello.pid for hello in hellos)
        self._send(hellos[0].model_copy(update={"pid": os.getpid(), "ranks": ranks}))
        while True:
            self.idle.set()
            command = commands.get()
            self.idle.clear()
            for rank in range(len(self._devices)):
                self._message_queue.command(rank, command)
            if isinstance(command, MeasureHardware):
                self._send_hardware()
            elif isinstance(command, Begin):
                self._send(self._collect(ReportReply)[0])
            elif isinstance(command, RunTrial):
                self._send(_Trial(self._message_queue, self._devices, command.task, self._send).follow())

    def _send_hardware(self) -> None:
        try:
            hardware = merge_hardware([reply.hardware for reply in self._collect(HardwareReply)])
        except ValueError as error:
            self._end(Refused(reason=str(error)))
        self._send(HardwareReply(hardware=hardware))

    def _collect(self, kind: type[R]) -> list[R]:
        """Wait for one reply of each rank, and return them in the order of ranks."""
        replies: dict[int, R] = {}
        while len(replies) < len(self._devices):
            received = self._message_queue.next_reply()
            assert received is not None
            rank, reply = received
            if isinstance(reply, Refused | RankLost):
                self._end(reply)
            assert isinstance(reply, kind), f"rank {rank} sent a reply that was not asked for: {reply.type}"
            replies[rank] = reply
        return [replies[rank] for rank in sorted(replies)]

    def _end(self, reply: Refused | RankLost) -> NoReturn:
        self._send(reply)
        raise GroupEndedError


class _Trial:
    """A trial in progress: the replies of its ranks so far."""

    def __init__(
        self, message_queue: MessageQueue, devices: Sequence[str], task: TrialTask, send: Callable[[Frozen], None]
    ) -> None:
        self._message_queue = message_queue
        self._devices = devices
        self._send = send
        self._num_ranks = min(task.num_processes, len(devices))
        self._num_started = [0] * self._num_ranks
        self._num_announced = 0
        self._measured: list[list[ComponentMeasurement]] = [[] for _ in range(self._num_ranks)]
        self._merged: list[ComponentMeasurement] = []
        self._finished: dict[int, TrialFinished] = {}
        self._first_failed: int | None = None

    def follow(self) -> TrialFinished:
        """Wait for the ranks, and report their progress to the parent; return the merged result.

        Raises:
            GroupEndedError: a rank has ended.
        """
        deadline: float | None = None
        while len(self._finished) < self._num_ranks:
            received = self._message_queue.next_reply(None if deadline is None else deadline - time.monotonic())
            if received is None:
                break
            rank, reply = received
            if isinstance(reply, RankLost):
                self._send(reply)
                raise GroupEndedError
            if isinstance(reply, ComponentStarted):
                self._num_started[rank] += 1
                if self._num_started[rank] > self._num_announced:
                    self._num_announced += 1
                    self._send(reply)
            elif isinstance(reply, ComponentMeasured):
                self._add(rank, reply.measurement)
            else:
                assert isinstance(reply, TrialFinished), (
                    f"rank {rank} sent a reply that was not asked for: {reply.type}"
                )
                self._finished[rank] = reply
                outcome = reply.measurement.outcome
                if outcome is Outcome.OUT_OF_MEMORY and not _failed_alone(reply):
                    break
                if outcome is not Outcome.OK and deadline is None:
                    self._first_failed = rank
                    deadline = time.monotonic() + GRACE_SECONDS
        return self._conclude()

    def _add(self, rank: int, measurement: ComponentMeasurement) -> None:
        self._measured[rank].append(measurement)
        done = len(self._merged)
        if all(len(measured) > done for measured in self._measured):
            self._merged.append(merge_component([measured[done] for measured in self._measured]))
            self._send(ComponentMeasured(measurement=self._merged[-1]))

    def _conclude(self) -> TrialFinished:
        outcomes = {finished.measurement.outcome for finished in self._finished.values()}
        all_alike = len(self._finished) == self._num_ranks and len(outcomes) == 1
        is_harmless = outcomes <= {Outcome.OK, Outcome.UNSUPPORTED} or all(map(_failed_alone, self._finished.values()))
        if all_alike and (self._num_ranks == 1 or is_harmless):
            return merge_trial([self._finished[rank] for rank in sorted(self._finished)])
        rank, finished = self._deciding_failure()
        reason = f"rank {rank} ({self._devices[rank]}): {finished.measurement.reason}"
        measurement = finished.measurement.model_copy(update={"components": tuple(self._merged), "reason": reason})
        return finished.model_copy(update={"measurement": measurement, "poisoned": True})

    def _deciding_failure(self) -> tuple[int, TrialFinished]:
        """The rank whose failure is the outcome: one that ran out of memory, else the one that failed first."""
        for rank, finished in self._finished.items():
            if finished.measurement.outcome is Outcome.OUT_OF_MEMORY:
                return rank, finished
        assert self._first_failed is not None
        return self._first_failed, self._finished[self._first_failed]


def _failed_alone(finished: TrialFinished) -> bool:
    """Return whether memory ran out in a block that each rank computes alone, so that no rank waits inside it.

    All ranks compute the same, so all of them run out of memory there. A rank that did not would wait for the others to
    agree on the number of repeats.
    """
    measurement = finished.measurement
    failed = measurement.failed_component
    return measurement.outcome is Outcome.OUT_OF_MEMORY and failed is not None and not failed.is_joint


M = TypeVar("M", ComponentMeasurement, WholeModelMeasurement)

OPTIONAL = (
    *("host_once_seconds", "slowdown", "waiting_forward_seconds"),
    *("together_forward_seconds", "together_backward_seconds", "together_host_backward_seconds"),
)
"""Figures that not every component has."""


def merge_hardware(specs: Sequence[HardwareSpec]) -> HardwareSpec:
    """Describe the group as equal devices, each as slow and as small as the worst. Ranks on the CPU share its memory.

    Raises:
        ValueError: the devices are not alike.
    """
    first = specs[0]
    names = sorted({spec.device_name for spec in specs})
    if len(names) > 1:
        raise ValueError(f"the devices of a group must be alike, not {' and '.join(names)}")
    limit = min(spec.memory_limit_bytes for spec in specs)
    peaks = first.matmul_flops_per_second
    return first.model_copy(
        update={
            "num_devices": len(specs),
            "memory_limit_bytes": limit if first.device_kind == "cuda" else max(1, limit // len(specs)),
            "context_bytes": max(spec.context_bytes for spec in specs),
            "matmul_flops_per_second": {
                dtype: min(spec.matmul_flops_per_second[dtype] for spec in specs)
                for dtype in peaks
                if all(dtype in spec.matmul_flops_per_second for spec in specs)
            },
            "memory_bandwidth_bytes_per_second": min(spec.memory_bandwidth_bytes_per_second for spec in specs),
            "launch_seconds": max(spec.launch_seconds for spec in specs),
        }
    )


def merge_component(measurements: Sequence[ComponentMeasurement]) -> ComponentMeasurement:
    """Take the largest of every figure, and the smallest number of repeats. One rank's disturbed device counts."""
    assert len({measured.component for measured in measurements}) == 1, (
        "the ranks run the same components in the same order"
    )
    slowest = max(measurements, key=lambda measured: measured.device_seconds)
    return slowest.model_copy(
        update={
            "host_seconds": max(measured.host_seconds for measured in measurements),
            "forward_device_seconds": max(measured.forward_device_seconds for measured in measurements),
            "standard_error_seconds": max(measured.standard_error_seconds for measured in measurements),
            "repeats": min(measured.repeats for measured in measurements),
            "saved_bytes": max(measured.saved_bytes for measured in measurements),
            "forward_peak_bytes": max(measured.forward_peak_bytes for measured in measurements),
            "backward_peak_bytes": max(measured.backward_peak_bytes for measured in measurements),
            **{name: _largest(getattr(measured, name) for measured in measurements) for name in OPTIONAL},
            "conditions": _worst_conditions(slowest, measurements),
        }
    )


def _worst_conditions(slowest: M, measurements: Sequence[M]) -> Conditions | None:
    """Return the conditions of a rank whose device was disturbed, for which the others waited; else the slowest's."""
    disturbed = (measured.conditions for measured in measurements if measured.contamination is not None)
    return next(disturbed, slowest.conditions)


def _largest(figures: Iterable[float | None]) -> float | None:
    return max((figure for figure in figures if figure is not None), default=None)


def merge_trial(trials: Sequence[TrialFinished]) -> TrialFinished:
    """Merge the results of ranks that all had the same outcome."""
    measurements = [finished.measurement for finished in trials]
    components = zip(*(measurement.components for measurement in measurements), strict=True)
    whole = [m.whole_model for m in measurements if m.whole_model is not None]
    slowest = max(trials, key=lambda finished: finished.seconds)  # only its own phases add up to its time
    merged = slowest.measurement.model_copy(
        update={
            "components": tuple(merge_component(ranks) for ranks in components),
            "whole_model": _merge_whole_model(whole) if whole else None,
        }
    )
    poisoned = any(finished.poisoned for finished in trials)
    return slowest.model_copy(update={"measurement": merged, "poisoned": poisoned})


def _merge_whole_model(measurements: Sequence[WholeModelMeasurement]) -> WholeModelMeasurement:
    """Take micro-step and communication of the slowest rank: the others' communication includes their wait for it."""
    # Ranks that share the model wait for each other, and update unlike shares.
    is_shared = measurements[0].num_micro_batches is not None
    slowest = max(measurements, key=lambda whole: whole.shared_step_seconds if is_shared else whole.micro_step_seconds)
    optimizer = [slowest] if is_shared else measurements
    return slowest.model_copy(
        update={
            "optimizer_seconds": max(whole.optimizer_seconds for whole in optimizer),
            "standard_error_seconds": max(whole.standard_error_seconds for whole in measurements),
            "peak_bytes": max(whole.peak_bytes for whole in measurements),
            "reserved_bytes": max(whole.reserved_bytes for whole in measurements),
            "repeats": min(whole.repeats for whole in measurements),
            "conditions": _worst_conditions(slowest, measurements),
        }
    )


RANK_MODULE = "bexp.workers.profiler.distributed.rank"
MONITOR_SECONDS = 0.1
NOTICE_SECONDS = 10.0
"""How long the coordinator may take to report a lost rank to the parent."""


def serve_group(parent: Parent) -> int:
    """Run the ranks and their coordinator, and end this process and all ranks when one of them ends."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the coordinator reports it
    wait_for_open(parent.commands)
    store, port = host_store()
    coordinator = Coordinator(MessageQueue(join_store(port)), parent.devices, parent.send)

    def coordinate() -> None:
        try:
            coordinator.serve(parent.commands)
        except GroupEndedError:
            pass
        finally:
            end_group()

    thread = threading.Thread(target=coordinate, name="coordinator", daemon=True)
    thread.start()
    program, *arguments = module_command(
        RANK_MODULE,
        *("--rank", macros.local_rank),
        *("--devices", ",".join(parent.devices)),
        *("--port", str(port)),
        *("--parent", str(os.getpid())),
    )
    try:
        elastic_launch(launch_config(len(parent.devices), port), program)(*arguments)
    except ChildFailedError as error:
        message_queue = MessageQueue(join_store(port))
        for rank, failure in error.failures.items():
            message_queue.reply(rank, RankLost(rank=rank, device=parent.devices[rank], status=failure.exitcode))
        if not coordinator.idle.is_set():
            thread.join(NOTICE_SECONDS)
    del store
    end_group()
    return 1


def launch_config(num_ranks: int, port: int) -> LaunchConfig:
    """Return the launch of one node without restarts, which would silently repeat a trial that ran out of memory."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        max_restarts=0,
        run_id="bexp",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"is_host": False, "timeout": 60},
        local_addr="127.0.0.1",
        monitor_interval=MONITOR_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
