"""What the worker and its profiler process say to each other: one JSON object a line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from explorer.cost_model.components import Component
from explorer.records.measurement import ComponentMeasurement, Measurement
from explorer.records.trial import TrialPlan
from explorer.spec.base import Frozen
from explorer.spec.hardware import DeviceReport, HardwareSpec
from explorer.spec.request import ExplorationRequest


class MeasureHardware(Frozen):
    """Order: measure the device's peaks. Answered by `HardwareReply`."""

    type: Literal["measure_hardware"] = "measure_hardware"


class Begin(Frozen):
    """Order: a job begins. Answered by `ReportReply`. Sent again to a process that replaces a dead one.

    `others_bytes` is what the dead one said others held of the device when the job began.
    """

    type: Literal["begin"] = "begin"
    request: ExplorationRequest
    hardware: HardwareSpec
    others_bytes: Annotated[int, Field(ge=0)] | None = None


class RunTrial(Frozen):
    """Order: measure. Answered by `ComponentStarted` and `ComponentMeasured` as it goes, `TrialFinished` at the end."""

    type: Literal["run_trial"] = "run_trial"
    plan: TrialPlan


class Hello(Frozen):
    """First message of a profiler process: torch is imported and the device exists.

    A profiler of several devices names the processes that have them, each the leader of a process group.
    """

    type: Literal["hello"] = "hello"
    pid: int
    ranks: tuple[int, ...] = ()


class HardwareReply(Frozen):
    """The measured device."""

    type: Literal["hardware"] = "hardware"
    hardware: HardwareSpec


class ReportReply(Frozen):
    """Which back ends can serve the job's model, and what others hold of the device as the job begins."""

    type: Literal["report"] = "report"
    report: DeviceReport
    others_bytes: Annotated[int, Field(ge=0)] | None = None


class ComponentStarted(Frozen):
    """So that a crash or a hang can be blamed on the right component."""

    type: Literal["component_started"] = "component_started"
    component: Component


class ComponentMeasured(Frozen):
    """So that what was measured before a crash is not lost with the process."""

    type: Literal["component_measured"] = "component_measured"
    measurement: ComponentMeasurement


class TrialFinished(Frozen):
    """The trial's result. `seconds` is the process's own time; a `poisoned` process asks to be replaced."""

    type: Literal["trial_finished"] = "trial_finished"
    measurement: Measurement
    seconds: Annotated[float, Field(ge=0)]
    poisoned: bool = False


class RankLost(Frozen):
    """A process of the group has ended with `status` (negative: the signal that ended it), and the group with it."""

    type: Literal["rank_lost"] = "rank_lost"
    rank: int
    device: str
    status: int


class Refused(Frozen):
    """The process cannot do what was ordered, whatever the candidate: the device does not exist, for instance."""

    type: Literal["refused"] = "refused"
    reason: str


Order = Annotated[MeasureHardware | Begin | RunTrial, Field(discriminator="type")]
Reply = Annotated[
    Hello | HardwareReply | ReportReply | ComponentStarted | ComponentMeasured | TrialFinished | RankLost | Refused,
    Field(discriminator="type"),
]

ORDERS: TypeAdapter[Order] = TypeAdapter(Order)
REPLIES: TypeAdapter[Reply] = TypeAdapter(Reply)


def encode(message: Frozen) -> bytes:
    """One line."""
    return message.model_dump_json().encode() + b"\n"
