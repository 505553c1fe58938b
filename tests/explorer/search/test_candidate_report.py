"""What a recommendation says, and which candidates it is compared with."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.step import combine_seconds
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Conditions, Outcome
from bexp.explorer.records.recommendation import Alternative, Recommendation, Role, WholeModelCheck
from bexp.explorer.records.trial import TrialKind
from bexp.explorer.search.alternatives import (
    accumulate,
    best_stock,
    check_whole_model,
    compare,
    largest_untiled,
    whole_model_tokens_per_second,
)
from bexp.explorer.search.candidate_report import build_recommendation
from bexp.explorer.search.posterior import BestCandidate, Posterior
from tests.explorer.alternatives import alternative
from tests.explorer.notes import notes_of
from tests.explorer.search.small import (
    REPORT,
    candidate,
    know,
    measure,
    small_request,
    small_state,
    trial,
    whole,
)

ALL = range(12)
CHECK = WholeModelCheck(measurement=whole(), tokens_per_second=1.0, step_seconds=1.0, step_error=0.0, peak_error=0.0)


def known_state(**changes: Any) -> Posterior:
    state = small_state(**changes)
    know(state, *(c for c in state.table.candidates if c.recompute in ("none", "full")))
    return state


def recommend(state: Posterior, *, report: DeviceReport = REPORT, **changes: Any) -> Recommendation:
    table = state.table
    row, largest = table.row[candidate(4)], compared(state, candidate(4), Role.LARGEST_MICRO_BATCH, candidate(4))
    arguments: dict[str, Any] = {
        "best": BestCandidate(row, 0.876),
        "base": table.row[candidate(1)],
        "alternatives": (largest,),
    }
    return build_recommendation(state, report=report, **(arguments | changes))


def compared(state: Posterior, best: Candidate, role: Role, other: Candidate) -> Alternative:
    """A candidate compared with the best."""
    return compare(state, state.table.row[best], role, state.table.row[other], None)


@pytest.mark.parametrize(
    ("batch", "devices", "size", "steps", "nearest"),
    [
        (24, 1, 4, 6, ()),
        (24, 2, 4, 3, ()),
        (26, 2, 4, None, (24, 32)),
        (4, 1, 4, 1, ()),
        (3, 1, 4, None, (4,)),
        (5, 1, 4, None, (4, 8)),
    ],
)
def test_accumulation_divides_the_batch_or_names_the_nearest_that_do(
    batch: int, devices: int, size: int, steps: int | None, nearest: tuple[int, ...]
) -> None:
    req = small_request(batch_size=batch, num_devices=devices)
    assert accumulate(req, candidate(size)) == (steps, nearest)
    evaluated = small_request(batch_size=batch, num_devices=devices, mode="eval")
    assert accumulate(evaluated, candidate(size)) == (steps, nearest)
    assert accumulate(small_request(batch_size=None, num_devices=devices), candidate(size)) == (None, ())


def test_a_largest_size_that_is_not_measured_is_said_to_be_predicted() -> None:
    words = "the throughput of the largest micro-batch is predicted in part from smaller ones"
    partly = small_state()
    know(partly, candidate(1))
    assert words in notes_of(recommend(partly))
    assert words not in notes_of(recommend(known_state()))
    assert words not in notes_of(recommend(partly, alternatives=()))


def test_a_runner_up_that_was_faster_leaves_a_doubt() -> None:
    """If the whole models of both were run."""
    words = "the runner-up was the faster one"

    def has_doubt(ratio: float, *, ran: bool = True, prefer: str = "speed") -> bool:
        state, check = known_state(prefer=prefer), CHECK if ran else None
        rival = alternative(Role.RUNNER_UP, candidate(2), ratio=ratio, whole_model=check)
        run = trial(9, candidate(4), kind=TrialKind.WHOLE_MODEL, whole_model=whole())
        found = recommend(state, whole_model=run, alternatives=(rival,))
        assert found.alternative(Role.RUNNER_UP) == rival
        return any(words in note for note in notes_of(found))

    assert [has_doubt(ratio) for ratio in (0.999, 1.0, 1.1)] == [True, False, False]
    assert not has_doubt(1.0, ran=False)
    assert not has_doubt(0.999, prefer="memory")
    assert not any("runner-up" in note for note in notes_of(recommend(known_state())))


def test_nothing_that_was_not_run_whole_is_faster_than_the_recommended_candidate_that_was() -> None:
    """Limits of a space may exclude what is faster as composed; what they cost shows in what blocks compose."""
    state = known_state(prefer="memory", tolerance=0.2)  # it keeps slower ones among the contenders
    two, four = (state.table.row[candidate(size)] for size in (2, 4))

    def of_four() -> Alternative:
        return compared(state, candidate(2), Role.UNDIVIDED, candidate(4))

    def performance() -> float:
        return recommend(state, best=BestCandidate(two, 0.9), alternatives=()).performance

    before = performance()
    assert of_four().ratio < 0.9, "all figures are composed"
    reached = 0.97 * state.seconds(two).tokens_per_second
    state.knowledge.learn_whole_model(candidate(2), reached, 0.001)
    after = of_four()
    assert after.ratio == 1.0
    assert after.tokens_per_second == pytest.approx(reached)
    assert after.composed_tokens_per_second == state.seconds(four).tokens_per_second
    assert after.composed_tokens_per_second > state.seconds(two).tokens_per_second
    assert performance() == pytest.approx(before, rel=1e-2)
    state.knowledge.learn_whole_model(candidate(4), 1.03 * reached, 0.001)
    state.knowledge.learn_whole_model(candidate(1), 0.5 * reached, 0.001)
    assert of_four().ratio == pytest.approx(1 / 1.03)
    assert performance() == pytest.approx(2.0), "that of both whole models"


@pytest.mark.parametrize("role", Role)
def test_no_answer_calls_what_was_not_run_whole_faster_than_what_was(role: Role) -> None:
    """Whatever made the alternative: this rule stands where an answer is made."""
    state, run = known_state(), trial(9, candidate(4), kind=TrialKind.WHOLE_MODEL, whole_model=whole())
    faster = alternative(role, candidate(2), ratio=1 / 1.047)
    with pytest.raises(ValueError, match=f"{role}: what was not run whole is not known to be faster"):
        recommend(state, whole_model=run, alternatives=(faster,))
    for allowed in (faster.model_copy(update={"whole_model": CHECK}), faster.model_copy(update={"ratio": 1.0})):
        assert recommend(state, whole_model=run, alternatives=(allowed,)).alternatives == (allowed,)
    assert recommend(state, alternatives=(faster,)).alternatives == (faster,), "nothing was run whole"


def test_what_a_config_says_and_is_not_measured_is_noted() -> None:
    state = known_state()
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    state.request = state.request.model_copy(update={"target": "transformers", "hf_config": config})
    assert any("quantization_config (gptq) is left out" in note for note in notes_of(recommend(state)))


def test_an_execution_that_was_asked_for_and_cannot_be_had_is_noted_with_the_reason() -> None:
    refused = BackendSupport(name="graph", usable=False, reason="the model waits for the device")
    other = refused.model_copy(update={"name": "compile+graph"})
    report = REPORT.model_copy(update={"choices": {"execution": (refused, other)}})
    state = known_state()
    state.request = state.request.model_copy(update={"executions": (Execution.EAGER, Execution.GRAPH)})
    notes = notes_of(recommend(state, report=report))
    assert "execution 'graph' is left out: the model waits for the device" in notes
    assert not any("compile+graph" in note for note in notes)


def test_what_the_request_names_beside_others_and_the_device_cannot_use_is_noted() -> None:
    missing = BackendSupport(name="flash", usable=False, reason="flash needs another GPU")
    report = REPORT.model_copy(update={"attention_backends": (missing,)})
    note = "attention back end 'flash' is left out: flash needs another GPU"
    assert note in notes_of(recommend(known_state(attention_backends=["cudnn", "flash"]), report=report))
    assert note not in notes_of(recommend(known_state(attention_backends=["cudnn"]), report=report))


def test_a_budget_that_ended_the_search_below_its_confidence_target_is_noted() -> None:
    words = "the budget was used up before the confidence reached 95: raise max_seconds or max_trials"
    state = known_state()
    assert words in notes_of(recommend(state, final=True, out_of_budget=True))
    assert words not in notes_of(recommend(state, final=True))
    reached = BestCandidate(state.table.row[candidate(4)], 0.96)
    assert words not in notes_of(recommend(state, best=reached, final=True, out_of_budget=True))


def test_communication_that_is_not_timed_is_said_to_be_left_out() -> None:
    words = "communication between devices is not included in the time"
    assert words in notes_of(recommend(known_state(num_devices=2, batch_size=8)))
    assert not any("between devices" in note for note in notes_of(recommend(known_state())))


def exchanging_state(sharding: str = "none") -> Posterior:
    """Two devices, both the worker's own, that exchange gradients."""
    req = small_request(num_devices=2, batch_size=24, training={"sharding": sharding})
    assert req.model is not None
    candidates = small_state().table.candidates
    table = Composition(candidates, req.model, req, communicates=True)
    hardware = REPORT.hardware.model_copy(update={"num_devices": 2})
    return Posterior(table, candidates, req, hardware)


def test_the_exchange_of_a_whole_model_is_a_part_of_its_step() -> None:
    state = exchanging_state()
    model, req = state.table.model, state.request
    timed = whole_model_tokens_per_second(state, candidate(4), whole(0.004, communication_seconds=0.003))
    assert timed == pytest.approx(combine_seconds(0.004, 0.001, 4, model, req, communication=0.003).tokens_per_second)


def test_sizes_that_need_more_devices_than_there_are_are_noted() -> None:
    req: dict[str, Any] = {"num_devices": 4, "batch_size": 16, "context_parallel": {"sizes": [1, 2, 4]}}
    words = "context-parallel sizes 2, 4 need more devices than the 1 here"
    assert words in notes_of(recommend(small_state(**req)))
    hardware = REPORT.hardware.model_copy(update={"num_devices": 2})
    two = notes_of(recommend(small_state(**req), report=REPORT.model_copy(update={"hardware": hardware})))
    assert "context-parallel sizes 4 need more devices than the 2 here" in two


def test_only_whole_models_that_ran_are_compared() -> None:
    state = known_state()
    row = state.table.row[candidate(4)]
    failed = trial(9, candidate(4), Outcome.CRASHED, kind=TrialKind.WHOLE_MODEL, whole_model=whole())
    assert check_whole_model(state, row, None) is None
    assert check_whole_model(state, row, failed) is None
    assert check_whole_model(state, row, trial(9, candidate(4), kind=TrialKind.WHOLE_MODEL)) is None


def test_the_throughput_of_a_whole_model_leaves_out_an_exchange_that_is_not_composed() -> None:
    state = known_state(batch_size=12)
    found = whole(0.004, communication_seconds=5.0)
    expected = combine_seconds(0.004, 0.001, 4, state.table.model, state.request).tokens_per_second
    assert whole_model_tokens_per_second(state, candidate(4), found) == expected


def test_tiled_candidates_are_neither_the_largest_nor_stock() -> None:
    state = small_state(bta={"enable": None}, micro_batch_size=[2, 4])
    tiled = [i for i, c in enumerate(state.table.candidates) if c.bta_tile is not None]
    assert tiled
    assert largest_untiled(state, among=tiled) is None
    assert best_stock(state, REPORT, among=tiled) is None


def test_the_best_stock_candidate_uses_back_ends_of_an_ordinary_framework() -> None:
    state = known_state()
    fastest = best_stock(state, REPORT, among=ALL)
    mean = state.mean_tokens_per_second()
    assert fastest is not None
    assert mean[fastest] == max(mean)
    backends = tuple(
        b.model_copy(update={"stock": b.name != "cudnn"}) if b.name in ("cudnn", "flash") else b
        for b in REPORT.attention_backends
    )
    ours = REPORT.model_copy(update={"attention_backends": backends})
    found = best_stock(state, ours, among=ALL)
    assert found is not None
    assert state.table.candidates[found].attention_backend == "flash"
    assert best_stock(state, ours, among=[state.table.row[candidate(4)]]) is None


@pytest.mark.parametrize(("waited", "is_noted"), [(0.0, False), (0.09, False), (0.1, True), (0.48, True)])
def test_cores_that_others_share_are_told(waited: float, is_noted: bool) -> None:
    state = small_state()
    row = state.table.row[candidate(1)]
    shares = [0.0, *[waited] * (len(state.missing(row)) - 1)]
    measured = measure(state, state.missing(row), candidate(1))
    components = tuple(
        component.model_copy(update={"conditions": Conditions(core_wait_share=share)})
        for component, share in zip(measured.components, shares, strict=True)
    )
    state.knowledge.learn(row, measured.model_copy(update={"components": components}))
    notes = [note for note in notes_of(recommend(state)) if "other processes share these cores" in note]
    assert [f"threads waited {waited:.0%} of the time" in note for note in notes] == [True] * is_noted
