"""What a recommendation says, and which candidates it is compared with."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost_model.composition import Composition
from bexp.explorer.cost_model.step import combine_seconds
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Conditions, Outcome
from bexp.explorer.records.recommendation import Recommendation, RunnerUpCheck
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.candidate_report import (
    References,
    best_stock,
    build_recommendation,
    largest_untiled,
    largest_without_recompute,
)
from bexp.explorer.search.choices import accumulate
from bexp.explorer.search.posterior import BestCandidate, Posterior
from bexp.explorer.search.runner_up import RunnerUp
from bexp.explorer.search.whole_model_check import check_whole_model, whole_model_tokens_per_second
from bexp.explorer.spec.execution import Execution
from bexp.explorer.spec.hardware import BackendSupport
from tests.explorer.search.small import (
    MODEL,
    REPORT,
    candidate,
    know,
    measure,
    small_request,
    small_state,
    trial,
    whole,
)

FULL = {"recompute": "full"}
ALL = range(12)


def known_state(**changes: Any) -> Posterior:
    state = small_state(**changes)
    know(state, *(c for c in state.table.candidates if c.recompute in ("none", "full")))
    return state


def recommend(state: Posterior, *, report: DeviceReport = REPORT, **changes: Any) -> Recommendation:
    table = state.table
    references = References(
        base=table.row[candidate(1)], largest=table.row[candidate(4)], stock=table.row[candidate(2)]
    )
    arguments = {"best": BestCandidate(table.row[candidate(4)], 0.876), "references": references, **changes}
    return build_recommendation(state, report=report, **arguments)


def run_whole(micro_step: float = 0.004, **changes: Any) -> Trial:
    return trial(9, candidate(4), kind=TrialKind.WHOLE_MODEL, whole_model=whole(micro_step, **changes))


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


def test_the_figures_are_those_of_the_candidate_and_of_the_base() -> None:
    state = known_state(batch_size=12)
    found, table = recommend(state), state.table
    row, base = table.row[candidate(4)], table.row[candidate(1)]
    seconds = state.corrected_seconds(row)
    assert (found.candidate, found.base, found.confidence) == (candidate(4), candidate(1), 87)
    assert found.tokens_per_second == seconds.tokens_per_second
    assert found.performance == pytest.approx(
        seconds.tokens_per_second / state.corrected_seconds(base).tokens_per_second
    )
    assert (found.step_seconds, found.micro_step_seconds) == (seconds.step, seconds.micro_step)
    assert found.optimizer_seconds == seconds.optimizer
    assert found.communication_seconds is None, "nothing is exchanged"
    assert (found.grad_accum_steps, found.nearest_batch_sizes) == (3, ())
    assert found.measured_peak_bytes == state.bytes(row).peak == found.memory.total
    assert found.predicted_peak_bytes == state.memory.predicted_bytes(row).peak < found.measured_peak_bytes
    assert found.required_bytes == state.bytes(row).required
    assert found.memory_limit_bytes == state.limit_bytes


def test_alternatives_are_compared_with_the_recommended_candidate() -> None:
    state = known_state()
    found = recommend(state)
    assert found.largest_micro_batch is not None
    assert found.stock is not None
    assert found.largest_without_recompute is None
    assert (found.largest_micro_batch.gain, found.stock.candidate) == (1.0, candidate(2))
    stock = state.corrected_seconds(state.table.row[candidate(2)]).tokens_per_second
    assert found.stock.tokens_per_second == stock
    assert found.stock.gain == pytest.approx(found.tokens_per_second / stock)
    assert not found.stock.predicted
    partly = small_state()
    know(partly, candidate(1))
    assert recommend(partly).stock.predicted  # type: ignore[union-attr]  # not null here


def test_a_largest_size_that_is_not_measured_is_said_to_be_predicted() -> None:
    words = "the throughput of the largest micro-batch is predicted in part from smaller ones"
    partly = small_state()
    know(partly, candidate(1))
    assert words in recommend(partly).notes
    assert words not in recommend(known_state()).notes
    alone = References(base=partly.table.row[candidate(1)])
    assert words not in recommend(partly, references=alone).notes


def runner_up(gain: float | None) -> RunnerUpCheck:
    return RunnerUpCheck(candidate=candidate(2), composed_tokens_per_second=1.0, outcome=Outcome.OK, gain=gain)


def test_a_runner_up_that_was_faster_leaves_a_doubt() -> None:
    state = known_state()
    doubts = {
        gain: any(
            "the runner-up was the faster one" in note for note in recommend(state, runner_up=runner_up(gain)).notes
        )
        for gain in (None, 0.999, 1.0, 1.1)
    }
    assert doubts == {None: False, 0.999: True, 1.0: False, 1.1: False}
    assert recommend(state, runner_up=runner_up(1.1)).runner_up == runner_up(1.1)
    assert not any("runner-up" in note for note in recommend(state).notes)
    preferring = recommend(known_state(prefer="memory"), runner_up=runner_up(0.999))
    assert not any("the runner-up was the faster one" in note for note in preferring.notes)


def test_what_became_of_the_whole_model_is_noted() -> None:
    state = known_state()
    assert "whole model: not run with this candidate" in recommend(state).notes
    assert not any("whole model" in note for note in recommend(state, whole_model=run_whole()).notes)
    notes = {}
    for outcome in (Outcome.UNSUPPORTED, Outcome.CRASHED):
        failed = trial(9, candidate(4), outcome, kind=TrialKind.WHOLE_MODEL, reason="of a reason")
        (notes[outcome],) = (n for n in recommend(state, whole_model=failed).notes if n.startswith("whole model"))
    assert notes == {
        Outcome.UNSUPPORTED: "whole model: not run: of a reason",
        Outcome.CRASHED: "whole model: crashed: of a reason",
    }


def test_execution_sharding_and_default_attention_are_noted() -> None:
    state = known_state()
    notes = recommend(state).notes
    assert notes[0] == "execution: eager"
    assert "attention 'cudnn' is the default of torch here" in notes
    flash = REPORT.model_copy(update={"default_attention": "flash"})
    assert not any("torch's own default" in note for note in recommend(state, report=flash).notes)
    sharded = known_state(num_devices=2, batch_size=8, training={"sharding": "zero2"})
    assert "memory assumes zero2 over 2 devices" in recommend(sharded).notes
    assert not any("memory assumes" in note for note in notes)
    still = small_state(mode="eval", num_devices=2, batch_size=8, training={"sharding": "zero2"})
    assert not any("memory assumes" in note for note in recommend(still).notes)


def test_what_a_config_says_and_is_not_measured_is_noted() -> None:
    state = known_state()
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    state.request = state.request.model_copy(update={"target": "transformers", "hf_config": config})
    assert any("quantization_config (gptq) is left out" in note for note in recommend(state).notes)


def test_ligers_kernels_that_were_left_out_are_noted_with_the_reason() -> None:
    missing = BackendSupport(name="liger", usable=False, reason="pip install liger-kernel")
    report = REPORT.model_copy(update={"kernels": (missing,), "losses": (missing,)})
    asked = {"kernels": ("library", "liger"), "losses": ("library", "liger")}
    state = known_state()
    assert not any("liger" in note for note in recommend(state, report=report).notes), "nobody asked for it"
    state.request = state.request.model_copy(update=asked)
    notes = recommend(state, report=report).notes
    assert "kernels 'liger' are left out: pip install liger-kernel" in notes
    assert "loss 'liger' is left out: pip install liger-kernel" in notes


def test_an_execution_that_was_asked_for_and_cannot_be_had_is_noted_with_the_reason() -> None:
    refused = BackendSupport(name="graph", usable=False, reason="the model waits for the device")
    other = refused.model_copy(update={"name": "compile+graph"})
    report = REPORT.model_copy(update={"executions": (refused, other)})
    state = known_state()
    state.request = state.request.model_copy(update={"executions": (Execution.EAGER, Execution.GRAPH)})
    notes = recommend(state, report=report).notes
    assert "execution 'graph' is left out: the model waits for the device" in notes
    assert not any("compile+graph" in note for note in notes)


def test_what_the_request_names_beside_others_and_the_device_cannot_use_is_noted() -> None:
    missing = BackendSupport(name="flash", usable=False, reason="flash needs another GPU")
    report = REPORT.model_copy(update={"attention_backends": (missing,)})
    note = "attention back end 'flash' is left out: flash needs another GPU"
    assert note in recommend(known_state(attention_backends=["cudnn", "flash"]), report=report).notes
    assert note not in recommend(known_state(attention_backends=["cudnn"]), report=report).notes


def test_a_budget_that_ended_the_search_below_its_confidence_target_is_noted() -> None:
    words = "the budget was used up before the confidence reached 95: raise max_seconds or max_trials"
    state = known_state()
    assert words in recommend(state, final=True, out_of_budget=True).notes
    assert words not in recommend(state, final=True).notes
    reached = BestCandidate(state.table.row[candidate(4)], 0.96)
    assert words not in recommend(state, best=reached, final=True, out_of_budget=True).notes


def test_without_whole_models_a_rival_that_only_these_tell_apart_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(row: int = 0, chance: float = 0.46, confidence: float = 0.54, **changes: Any) -> list[str]:
        state = known_state(**{"verify": False} | changes)
        found = RunnerUp(row, chance, 0.01, 1.0)
        monkeypatch.setattr("bexp.explorer.search.candidate_report.find_runner_up", lambda _: found)
        best = BestCandidate(state.table.row[candidate(4)], confidence)
        return [note for note in recommend(state, best=best, final=True).notes if "do not tell" in note]

    table = known_state().table
    rival = table.row[candidate(2)]
    (note,) = noted(rival)
    assert f"whether {candidate(2).describe()} is faster (a chance of 46%)" in note
    assert noted(rival, verify=True) == noted(rival, confidence=0.96) == noted(rival, chance=0.0) == []
    assert noted(table.row[candidate(4)]) == []


def test_communication_that_is_not_timed_is_said_to_be_left_out() -> None:
    words = "communication between devices is not included in the time"
    assert words in recommend(known_state(num_devices=2, batch_size=8)).notes
    assert not any("between devices" in note for note in recommend(known_state()).notes)


def exchanging_state(sharding: str = "none") -> Posterior:
    """Two devices, both the worker's own, that exchange gradients."""
    req = small_request(num_devices=2, batch_size=24, training={"sharding": sharding})
    assert req.model is not None
    candidates = small_state().table.candidates
    table = Composition(candidates, req.model, req, communicates=True)
    hardware = REPORT.hardware.model_copy(update={"num_devices": 2})
    return Posterior.of(table, candidates, req, hardware)


@pytest.mark.parametrize(
    ("sharding", "what"),
    [("none", "gradients"), ("zero1", "gradients and parameters"), ("zero3", "gradients and parameters")],
)
def test_communication_that_is_timed_is_told_with_its_share(sharding: str, what: str) -> None:
    state = exchanging_state(sharding)
    seconds = state.corrected_seconds(state.table.row[candidate(4)])
    found = recommend(state)
    assert found.communication_seconds == seconds.communication > 0
    assert (
        f"the exchange of {what} between 2 devices is included in the time: beyond what computation hides it takes "
        f"{1000 * seconds.communication:.1f} ms of a step ({100 * seconds.communication / seconds.step:.1f}%)"
    ) in found.notes


def test_a_whole_model_that_did_not_time_its_exchange_is_completed_by_the_composed_one() -> None:
    state = exchanging_state()
    composed = state.seconds(state.table.row[candidate(4)])
    model, req = state.table.model, state.request
    silent = whole_model_tokens_per_second(state, candidate(4), whole(0.004))
    completed = combine_seconds(0.004, composed.optimizer, 4, model, req, communication=composed.communication)
    assert silent == pytest.approx(completed.tokens_per_second)
    timed = whole_model_tokens_per_second(state, candidate(4), whole(0.004, communication_seconds=0.003))
    assert timed == pytest.approx(combine_seconds(0.004, 0.001, 4, model, req, communication=0.003).tokens_per_second)


def test_sizes_that_need_more_devices_than_there_are_are_noted() -> None:
    req: dict[str, Any] = {"num_devices": 4, "batch_size": 16, "context_parallel": {"sizes": [1, 2, 4]}}
    words = "context-parallel sizes 2, 4 need more devices than the 1 here"
    assert words in recommend(small_state(**req)).notes
    hardware = REPORT.hardware.model_copy(update={"num_devices": 2})
    two = recommend(small_state(**req), report=REPORT.model_copy(update={"hardware": hardware})).notes
    assert "context-parallel sizes 4 need more devices than the 2 here" in two


@pytest.mark.parametrize(("vocabulary", "padded"), [(1001, 1024), (1026, 1088), (1000, None), (1024, None)])
def test_a_vocabulary_off_the_fast_kernels_is_noted_with_the_next_multiple(vocabulary: int, padded: int | None) -> None:
    state = known_state(model={**MODEL, "vocab_size": vocabulary})
    notes = [note for note in recommend(state).notes if note.startswith("head and loss")]
    if padded is None:
        assert not notes
        return
    row = state.table.row[candidate(4)]
    seconds = {
        c.kind.value: float(state.surrogate.device_mean_K[state.table.column[c]])
        for c in state.table.decompositions[row].components
    }
    micro_step = seconds["embedding"] + seconds["head"] + 2 * (seconds["attention"] + seconds["dense_ffn"])
    assert notes == [
        f"head and loss take {seconds['head'] / micro_step:.0%} of a micro-step: vocab_size {vocabulary} is no "
        f"multiple of 8, which slows their products down; {padded} would not"
    ]


def test_a_whole_model_is_compared_with_its_composition() -> None:
    state = known_state(batch_size=12)
    row = state.table.row[candidate(4)]
    composed = state.seconds(row)
    run = run_whole(1.25 * composed.micro_step, optimizer_seconds=2 * composed.optimizer, peak_bytes=10**9)
    found = check_whole_model(state, row, run)
    step = 12 / 4 * 1.25 * composed.micro_step + 2 * composed.optimizer
    assert found is not None
    assert found.step_seconds == pytest.approx(step)
    assert found.tokens_per_second == pytest.approx(12 * 512 / step)
    assert found.step_error == pytest.approx(composed.step / step - 1)
    assert found.step_error < 0
    assert found.peak_error == pytest.approx(state.bytes(row).peak / 10**9 - 1)
    assert recommend(state, whole_model=run).whole_model == found


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


def test_the_largest_size_is_taken_at_its_fastest_and_only_if_it_fits() -> None:
    state = small_state()
    know(state, candidate(4), candidate(2), candidate(4, **FULL))
    row, flash = state.table.row, candidate(4, attention_backend="flash")
    rows = [row[c] for c in (candidate(4, **FULL), candidate(2), candidate(4), flash)]
    mean = state.mean_tokens_per_second()
    fastest = max((candidate(4), flash), key=lambda c: float(mean[row[c]]))
    assert mean[row[candidate(4, **FULL)]] < mean[row[fastest]]
    assert largest_untiled(state, among=rows) == largest_without_recompute(state, among=rows) == row[fastest]
    assert largest_untiled(state, among=rows[:2]) == row[candidate(4, **FULL)], "the size counts, not the speed"
    assert largest_without_recompute(state, among=rows[:2]) == row[candidate(2)]
    assert largest_untiled(state, among=[row[candidate(1)], row[candidate(2)]]) == row[candidate(2)]
    assert largest_untiled(state, among=[]) is None
    assert largest_without_recompute(state, among=[row[candidate(4, **FULL)]]) is None
    tight = small_state(memory_limit_gib=(state.bytes(row[candidate(2)]).required + 2e6) / 2**30)
    know(tight, *(c for c in tight.table.candidates if c.recompute == "none"))
    rows = [i for i, c in enumerate(tight.table.candidates) if c.recompute == "none"]
    found = largest_untiled(tight, among=rows)
    assert found is not None
    assert tight.table.candidates[found].micro_batch_size == 2


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
    notes = [note for note in recommend(state).notes if "other processes share these cores" in note]
    assert [f"threads waited {waited:.0%} of the time" in note for note in notes] == [True] * is_noted
