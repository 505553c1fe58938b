"""A custom target for the profiler: its model is measured whole, one setting at a time."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.step import memory_limit, static_parts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import MAX_SETTINGS, ModelParts, Part
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentMeasurement, Outcome
from bexp.explorer.request.request import ExplorationRequest
from bexp.tune.placeholders import describe_choice
from bexp.workers.instruments.failures import TargetKilledError, TrialFailedError, UnsupportedTrialError
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.process.exit_status import KILLED_HINT
from bexp.workers.targets.custom.command import CommandProcess
from bexp.workers.targets.custom.process import TargetProcess

_log = logging.getLogger(__name__)

PASSES = 3
"""A backward pass takes twice the operations of the forward pass."""
COMPARE_SHARE = 0.1
"""The share of the budget that a command may spend on the comparison of its gradients."""
MICRO_STEP_FIGURES = ("num_shapes", "busy_share", "span_seconds", "new_width_seconds", "new_width_share")
"""What a training command also says of its micro-steps, if it knows it."""
OPEN_SECONDS = 150.0
"""The longest that importing, building and describing may take; a profiler that reports has a deadline of 180 s."""


@dataclass(frozen=True, slots=True)
class TargetSource:
    """The source of a target: its name, its version, and the file or module with its class."""

    name: str
    version: str
    reference: str

    @classmethod
    def of_file(cls, name: str, reference: str) -> TargetSource:
        """Return the source of a target in a file: `/home/me/train.py:Target`."""
        return cls(name, Path(reference).name, reference)


class CustomTarget:
    """One job's target on one device. Each exploration has a fresh process, and another one after a failure.

    If a process is killed for no known reason before it has described the model, another one is started once. A kill in
    a trial is the trial's outcome, and the parent of the profiler runs the trial once more.
    """

    def __init__(
        self,
        source: TargetSource,
        request: ExplorationRequest,
        device: str,
        *,
        start: Callable[[], CommandProcess] | None = None,
    ) -> None:
        """Check the request. `start` starts a command that answers instead of a target's process.

        Raises:
            UnsupportedTrialError: the request asks for something that no custom target can do.
        """
        for what, asked in (
            ("eval mode", request.mode == "eval"),
            ("torch.compile by the profiler", request.space.compiles),
            ("LoRA by the profiler", request.training.lora is not None),
            (
                "sharding by the profiler",
                request.mode == "train" and request.space.highest_sharding is not Sharding.NONE,
            ),
        ):
            if asked:
                raise UnsupportedTrialError(f"target '{source.name}' is measured as its code trains: no {what}")
        self._source = source
        self._request = request
        self._device = device
        self._start = start
        self._process: TargetProcess | CommandProcess | None = None
        self._choices: dict[str, dict[str, Any]] = {}
        self._open_choice: str | None = None
        self._hardware: HardwareSpec | None = None
        self._parts: ModelParts | None = None
        self._last: tuple[PhaseClock, Candidate, dict[str, Any]] | None = None

    def report(self, hardware: HardwareSpec) -> DeviceReport:
        """Build the model, and describe it by figures of steps with one and two sequences.

        Raises:
            UnsupportedTrialError: the target cannot be imported or built, or its step fails with one sequence.
        """
        self._hardware = hardware
        try:
            introduction = self._introduce_alive()
        except TrialFailedError as error:
            if self._start is not None:  # a command's errors name it
                raise UnsupportedTrialError(str(error)) from error
            how = "" if error.outcome is Outcome.UNSUPPORTED else f"{error.outcome}: "
            raise UnsupportedTrialError(f"target '{self._source.name}': {how}{error}") from error
        self._open_choice = next(iter(self._choices), None)
        self._parts = self._describe(introduction)
        own = BackendSupport(name=OWN_ATTENTION, usable=True)
        return DeviceReport(
            hardware=hardware, attention_backends=(own,), default_attention=OWN_ATTENTION, parts=self._parts
        )

    def measure_component(self, component: Component, candidate: Candidate, clock: PhaseClock) -> ComponentMeasurement:
        """Measure the whole of a micro-step, or the optimizer's step.

        Raises:
            TrialFailedError: the target's outcome.
        """
        assert self._parts is not None, "report() comes first"
        figures = self._measure(candidate, clock)
        optimizer = component.kind is ComponentKind.OPTIMIZER
        seconds = figures["optimizer_seconds"] if optimizer else figures["micro_step_seconds"]
        activations = 0 if optimizer else max(0, figures["peak_bytes"] - static_parts(self._parts, self._request).total)
        return ComponentMeasurement(
            component=component,
            device_seconds=seconds,
            host_seconds=0.0,
            forward_device_seconds=seconds if optimizer else seconds / 3,
            standard_error_seconds=figures["standard_error_seconds"],
            repeats=figures["repeats"],
            saved_bytes=0,
            forward_peak_bytes=activations,
            backward_peak_bytes=activations,
            grad_accum_steps=figures.get("grad_accum_steps"),
            compile_seconds=() if optimizer else tuple(figures.get("compile_seconds", ())),
            **({} if optimizer else {name: figures.get(name) for name in MICRO_STEP_FIGURES}),
        )

    def rest(self) -> None:
        """Keep the model for the next trial: it lies in the process of the target, not in this one."""

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None

    @property
    def _deadline(self) -> float:
        return self._request.budget.trial_timeout_seconds

    def _measure(self, candidate: Candidate, clock: PhaseClock) -> dict[str, Any]:
        """Return the figures of a candidate's step, which the components of one trial share, as they share a clock."""
        if self._last is not None and self._last[0] is clock and self._last[1] == candidate:
            return self._last[2]
        self._last = None
        until = time.monotonic() + self._deadline
        with clock.phase("build"):
            if self._process is None or not self._process.alive or candidate.settings != self._open_choice:
                self._open(candidate.settings, min(until, time.monotonic() + OPEN_SECONDS))
            assert self._process is not None, "it was opened"
            self._process.prepare(candidate.micro_batch_size, max(0.0, until - time.monotonic()))
        with clock.phase("timed"):
            figures = self._ask("measure", until, micro_batch_size=candidate.micro_batch_size)
        self._last = (clock, candidate, figures)
        return figures

    def _introduce_alive(self) -> dict[str, Any]:
        """Return a process's description of the model. If it is killed for no known reason, another one is asked.

        Both have OPEN_SECONDS together. After more than half of them another one would not be ready in time.
        """
        begun = time.monotonic()
        try:
            return self._introduce(begun + OPEN_SECONDS)
        except TargetKilledError as error:
            killed = error
        passed = time.monotonic() - begun
        if passed > OPEN_SECONDS / 2:
            late = f"after {passed:.0f} of the {OPEN_SECONDS:g} s for importing and building, too late for another try"
            raise TrialFailedError(killed.outcome, f"{killed}, {late}; {KILLED_HINT}") from killed
        _log.warning("the target is started once more: %s", killed)
        try:
            return self._introduce(begun + OPEN_SECONDS)
        except TargetKilledError as error:
            raise TrialFailedError(error.outcome, f"twice: {error}; {KILLED_HINT}") from error
        except TrialFailedError as error:
            raise TrialFailedError(error.outcome, f"{error}; before, {killed}, and it was started once more") from error

    def _introduce(self, until: float) -> dict[str, Any]:
        """Start a process, which builds the model of the first choice, and return its description."""
        self._choices = _choices(self._open(None, until)["dimensions"])
        return self._ask("describe", until)

    def _ask(self, command: str, until: float, **arguments: Any) -> dict[str, Any]:
        """Return the reply of the open process, which has to come before `until` and within a trial's deadline."""
        assert self._process is not None, "it was opened"
        left = max(0.0, until - time.monotonic())
        return self._process.ask(command, min(self._deadline, left), **arguments)

    def _open(self, choice: str | None, until: float) -> dict[str, Any]:
        assert self._hardware is not None, "report() comes first"
        self.close()
        self._process = TargetProcess() if self._start is None else self._start()
        self._open_choice = choice
        return self._ask(
            "open",
            until,
            reference=self._source.reference,
            config=config_of(self._request),
            choice=None if choice is None else self._choices[choice],
            device=self._device,
            optimizer=self._request.training.optimizer.name,
            seed=self._request.seed,
            memory_limit_bytes=memory_limit(self._request, self._hardware),
            context_bytes=self._hardware.context_bytes,
            **({} if self._start is None else {"compare_seconds": COMPARE_SHARE * self._request.budget.max_seconds}),
        )

    def _describe(self, introduction: Mapping[str, Any]) -> ModelParts:
        parameters, trainable = introduction["num_parameters"], introduction["trainable_bytes"]
        length = introduction["seq_length"]
        saved = introduction["saved_bytes"] / length
        return ModelParts(
            target=self._source.name,
            target_version=self._source.version,
            name=introduction["class_name"],
            class_name=introduction["class_name"],
            dtype=_dtype_of(introduction),
            seq_length=length,
            layers=(),
            kinds=(),
            shell=Part(
                num_parameters=parameters,
                parameter_bytes=introduction["parameter_bytes"],
                trainable_bytes=trainable,
                flops_per_token=self._flops_per_token(introduction),
                saved_bytes_per_token=saved,
            ),
            output_bytes_per_token=1,
            num_parameters=parameters,
            parameter_bytes=introduction["parameter_bytes"],
            trainable_bytes=trainable,
            settings=tuple(self._choices),
            batch_size=introduction.get("batch_size"),
            micro_batch_size=introduction.get("micro_batch_size"),
            num_steps=introduction.get("num_steps"),
            samples=introduction.get("samples"),
            evaluation=introduction.get("evaluation"),
            switched_off=tuple(introduction.get("switched_off", ())),
            gradients=introduction.get("gradients"),
            processes=introduction.get("processes"),
        )

    def _flops_per_token(self, introduction: Mapping[str, Any]) -> float:
        """Operations of a token's forward pass: those of dense layers, or the most that its seconds allow.

        The peak of the weights' number format turns seconds into operations, because the roofline divides by it.
        """
        seconds = introduction.get("seconds_per_token")
        if seconds is None or self._hardware is None:
            return 2.0 * float(introduction["num_parameters"])
        return float(seconds) * self._hardware.matmul_peak(_dtype_of(introduction)) / PASSES


def _dtype_of(introduction: Mapping[str, Any]) -> DType:
    return DType(introduction["dtype"]) if introduction["dtype"] in set(DType) else DType.FLOAT32


def config_of(request: ExplorationRequest) -> dict[str, Any]:
    """Return the configuration of a target's model: the request's target_config, its config.json, or its model."""
    if request.target_config is not None:
        return request.target_config
    return request.explored.as_config()


def _choices(dimensions: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Every combination of a target's dimensions by its text; none without dimensions.

    Raises:
        TrialFailedError: a dimension has no value, or there are too many combinations.
    """
    if not dimensions:
        return {}
    choices = [dict(zip(dimensions, values, strict=True)) for values in itertools.product(*dimensions.values())]
    if not 1 <= len(choices) <= MAX_SETTINGS:
        reason = f"its dimensions have {len(choices)} combinations; 1 to {MAX_SETTINGS} can be explored"
        raise TrialFailedError(Outcome.UNSUPPORTED, reason)
    return {describe_choice(each): each for each in choices}
