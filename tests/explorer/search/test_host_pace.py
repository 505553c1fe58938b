"""The note that the host sets the pace, and what shows it."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.answers.answer import Explored, answer_text
from bexp.explorer.model.target import LOCAL
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.recommendation import NoteCode, Recommendation
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from tests.explorer.search.small import REPORT, small_request
from tests.explorer.search.test_whole_search import Command
from tests.explorer.simulator import SimulatedDevice

SPEEDS = {1: 50.0, 2: 80.0, 4: 100.0}


class WatchedCommand(Command):
    """A command whose trials know how long the device was busy, and how far single seconds differed."""

    def __init__(self, **figures: Any) -> None:
        super().__init__(SPEEDS, 0.001, 4)
        self.figures = figures

    def __call__(self, task: TrialTask) -> Measurement:
        measurement = super().__call__(task)
        measured = []
        for each in measurement.components:
            changes = dict(self.figures) if each.component.micro_batch_size else {}
            if "span_seconds" in changes:
                changes["span_seconds"] = tuple(share * each.device_seconds for share in changes["span_seconds"])
            measured.append(each.model_copy(update=changes))
        return measurement.model_copy(update={"components": tuple(measured)})


def pace(request: ExplorationRequest, device: Any, report: Any) -> tuple[str, str]:
    """The note of the final answer, and its row."""
    [*_, last] = explore(request, report, device, clock=lambda: 0.0)
    assert last.answer is not None
    best = last.answer.recommendation
    assert isinstance(best, Recommendation)
    text = answer_text(Explored("j", request, report), best, last.answer)
    assert text is not None
    notes = [note.text for note in best.notes if note.code is NoteCode.HOST_PACE]
    return "".join(notes), "".join(row.text for row in text.rows if row.label == "pace")


@pytest.mark.parametrize(
    ("figures", "kind", "said"),
    [
        ({"busy_share": 0.45, "span_seconds": (0.8, 1.25)}, "cuda", ["45% of the time", "had 78.0 to 122 samples/s"]),
        ({"busy_share": 0.45}, "cuda", ["45% of the time. Other work"]),
        ({"busy_share": 0.97, "span_seconds": (0.8, 1.25)}, "cuda", []),
        ({}, "cuda", []),
        ({"busy_share": 0.45}, "cpu", []),
    ],
)
def test_a_command_that_waits_for_the_host_is_named_with_the_range_of_its_speed(
    figures: dict[str, Any], kind: Any, said: list[str]
) -> None:
    command = WatchedCommand(**figures)
    note, shown = pace(ExplorationRequest.model_validate({"target": LOCAL}), command, command.report(kind))
    assert note == shown
    assert bool(note) == bool(said)
    assert all(each in note for each in said), note


@pytest.mark.parametrize(("share", "shown"), [(0.5, True), (0.0, False), (None, False)])
def test_a_command_whose_new_widths_take_longer_says_so(share: float | None, *, shown: bool) -> None:
    command = WatchedCommand(new_width_seconds=0.2, new_width_share=share)
    [*_, last] = explore(
        ExplorationRequest.model_validate({"target": LOCAL}), command.report("cuda"), command, clock=lambda: 0.0
    )
    assert last.answer is not None
    assert last.answer.recommendation is not None
    notes = [note.text for note in last.answer.recommendation.notes if note.code is NoteCode.WIDTHS]
    assert bool(notes) == shown
    assert all("takes 0.20 s longer" in text and "pad_to_multiple_of=64" in text for text in notes)


@pytest.mark.parametrize("slower", [0.2, 3.0])
def test_blocks_that_the_host_issues_more_slowly_than_they_run_are_named(slower: float) -> None:
    request = small_request()
    device = SimulatedDevice(request, 0)

    def measure(task: TrialTask) -> Measurement:
        measurement = device(task)
        changed = [
            each.model_copy(update={"host_seconds": slower * each.device_seconds}) for each in measurement.components
        ]
        return measurement.model_copy(update={"components": tuple(changed), "whole_model": None})

    note, shown = pace(request, measure, REPORT)
    assert note == shown
    assert note.startswith("the host sets the pace: it issues a micro-step in ") == (slower > 1.0), note
