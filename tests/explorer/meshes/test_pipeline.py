"""The simulated pipeline against the closed forms of even stages, torch's own orders, and cases counted by hand."""

from __future__ import annotations

import itertools
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.meshes import report as mesh_report
from bexp.explorer.meshes.pipeline import StageCosts, balance_layers, pipeline_seconds, rank_order, simulate_pipeline

SIZES = [(2, 2), (2, 6), (4, 4), (4, 12), (8, 16)]


@pytest.mark.parametrize(("ranks", "number"), SIZES)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (2.0, 3.0)])
def test_even_stages_take_the_seconds_of_the_closed_forms(
    ranks: int, number: int, forward: float, backward: float
) -> None:
    costs = StageCosts(forward, backward)
    work = number * (forward + backward)
    plain = simulate_pipeline([costs] * ranks, Schedule.ONE_F_ONE_B, ranks, number)
    assert plain.seconds == pytest.approx(work + (ranks - 1) * (forward + backward))
    for virtual in (2, 3):
        part = StageCosts(forward / virtual, backward / virtual)
        found = simulate_pipeline([part] * (ranks * virtual), Schedule.INTERLEAVED, ranks, number)
        assert found.seconds == pytest.approx(work + (ranks - 1) * (forward + backward) / virtual)


def test_a_rank_of_1f1b_holds_as_many_micro_batches_as_ranks_follow_it() -> None:
    run = simulate_pipeline([StageCosts(1, 2, 10, 3)] * 4, Schedule.ONE_F_ONE_B, 4, 12)
    assert run.peak_bytes == (43, 33, 23, 13)
    assert simulate_pipeline([StageCosts(1, 2, 10)] * 8, Schedule.INTERLEAVED, 4, 12).peak_bytes[0] == 110


def test_the_slowest_stage_and_the_links_set_the_pace() -> None:
    stages = [StageCosts(1, 2), StageCosts(2, 4), StageCosts(1, 2)]
    run = simulate_pipeline(stages, Schedule.ONE_F_ONE_B, 3, 30)
    assert 30 * 6 < run.seconds < 30 * 6 + 3 * 6
    assert run.busy_seconds == (90, 180, 90)
    assert run.bubble_share == pytest.approx(1 - 360 / (3 * run.seconds))
    far = [StageCosts(s.forward, s.backward, hand_over=0.25) for s in stages]
    assert (
        simulate_pipeline(far, Schedule.ONE_F_ONE_B, 3, 3).seconds
        > simulate_pipeline(stages, Schedule.ONE_F_ONE_B, 3, 3).seconds
    )


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_long_step_is_extrapolated_from_a_short_one(schedule: Schedule) -> None:
    virtual = 2 if schedule is Schedule.INTERLEAVED else 1
    stages = [StageCosts(1 + 0.1 * i, 2 + 0.2 * (i % 3), 10, hand_over=0.05) for i in range(4 * virtual)]
    seconds, run = pipeline_seconds(stages, schedule, 4, 64)
    whole = simulate_pipeline(stages, schedule, 4, 64)
    assert seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert run.peak_bytes == whole.peak_bytes


@pytest.mark.parametrize(("ranks", "number"), [(2, 4), (4, 4), (4, 8), (4, 10), (3, 9)])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_the_orders_are_those_of_torch(ranks: int, number: int, virtual: int) -> None:
    schedules: Any = import_module("torch.distributed.pipelining.schedules")

    def torch_order(name: str, rank: int) -> list[tuple[str, int, int]]:
        kind = getattr(schedules, name)
        if name == "Schedule1F1B":
            found = kind._get_pipeline_order(SimpleNamespace(_num_stages=ranks, _n_microbatches=number))[rank]
        else:
            rounds = max(1, number // ranks)
            state = SimpleNamespace(
                n_local_stages=virtual,
                pp_group_size=ranks,
                microbatches_per_round=number // rounds,
                _n_microbatches=number,
            )
            found = kind._calculate_single_rank_operations(state, rank)
        letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
        known = [a for a in found if a is not None and a.computation_type.name in letters]
        return [(letters[a.computation_type.name], a.stage_index, a.microbatch_index) for a in known]

    schedule, name = Schedule.ONE_F_ONE_B, "Schedule1F1B"
    if virtual > 1:
        schedule, name = Schedule.INTERLEAVED, "ScheduleInterleaved1F1B"
    for rank in range(ranks):
        ours = [(str(a.kind), a.stage, a.micro_batch) for a in rank_order(schedule, rank, ranks, number, virtual)]
        theirs = torch_order(name, rank)
        if (
            name == "Schedule1F1B" and rank == ranks - 1
        ):  # its listing counts forwards from 1 there, and runs them from 0
            theirs = [(kind, stage, index - (kind == "F")) for kind, stage, index in theirs]
        assert ours == theirs


@pytest.mark.parametrize(
    ("schedule", "number", "virtual", "message"),
    [
        (Schedule.ONE_F_ONE_B, 3, 1, "3 micro-batches are fewer than the 4 ranks"),
        (Schedule.ONE_F_ONE_B, 8, 2, "no virtual stages"),
        (Schedule.INTERLEAVED, 9, 2, "do not divide into 2 rounds"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(schedule: Schedule, number: int, virtual: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_order(schedule, 0, 4, number, virtual)


def test_layers_are_balanced_with_embedding_and_head() -> None:
    assert balance_layers([1.0] * 32, 4) == (8, 8, 8, 8)
    assert balance_layers([1.0] * 126, 16, first=1.0, last=1.0)[0] == 7
    assert balance_layers([1.0] * 6, 2, last=2.0) == (4, 2)
    assert balance_layers([1.0, 1.0, 4.0, 1.0], 3) == (2, 1, 1)
    for count in range(1, 9):
        seconds = [float(1 + i * 7 % 5) for i in range(8)]
        best = min(
            max(
                sum(seconds[a:b]) + (0.5 if a == 0 else 0) + (3.0 if b == 8 else 0)
                for a, b in itertools.pairwise((0, *cuts, 8))
            )
            for cuts in itertools.combinations(range(1, 8), count - 1)
        )
        found = balance_layers(seconds, count, first=0.5, last=3.0)
        ends = list(itertools.accumulate(found, initial=0))
        longest = max(
            sum(seconds[a:b]) + (0.5 if a == 0 else 0) + (3.0 if b == 8 else 0) for a, b in itertools.pairwise(ends)
        )
        assert longest == pytest.approx(best, rel=1e-6)
    with pytest.raises(ValueError, match="fewer than 3 stages"):
        balance_layers([1.0, 1.0], 3)


def test_a_picture_of_many_ranks_shows_some_of_them() -> None:
    run = simulate_pipeline([StageCosts(1.0, 2.0)] * 40, Schedule.ONE_F_ONE_B, 40, 40)
    drawn = mesh_report.draw_pipeline(run)
    assert drawn.ranks == tuple(range(0, 40, 3))
    assert {len(line) for line in drawn.lines} == {mesh_report.WIDTH}
