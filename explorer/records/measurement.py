"""The reports of the profiler: seconds and bytes of components, and the outcome of a trial."""

from __future__ import annotations

import operator
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
    """The end of a trial. Failure is data, never an exception.

    `contaminated` means that the trial ran well, but on a device that was shared or throttled during it.
    """

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    CONTAMINATED = "contaminated"


class BatchFigures(Frozen):
    """The figures of one of several micro-batches of a component; the fields are those of `ComponentFigures`."""

    positions: Annotated[int, Field(ge=1)]
    device_seconds: Seconds
    saved_bytes: Bytes
    forward_peak_bytes: Bytes
    backward_peak_bytes: Bytes


class ComponentFigures(Frozen):
    """The time and the memory of one component, run back to back: forward, then backward, without synchronising.

    Seconds are summed over the model, those of the device and of the host apart, and the larger sum counts. Bytes are
    differences of `max_memory_allocated`, without parameters and gradients. With texts of unequal lengths, seconds are
    the mean over an epoch's micro-batches, and bytes those of the longest.
    """

    device_seconds: Seconds = Field(
        description="The median time of one forward and backward while the host is far ahead of the device. Of an "
        "optimizer, the time of one device's step on its share of the states. Of communication, the time of the whole "
        "model's traffic with no computation: forward gathers, and backward gathers and reduces."
    )
    host_seconds: Seconds = Field(
        description="The host's time to issue them; of communication, for the whole model in each micro-step."
    )
    forward_device_seconds: Seconds = Field(description="The forward part of `device_seconds`.")
    standard_error_seconds: Seconds
    repeats: Annotated[int, Field(ge=1)]
    saved_bytes: Bytes = Field(
        description="Alive between forward and backward, unless the block is recomputed as a whole."
    )
    forward_peak_bytes: Bytes = Field(description="The peak of forward above the level before it.")
    backward_peak_bytes: Bytes = Field(description="The peak of backward above the level before forward.")
    slowdown: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Of communication: the seconds by which each second of traffic delays the computation under way.",
    )
    host_once_seconds: Seconds | None = Field(
        None, description="Of communication: the host's additional time in the first and last micro-step of a step."
    )
    waiting_forward_seconds: Seconds | None = Field(
        None,
        description="Of a block whose experts devices share: the time of one of several forwards in a row, run by all "
        "devices together. The host waits for the device in the middle of each.",
        exclude_if=is_null,
    )
    together_forward_seconds: Seconds | None = Field(
        None,
        description="Of such a block: the device's time of forward on all devices together, with the host's wait. "
        "`device_seconds` is that of a device alone, which copies its own rows in place of exchanges.",
        exclude_if=is_null,
    )
    together_backward_seconds: Seconds | None = Field(
        None, description="Of such a block: the same of backward.", exclude_if=is_null
    )
    together_host_backward_seconds: Seconds | None = Field(
        None, description="Of such a block: the host's time to issue backward.", exclude_if=is_null
    )
    batches: tuple[BatchFigures, ...] | None = Field(
        None, description="The measured micro-batches of texts, as in `TextBatches.measured`.", exclude_if=is_null
    )
    new_width_seconds: Seconds | None = Field(
        None,
        description="The additional time when a process first runs rows of a width. Other seconds leave it out; those "
        "of a training command have it as often as `new_width_share` says.",
        exclude_if=is_null,
    )
    new_width_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Of a training command: the share of an epoch's micro-batches that are the first of their width.",
        exclude_if=is_null,
    )
    grad_accum_steps: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Micro-batches of an optimizer step of a training command, as they were counted.",
        exclude_if=is_null,
    )
    compile_seconds: tuple[Seconds, ...] = Field(
        (),
        description="Of torch.compile in a training command: of each micro-step in which code was compiled. Other "
        "seconds leave it out.",
        exclude_if=operator.not_,
    )
    num_shapes: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Different shapes of the micro-batches of a training command that ran.", exclude_if=is_null
    )
    busy_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Of a training command: the share of the timed seconds in which the device ran a kernel, in the "
        "samples of its driver.",
        exclude_if=is_null,
    )
    span_seconds: tuple[Seconds, Seconds] | None = Field(
        None,
        description="Of a training command: the mean micro-step in the fastest and in the slowest second that was "
        "timed.",
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

    Devices that train together run three micro-steps, and devices that share the model `num_micro_batches`. With texts
    of unequal lengths, the micro-steps are those of `TextBatches.measured`. Seconds are medians.
    """

    micro_step_seconds: Seconds = Field(
        description="Of one micro-step. Of devices that train together, the second one, with the traffic that every "
        "micro-step has. Of texts of unequal lengths, the mean over an epoch. Of a shared model, the time of all "
        "micro-batches with exchanges and bubbles, divided by their number."
    )
    optimizer_seconds: Seconds
    standard_error_seconds: Seconds
    peak_bytes: Bytes = Field(description="The step's max_memory_allocated.")
    reserved_bytes: Bytes = Field(description="The step's max_memory_reserved.")
    repeats: Annotated[int, Field(ge=1)]
    communication_seconds: Seconds | None = Field(
        None,
        description="The additional time of the first and the last micro-step, once a step whatever their number; null "
        "if nothing was exchanged.",
    )
    conditions: Conditions | None = None
    num_micro_batches: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The micro-batches of a step of devices that share the model; null for others."
    )

    @property
    def contamination(self) -> str | None:
        """Why this timing cannot be trusted; None if it can."""
        return self.conditions.contamination if self.conditions is not None else None

    @property
    def shared_step_seconds(self) -> float:
        """The seconds of the step that devices which share the model have run."""
        assert self.num_micro_batches is not None, "devices have run it together"
        return self.num_micro_batches * self.micro_step_seconds + self.optimizer_seconds


class PhaseSeconds(Frozen):
    """The seconds of a trial by phase, in the profiler and between the processes."""

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

    `components` are those that this trial measured, without those of earlier trials. If the outcome is not ok,
    `failed_component` is the component that failed (None: the candidate as a whole), and `reason` the cause. A trial
    that is ok has a `reason` if it was measured twice.
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

    A wide spread of the repeats is not recorded here, because the standard error shows it.
    """

    sm_clock_mhz: float | None = Field(None, description="The median.")
    sm_clock_min_mhz: float | None = Field(None, description="The lowest clock during the repeats.")
    sm_clock_max_mhz: float | None = Field(None, description="The highest clock of the device.")
    memory_clock_mhz: float | None = Field(None, description="The median.")
    power_watts: float | None = Field(None, description="The median.")
    temperature_celsius: float | None = Field(None, description="The highest value.")
    clock_reasons: tuple[str, ...] = Field((), description="All of NVML's reasons for clocks that occurred.")
    foreign_processes: Annotated[int, Field(ge=0)] = Field(
        0, description="Other processes on the device that appeared since the job began."
    )
    foreign_bytes: Annotated[int, Field(ge=0)] = Field(0, description="The device memory of those processes.")
    foreign_busy_share: Share | None = Field(
        None, description="The share of the device's time that other processes used."
    )
    host_busy_share: Share | None = Field(
        None, description="The share of the host's CPU time that other programs used."
    )
    core_wait_share: Share | None = Field(
        None, description="On a CPU: the time that the process's threads waited for a core, summed, at most 1."
    )

    @property
    def contamination(self) -> str | None:
        """Why a timing says little about the device itself; None if there is no such reason.

        A busy host contaminates nothing: it is usual on a machine of few cores, and repeats show it.
        """
        if self.foreign_processes or self.foreign_bytes or (self.foreign_busy_share or 0.0) >= FOREIGN_BUSY_SHARE:
            others = "another process" if self.foreign_processes <= 1 else f"{self.foreign_processes} other processes"
            held = f", which took {self.foreign_bytes / GIB:.0f} GiB" if self.foreign_bytes >= GIB else ""
            return f"the device is shared with {others}{held}"
        slowdowns = [reason for reason in self.clock_reasons if reason in SLOWDOWNS]
        return f"the device is throttled: {', '.join(slowdowns)}" if slowdowns else None


CONTAMINATED_ATTEMPTS = 3
"""After so many contaminated measurements, a component counts as one that cannot be measured here."""


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
