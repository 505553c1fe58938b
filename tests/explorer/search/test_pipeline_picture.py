"""A pipeline as text."""

from __future__ import annotations

import pytest

from bexp.explorer.cost_model.pipeline import StageCosts, simulate_pipeline
from bexp.explorer.search import mesh_report
from bexp.explorer.spec.mesh import Schedule


@pytest.mark.parametrize(
    ("schedule", "lines"),
    [
        (Schedule.ONE_F_ONE_B, ("FFff....BBBBFFbbbb", "..FFBBBBffbbbbFFBB")),
        (Schedule.ZB_H1, ("FFff..BBWWFFbb", "..FFBBffbbWWFF")),
    ],
)
def test_a_picture_shows_the_passes_and_the_waiting_of_each_rank(
    schedule: Schedule, lines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_report, "WIDTH", len(lines[0]))
    run = simulate_pipeline([StageCosts(2.0, 4.0, 2.0)] * 2, schedule, 2, 8)
    drawn = mesh_report.draw_pipeline(run)
    assert drawn.seconds == len(lines[0]), "a character is a second"
    assert drawn.lines == lines


def test_a_picture_of_many_ranks_shows_some_of_them() -> None:
    run = simulate_pipeline([StageCosts(1.0, 2.0)] * 40, Schedule.ONE_F_ONE_B, 40, 40)
    drawn = mesh_report.draw_pipeline(run)
    assert drawn.ranks == tuple(range(0, 40, 3))
    assert {len(line) for line in drawn.lines} == {mesh_report.WIDTH}
