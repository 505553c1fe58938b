"""The exploration against a simulated device whose truth is known."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from bexp.explorer.cost.composition import Composition, required_table
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import enumerate_candidates
from tests.explorer.explorations import MODEL, answer_of, best_of, explored, lines, request, run, trials_of
from tests.explorer.notes import notes_of
from tests.explorer.simulator import SimulatedDevice, report


def test_finds_a_candidate_within_tolerance_in_few_trials() -> None:
    req = request(micro_batch_size="explore", attention_backends=None)
    device = SimulatedDevice(req)
    steps = run(req, device)
    found = best_of(steps)
    space = enumerate_candidates(req, report(memory_gib=40), req.shapes)
    table = Composition(space.candidates, req.shapes, req)
    truth = device.true_tokens_per_second(table)
    sizes = np.array([device.weigh(c, table.model) for c in table.components], dtype=float).T
    saved, transient = table.activation_bytes(*sizes)
    required = required_table(table, saved + transient, report(memory_gib=40).hardware)
    fitting = truth[required <= found.memory_limit_bytes]
    assert truth[table.row[found.candidate]] >= 0.99 * max(fitting)
    assert len(trials_of(steps)) <= 40 < len(fitting)
    assert found.confidence >= 90


def test_measures_no_component_twice_and_ends_with_the_whole_model() -> None:
    device, _ = explored()
    measured = [c.key for plan in device.plans for c in plan.components]
    assert len(measured) == len(set(measured))
    kinds = [plan.kind for plan in device.plans]
    assert kinds[kinds.index(TrialKind.WHOLE_MODEL) :] == [TrialKind.WHOLE_MODEL] * 2


@cache
def uninterrupted() -> tuple[Progress, ...]:
    return tuple(run(request(), SimulatedDevice(request(), noise=0.0)))


@pytest.mark.parametrize("stop_after", [1, 3, 6])
def test_resumes_where_it_would_have_gone(stop_after: int) -> None:
    """Noise-free, so that an interrupted and an uninterrupted run see the same measurements."""
    req, whole = request(), list(uninterrupted())
    before = whole[:stop_after]
    device = SimulatedDevice(req, noise=0.0)
    after = run(req, device, history=trials_of(before))
    assert [t.candidate for t in trials_of(before) + trials_of(after)] == [t.candidate for t in trials_of(whole)]
    stored = {c.component.key for t in trials_of(before) for c in t.measurement.components}
    assert not stored & {c.key for plan in device.plans for c in plan.components}
    assert [e.message for s in before + after for e in s.events if e.code is EventCode.RECOMMENDATION] == lines(
        whole, EventCode.RECOMMENDATION
    )
    for code in (EventCode.SPACE, EventCode.BASE, EventCode.TRIAL, EventCode.SUCCEEDED):
        assert len(lines(before + after, code)) == len(lines(whole, code))


def test_capacity_factors_are_compared_and_share_all_but_their_experts() -> None:
    moe = MODEL["moe"] | {"capacity_factor": [None, 1.0, 2.0]}
    req = request(model=MODEL | {"moe": moe}, routing={"kind": "zipf"}, micro_batch_size=[2, 4])
    device = SimulatedDevice(req)
    steps = run(req, device)
    answer = answer_of(steps)
    assert [v.capacity_factor for v in answer.variants] == [None, 1.0, 2.0]
    dropped = [v.recommendation.dropped_share for v in answer.variants if v.recommendation is not None]
    assert dropped[0] is None
    assert dropped[1] is not None
    assert dropped[2] is not None
    assert 0.1 < dropped[2] < dropped[1] < 0.6
    assert any("num_query_groups=4,capacity_factor=2," in line for line in lines(steps, EventCode.VARIANT))
    assert {trial.candidate.capacity_factor for trial in trials_of(steps)} == {None, 1.0, 2.0}
    measured = [c for plan in device.plans for c in plan.components]
    assert len(measured) == len({c.key for c in measured})
    assert {c.capacity_factor for c in measured if c.kind.value == "moe_ffn"} == {None, 1.0, 2.0}
    assert {c.capacity_factor for c in measured if c.kind.value != "moe_ffn"} == {None}


def test_eval_mode_has_no_recomputation_and_no_optimizer() -> None:
    req = request(mode="eval")
    device = SimulatedDevice(req)
    found = best_of(run(req, device))
    assert found.candidate.recompute is Recompute.NONE
    assert found.optimizer_seconds == 0
    assert found.memory.gradients == found.memory.optimizer_states == 0
    assert not any(c.kind.value == "optimizer" for plan in device.plans for c in plan.components)


def test_budget_ends_the_search_with_an_honest_confidence() -> None:
    req = request(budget={"max_trials": 2}, verify=False)
    found = best_of(run(req, SimulatedDevice(req)))
    assert found.confidence < 90


def test_a_spent_budget_still_finds_one_candidate_beside_a_base_outside_the_space() -> None:
    req = request(base_micro_batch_size=24, budget={"max_trials": 1}, verify=False)
    found = best_of(run(req, SimulatedDevice(req)))
    assert found.base.micro_batch_size == 24 != found.candidate.micro_batch_size


@pytest.mark.parametrize(("vocab_size", "padded"), [(32_001, 32_064), (50_257, 50_304), (50_264, None), (32_000, None)])
def test_a_vocabulary_that_slows_the_head_down_is_noted(vocab_size: int, padded: int | None) -> None:
    req = request(model=MODEL | {"vocab_size": vocab_size}, micro_batch_size=[1, 2], verify=False)
    found = best_of(run(req, SimulatedDevice(req)))
    notes = [note for note in notes_of(found) if "vocab_size" in note]
    if padded is None:
        assert not notes
        return
    (note,) = notes
    share = int(note.split("take ")[1].split("%")[0])
    assert 0 < share < 50
    assert note.endswith(f"{padded} would not")


def test_the_memory_with_reserve_is_above_the_peak_of_the_whole_model_that_ran() -> None:
    """As with CUDA graphs, whose memory serves nothing else."""
    device = SimulatedDevice(request())

    def higher(task: TrialTask) -> Measurement:
        found = device(task)
        whole = found.whole_model
        if whole is None:
            return found
        return found.model_copy(update={"whole_model": whole.model_copy(update={"peak_bytes": 2 * whole.peak_bytes})})

    found = best_of(list(explore(request(), report(), higher)))
    assert found.whole_model is not None
    assert found.expected_peak_bytes > 1.5 * found.measured_peak_bytes, "more than what is composed"
    assert found.required_bytes > found.expected_peak_bytes
