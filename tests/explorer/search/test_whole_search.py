"""The search over a model that is measured whole, such as that of a training command."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from bexp.explorer.answers.answer import Explored, answer_text
from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import GradientComparison, ModelParts, Part, SampleLengths
from bexp.explorer.model.target import LOCAL, OWN_ATTENTION
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Measurement, Outcome, PhaseSeconds
from bexp.explorer.records.recommendation import Recommendation, Role
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from tests.explorer.alternatives import other_of
from tests.explorer.cost.tiny import hardware
from tests.explorer.measurements import measured

RISING = {1: 9.6, 2: 17.3, 4: 35.0, 8: 50.9, 16: 55.3}
"""Samples a second of each micro-batch size; those of GPT-2 on an H100, in a plain loop."""
FLAT = {1: 40.0, 2: 50.0, 4: 55.0, 8: 56.0, 16: 56.2}
WITH_A_PEAK = {1: 40.0, 2: 50.0, 4: 55.0, 8: 52.0, 16: 48.0}
BYTES = 1 << 30


class Command:
    """Answers as a training command does whose steps differ by `noise`, and which has no memory from a size on.

    Its roofline takes `off` times as long as its own size does.
    """

    def __init__(
        self,
        speeds: dict[int, float],
        noise: float,
        own: int,
        *,
        full_from: int = 1 << 10,
        limit: int = BYTES << 10,
        off: float = 1.0,
    ) -> None:
        self.speeds, self.noise, self.own, self.full_from, self.limit = speeds, noise, own, full_from, limit
        self.off = off
        self.tasks: list[TrialTask] = []
        self.found: list[Recommendation] = []
        self._rng = np.random.default_rng(0)

    def report(self, device_kind: Literal["cpu", "cuda"]) -> DeviceReport:
        flops = self.off * 1e12 / 3 / self.speeds[self.own]
        size = {"num_parameters": 1000, "parameter_bytes": 4000, "trainable_bytes": 4000}
        parts = ModelParts.model_validate(
            {
                **{"target": LOCAL, "target_version": "1", "name": "train", "class_name": "Net", "dtype": "float32"},
                **{"seq_length": 1, "layers": (), "kinds": (), "output_bytes_per_token": 1, **size},
                "shell": Part(**size, flops_per_token=flops, saved_bytes_per_token=1.0),
                "batch_size": max(self.speeds),
                "micro_batch_size": self.own,
            }
        )
        device = hardware(device_kind, memory_bytes=self.limit, memory_limit_bytes=self.limit)
        device = device.model_copy(update={"matmul_flops_per_second": {DType.FLOAT32: 1e12}})
        own = BackendSupport(name=OWN_ATTENTION, usable=True)
        return DeviceReport(hardware=device, attention_backends=(own,), default_attention=OWN_ATTENTION, parts=parts)

    def __call__(self, task: TrialTask) -> Measurement:
        self.tasks.append(task)
        size = task.candidate.micro_batch_size
        if size >= self.full_from:
            full, failed = Outcome.OUT_OF_MEMORY, task.components[0]
            return Measurement(candidate=task.candidate, outcome=full, reason="full", failed_component=failed)
        found = []
        for component in task.components:
            is_optimizer = component.kind is ComponentKind.OPTIMIZER
            true, needed = (1e-3, 0) if is_optimizer else (size / self.speeds[size], BYTES + size * 1000)
            seconds = true * float(np.exp(self.noise * self._rng.standard_normal()))
            peaks = {"forward_peak_bytes": needed, "backward_peak_bytes": needed}
            found.append(measured(component, seconds, standard_error_seconds=2e-3 * seconds, **peaks))
        return Measurement(
            candidate=task.candidate,
            outcome=Outcome.OK,
            components=tuple(found),
            phases=PhaseSeconds(build=10.0, warm_up=0.0, timed=3.0),
        )

    def tune(self, device_kind: Literal["cpu", "cuda"]) -> Recommendation | None:
        request = ExplorationRequest.model_validate({"target": LOCAL})
        answer = None
        for progress in explore(request, self.report(device_kind), self, clock=lambda: 13.0 * len(self.tasks)):
            if progress.trial is not None and progress.recommendation is not None:
                self.found.append(progress.recommendation)
            answer = progress.answer
        return None if answer is None else answer.recommendation


@pytest.mark.parametrize("own", [1, 4, 16])
@pytest.mark.parametrize(("speeds", "best"), [(RISING, {16}), (FLAT, {8, 16}), (WITH_A_PEAK, {4})])
@pytest.mark.parametrize(("device_kind", "noise"), [("cuda", 0.003), ("cpu", 0.03)])
def test_the_confidence_follows_from_what_was_measured_and_each_trial_measures_a_whole_step(
    device_kind: Literal["cpu", "cuda"], noise: float, speeds: dict[int, float], best: set[int], own: int
) -> None:
    command = Command(speeds, noise, own)
    answer = command.tune(device_kind)
    assert answer is not None
    assert answer.candidate.micro_batch_size in best
    assert answer.confidence >= (60 if best == {8, 16} else 90)  # noise hides which of the two is faster
    assert {task.kind for task in command.tasks} == {TrialKind.COMPONENTS}
    assert answer.whole_model is None
    sizes = [task.candidate.micro_batch_size for task in command.tasks]
    early = [each.confidence for number, each in enumerate(command.found, 1) if len(set(sizes[:number])) == 1]
    assert early
    assert max(early) <= 25, "one size of at least four that may be the best was measured"
    assert other_of(answer, Role.FASTEST).candidate == answer.candidate


def saturating(fixed: float) -> dict[int, float]:
    """Samples a second of steps with a fixed part that takes as long as so many samples."""
    return {size: 100.0 * size / (size + fixed) for size in (1, 2, 4, 8, 16, 32)}


@pytest.mark.parametrize("off", [1.0, 16.0, 1 / 16])
@pytest.mark.parametrize(("own", "fixed"), [(4, 1.0), (4, 8.0), (16, 8.0), (16, 100.0)])
@pytest.mark.parametrize(("device_kind", "noise"), [("cuda", 0.003), ("cpu", 0.01)])
def test_no_size_is_measured_that_larger_ones_show_to_be_slower(
    device_kind: Literal["cpu", "cuda"], noise: float, own: int, fixed: float, off: float
) -> None:
    """Not even if the roofline is far off, as where float32 weights are multiplied in bfloat16."""
    command = Command(saturating(fixed), noise, own, off=off)
    answer = command.tune(device_kind)
    assert answer is not None
    assert (answer.candidate.micro_batch_size, answer.confidence >= 95) == (32, True)
    assert min(task.candidate.micro_batch_size for task in command.tasks) == own


@pytest.mark.parametrize(("own", "full_from"), [(4, 16), (2, 8)])
def test_no_size_below_is_measured_where_memory_ends_above(own: int, full_from: int) -> None:
    command = Command(saturating(8.0), 0.003, own, full_from=full_from)
    answer = command.tune("cuda")
    assert answer is not None
    assert (answer.candidate.micro_batch_size, answer.confidence >= 95) == (full_from // 2, True)
    assert min(task.candidate.micro_batch_size for task in command.tasks) == own


@pytest.mark.parametrize(
    "speeds", [{1: 10.0, 2: 18.0, 4: 30.0, 8: 40.0, 16: 28.0, 32: 26.0}, {**WITH_A_PEAK, 32: 44.0}]
)
def test_smaller_sizes_are_measured_where_larger_ones_are_slower(speeds: dict[int, float]) -> None:
    command = Command(speeds, 0.003, 16)
    answer = command.tune("cuda")
    assert answer is not None
    assert answer.candidate.micro_batch_size == max(speeds, key=lambda size: speeds[size])


def test_one_size_alone_rules_out_no_other() -> None:
    command = Command(RISING, 0.003, 16)
    command.tune("cuda")
    assert [task.candidate.micro_batch_size for task in command.tasks] == [16, 8], "how the speed goes is shown by two"


def test_a_size_without_memory_counts_as_settled() -> None:
    command = Command(RISING, 0.003, 2, full_from=8)
    answer = command.tune("cuda")
    assert answer is not None
    assert (answer.candidate.micro_batch_size, answer.confidence >= 95) == (4, True)


def test_a_size_that_has_run_above_the_limit_is_not_recommended() -> None:
    command = Command(RISING, 0.003, 1, limit=BYTES + (BYTES >> 3))
    assert command.tune("cuda") is None
    assert command.tasks, "it was measured"


def test_rates_are_of_samples_where_nobody_knows_their_tokens() -> None:
    command = Command(RISING, 0.003, 4)
    request = ExplorationRequest.model_validate({"target": LOCAL})
    report = command.report("cuda")
    said: list[str] = []
    for progress in explore(request, report, command, clock=lambda: 13.0 * len(command.tasks)):
        said += [event.message for event in progress.events]
        answer = progress.answer
    assert answer is not None
    assert answer.recommendation is not None
    text = answer_text(Explored("j", request, report), answer.recommendation, answer)
    assert text is not None
    said += [row.text for row in text.rows]
    assert sum(" samples/s" in each for each in said) > len(command.tasks)
    assert not [each for each in said if "tokens/s" in each]


def test_no_size_is_tried_that_the_training_has_too_few_samples_for() -> None:
    command = Command(RISING, 0.003, 4)
    report = command.report("cuda")
    assert report.parts is not None
    samples = SampleLengths(number=10, num_read=10, longest=64)
    few = report.model_copy(update={"parts": report.parts.model_copy(update={"samples": samples})})
    [*_, last] = explore(ExplorationRequest.model_validate({"target": LOCAL}), few, command, clock=lambda: 0.0)
    assert last.answer is not None
    assert last.answer.recommendation is not None
    assert max(task.candidate.micro_batch_size for task in command.tasks) == 8
    command.tasks.clear()
    of_a_large_base = ExplorationRequest.model_validate({"target": LOCAL, "base_micro_batch_size": 16})
    assert [*explore(of_a_large_base, few, command, clock=lambda: 0.0)]
    assert max(task.candidate.micro_batch_size for task in command.tasks) <= 10
    asked = ExplorationRequest.model_validate({"target": LOCAL, "micro_batch_size": 16})
    [*_, last] = explore(asked, few, command, clock=lambda: 0.0)
    assert last.answer is not None
    assert last.answer.variants[0].reason == "the training has too few samples for a micro-batch of 16: 10 at most"


@pytest.mark.parametrize("own", [1, 4])
def test_a_size_that_has_to_stay_is_the_only_one(own: int) -> None:
    command = Command(RISING, 0.003, own)
    gradients = GradientComparison(agrees=False, keeps_size=True, text="they depend on each other")
    report = command.report("cuda")
    assert report.parts is not None
    kept = report.model_copy(update={"parts": report.parts.model_copy(update={"gradients": gradients})})
    request = ExplorationRequest.model_validate({"target": LOCAL})
    [*_, last] = explore(request, kept, command, clock=lambda: 13.0 * len(command.tasks))
    assert last.answer is not None
    assert last.answer.recommendation is not None
    assert {task.candidate.micro_batch_size for task in command.tasks} == {own}
    assert "they depend on each other" in [note.text for note in last.answer.recommendation.notes]
    asked = ExplorationRequest.model_validate({"target": LOCAL, "micro_batch_size": 16})
    [*_, last] = explore(asked, kept, command, clock=lambda: 13.0 * len(command.tasks))
    assert last.answer is not None
    assert f"the micro-batch has to stay {own}" in str(last.answer.variants[0].reason)
