"""A trial: the request to the profiler, the interface to run it, and the stored result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from bexp.explorer.cost.collectives import is_communication_timed
from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.amounts import RateUnit, bytes_text, is_in_tokens, rate_text
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.extensions import Extended
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.plan import SharedRun
from bexp.explorer.request.request import ExplorationRequest

SharedRunOf = Annotated[SharedRun, Extended()]


class TrialKind(StrEnum):
    """The kind of a trial: it times the components of a candidate that are not known yet, or runs the whole model."""

    COMPONENTS = "components"
    WHOLE_MODEL = "whole_model"


class TrialTask(Frozen):
    """A request to the profiler."""

    number: Annotated[int, Field(ge=0)]
    kind: TrialKind
    model: ExploredModel = Field(description="The variant that the candidate is for.")
    candidate: Candidate
    components: tuple[Component, ...] = Field((), description="To measure, in this order.")
    again: bool = Field(False, description="An earlier trial measured them all: the device is noisy.")
    timeout_seconds: Annotated[float, Field(gt=0)]
    num_processes: Annotated[int, Field(ge=1)] = Field(
        1,
        description="Processes that run it together, a device each: a multiple of every context_parallel_size needed.",
    )

    shared_run: SharedRunOf | None = Field(None, description="Of a whole model that devices share.")

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The groups of processes that exchange something in it: their size, and how far apart their members are."""
        groups = [] if self.shared_run is None else list(self.shared_run.groups)
        groups += [(c.exchange.size, c.exchange.stride) for c in self.components if c.exchange is not None]
        groups += [(c.expert_parallel_size, 1) for c in self.components if c.expert_parallel_size > 1]
        return tuple(dict.fromkeys(groups))

    @property
    def context_parallel_sizes(self) -> tuple[int, ...]:
        """The numbers of processes that must share a sequence in this trial, ascending, without 1."""
        if self.kind is TrialKind.WHOLE_MODEL:
            sizes = {self.candidate.context_parallel_size} - {1}
        else:
            sizes = {component.context_parallel_size for component in self.components if component.communicates}
        return tuple(sorted(sizes))

    @model_validator(mode="after")
    def _enough_processes(self) -> Self:
        for size in self.context_parallel_sizes:
            if self.num_processes % size:
                raise ValueError(f"num_processes ({self.num_processes}) is no multiple of context_parallel_size {size}")
        return self


def count_processes(
    kind: TrialKind,
    candidate: Candidate,
    components: Sequence[Component],
    request: ExplorationRequest,
    hardware: HardwareSpec,
) -> int:
    """Return the number of processes, each on one device, that run a trial together.

    If the profiler has all devices that train together, every trial takes them all: in training all compute at the same
    time, and a step waits for the slowest. Otherwise a trial of components takes the largest number of devices that
    share a sequence in one of them. A whole model takes one group that shares sequences.
    """
    if is_communication_timed(request, hardware):
        return request.num_devices
    if kind is TrialKind.COMPONENTS:
        return max((c.context_parallel_size for c in components if c.communicates), default=1)
    return request.num_devices if request.num_devices <= hardware.num_devices else candidate.context_parallel_size


WHOLE_MODEL_TIMEOUT_FACTOR = 3
"""A whole model may take this many times a trial's timeout, because it builds all its layers."""


def timeout_seconds(kind: TrialKind, request: ExplorationRequest) -> float:
    """Return the time limit of a trial."""
    factor = WHOLE_MODEL_TIMEOUT_FACTOR if kind is TrialKind.WHOLE_MODEL else 1
    return factor * request.budget.trial_timeout_seconds


Measure = Callable[[TrialTask], Measurement]
"""Runs a trial. A crash, a hang or an OOM of a candidate is an `Outcome` and never an exception."""


class TrialExecutor(ABC):
    """Runs up to `capacity` trials at once, all on equal hardware. It is a `Measure`, too.

    One caller submits and waits. A candidate that fails is an `Outcome`, as with every `Measure`, never an exception.
    """

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The number of trials that may be in flight, at least 1. It may change while a job runs."""

    @abstractmethod
    def submit(self, task: TrialTask) -> None:
        """Begin a trial; no other trial in flight has its number."""

    @abstractmethod
    def wait(self) -> tuple[TrialTask, Measurement]:
        """Wait for the next trial in flight to end; there is at least one."""

    def __call__(self, task: TrialTask) -> Measurement:
        """Run a trial while nothing else is in flight."""
        self.submit(task)
        done, measurement = self.wait()
        assert done.number == task.number, "another trial was in flight"
        return measurement


class OneAtATime(TrialExecutor):
    """Runs one trial at a time, when it is waited for."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._task: TrialTask | None = None

    @property
    def capacity(self) -> int:
        """One trial."""
        return 1

    def submit(self, task: TrialTask) -> None:
        """Keep the task until it is waited for."""
        assert self._task is None, "a trial is in flight"
        self._task = task

    def wait(self) -> tuple[TrialTask, Measurement]:
        """Run the task that was submitted."""
        task, self._task = self._task, None
        assert task is not None, "no trial is in flight"
        return task, self._measure(task)


def executor_of(measure: Measure) -> TrialExecutor:
    """Return `measure` itself if it is an executor, else one that runs a trial at a time with it."""
    return measure if isinstance(measure, TrialExecutor) else OneAtATime(measure)


class Trial(Frozen):
    """A finished trial, as stored: its prediction, its measurement, and the figures that this composes to.

    A figure is null if the outcome does not allow it; so is the throughput of a trial that measured what all candidates
    share.
    """

    number: Annotated[int, Field(ge=0)]
    kind: TrialKind
    measurement: Measurement
    predicted_peak_bytes: int | None = Field(
        None, description="The prediction just before the trial; of a whole model, the composed peak."
    )
    measured_peak_bytes: int | None = Field(
        None,
        description="Composed of measured components; of a whole model, the peak of its run. Null if a component was "
        "not measured by then: the figures are predicted in part.",
    )
    predicted_tokens_per_second: float | None = None
    tokens_per_second: float | None = None
    rate_unit: RateUnit = Field(RateUnit.TOKENS, description="What tokens_per_second counts.", exclude_if=is_in_tokens)
    suggest_seconds: Annotated[float, Field(ge=0)] = 0.0
    seconds: Annotated[float, Field(ge=0)] = Field(0.0, description="Wall time of the measurement, messages included.")
    shared_run: SharedRunOf | None = Field(None, description="Of a whole model that devices share.")

    @property
    def candidate(self) -> Candidate:
        """The candidate that was tried."""
        return self.measurement.candidate

    @property
    def is_predicted(self) -> bool:
        """Whether its figures are predicted in part: not every component of its candidate was measured by then."""
        return self.measured_peak_bytes is None

    @property
    def peak_bytes(self) -> int | None:
        """The peak as measured, else as predicted."""
        return self.predicted_peak_bytes if self.is_predicted else self.measured_peak_bytes

    def describe_figures(self, of: str = "") -> str:
        """Return the tokens/s `of` a device and the peak, and whether they are predicted in part."""
        peak = "" if self.peak_bytes is None else f", peak {bytes_text(self.peak_bytes)}"
        predicted = ", predicted in part" if self.is_predicted else ""
        return f"{rate_text(self.tokens_per_second or 0.0, self.rate_unit)}{of}{peak}{predicted}"
