"""Speaks for the ranks of a group: hands them their parent's orders, and makes one answer of theirs."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from explorer.records.measurement import ComponentMeasurement, Outcome
from explorer.records.trial import TrialPlan
from explorer.spec.base import Frozen
from workers.process.protocol import (
    Begin,
    ComponentMeasured,
    ComponentStarted,
    HardwareReply,
    Hello,
    MeasureHardware,
    Order,
    RankLost,
    Refused,
    ReportReply,
    RunTrial,
    TrialFinished,
)
from workers.profiler.distributed.merging import merge_component, merge_hardware, merge_trial
from workers.profiler.distributed.message_queue import MessageQueue

GRACE_SECONDS = 5.0
"""How long a failure waits for the one that caused it: an operation fails on every rank when one of them has ended."""

R = TypeVar("R", Hello, HardwareReply, ReportReply)


class GroupEndedError(Exception):
    """The parent was told that the group cannot go on."""


class Coordinator:
    """What the parent sees of a group.

    The ranks' reducer on a trial's outcome is made here, of what each has put on the messages: every rank's success, or
    the failure of one. No rank learns of it, since after a failure of a trial that several run none is of any use: some
    wait for others in the middle of an operation. Only where memory runs out on all of them, in a block that each
    computes by itself, they go on.
    """

    def __init__(self, messages: MessageQueue, devices: Sequence[str], send: Callable[[Frozen], None]) -> None:
        self._messages = messages
        self._devices = devices
        self._send = send
        self.idle = threading.Event()

    def serve(self, orders: queue.SimpleQueue[Order]) -> NoReturn:
        """Answer orders, until GroupEndedError."""
        found = self._collect(Hello)
        self._send(Hello(pid=os.getpid(), ranks=tuple(hello.pid for hello in found)))
        while True:
            self.idle.set()
            order = orders.get()
            self.idle.clear()
            for rank in range(len(self._devices)):
                self._messages.order(rank, order)
            if isinstance(order, MeasureHardware):
                self._tell_hardware()
            elif isinstance(order, Begin):
                self._send(self._collect(ReportReply)[0])
            elif isinstance(order, RunTrial):
                self._send(_Trial(self._messages, self._devices, order.plan, self._send).follow())

    def _tell_hardware(self) -> None:
        try:
            hardware = merge_hardware([reply.hardware for reply in self._collect(HardwareReply)])
        except ValueError as error:
            self._end(Refused(reason=str(error)))
        self._send(HardwareReply(hardware=hardware))

    def _collect(self, kind: type[R]) -> list[R]:
        """One reply of each rank, in their order."""
        found: dict[int, R] = {}
        while len(found) < len(self._devices):
            said = self._messages.next_reply()
            assert said is not None
            rank, reply = said
            if isinstance(reply, Refused | RankLost):
                self._end(reply)
            assert isinstance(reply, kind), f"rank {rank} answered out of turn: {reply.type}"
            found[rank] = reply
        return [found[rank] for rank in sorted(found)]

    def _end(self, reply: Refused | RankLost) -> NoReturn:
        self._send(reply)
        raise GroupEndedError


class _Trial:
    """One trial: what its ranks have said so far."""

    def __init__(
        self, messages: MessageQueue, devices: Sequence[str], plan: TrialPlan, send: Callable[[Frozen], None]
    ) -> None:
        self._messages = messages
        self._devices = devices
        self._send = send
        self._num_ranks = min(plan.num_processes, len(devices))
        self._num_started = [0] * self._num_ranks
        self._num_announced = 0
        self._measured: list[list[ComponentMeasurement]] = [[] for _ in range(self._num_ranks)]
        self._merged: list[ComponentMeasurement] = []
        self._finished: dict[int, TrialFinished] = {}
        self._first_failed: int | None = None

    def follow(self) -> TrialFinished:
        """Wait for the ranks, and tell the parent how far they are; returns what they come to.

        Raises:
            GroupEndedError: a rank has ended.
        """
        deadline: float | None = None
        while len(self._finished) < self._num_ranks:
            said = self._messages.next_reply(None if deadline is None else deadline - time.monotonic())
            if said is None:
                break
            rank, reply = said
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
                assert isinstance(reply, TrialFinished), f"rank {rank} answered out of turn: {reply.type}"
                self._finished[rank] = reply
                outcome = reply.measurement.outcome
                if outcome is Outcome.OUT_OF_MEMORY and not _by_itself(reply):
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
        together = len(self._finished) == self._num_ranks and len(outcomes) == 1
        harmless = outcomes <= {Outcome.OK, Outcome.UNSUPPORTED} or all(map(_by_itself, self._finished.values()))
        if together and (self._num_ranks == 1 or harmless):
            return merge_trial([self._finished[rank] for rank in sorted(self._finished)])
        rank, finished = self._decisive()
        reason = f"rank {rank} ({self._devices[rank]}): {finished.measurement.reason}"
        measurement = finished.measurement.model_copy(update={"components": tuple(self._merged), "reason": reason})
        return finished.model_copy(update={"measurement": measurement, "poisoned": True})

    def _decisive(self) -> tuple[int, TrialFinished]:
        """A rank that ran out of memory, or else the one that failed first."""
        for rank, finished in self._finished.items():
            if finished.measurement.outcome is Outcome.OUT_OF_MEMORY:
                return rank, finished
        assert self._first_failed is not None
        return self._first_failed, self._finished[self._first_failed]


def _by_itself(finished: TrialFinished) -> bool:
    """Whether memory ran out in a block that each rank computes for itself: no other waits for it within one.

    All ranks have the same to compute, so that they come to it together; one that does not would wait for the others'
    word on how often to repeat.
    """
    found = finished.measurement
    failed = found.failed_component
    return found.outcome is Outcome.OUT_OF_MEMORY and failed is not None and not failed.is_joint
