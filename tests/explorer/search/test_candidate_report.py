"""What a recommendation says, and which candidates it is compared with."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.parts import Float8Layers
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Conditions
from bexp.explorer.records.recommendation import Alternative, Recommendation, Role, WholeModelCheck
from bexp.explorer.records.trial import TrialKind
from bexp.explorer.search.alternatives import accumulate, best_stock, compare
from bexp.explorer.search.candidate_report import build_recommendation, candidate_notes
from bexp.explorer.search.posterior import BestCandidate, Posterior
from tests.explorer.alternatives import alternative
from tests.explorer.cost import described
from tests.explorer.notes import notes_of
from tests.explorer.search.small import REPORT, candidate, know, measure, small_request, small_state, trial, whole

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


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("out_of_budget", "the budget was used up before the confidence reached 95: raise max_seconds or max_trials"),
        (
            "out_of_time",
            "whole models have 50% of max_seconds, and had used it up before the confidence reached 95: "
            "raise max_seconds",
        ),
    ],
)
def test_a_budget_that_ended_the_search_below_its_confidence_target_is_noted(why: str, words: str) -> None:
    state = known_state()
    ended: dict[str, Any] = {"final": True, why: True}
    assert words in notes_of(recommend(state, **ended))
    assert words not in notes_of(recommend(state, final=True))
    reached = BestCandidate(state.table.row[candidate(4)], 0.96)
    assert words not in notes_of(recommend(state, best=reached, **ended))


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


OWN = {"target": "transformers", "model": None, "hf_config": {"model_type": "llama"}, "hf_seq_length": 32}


def said_of(training: dict[str, Any] | None = None, recompute: str = "none", **parts: Any) -> str:
    asked = described.request(**OWN, training=training or {}, recompute=["none", "offload"])
    return "\n".join(
        map(str, candidate_notes(asked, described.candidate(recompute=recompute), described.device(**parts), None))
    )


def test_activations_on_the_host_are_stated_with_their_size() -> None:
    assert "host" not in said_of()
    assert "recompute 'offload' is left out: no room" in said_of(
        unavailable={"offload": "no room", "groups_2": "other"}
    )
    layer = 4 * 32 * 640  # bytes that each of six layers keeps
    found = said_of(recompute="offload")
    assert f"activations: about {6 * layer / 2**30:.1f} GiB of the host's memory, pinned" in found


def test_an_optimizer_on_the_host_is_stated_with_the_way_to_give_it_to_a_trainer() -> None:
    found = said_of({"optimizer": {"name": "adamw_cpu_offload"}}, optimizer_host_bytes=3 << 30)
    assert "optimizer: 3.0 GiB of the host's memory" in found
    assert "optimizer_cls_and_kwargs=(torchao.optim.CPUOffloadOptimizer" in found


def test_float8_states_its_error_and_what_stays_in_bfloat16() -> None:
    found = said_of(
        {"precision": "float8_rowwise"}, float8=Float8Layers(num_linear=8, output_error=0.031, gradient_error=0.0567)
    )
    assert "float8 (rowwise): 8 linear layers of decoder layers; experts stay in bfloat16" in found
    assert "off by 3.1% of its norm in bfloat16, and its gradients by 5.7%" in found


def test_a_paged_optimizer_is_stated_to_be_counted_on_the_device() -> None:
    assert "its pages are counted on the device" in said_of({"optimizer": {"name": "paged_adamw_8bit"}})
    assert "pages" not in said_of({"optimizer": {"name": "adamw_bnb_8bit"}})
