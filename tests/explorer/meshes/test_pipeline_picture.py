"""A pipeline as text."""

from __future__ import annotations

from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.meshes import report as mesh_report
from bexp.explorer.meshes.pipeline import StageCosts, simulate_pipeline


def test_a_picture_of_many_ranks_shows_some_of_them() -> None:
    run = simulate_pipeline([StageCosts(1.0, 2.0)] * 40, Schedule.ONE_F_ONE_B, 40, 40)
    drawn = mesh_report.draw_pipeline(run)
    assert drawn.ranks == tuple(range(0, 40, 3))
    assert {len(line) for line in drawn.lines} == {mesh_report.WIDTH}
