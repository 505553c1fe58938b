"""The messages between a worker and its profiler process: one JSON object a line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from bexp.explorer.cost.components import Component
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.hardware import HardwareSpec, SoftwareVersions
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest


class Open(Frozen):
    """Command: take the device, whose lock comes with it. The answer is `Hello`.

    Before this command a process holds neither the lock nor memory of a device.
    """

    type: Literal["open"] = "open"


class MeasureHardware(Frozen):
    """Command: measure the device's peaks. The answer is a `HardwareReply`."""

    type: Literal["measure_hardware"] = "measure_hardware"


class Begin(Frozen):
    """Command: a job begins. The answer is a `ReportReply`. A process that replaces a dead one gets it again."""

    type: Literal["begin"] = "begin"
    request: ExplorationRequest
    hardware: HardwareSpec
    others_bytes: Annotated[int, Field(ge=0)] | None = None
    """Device memory that other processes held when the job began, as the dead process said."""
    known_report: DeviceReport | None = Field(None, description="What the dead process had reported.")


class RunTrial(Frozen):
    """Command: run a trial. Answers: `ComponentStarted` and `ComponentMeasured`, then `TrialFinished`."""

    type: Literal["run_trial"] = "run_trial"
    task: TrialTask


class EndJob(Frozen):
    """Command: the job is over, and everything that was built for it can go. There is no answer."""

    type: Literal["end_job"] = "end_job"


class Hello(Frozen):
    """The first message of a profiler process: torch is imported and the device exists.

    `device_name` and `versions` are those of its later `HardwareSpec`. `ranks` are the ids of the processes that own
    the devices of a group; each leads a process group.
    """

    type: Literal["hello"] = "hello"
    pid: int
    device_name: str
    versions: SoftwareVersions
    ranks: tuple[int, ...] = ()


class HardwareReply(Frozen):
    """The measured device."""

    type: Literal["hardware"] = "hardware"
    hardware: HardwareSpec


class ReportReply(Frozen):
    """The back ends that can serve the job's model, and the bytes of device memory that other processes hold."""

    type: Literal["report"] = "report"
    report: DeviceReport
    others_bytes: Annotated[int, Field(ge=0)] | None = None


class ComponentStarted(Frozen):
    """The process begins a component, which is to blame for a crash or a hang after this message."""

    type: Literal["component_started"] = "component_started"
    component: Component


class ComponentMeasured(Frozen):
    """A component was measured. The message is sent at once, so that a later crash does not lose it."""

    type: Literal["component_measured"] = "component_measured"
    measurement: ComponentMeasurement


class TrialFinished(Frozen):
    """The trial's result. `seconds` is the process's own time. A `poisoned` process must be replaced.

    `target_killed` says that a custom target's own process was killed for no known reason.
    """

    type: Literal["trial_finished"] = "trial_finished"
    measurement: Measurement
    seconds: Annotated[float, Field(ge=0)]
    poisoned: bool = False
    target_killed: bool = False


class RankLost(Frozen):
    """A rank has ended with `status` (negative: the signal that ended it), and its group ends with it."""

    type: Literal["rank_lost"] = "rank_lost"
    rank: int
    device: str
    status: int


class Refused(Frozen):
    """The process cannot carry out any command, for instance because the device does not exist."""

    type: Literal["refused"] = "refused"
    reason: str


Command = Annotated[Open | MeasureHardware | Begin | RunTrial | EndJob, Field(discriminator="type")]
Reply = Annotated[
    Hello | HardwareReply | ReportReply | ComponentStarted | ComponentMeasured | TrialFinished | RankLost | Refused,
    Field(discriminator="type"),
]

COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)
REPLIES: TypeAdapter[Reply] = TypeAdapter(Reply)


def encode(message: Frozen) -> bytes:
    """Return the message as one line."""
    return message.model_dump_json().encode() + b"\n"
