"""What the profiler reports: seconds and bytes of components, and how a trial ended."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from explorer.cost_model.components import Component
from explorer.spec.base import Frozen
from explorer.spec.candidate import Candidate

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class Outcome(StrEnum):
    """How a trial ended. Failure is data, never an exception.

    `contaminated` ran well, but on a device that was shared or throttled meanwhile.
    """

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    CONTAMINATED = "contaminated"

    @classmethod
    def _missing_(cls, value: object) -> Outcome | None:
        return cls.CONTAMINATED if value == "tainted" else None  # its name in rows that earlier versions stored


class ComponentMeasurement(Frozen):
    """One component, timed back to back (forward, backward, no synchronisation between) and weighed.

    `device_seconds` is the median time of one forward + backward with the host far enough ahead not to matter,
    `host_seconds` the host's time to issue it; whichever sum over the model is larger decides. For the optimizer both
    are of one device's step: its share of the model if the states are sharded. `forward_device_seconds` is the forward
    part of `device_seconds`.

    Bytes are `max_memory_allocated` differences, parameters and gradients excluded: `saved_bytes` is what a forward
    leaves alive for its backward, without recomputation of the whole block; `forward_peak_bytes` and
    `backward_peak_bytes` are the highest level of either pass over the level before the forward.

    Of communication the forward is what is gathered in forward, the backward what is gathered and reduced in backward,
    once for the whole model, with nothing beside it. `slowdown` is what computation beside it loses, in seconds for
    each second of the traffic. `host_seconds` is what the host does about it in each micro-step, `host_once_seconds`
    what it does more in the first and the last of a step, for the whole model. Both are null for other components.
    """

    component: Component
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
    conditions: Conditions | None = None

    @property
    def contamination(self) -> str | None:
        """Why this timing is not to be trusted; null if it is."""
        return self.conditions.contamination if self.conditions is not None else None


class WholeModelMeasurement(Frozen):
    """A whole training step, run as it would be in training: two accumulated micro-steps and the optimizer.

    `micro_step_seconds` and `optimizer_seconds` are medians; `peak_bytes` is max_memory_allocated, `reserved_bytes`
    max_memory_reserved of the step. Devices that train together take three micro-steps: `micro_step_seconds` are of the
    one in the middle, with the traffic that every micro-step has, and `communication_seconds` what the first and the
    last take beyond it, which passes once a step however many there are. Null where nothing was exchanged.
    """

    micro_step_seconds: Seconds
    optimizer_seconds: Seconds
    standard_error_seconds: Seconds
    peak_bytes: Bytes
    reserved_bytes: Bytes
    repeats: Annotated[int, Field(ge=1)]
    communication_seconds: Seconds | None = None
    conditions: Conditions | None = None

    @property
    def contamination(self) -> str | None:
        """Why this timing is not to be trusted; null if it is."""
        return self.conditions.contamination if self.conditions is not None else None


class PhaseSeconds(Frozen):
    """Where a trial's time went, in the profiler and between the processes."""

    process_start: Seconds = 0.0
    build: Seconds = 0.0
    warm_up: Seconds = 0.0
    timed: Seconds = 0.0
    messaging: Seconds = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.process_start + self.build + self.warm_up + self.timed + self.messaging


class Measurement(Frozen):
    """The result of one trial.

    `components` holds what this trial measured; what earlier trials measured is not repeated. With an outcome other
    than ok, `failed_component` says which one failed (null: the candidate as a whole) and `reason` why.
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
        """Why something that was timed is not to be trusted; null if all of it is."""
        timed = (*self.components, *((self.whole_model,) if self.whole_model is not None else ()))
        return next((found.contamination for found in timed if found.contamination is not None), None)


GIB = 2**30
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""Clock reasons of a device that is not itself: too hot, or told by the board to slow down.

The software power cap is none of them: a large GPU under load runs at it all the time, in training as well.
"""
FOREIGN_BUSY_SHARE = 0.05
"""Of a device's time: what another process may use before a timing is no longer one's own."""

Share = Annotated[float, Field(ge=0, le=1)]


class Conditions(Frozen):
    """What was read off a device during the timed repeats; null is what it does not tell.

    `sm_clock_mhz` and `memory_clock_mhz` are medians, `sm_clock_min_mhz` the lowest, `sm_clock_max_mhz` the highest
    that the device has; `power_watts` is a median, `temperature_celsius` the highest. `clock_reasons` are NVML's
    reasons for the clocks, all that occurred. `foreign_processes` and `foreign_bytes` are other processes, and
    memory of others, that appeared since the job began; `foreign_busy_share` is the device time, `host_busy_share` the
    CPU time of the host, that others used.

    A wide spread of the repeats is no part of it: the standard error says so, and the search weighs a timing by it.
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

    @property
    def contamination(self) -> str | None:
        """Why what was timed says little about the device itself; null if nothing speaks against it.

        A busy host is recorded and contaminates nothing: on a machine of few cores it is the rule, and repeats show it.
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
