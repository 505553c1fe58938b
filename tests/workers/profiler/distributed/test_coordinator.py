"""What the parent of a group hears, given what its ranks put on the messages."""

from __future__ import annotations

import queue
from collections import deque
from typing import Any

import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.measurement import (
    ComponentMeasurement,
    Conditions,
    Measurement,
    Outcome,
    PhaseSeconds,
    WholeModelMeasurement,
)
from bexp.explorer.records.trial import TrialTask
from bexp.workers.process.protocol import (
    Command,
    ComponentMeasured,
    ComponentStarted,
    HardwareReply,
    Hello,
    MeasureHardware,
    RankLost,
    Refused,
    Reply,
    RunTrial,
    TrialFinished,
)
from bexp.workers.profiler.distributed.coordinator import (
    Coordinator,
    GroupEndedError,
    merge_component,
    merge_hardware,
    merge_trial,
)
from tests.workers.profiler.samples import HARDWARE, candidate, components_of, plan

DEVICES = ("cuda:0", "cuda:1")
COMPONENTS = components_of(candidate())[:2]
PLAN = plan(candidate(), COMPONENTS, num_processes=2)


class ScriptedMessageQueue:
    """Ranks that say what they are told to, whatever the order; nothing more comes after that."""

    def __init__(self, said: list[tuple[int, Reply]]) -> None:
        self.said = deque(said)
        self.commands: list[tuple[int, Command]] = []

    def command(self, rank: int, command: Command) -> None:
        self.commands.append((rank, command))

    def next_reply(self, seconds: float | None = None) -> tuple[int, Reply] | None:
        if self.said:
            return self.said.popleft()
        assert seconds is not None, "it waits for ever"
        return None


def measured(component: Component, seconds: float, size: int) -> ComponentMeasurement:
    return ComponentMeasurement(
        component=component,
        device_seconds=seconds,
        host_seconds=1.0 / seconds,
        forward_device_seconds=seconds / 3,
        standard_error_seconds=0.0,
        repeats=int(10 * seconds),
        saved_bytes=size,
        forward_peak_bytes=2 * size,
        backward_peak_bytes=3 * size,
    )


def finished(
    *components: ComponentMeasurement,
    outcome: Outcome = Outcome.OK,
    reason: str | None = None,
    failed_component: Component | None = None,
    **fields: Any,
) -> TrialFinished:
    measurement = Measurement(
        candidate=candidate(),
        outcome=outcome,
        reason=reason,
        components=components,
        failed_component=failed_component,
        phases=PhaseSeconds(timed=fields.get("seconds", 1.0)),
    )
    return TrialFinished(measurement=measurement, **({"seconds": 1.0} | fields))


def heard(said: list[tuple[int, Reply]], order: Command | None = None, *, ends: bool = False) -> list[Frozen]:
    """What the parent hears of one order, after the greeting."""
    name, versions = HARDWARE.device_name, HARDWARE.versions
    hellos: list[tuple[int, Reply]] = [
        (rank, Hello(pid=100 + rank, device_name=name, versions=versions)) for rank in (1, 0)
    ]
    sent: list[Frozen] = []
    orders: queue.SimpleQueue[Command] = queue.SimpleQueue()
    orders.put(order or RunTrial(task=PLAN))
    messages = ScriptedMessageQueue([*hellos, *said])
    served = Coordinator(messages, DEVICES, sent.append)  # type: ignore[arg-type]  # a stand-in

    class EndOfTest(Exception):  # noqa: N818 - no error
        pass

    class OneCommand(queue.SimpleQueue[Command]):
        def get(self, *_: Any, **__: Any) -> Command:
            if orders.empty():
                raise EndOfTest
            return orders.get()

    with pytest.raises(GroupEndedError if ends else EndOfTest):
        served.serve(OneCommand())
    assert sent[0].model_dump()["ranks"] == (100, 101)
    assert [rank for rank, _ in messages.commands] == [0, 1]
    return sent[1:]


def end_of(said: list[Frozen]) -> TrialFinished:
    assert isinstance(said[-1], TrialFinished)
    return said[-1]


def in_lockstep(*seconds: float) -> list[tuple[int, Reply]]:
    """Two ranks that measure both components, rank 1 first."""
    said: list[tuple[int, Reply]] = []
    for component in COMPONENTS:
        said += [(rank, ComponentStarted(component=component)) for rank in (1, 0)]
        said += [
            (rank, ComponentMeasured(measurement=measured(component, seconds[rank], 10 + rank))) for rank in (1, 0)
        ]
    return said


def all_finished(*seconds: float) -> list[tuple[int, Reply]]:
    ranks = [[measured(c, seconds[rank], 10 + rank) for c in COMPONENTS] for rank in (0, 1)]
    return [(rank, finished(*ranks[rank], seconds=seconds[rank])) for rank in (0, 1)]


def test_a_step_takes_as_long_as_its_slowest_rank_and_each_component_is_told_once() -> None:
    said = heard([*in_lockstep(4.0, 2.0), *all_finished(4.0, 2.0)])
    assert [type(message) for message in said] == [
        *(ComponentStarted, ComponentMeasured, ComponentStarted, ComponentMeasured),
        TrialFinished,
    ]
    result = end_of(said)
    assert result.measurement.outcome is Outcome.OK
    assert (result.seconds, result.measurement.phases.timed, result.poisoned) == (4.0, 4.0, False)
    for found in (*result.measurement.components, said[1].measurement):  # type: ignore[attr-defined]  # known here
        assert (found.device_seconds, found.host_seconds, found.repeats) == (4.0, 0.5, 20)
        assert (found.saved_bytes, found.forward_peak_bytes, found.backward_peak_bytes) == (11, 22, 33)
    assert tuple(m.component for m in result.measurement.components) == COMPONENTS


def test_one_ranks_exhaustion_is_the_trials_and_nobody_waits_for_the_others() -> None:
    said = heard([*in_lockstep(1.0, 1.0)[:4], (1, finished(outcome=Outcome.OUT_OF_MEMORY, reason="no more"))])
    result = end_of(said)
    assert result.measurement.outcome is Outcome.OUT_OF_MEMORY
    assert result.measurement.reason == "rank 1 (cuda:1): no more"
    assert result.poisoned
    assert len(result.measurement.components) == 1, "what all ranks have measured is kept"


def test_exhaustion_of_all_ranks_by_themselves_leaves_the_group_as_it_was() -> None:
    block, joint = COMPONENTS[0], Component(kind=ComponentKind.COMMUNICATION, micro_batch_size=0)
    for failed, others, is_poisoned in ((block, True, False), (block, False, True), (joint, True, True)):
        each = finished(outcome=Outcome.OUT_OF_MEMORY, reason="no more", failed_component=failed)
        result = end_of(heard([(rank, each) for rank in ((0, 1) if others else (0,))]))
        assert result.measurement.outcome is Outcome.OUT_OF_MEMORY
        assert result.measurement.failed_component == failed
        assert result.poisoned is is_poisoned


@pytest.mark.parametrize("exhausted_first", [True, False])
def test_exhaustion_explains_the_failure_of_the_others(exhausted_first: bool) -> None:
    said = [
        (0, finished(outcome=Outcome.OUT_OF_MEMORY, reason="no more")),
        (1, finished(outcome=Outcome.CRASHED, reason="connection closed by peer")),
    ]
    result = end_of(heard(said if exhausted_first else said[::-1]))  # type: ignore[arg-type]  # a stand-in
    assert result.measurement.outcome is Outcome.OUT_OF_MEMORY


def test_a_rank_that_fails_alone_is_the_first_to_have_failed() -> None:
    result = end_of(heard([(1, finished(outcome=Outcome.CRASHED, reason="illegal access"))]))
    assert result.measurement.reason == "rank 1 (cuda:1): illegal access"
    assert result.poisoned
    both = [(rank, finished(outcome=Outcome.CRASHED, reason=f"of {rank}")) for rank in (1, 0)]
    result = end_of(heard(both))  # type: ignore[arg-type]  # a stand-in
    assert result.measurement.reason == "rank 1 (cuda:1): of 1"


def test_a_dead_rank_explains_the_failure_of_the_others() -> None:
    dead = RankLost(rank=0, device="cuda:0", status=-11)
    assert heard([(1, finished(outcome=Outcome.CRASHED, reason="closed")), (0, dead)], ends=True) == [dead]


def test_what_all_ranks_refuse_leaves_the_group_as_it_was() -> None:
    result = end_of(heard([(rank, finished(outcome=Outcome.UNSUPPORTED, reason="no kernel")) for rank in (0, 1)]))
    assert (result.measurement.outcome, result.measurement.reason) == (Outcome.UNSUPPORTED, "no kernel")
    assert not result.poisoned


def test_a_trial_of_one_process_is_the_first_ranks_alone() -> None:
    alone = finished(outcome=Outcome.OUT_OF_MEMORY, reason="no more")
    single = RunTrial(task=TrialTask.model_validate(PLAN.model_dump() | {"num_processes": 1}))
    assert heard([(0, alone)], single) == [alone], "nobody waits for it: it need not be replaced"


@pytest.mark.parametrize("disturbed", [0, 1])
def test_a_disturbed_device_of_any_rank_spoils_the_time_of_all(disturbed: int) -> None:
    ranks = [measured(COMPONENTS[0], seconds, 10) for seconds in (1.0, 2.0)]
    throttled = Conditions(clock_reasons=("hw_thermal_slowdown",))
    ranks[disturbed] = ranks[disturbed].model_copy(update={"conditions": throttled})
    merged = merge_component(ranks)
    assert merged.device_seconds == 2.0
    assert merged.contamination == throttled.contamination


def test_devices_are_as_good_as_the_worst_of_them() -> None:
    gpu = HARDWARE.model_copy(update={"device_kind": "cuda", "context_bytes": 5})
    slow = gpu.model_copy(update={"memory_bandwidth_bytes_per_second": 1e9, "memory_limit_bytes": 7})
    (reply,) = heard([(0, HardwareReply(hardware=gpu)), (1, HardwareReply(hardware=slow))], MeasureHardware())
    assert isinstance(reply, HardwareReply)
    assert reply.hardware.num_devices == 2
    assert reply.hardware.memory_bandwidth_bytes_per_second == 1e9
    assert reply.hardware.memory_limit_bytes == 7
    assert merge_hardware([HARDWARE, HARDWARE]).memory_limit_bytes == HARDWARE.memory_limit_bytes // 2


def test_devices_that_differ_are_refused() -> None:
    other: HardwareSpec = HARDWARE.model_copy(update={"device_name": "another"})
    replies: list[tuple[int, Reply]] = [(0, HardwareReply(hardware=HARDWARE)), (1, HardwareReply(hardware=other))]
    (reply,) = heard(replies, MeasureHardware(), ends=True)
    assert isinstance(reply, Refused)
    assert "another" in reply.reason


def test_whole_models_are_merged_and_components_must_match() -> None:
    def whole(seconds: float, peak: int, communication: float) -> TrialFinished:
        found = WholeModelMeasurement(
            micro_step_seconds=seconds,
            optimizer_seconds=1 / seconds,
            communication_seconds=communication,
            standard_error_seconds=0.0,
            peak_bytes=peak,
            reserved_bytes=peak,
            repeats=3,
        )
        result = finished()
        return result.model_copy(update={"measurement": result.measurement.model_copy(update={"whole_model": found})})

    merged = merge_trial([whole(1.0, 30, 3.1), whole(2.0, 20, 0.1)]).measurement.whole_model
    assert merged is not None
    assert merged.communication_seconds == 0.1, "the first one waited for the second in each of its three micro-steps"
    assert (merged.micro_step_seconds, merged.optimizer_seconds, merged.peak_bytes) == (2.0, 1.0, 30)
    with pytest.raises(AssertionError, match="same components"):
        merge_component([measured(component, 1.0, 1) for component in COMPONENTS])
