"""The whole models at the end of an exploration: what is run, what it changes, and that a restart changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Role
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.search.alternatives import compare
from bexp.explorer.search.explore import explore
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.noise_limit import NoiseLimit
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.search_space import NextCheck
from bexp.explorer.search.whole_models import ATTEMPTS, RunnerUp, WholeModels
from tests.explorer.alternatives import other_of
from tests.explorer.explorations import answer_of, best_of, lines, pruned, request, trials_of
from tests.explorer.search.small import MODEL, candidate, know, small_state, trial
from tests.explorer.search.small import whole as measured_whole
from tests.explorer.simulator import SimulatedDevice, report


def run(device: SimulatedDevice, history: tuple[Trial, ...] = ()) -> list[Progress]:
    steps = explore(device.request, report(memory_gib=40), device, history=history, clock=lambda: 0.0, prune=pruned)
    return list(steps)


def device_with(
    own: dict[Candidate, float] | None = None, *, common: float = 1.0, outcomes: tuple[Outcome, ...] = (), **asked: Any
) -> SimulatedDevice:
    device = SimulatedDevice(request(**asked), noise=0.0)
    device.own_factors = own or {}
    device.whole_model_factor = common
    device.whole_model_outcomes = list(outcomes)
    return device


def whole(steps: list[Progress]) -> list[Trial]:
    return [t for t in trials_of(steps) if t.kind is TrialKind.WHOLE_MODEL]


@cache
def plain() -> tuple[Progress, ...]:
    """Where whole models do what their components compose to."""
    return tuple(run(device_with()))


def pair() -> tuple[Candidate, Candidate]:
    """The recommended candidate and its runner-up there."""
    first, second = (t.candidate for t in whole(list(plain())))
    return first, second


def test_a_runner_up_that_is_better_as_a_whole_model_becomes_the_answer() -> None:
    winner, rival = pair()
    steps = run(device_with({rival: 0.93}))
    found = best_of(steps)
    assert [t.candidate for t in whole(steps)][:2] == [winner, rival]
    assert found.candidate == rival
    assert other_of(found, Role.RUNNER_UP).candidate == winner
    assert found.whole_model is not None
    assert found.tokens_per_second == pytest.approx(found.whole_model.tokens_per_second, rel=0.01)
    assert found.confidence >= 80
    (line,) = lines(steps, EventCode.ANSWER_CHANGED)
    assert line == f"Whole models change the answer from {winner.describe()} to {rival.describe()}"
    last = [e for s in steps for e in s.events if e.code is EventCode.RECOMMENDATION][-1]
    assert last.data["recommendation"]["candidate"] == rival.model_dump(mode="json")


def test_an_answer_is_never_slower_than_its_runner_up_beyond_the_tolerance_whatever_the_noise() -> None:
    winner, rival = pair()
    device = device_with({rival: 0.95})
    device.whole_model_error = 0.2
    found = best_of(run(device))
    assert found.candidate == rival != winner
    assert other_of(found, Role.RUNNER_UP).candidate == winner
    assert other_of(found, Role.RUNNER_UP).ratio > 1


def test_a_runner_up_that_does_not_fit_is_told_and_ruled_out() -> None:
    winner, rival = pair()
    steps = run(device_with(outcomes=(Outcome.OK, Outcome.OUT_OF_MEMORY)))
    found = best_of(steps)
    assert [t.candidate for t in whole(steps)[:2]] == [winner, rival]
    assert found.candidate != rival
    assert rival not in [t.candidate for t in whole(steps)[2:]]
    assert len(whole(steps)) <= ATTEMPTS
    assert found.alternative(Role.RUNNER_UP) is not None
    assert any("out_of_memory" in line for line in lines(steps, EventCode.WARNING))


@pytest.mark.parametrize("outcome", [Outcome.UNSUPPORTED, Outcome.TIMED_OUT])
def test_where_whole_models_do_not_run_the_runner_up_is_not_tried(outcome: Outcome) -> None:
    steps = run(device_with(outcomes=(outcome,)))
    assert len(whole(steps)) == 1
    assert best_of(steps).alternative(Role.RUNNER_UP) is None


def test_a_whole_model_that_is_unsupported_rules_out_those_that_share_its_execution() -> None:
    executions = (Execution.EAGER, Execution.COMPILE, Execution.GRAPH)
    steps = run(device_with(executions=executions, outcomes=(Outcome.UNSUPPORTED,)))
    first, second, *_ = whole(steps)
    found = best_of(steps)
    assert {second.candidate.execution, found.candidate.execution} < set(executions) - {first.candidate.execution}
    assert found.whole_model is not None
    assert found.confidence >= 95


def test_where_none_is_supported_the_components_decide() -> None:
    """Two unlike candidates are tried; their figures stand as far as components show them."""
    steps = run(device_with(executions=(Execution.EAGER, Execution.COMPILE), outcomes=(Outcome.UNSUPPORTED,) * 9))
    assert len({t.candidate.execution for t in whole(steps)}) == len(whole(steps)) == 2
    assert best_of(steps).candidate == whole(steps)[0].candidate
    assert best_of(steps).whole_model is None


def test_two_that_are_unsupported_for_one_reason_say_nothing_of_others_once_one_ran() -> None:
    executions = (Execution.EAGER, Execution.COMPILE, Execution.GRAPH, Execution.COMPILE_GRAPH)
    refused = (Outcome.OK, Outcome.UNSUPPORTED, Outcome.UNSUPPORTED)
    steps = run(device_with(executions=executions, outcomes=refused, budget={"confidence_target": 99}))
    ran = [(t.candidate.execution, t.measurement.outcome) for t in whole(steps)]
    bad = {execution for execution, outcome in ran if outcome is Outcome.UNSUPPORTED}
    assert len(bad) == 2
    assert len(ran) > 3, "others follow"
    assert not bad & {execution for execution, _ in ran[3:]}
    assert best_of(steps).candidate.execution not in bad
    assert best_of(steps).confidence >= 95, "those that cannot be had are no rivals"


def test_a_spent_budget_leaves_the_runner_up_out() -> None:
    searched = sum(t.kind is TrialKind.COMPONENTS for t in trials_of(list(plain())))
    steps = run(device_with(budget={"max_trials": searched + 1}))
    assert [t.candidate for t in whole(steps)] == [pair()[0]]
    assert best_of(steps).alternative(Role.RUNNER_UP) is None
    assert best_of(steps).whole_model is not None


def test_nothing_is_run_whole_unless_asked_for() -> None:
    assert whole(run(device_with(verify=False))) == []


class Interrupted(SimulatedDevice):
    """Fails a test that asks for what is stored."""

    stored: frozenset[tuple[TrialKind, Candidate]] = frozenset()

    def __call__(self, task: TrialTask) -> Measurement:
        assert task.kind is TrialKind.COMPONENTS or (task.kind, task.candidate) not in self.stored
        return super().__call__(task)


@pytest.mark.parametrize(
    ("own", "outcomes"),
    [
        ((1.0, 0.97), ()),
        ((1.06, 1.0), ()),
        ((1.0, 1.0), (Outcome.OK, Outcome.OUT_OF_MEMORY)),
        ((1.0, 0.97), (Outcome.CRASHED, Outcome.OK)),
    ],
)
def test_a_restart_at_any_point_of_the_checks_changes_nothing(
    own: tuple[float, float], outcomes: tuple[Outcome, ...]
) -> None:
    factors = dict(zip(pair(), own, strict=True))
    undisturbed = run(device_with(factors, outcomes=outcomes))
    trials = trials_of(undisturbed)
    first = next(i for i, t in enumerate(trials) if t.kind is TrialKind.WHOLE_MODEL)
    for stored in range(first - 1, len(trials) + 1):
        history = tuple(trials[:stored])
        done = [t for t in history if t.kind is TrialKind.WHOLE_MODEL]
        device = Interrupted(request(), noise=0.0)
        again = {(t.kind, t.candidate) for t in trials[stored:]}  # a run may be repeated because of its noise
        device.stored = frozenset((t.kind, t.candidate) for t in done) - again
        device.own_factors = factors
        device.whole_model_outcomes = list(outcomes[len(done) :])
        steps = run(device, history)
        assert [*history, *trials_of(steps)] == trials
        assert answer_of(steps) == answer_of(undisturbed)
        said = [e.message for s in undisturbed[stored:] for e in s.events if e.code >= EventCode.TRIAL]
        assert [e.message for s in steps for e in s.events if e.code >= EventCode.TRIAL] == said


def small_whole_models(*trials: Trial, **changes: Any) -> tuple[Posterior, WholeModels]:
    """A state that knows the sizes 1, 2 and 4, and the whole models that ran."""
    state = small_state(**changes)
    know(state, candidate(1), candidate(2), candidate(4))
    history = TrialHistory(trials, state.request.budget, 1)
    return state, WholeModels(state, history, 0, NoiseLimit(state, history, 0))


def whole_trial(
    number: int, size: int, outcome: Outcome = Outcome.OK, tokens: float | None = None, seconds: float = 1.0
) -> Trial:
    """A whole model; one that ran has the micro-steps of so many tokens/s, and its optimizer takes no time."""
    found: dict[str, Any] = {"reason": "why", "seconds": seconds}
    if tokens is not None:
        found["whole_model"] = measured_whole(size * MODEL["seq_length"] / tokens, optimizer_seconds=0.0)
    return trial(number, candidate(size), outcome, kind=TrialKind.WHOLE_MODEL, tokens=tokens, **found)


def test_the_fastest_other_whole_model_is_the_runner_up_with_the_gain_over_it() -> None:
    ran = [whole_trial(7, 4, tokens=110.0), whole_trial(8, 1, tokens=80.0), whole_trial(9, 2, tokens=100.0)]
    state, models = small_whole_models(*ran)
    assert models.runner_up_of(candidate(4)) == candidate(2)
    four, two = (state.table.row[candidate(size)] for size in (4, 2))
    found = compare(state, four, Role.RUNNER_UP, two, models.of(candidate(2)))
    assert found.ratio == pytest.approx(1.1)
    assert (found.is_measured_whole, found.outcome) == (True, Outcome.OK)
    assert found.composed_tokens_per_second == pytest.approx(state.seconds(two).tokens_per_second)


def test_of_runners_up_that_failed_the_last_is_told() -> None:
    failed = [whole_trial(8, 1, Outcome.OUT_OF_MEMORY), whole_trial(9, 2, Outcome.CRASHED)]
    state, models = small_whole_models(whole_trial(7, 4, tokens=110.0), *failed)
    assert models.runner_up_of(candidate(4)) == candidate(2)
    four, two = (state.table.row[candidate(size)] for size in (4, 2))
    found = compare(state, four, Role.RUNNER_UP, two, models.of(candidate(2)))
    assert (found.is_measured_whole, found.outcome, found.reason) == (False, Outcome.CRASHED, "why")


def test_a_whole_model_that_failed_before_the_recommended_one_ran_is_no_runner_up() -> None:
    _, models = small_whole_models(whole_trial(7, 1, Outcome.OUT_OF_MEMORY), whole_trial(8, 4, tokens=110.0))
    assert models.runner_up_of(candidate(4)) is None
    _, alone = small_whole_models(whole_trial(7, 1, Outcome.OUT_OF_MEMORY))
    assert alone.runner_up_of(candidate(2)) is None, "the recommended candidate has not run"


def test_the_confidence_falls_where_runs_of_one_whole_model_differ_widely() -> None:
    """The recommended candidate has run at what it composes to, and at 0.4 of that."""
    state, _ = small_whole_models()
    calm = state.recommend()
    assert calm is not None
    best = state.table.candidates[calm.row]
    composed = state.seconds(calm.row).tokens_per_second
    for number, share in enumerate((1.0, 0.4), 7):
        state.knowledge.learn_whole_model(best, share * composed, 0.001, number=number)
    disturbed = state.recommend()
    assert disturbed is not None
    assert disturbed.confidence < 0.7 * calm.confidence


@pytest.mark.parametrize("finder", ["find_runner_up", "find_above_limit"])
@pytest.mark.parametrize(("share", "is_run"), [(0.95, False), (1.05, True), (20.0, True)])
@pytest.mark.parametrize(("seconds", "confidence"), [(1.0, 0.99), (30.0, 0.99), (30.0, 0.9)])
def test_a_rival_is_run_if_its_expected_gain_is_worth_it(
    monkeypatch: pytest.MonkeyPatch, share: float, is_run: bool, seconds: float, confidence: float, finder: str
) -> None:
    """Worth it are 0.005% where the tolerance is 1%, and for a runner-up of a sure answer 0.005% for each second."""
    state, _ = small_whole_models()
    monkeypatch.setattr(state, "whole_model_seconds", lambda row: seconds)
    least = 0.0015 if (finder, seconds, confidence) == ("find_runner_up", 30.0, 0.99) else 0.00005
    gain = share * least
    best = state.recommend()
    assert best is not None
    best = replace(best, confidence=confidence)
    size = state.table.candidates[best.row].micro_batch_size
    history = TrialHistory([whole_trial(7, size, tokens=100.0)], state.request.budget, 1)
    monkeypatch.setattr(state.knowledge.whole_models, "was_run", lambda row: row == best.row)
    monkeypatch.setattr(state, "recommend", lambda: best)
    rival = RunnerUp(state.table.row[candidate(1)], 0.3, gain, 0.4)
    for each in ("find_runner_up", "find_above_limit"):
        found_by_it = rival if each == finder else None
        monkeypatch.setattr(f"bexp.explorer.search.whole_models.{each}", lambda *_, found=found_by_it: found)
    check = NextCheck(rival.row, 0.3, None if finder == "find_runner_up" else 0.3)
    assert WholeModels(state, history, 0, NoiseLimit(state, history, 0)).next() == (check if is_run else None)


def next_row(
    monkeypatch: pytest.MonkeyPatch, ran: Callable[[int], list[Trial]], confidence: float | None = None
) -> tuple[int | None, int]:
    """Return the row that is run whole after what ran, given the best's size, and that of a likely rival."""
    state, _ = small_whole_models()
    best = state.recommend()
    assert best is not None
    size = state.table.candidates[best.row].micro_batch_size
    rival = state.table.row[candidate(next(other for other in (1, 2, 4) if other != size))]
    monkeypatch.setattr("bexp.explorer.search.whole_models.find_runner_up", lambda *_: RunnerUp(rival, 0.5, 0.1, 1.0))
    sure = best if confidence is None else replace(best, confidence=confidence)
    monkeypatch.setattr(state, "recommend", lambda: sure)
    history = TrialHistory(ran(size), state.request.budget, 1)
    is_known = any(each.kind is TrialKind.WHOLE_MODEL for each in history.trials)
    monkeypatch.setattr(state.knowledge.whole_models, "was_run", lambda row: is_known)
    models = WholeModels(state, history, 0, NoiseLimit(state, history, 0))
    check, is_sure = models.next(), 100 * sure.confidence >= state.request.budget.confidence_target
    assert models.lacks_time is (check is None and not is_sure), "a larger budget would tell more"
    return (None if check is None else check.row), rival


@pytest.mark.parametrize(("spent", "is_run"), [(250.0, True), (298.5, False)])
def test_after_the_first_a_whole_model_begins_only_if_it_ends_within_half_of_the_seconds(
    monkeypatch: pytest.MonkeyPatch, spent: float, is_run: bool
) -> None:
    first, rival = next_row(monkeypatch, lambda size: [])
    assert first not in (None, rival)
    found, rival = next_row(monkeypatch, lambda size: [whole_trial(7, size, tokens=100.0, seconds=spent)])
    assert found == (rival if is_run else None)


@pytest.mark.parametrize(
    ("number", "searched", "confidence", "is_run"),
    [(3, 1.0, 0.99, True), (4, 60.0, 0.99, False), (4, 100.0, 0.99, True), (4, 60.0, 0.9, True)],
)
def test_after_a_few_whole_models_those_of_a_sure_answer_take_hardly_longer_than_the_components(
    monkeypatch: pytest.MonkeyPatch, number: int, searched: float, confidence: float, is_run: bool
) -> None:
    """Each of them has taken 7 s, and the next one is expected to take 36 s."""

    def ran(size: int) -> list[Trial]:
        wholes = [whole_trial(7 + i, size, tokens=100.0, seconds=7.0) for i in range(number)]
        return [trial(0, candidate(size), seconds=searched), *wholes]

    found, rival = next_row(monkeypatch, ran, confidence)
    assert found == (rival if is_run else None)
