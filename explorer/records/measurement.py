"""What the profiler reports: seconds and bytes of components, and how a trial ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.base import Frozen, is_null

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class Outcome(StrEnum):
    """How a trial ended. Failure is data, never an exception.

    `contaminated` means that the trial ran well, but on a device that was shared or throttled meanwhile.
    """

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    CONTAMINATED = "contaminated"


class BatchFigures(Frozen):
    """What one of several micro-batches of a component took; the fields are those of `ComponentFigures`."""

    positions: Annotated[int, Field(ge=1)]
    device_seconds: Seconds
    saved_bytes: Bytes
    forward_peak_bytes: Bytes
    backward_peak_bytes: Bytes


class ComponentFigures(Frozen):
    """The time and the memory of one component, run back to back: forward, then backward, without synchronising.

    `device_seconds` is the median time of one forward and backward while the host is so far ahead that its time does
    not matter. `host_seconds` is the host's time to issue them. Each is summed over the model, and the larger sum
    decides. The times of the optimizer are those of one device's step, which is its share of the model if the states
    are sharded. `forward_device_seconds` is the forward part of `device_seconds`.

    Bytes are differences of `max_memory_allocated`, without parameters and gradients. `saved_bytes` is what a forward
    leaves alive for its backward if the block is not recomputed as a whole. `forward_peak_bytes` and
    `backward_peak_bytes` are the highest level of each pass above the level before the forward.

    The forward of a communication component gathers what forward needs; its backward gathers and reduces what backward
    needs. Each runs once for the whole model, with nothing beside it. `slowdown` is the time that computation loses
    beside the traffic, in seconds for each second of traffic. `host_seconds` is the host's time for it in each
    micro-step, and `host_once_seconds` the additional time in the first and the last micro-step of a step, for the
    whole model. `slowdown` and `host_once_seconds` are null for other components.

    Devices that share experts also run the block together, with its exchanges issued as in training: the host waits for
    the device in the middle of the block and only then issues the rest. `together_forward_seconds` and
    `together_backward_seconds` are then the device's, the wait included, and `waiting_forward_seconds` is what passes
    in one of several forwards in a row. The host issues backward in `together_host_backward_seconds`. The other seconds
    are of a device alone, which copies its own rows in place of exchanges. The four are null for all other components.

    Where texts have unequal lengths, seconds are the mean over an epoch's micro-batches, and bytes those of the
    longest. `batches` are the micro-batches that were measured, as in `TextBatches.measured`. `new_width_seconds` is
    what the passes take longer when a process first runs rows of a width, which the other seconds leave out.
    """

    device_seconds: Seconds
    host_seconds: Seconds
    forward_device_seconds: Seconds
    standard_error_seconds: Seconds
    repeats: Annotated[int, Field(ge=1)]
    saved_bytes: Bytes
    forward_peak_bytes: Bytes
    backward_peak_bytes: Bytes
    slowdown: Annotated[float, Field(ge=0, le=1)] | None = None
    host_once_seconds: Seconds | None = None
    waiting_forward_seconds: Seconds | None = Field(None, exclude_if=is_null)
    together_forward_seconds: Seconds | None = Field(None, exclude_if=is_null)
    together_backward_seconds: Seconds | None = Field(None, exclude_if=is_null)
    together_host_backward_seconds: Seconds | None = Field(None, exclude_if=is_null)
    batches: tuple[BatchFigures, ...] | None = Field(None, exclude_if=is_null)
    new_width_seconds: Seconds | None = Field(None, exclude_if=is_null)
    grad_accum_steps: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Micro-batches of an optimizer step of a training command, as they were counted.",
        exclude_if=is_null,
    )


class ComponentMeasurement(ComponentFigures):
    """The figures of one component, and the state of the device while it was timed."""

    component: Component
    conditions: Conditions | None = None

    @property
    def contamination(self) -> str | None:
        """Why this timing cannot be trusted; None if it can."""
        return self.conditions.contamination if self.conditions is not None else None


class WholeModelMeasurement(Frozen):
    """A whole training step, run as it would be in training: two accumulated micro-steps and the optimizer.

    `micro_step_seconds` and `optimizer_seconds` are medians. `peak_bytes` is the step's max_memory_allocated, and
    `reserved_bytes` its max_memory_reserved. Devices that train together run three micro-steps. `micro_step_seconds` is
    then the time of the second, with the traffic that every micro-step has. `communication_seconds` is what the first
    and the last take beyond it; this occurs once a step, however many micro-steps there are. It is null if nothing was
    exchanged.

    Where texts have unequal lengths, the micro-steps are those of `TextBatches.measured`, and `micro_step_seconds` is
    the mean over an epoch that follows from them.

    Devices that form a mesh run a step of `num_micro_batches`, which is null for all others. `micro_step_seconds` is
    then what all of them took, exchanges and bubbles included, divided by their number.
    """

    micro_step_seconds: Seconds
    optimizer_seconds: Seconds
    standard_error_seconds: Seconds
    peak_bytes: Bytes
    reserved_bytes: Bytes
    repeats: Annotated[int, Field(ge=1)]
    communication_seconds: Seconds | None = None
    conditions: Conditions | None = None
    num_micro_batches: Annotated[int, Field(ge=1)] | None = None

    @property
    def contamination(self) -> str | None:
        """Why this timing cannot be trusted; None if it can."""
        return self.conditions.contamination if self.conditions is not None else None

    @property
    def mesh_step_seconds(self) -> float:
        """The step of devices that form a mesh, as it was run."""
        assert self.num_micro_batches is not None, "a mesh has run it"
        return self.num_micro_batches * self.micro_step_seconds + self.optimizer_seconds


class PhaseSeconds(Frozen):
    """Where a trial's time went, in the profiler and between the processes."""

    process_start: Seconds = 0.0
    build: Seconds = 0.0
    warm_up: Seconds = 0.0
    timed: Seconds = 0.0
    messaging: Seconds = 0.0

    @property
    def total(self) -> float:
        """The sum of all phases."""
        return self.process_start + self.build + self.warm_up + self.timed + self.messaging


class Measurement(Frozen):
    """The result of one trial.

    `components` holds what this trial measured, without what earlier trials measured. If the outcome is not ok,
    `failed_component` says which component failed (null: the candidate as a whole) and `reason` says why. A trial that
    is ok has a `reason` if it was measured twice.
    """

    candidate: Candidate
    outcome: Outcome
    reason: str | None = None
    components: tuple[ComponentMeasurement, ...] = ()
    failed_component: Component | None = None
    whole_model: WholeModelMeasurement | None = None
    phases: PhaseSeconds = PhaseSeconds()

    @property
    def contamination(self) -> str | None:
        """Why a timing of this trial cannot be trusted; None if all of them can."""
        timed = (*self.components, *((self.whole_model,) if self.whole_model is not None else ()))
        return next((part.contamination for part in timed if part.contamination is not None), None)


GIB = 2**30
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""Clock reasons of a device that is slower than usual, because it is too hot or the board slows it down.

The software power cap is not one of them, because a large GPU under load always runs at it, in training as well.
"""
FOREIGN_BUSY_SHARE = 0.05
"""The share of a device's time that other processes may use before a timing counts as contaminated."""

Share = Annotated[float, Field(ge=0, le=1)]


class Conditions(Frozen):
    """The state of a device during the timed repeats; a field is null if the device does not report it.

    `sm_clock_mhz` and `memory_clock_mhz` are medians. `sm_clock_min_mhz` is the lowest clock that was seen, and
    `sm_clock_max_mhz` the highest that the device has. `power_watts` is a median, `temperature_celsius` the highest
    value. `clock_reasons` are all of NVML's reasons for the clocks that occurred. `foreign_processes` and
    `foreign_bytes` are other processes, and their memory, that appeared since the job began. `foreign_busy_share` is
    the share of the device's time that others used, `host_busy_share` the share of the host's CPU time. On a CPU
    `core_wait_share` is the time that the process's threads waited for a core, added up over them and at most 1.

    A wide spread of the repeats is not recorded here; the standard error shows it.
    """

    sm_clock_mhz: float | None = None
    sm_clock_min_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    clock_reasons: tuple[str, ...] = ()
    foreign_processes: Annotated[int, Field(ge=0)] = 0
    foreign_bytes: Annotated[int, Field(ge=0)] = 0
    foreign_busy_share: Share | None = None
    host_busy_share: Share | None = None
    core_wait_share: Share | None = None

    @property
    def contamination(self) -> str | None:
        """Why a timing says little about the device itself; None if there is no such reason.

        A busy host is recorded and contaminates nothing, because it is usual on a machine of few cores, and repeats
        show it.
        """
        if self.foreign_processes or self.foreign_bytes or (self.foreign_busy_share or 0.0) >= FOREIGN_BUSY_SHARE:
            others = "another process" if self.foreign_processes <= 1 else f"{self.foreign_processes} other processes"
            held = f", which took {self.foreign_bytes / GIB:.0f} GiB" if self.foreign_bytes >= GIB else ""
            return f"the device is shared with {others}{held}"
        slowdowns = [reason for reason in self.clock_reasons if reason in SLOWDOWNS]
        return f"the device is throttled: {', '.join(slowdowns)}" if slowdowns else None


CONTAMINATED_ATTEMPTS = 3
"""How often a component is measured before it counts as one that cannot be measured here."""


def judge(measurement: Measurement) -> Measurement:
    """Return a measurement that went well as contaminated if a part of it is; return any other as it is."""
    if measurement.outcome is not Outcome.OK or measurement.contamination is None:
        return measurement
    return measurement.model_copy(update={"outcome": Outcome.CONTAMINATED, "reason": measurement.contamination})


@dataclass(frozen=True, slots=True)
class SizeResult:
    """One micro-batch size of a step that a training process measures itself.

    `seconds` are those of forward and backward of one micro-batch, for each repeat. `peak_bytes` is the highest
    max_memory_allocated of any process; None on a device that does not count it.
    """

    micro_batch_size: int
    outcome: Outcome
    reason: str | None = None
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None

    @property
    def mean_seconds(self) -> float:
        """The mean over the repeats."""
        return sum(self.seconds) / len(self.seconds)
