"""The search for the best micro-batch size of a step that a training process measures itself (`bexp.explore`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Floats
from bexp.explorer.cost.step import memory_limit, required_bytes, static_parts
from bexp.explorer.dimensions.micro_batch_size import MAX_MICRO_BATCH_SIZE
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec, SoftwareVersions
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import ExploredModel, ModelParts, Part
from bexp.explorer.model.target import LOCAL, OWN_ATTENTION
from bexp.explorer.model.training import OptimizerSpec, TrainingSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventDraft
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome, SizeResult
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import Budget, ExplorationRequest
from bexp.explorer.search.confidence import confidence_score, confidences
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import PrunedSpace, prune_space
from bexp.explorer.surrogate.hyperparameters import LOG_STD, RUN_GRID, RUN_MEDIAN

MAX_SIZES = 64
PASSES = 3
"""Forward and backward take about three times the operations of the forward pass."""
_FREE = 1e15
"""Bytes a second of a bandwidth that costs next to nothing: the expected seconds follow from the operations alone."""
_SOME_BYTES = 4
"""Stands for parameters and gradients that nobody counts: zero bytes would take zero seconds, without a logarithm."""


@dataclass(frozen=True, slots=True)
class StepDescription:
    """A step, its device, and the measurement of the first size. Bytes are zero where nothing counts them.

    Memory then decides nothing.
    """

    device_kind: Literal["cpu", "cuda"]
    device_name: str
    num_parameters: int
    torch_version: str
    sizes: tuple[int, ...]
    max_seconds: float
    first: SizeResult
    memory_bytes: int = 0
    context_bytes: int = 0
    held_bytes: int = 0
    """Held by the process between two steps, without gradients."""
    gradient_bytes: int = 0
    sequences: int | None = None
    """A process's share of the effective batch; without it the optimizer's time counts for nothing."""
    optimizer_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The recommended size, None if there is none, and which sizes were not tried because they cannot fit.

    `scatter` is the relative standard deviation between measurements of one size.
    """

    micro_batch_size: int | None = None
    sequences_per_second: float | None = None
    confidence: int | None = None
    scatter: float | None = None
    predicted_out: tuple[int, ...] = ()
    reason: str | None = None


class _StoppedError(Exception):
    """Nothing is measured any more."""


class SizesError(ValueError):
    """The sizes are none that a search takes."""


def search_step(
    description: StepDescription,
    ask: Callable[[int], SizeResult | None],
    tell: Callable[[EventDraft], None] = lambda _: None,
) -> StepAnswer:
    """Return the size to recommend. `ask` measures a size, and returns None to end the search with what is known.

    `tell` takes each event of the search.

    Raises SizesError for more than 64 sizes, or for one above 256.
    """
    if len(description.sizes) > MAX_SIZES or max(description.sizes) > MAX_MICRO_BATCH_SIZE:
        raise SizesError(f"it takes at most {MAX_SIZES} sizes, up to {MAX_MICRO_BATCH_SIZE}")
    request, report = _request(description), _report(description)
    measurer = _Measurer(description, request, report, ask)
    spaces: list[PrunedSpace] = []

    def prune(model: ExploredModel, request: ExplorationRequest, report: DeviceReport) -> PrunedSpace:
        spaces.append(prune_space(model, request, report))
        return spaces[-1]

    best: Recommendation | None = None
    reason = None
    try:
        for progress in explore(request, report, measurer, prune=prune):
            for event in progress.events:
                tell(event)
            best = progress.recommendation or best
            if progress.answer is not None:
                best, reason = progress.answer.recommendation, progress.answer.variants[0].reason
    except _StoppedError:
        reason = None if best is not None else "no size was measured"
    kept = {c.micro_batch_size for space in spaces for c in space.legal.candidates}
    predicted_out = tuple(size for size in description.sizes if spaces and size not in kept)
    if best is None:
        return StepAnswer(predicted_out=predicted_out, reason=reason)
    return _settle(best, measurer, predicted_out)


def _settle(best: Recommendation, measurer: _Measurer, predicted_out: tuple[int, ...]) -> StepAnswer:
    """Return the answer after a check of the search by the timings.

    If the timings prefer another size than the search, that size is recommended. The confidence is the lower of both.
    """
    size, fitting = best.candidate.micro_batch_size, measurer.fitting_sizes()
    if size not in fitting:  # it was not measured, because the sizes around it say enough
        return StepAnswer(size, best.tokens_per_second, best.confidence, predicted_out=predicted_out)
    timings = measurer.timings()
    confidences = timings.confidences(measurer.request.tolerance, fitting)
    size = max(confidences, key=lambda each: (confidences[each], each == size))
    return StepAnswer(
        micro_batch_size=size,
        sequences_per_second=timings.rate(size),
        confidence=min(best.confidence, confidence_score(confidences[size])),
        scatter=timings.scatter,
        predicted_out=predicted_out,
    )


class _Measurer:
    """Answers the trials of an exploration. The first measurement of the first size is there already."""

    def __init__(
        self,
        description: StepDescription,
        request: ExplorationRequest,
        report: DeviceReport,
        ask: Callable[[int], SizeResult | None],
    ) -> None:
        assert report.parts is not None, "a step is measured as a whole"
        self._description = description
        self._static_bytes = static_parts(report.parts, request).total
        self._ask = ask
        self._unused: SizeResult | None = description.first
        self._results = [description.first]
        self._hardware = report.hardware
        self.request = request

    def __call__(self, task: TrialTask) -> Measurement:
        shell = next((c for c in task.components if c.kind is ComponentKind.SHELL), None)
        result = None if shell is None else self._result(task.candidate.micro_batch_size)
        if result is not None and (outcome := result.outcome) is not Outcome.OK:
            reason = result.reason or outcome.value
            # What breaks one size need not break a larger one. Memory and time that are too short at one size are.
            failed = None if outcome is Outcome.CRASHED else shell
            return Measurement(candidate=task.candidate, outcome=outcome, reason=reason, failed_component=failed)
        components = tuple(self._measured(component, result) for component in task.components)
        return Measurement(candidate=task.candidate, outcome=Outcome.OK, components=components)

    def _result(self, size: int) -> SizeResult:
        if self._unused is not None and self._unused.micro_batch_size == size:
            result, self._unused = self._unused, None
            return result
        answer = self._ask(size)
        if answer is None:
            raise _StoppedError
        self._results.append(answer)
        return answer

    def timings(self) -> StepTimings:
        """Return what the timings of the sizes that never failed say."""
        sound = self._sound_sizes()
        seconds: dict[int, list[tuple[float, ...]]] = {size: [] for size in sound}
        for result in self._results:
            if result.micro_batch_size in sound:
                seconds[result.micro_batch_size].append(result.seconds)
        overhead = self._optimizer_seconds / (self._description.sequences or 1)
        return StepTimings(self._description.device_kind, seconds, overhead)

    def fitting_sizes(self) -> set[int]:
        """Return the sizes that never failed, and whose peaks leave the free memory that the search asks for."""
        hardware, request = self._hardware, self.request
        limit = memory_limit(request, hardware)
        above = {
            result.micro_batch_size
            for result in self._results
            if required_bytes(result.peak_bytes or 0, hardware, request.allocator) > limit
        }
        return self._sound_sizes() - above

    def _sound_sizes(self) -> set[int]:
        failed = {result.micro_batch_size for result in self._results if not result.seconds}
        return {result.micro_batch_size for result in self._results} - failed

    def _measured(self, component: Component, result: SizeResult | None) -> ComponentMeasurement:
        """Return the figures of the step of a size, or of the optimizer."""
        seconds, error, passes, repeats, activations = self._optimizer_seconds, 0.0, 1, 1, 0
        if component.kind is ComponentKind.SHELL and result is not None:
            (seconds, error), passes, repeats = mean_and_error(result.seconds), PASSES, len(result.seconds)
            activations = max(0, (result.peak_bytes or 0) - self._static_bytes)
        return ComponentMeasurement(
            component=component,
            device_seconds=seconds,
            host_seconds=0.0,
            forward_device_seconds=seconds / passes,
            standard_error_seconds=error,
            repeats=repeats,
            saved_bytes=0,
            forward_peak_bytes=activations,
            backward_peak_bytes=activations,
        )

    @property
    def _optimizer_seconds(self) -> float:
        return self._description.optimizer_seconds if self._description.sequences is not None else 0.0


def _request(description: StepDescription) -> ExplorationRequest:
    return ExplorationRequest(
        target=LOCAL,
        target_config={},
        micro_batch_size=description.sizes,
        batch_size=description.sequences or max(description.sizes),
        training=TrainingSpec(optimizer=OptimizerSpec(name="sgd", master_dtype=None)),
        budget=Budget(max_seconds=min(description.max_seconds, 86_400.0), max_trials=4 * len(description.sizes)),
    )


def _report(description: StepDescription) -> DeviceReport:
    """Describe the device and the step. The first measurement says how fast the device is with this step.

    The optimizer of the request keeps one number a parameter. The step's own state lies in `held_bytes`, which the
    parameters stand for, less that number.
    """
    first, size = description.first, description.first.micro_batch_size
    flops = 2.0 * description.num_parameters
    seconds = mean_and_error(first.seconds)[0] if first.seconds else 1.0
    counted = description.memory_bytes > 0 and first.peak_bytes is not None
    static = description.held_bytes + description.gradient_bytes
    saved = max(0, (first.peak_bytes or 0) - static) / size if counted else 0.0
    memory = description.memory_bytes if counted else 1 << 50
    hardware = HardwareSpec(
        device_kind=description.device_kind,
        device_name=description.device_name,
        memory_bytes=memory,
        memory_limit_bytes=memory,
        context_bytes=description.context_bytes,
        matmul_flops_per_second={dtype: PASSES * flops * size / max(seconds, 1e-9) for dtype in DType},
        memory_bandwidth_bytes_per_second=_FREE,
        launch_seconds=1e-9,
        versions=SoftwareVersions(python="", torch=description.torch_version),
    )
    gradients = max(_SOME_BYTES, description.gradient_bytes if counted else 0)
    parameters = max(_SOME_BYTES, description.held_bytes - gradients if counted else 0)
    parts = ModelParts(
        target=LOCAL,
        target_version="",
        name="step",
        dtype=DType.FLOAT32,
        seq_length=1,
        layers=(),
        kinds=(),
        shell=Part(
            num_parameters=description.num_parameters,
            parameter_bytes=parameters,
            trainable_bytes=gradients,
            flops_per_token=flops,
            saved_bytes_per_token=saved,
        ),
        output_bytes_per_token=1,
        num_parameters=description.num_parameters,
        parameter_bytes=parameters,
        trainable_bytes=gradients,
    )
    own = BackendSupport(name=OWN_ATTENTION, usable=True)
    return DeviceReport(hardware=hardware, attention_backends=(own,), default_attention=OWN_ATTENTION, parts=parts)


NUM_SAMPLES = 4096
FEW_REPEATS_ERROR = 0.1
"""The relative standard error of a measurement with one repeat alone."""


def mean_and_error(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the repeats and its standard error; an error of a tenth if there is one repeat alone."""
    mean = sum(seconds) / len(seconds)
    if len(seconds) < 2:
        return mean, mean * FEW_REPEATS_ERROR
    variance = sum((each - mean) ** 2 for each in seconds) / (len(seconds) - 1)
    return mean, math.sqrt(variance / len(seconds))


class StepTimings:
    """The posterior of the speed of S sizes, given one or more measurements of each.

    `measurements` holds the seconds of the repeats of each measurement, by size. `overhead_seconds` are the seconds
    that each sequence adds to them: its share of the optimizer's step.
    """

    def __init__(
        self, device_kind: str, measurements: Mapping[int, Sequence[Sequence[float]]], overhead_seconds: float = 0.0
    ) -> None:
        self.sizes = sorted(measurements)
        self._rates: dict[int, float] = {}
        number, within, squares, logs = [], [], [], []
        for size in self.sizes:
            figures = [mean_and_error(seconds) for seconds in measurements[size]]
            means = np.array([mean + overhead_seconds * size for mean, _ in figures])
            errors = np.array([error for _, error in figures]) / means
            self._rates[size] = size / float(means.mean())
            number.append(float(len(figures)))
            within.append(float(np.mean(errors**2)))
            squares.append(float(((np.log(means) - np.log(means).mean()) ** 2).sum()))
            logs.append(math.log(size) - float(np.log(means).mean()))
        self._within_S = np.array(within)
        run_R = _run_posterior(RUN_MEDIAN[device_kind], np.array(number), self._within_S, np.array(squares))
        self._mean_run = float(run_R @ RUN_GRID)
        rng = np.random.default_rng(0)
        run_N = rng.choice(RUN_GRID, NUM_SAMPLES, p=run_R)
        std_NS = np.sqrt((run_N[:, None] ** 2 + self._within_S) / np.array(number))
        self._logs_NS: Floats = np.array(logs) + std_NS * rng.standard_normal(std_NS.shape)

    @property
    def scatter(self) -> float:
        """The relative standard deviation of a measurement, expected after all that were made."""
        return math.sqrt(self._mean_run**2 + float(self._within_S.mean()))

    def rate(self, size: int) -> float:
        """Return the sequences a second of a size, by the mean seconds of its measurements."""
        return self._rates[size]

    def confidences(self, tolerance: float, among: Collection[int]) -> dict[int, float]:
        """Return, for each size of `among`, the probability that it is within `tolerance` of the best of them, 0..1."""
        kept = [size for size in self.sizes if size in among]
        logs_NA = self._logs_NS[:, [self.sizes.index(size) for size in kept]]
        rates_NA = np.exp(logs_NA)
        return dict(zip(kept, confidences(rates_NA, rates_NA, tolerance).tolist(), strict=True))


def _run_posterior(median: float, number_S: Floats, within_S: Floats, squares_S: Floats) -> Floats:
    """Probability of each value of RUN_GRID, given how measurements of one size scatter around their mean."""
    variance_RS = RUN_GRID[:, None] ** 2 + within_S
    logs = -0.5 * (np.log(RUN_GRID / median) / LOG_STD) ** 2
    logs -= 0.5 * ((number_S - 1) * np.log(variance_RS) + squares_S / variance_RS).sum(axis=1)
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())
