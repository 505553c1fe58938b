"""What compiling costs, in the choice among candidates and in the answer's words."""

from __future__ import annotations

from typing import Literal

import pytest

from bexp.explorer.answers.answer import Explored, answer_text
from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.model.target import LOCAL
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.recommendation import NoteCode, Recommendation
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from tests.explorer.search.small import REPORT, small_request
from tests.explorer.search.test_whole_search import Command
from tests.explorer.simulator import SimulatedDevice

PLAIN, COMPILED = "torch_compile=false", "torch_compile=true"
SPEEDS = {1: 50.0, 2: 80.0, 4: 100.0}
FASTER = 1.25


class CompiledCommand(Command):
    """A command that is faster if it is compiled, of `num_steps` optimizer steps of four samples, if that is known."""

    def __init__(self, seconds: tuple[float, ...], num_steps: int | None) -> None:
        super().__init__(SPEEDS, 0.001, 4)
        self.seconds, self.num_steps = seconds, num_steps

    def report(self, device_kind: Literal["cpu", "cuda"]) -> DeviceReport:
        report = super().report(device_kind)
        assert report.parts is not None
        changes = {"settings": (PLAIN, COMPILED), "num_steps": self.num_steps}
        return report.model_copy(update={"parts": report.parts.model_copy(update=changes)})

    def __call__(self, task: TrialTask) -> Measurement:
        measurement = super().__call__(task)
        if task.candidate.settings != COMPILED:
            return measurement
        measured = []
        for each in measurement.components:
            if each.component.micro_batch_size:
                changes = {
                    "device_seconds": each.device_seconds / FASTER,
                    "compile_seconds": self.seconds,
                    "num_shapes": 9,
                }
                measured.append(each.model_copy(update=changes))
            else:
                measured.append(each)
        return measurement.model_copy(update={"components": tuple(measured)})


def answer_of(command: CompiledCommand) -> tuple[Recommendation, str, str]:
    """The recommendation, its note on compilation, and all of its text."""
    request, report = ExplorationRequest.model_validate({"target": LOCAL}), command.report("cuda")
    [*_, last] = explore(request, report, command, clock=lambda: 13.0 * len(command.tasks))
    assert last.answer is not None
    best = last.answer.recommendation
    assert best is not None
    text = answer_text(Explored("j", request, report), best, last.answer)
    assert text is not None
    notes = [note.text for note in best.notes if note.code is NoteCode.COMPILATION]
    assert len(notes) <= 1
    return best, "".join(notes), "\n".join(row.text for row in text.rows if row.label == "compilation")


SAVED = 4 / 100 * (1 - 1 / FASTER)  # seconds of a step
PAYS = 40.0 / SAVED


@pytest.mark.parametrize("num_steps", [None, round(1.5 * PAYS), round(40 * PAYS)])
def test_compiled_code_is_recommended_if_the_run_is_long_enough_or_if_its_length_is_not_known(
    num_steps: int | None,
) -> None:
    best, note, shown = answer_of(CompiledCommand((40.0,), num_steps))
    assert best.candidate.settings == COMPILED
    assert best.confidence >= 90
    assert note.startswith("40.0 s before full speed; it pays back after ")
    assert note == shown, "a row of its own"
    steps = int(note.partition("after ")[2].partition(" ")[0].replace(",", ""))
    assert steps == pytest.approx(PAYS, rel=0.05)
    assert PLAIN in note
    assert ("the run has" in note) == (num_steps is not None)


@pytest.mark.parametrize("share", [0.02, 0.6])
def test_a_run_that_ends_before_it_pays_back_is_not_compiled(share: float) -> None:
    command = CompiledCommand((30.0, 6.0, 4.0), round(share * PAYS))
    best, note, _ = answer_of(command)
    assert (best.candidate.settings, best.candidate.micro_batch_size) == (PLAIN, 4)
    assert best.confidence >= 90
    assert COMPILED in note
    assert "(30.0 s at first, then 6.0 s, 4.0 s for other shapes; a trial saw 9)" in note
    assert f"the run has {round(share * PAYS):,}" in note


def test_without_a_compilation_there_is_nothing_to_say() -> None:
    best, note, shown = answer_of(CompiledCommand((), 10))
    assert best.candidate.settings == COMPILED
    assert (note, shown) == ("", "")


class CompilingDevice(SimulatedDevice):
    """A device on which compiled components are faster, and each takes some seconds to compile."""

    EACH = 12.0

    def seconds(self, component: Component, model: ExploredModel) -> tuple[float, float]:
        device, host = super().seconds(component, model)
        return (device / 1.5, host / 1.5) if component.is_compiled else (device, host)

    def __call__(self, task: TrialTask) -> Measurement:
        measurement = super().__call__(task)
        number = sum(component.is_compiled for component in task.components)
        phases = measurement.phases.model_copy(update={"warm_up": self.EACH * number})
        return measurement.model_copy(update={"phases": phases})


@pytest.mark.parametrize("executions", [["eager", "compile"], ["compile"], ["eager"]])
def test_an_exploration_of_executions_says_when_compiled_code_pays_back(executions: list[str]) -> None:
    request = small_request(executions=executions, device_kind="cuda", batch_size=64, micro_batch_size=[4, 8])
    *_, last = explore(request, REPORT, CompilingDevice(request))
    assert last.answer is not None
    best = last.answer.recommendation
    assert best is not None
    notes = [note.text for note in best.notes if note.code is NoteCode.COMPILATION]
    if executions == ["eager"]:
        assert notes == []
        return
    assert float(notes[0].split()[0]) % CompilingDevice.EACH == pytest.approx(0.0)
    if executions == ["compile"]:
        assert notes[0].endswith(" s before full speed; nothing was measured that does not compile")
    else:
        assert best.candidate.execution is Execution.COMPILE
        assert "optimizer steps of 64 sequences against" in notes[0]
