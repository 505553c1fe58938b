"""What the profiler reports: seconds and bytes of components, and how a trial ended."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from explorer.candidates import Candidate
from explorer.components import Component
from explorer.conditions import Conditions
from explorer.frozen import Frozen

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class Outcome(StrEnum):
    """How a trial ended. Failure is data, never an exception.

    `tainted` ran well, but on a device that was shared or throttled meanwhile.
    """

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    TAINTED = "tainted"


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
    def taint(self) -> str | None:
        """Why this timing is not to be trusted; null if it is."""
        return self.conditions.taint if self.conditions is not None else None


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
    def taint(self) -> str | None:
        """Why this timing is not to be trusted; null if it is."""
        return self.conditions.taint if self.conditions is not None else None


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
    def taint(self) -> str | None:
        """Why something that was timed is not to be trusted; null if all of it is."""
        timed = (*self.components, *((self.whole_model,) if self.whole_model is not None else ()))
        return next((found.taint for found in timed if found.taint is not None), None)
