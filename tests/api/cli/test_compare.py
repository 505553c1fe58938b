"""`bexp compare`, and how far a document says that its answer can be trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest

from bexp.api.certainty import describe_certainty
from bexp.api.cli.errors import CommandError
from bexp.api.comparison import _advice, compare_answers
from bexp.client.errors import ProblemError
from bexp.client.explorations import Exploration, Explorations
from bexp.explorer.answers.text import row
from bexp.explorer.records.measurement import Conditions
from bexp.explorer.records.recommendation import Answer
from bexp.explorer.records.trial import Trial
from tests.api.cli.conftest import Run
from tests.api.cli.samples import ANSWER, RECOMMENDATION, SMALLER, TINY, UNDIVIDED, job_document
from tests.explorer.alternatives import with_alternatives
from tests.explorer.search.small import REPORT
from tests.explorer.search.test_comparison import whole_run

Worker = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def explored(bexp: Run, worker: Worker, configure: Callable[..., Path]) -> Callable[..., str]:
    """Explores, with fields in place of the request's own, and returns the id."""

    def explore(answer: Answer = ANSWER, **fields: Any) -> str:
        with worker(answer):
            done = bexp("submit", configure(**fields), "--set", "fresh=true", "--watch", "--json")
        assert done.code == 0, done.stderr
        job_id: str = json.loads(done.stdout)["job"]["id"]
        return job_id

    return explore


def test_comparing_says_how_surely_and_what_differs(bexp: Run, explored: Callable[..., str]) -> None:
    a, b = explored(), explored(batch_size=48, budget={"max_seconds": 20})
    said = json.loads(bexp("compare", a, b, "--json").stdout)
    assert said["probability_b_faster"] == pytest.approx(0.5)  # the scripted worker has found the same twice
    assert said["differences"] == ["batch_size: 24 in A, 48 in B"]
    assert [said[side]["explorations"] for side in "ab"] == [[a], [b]]
    assert [line[0] for line in said["not_measured"]] == ["t", "t"]
    assert said["next_measurement"]["runs_of_each"] is None
    lines = bexp("compare", a, b).stdout
    assert lines.startswith("B is faster than A with a probability of 50%: 1.000x its speed, ")
    assert "batch_size: 24 in A, 48 in B" in lines
    assert bexp("compare", a, "latest").code == 0
    refused = bexp("compare", a, "unknown")
    assert refused.code == 2 and "no exploration begins with 'unknown'" in refused.stderr


def certainty(
    job: dict[str, Any] | None = None, reports: int = 0, *, served: int | None = None, **changes: Any
) -> dict[str, Any]:
    best = {**RECOMMENDATION.model_dump(mode="json"), **changes}
    document = {**(job or job_document()), "recommendation": best}
    if served is not None:
        document["answer"]["variants"][0] |= {"recommendation": best, "completed_target": served}
    found = describe_certainty(Exploration.model_validate(document), reports)
    assert found is not None
    return found


def test_a_document_says_what_was_not_measured_and_what_measuring_is_worth() -> None:
    known = certainty(reports=1, run_noise=0.02, expected_regret=0.004, confidences={"0.05": 95})
    assert (known["noise"], known["confidence"], known["confidence_by_tolerance"]) == (0.02, 87, {"0.05": 95})
    assert known["not_measured"] == [
        "all parts of the best with stock back ends and no batch tiling; its throughput is predicted in part",
        "whether training converges as well",
    ]
    assert known["next_measurement"] == {
        "worth_at_most": 0.004,
        "advice": "none: the confidence that was asked for is reached",
    }
    unknown = certainty(whole_model=None)["not_measured"]
    assert unknown[:2] == [
        "the recommended candidate as a whole model; its figures follow from measured parts",
        "the noise between runs",
    ]
    assert "a training run with this answer; none has been reported" in unknown
    higher = "explore again with a higher budget.max_seconds or budget.max_trials (option"
    for served, words in ((0, higher), (95, "nothing that is left to measure")):
        assert certainty(served=served, confidence=20)["next_measurement"]["advice"].startswith(words)
    communication = "communication between devices"
    assert communication not in unknown
    two = job_document(request={**TINY, "num_devices": 2})
    assert communication in certainty(two)["not_measured"]
    assert communication not in certainty(two, communication_seconds=0.01)["not_measured"]
    ran = {"micro_batch_size": 4, "attention_backend": "own", "num_query_groups": 1, "settings": "tf32=true"}
    in_steps = certainty(whole_model=None, candidate=ran, alternatives=[SMALLER.model_dump(mode="json")])[
        "not_measured"
    ]
    assert not any("as a whole model" in line for line in in_steps)
    assert "all parts of the best that divides the batch; its throughput is predicted in part" in in_steps
    running = certainty(job_document("running"))["next_measurement"]["advice"]
    assert running == "wait: the exploration has not ended"
    advised = describe_certainty(Exploration.model_validate(job_document("cancelled")), 0)
    assert advised is not None
    assert advised["next_measurement"]["advice"].startswith("resume the exploration, which has ended early, or")
    assert (known["tolerance"], known["confidence_asked_for"]) == (0.01, 60)
    unread = certainty(job_document(request=None), confidence=20)
    assert (unread["tolerance"], unread["confidence_asked_for"]) == (None, None)
    assert unread["next_measurement"]["advice"].startswith("resume the exploration")
    assert describe_certainty(Exploration.model_validate(job_document("queued")), 0) is None


def test_what_divides_the_batch_is_what_is_compared(bexp: Run, explored: Callable[..., str]) -> None:
    variant = ANSWER.variants[0].model_copy(update={"recommendation": UNDIVIDED})
    job_id = explored(ANSWER.model_copy(update={"variants": (variant,)}))
    said = json.loads(bexp("compare", job_id, job_id, "--json").stdout)
    assert said["a"]["candidate"]["micro_batch_size"] == 1
    assert said["a"]["num_runs"] == 0
    assert "A as a whole model; its speed follows from measured parts" in said["not_measured"]
    assert not said["a"]["is_recommended"]
    assert said["a"]["memory"] == {"allocated": UNDIVIDED.for_batch.expected_peak_bytes}
    assert "the best that divides the batch" in " ".join(bexp("compare", job_id, job_id).stdout.split())
    said = json.loads(bexp("compare", job_id, explored(), "--json").stdout)
    lines = " ".join(bexp("compare", job_id, "latest").stdout.split())
    assert said["speedup"] == pytest.approx(said["b"]["tokens_per_second"] / said["a"]["tokens_per_second"])
    assert f": {said['speedup']:.3f}x its speed" in lines
    for side, of in (("a", UNDIVIDED.for_batch), ("b", RECOMMENDATION)):
        assert said[side]["candidate"] == of.candidate.model_dump(mode="json")
        assert of.candidate.describe() in lines
        assert f": {said[side]['tokens_per_second']:,.0f} tokens/s, " in lines


def test_the_recommended_candidate_has_the_confidence_of_best(bexp: Run, explored: Callable[..., str]) -> None:
    assert SMALLER.confidence != RECOMMENDATION.confidence
    alike = SMALLER.model_copy(update={"candidate": RECOMMENDATION.candidate})
    best = with_alternatives(RECOMMENDATION, alike)
    job_id = explored(
        ANSWER.model_copy(update={"variants": (ANSWER.variants[0].model_copy(update={"recommendation": best}),)})
    )
    said = json.loads(bexp("compare", job_id, job_id, "--json").stdout)
    assert (said["a"]["is_recommended"], said["a"]["confidence"]) == (True, RECOMMENDATION.confidence)


def report_of(**hardware: Any) -> dict[str, Any]:
    report = REPORT.model_dump(mode="json")
    return {**report, "hardware": {**report["hardware"], **hardware}}


class Known:
    """Explorations with the tokens/s of the whole runs of their answer; the newest is the last."""

    def __init__(self, **speeds: tuple[float, ...]) -> None:
        self.speeds = speeds
        self.changes: dict[str, dict[str, Any]] = {name: {} for name in speeds}
        self.loads: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def get(self, job_id: str) -> Exploration:
        if job_id not in self.speeds:
            raise ProblemError(404, {"title": "Not Found"})
        return Exploration.model_validate(job_document(id=job_id, **self.changes[job_id]))

    def list(self) -> Iterator[Exploration]:
        return map(self.get, reversed(self.speeds))

    def trials(self, job_id: str) -> Iterator[Trial]:
        conditions = Conditions(host_busy_share=self.loads.get(job_id))
        for number, speed in enumerate(self.speeds[job_id]):
            run = whole_run(number, speed, conditions=conditions)
            yield run.model_copy(update={"seconds": self.seconds.get(job_id, 0.0) + number})

    def compare(self, a: str, b: str) -> tuple[dict[str, Any], str]:
        found = compare_answers(cast("Explorations", self), a, b)
        return found.document, "\n".join(found.lines)


def test_further_runs_count_once() -> None:
    known = Known(aaaa11=(100.0,), bbbb22=(101.0,), cccc33=(102.0,))
    said, _ = known.compare("aaaa11,aaaa,bbbb22,bbbb", "cccc33,latest")
    assert (said["a"]["explorations"], said["a"]["num_runs"]) == (["aaaa11", "bbbb22"], 2)
    assert (said["b"]["explorations"], said["b"]["num_runs"]) == (["cccc33"], 1)


def test_a_further_id_asks_the_same_and_one_without_a_run_is_named() -> None:
    known = Known(first=(100.0,), other=(50.0,), empty=())
    report = report_of(device_name="H100")
    known.changes = {"first": {"report": report}, "other": {"report": report}, "empty": {}}
    said, lines = known.compare("first,empty,other", "other")
    assert (said["a"]["num_runs"], said["not_measured"][0]) == (
        2,
        "the candidate of A in exploration empty, which has no whole run of it",
    )
    assert "which has no whole run of it" in " ".join(lines.split())
    for change, named in (
        ({"request": {**job_document()["request"], "batch_size": 48}}, "batch_size: 24 in first, 48 in other"),
        ({"report": report_of(device_name="A100")}, "device.device_name: H100 in first, A100 in other"),
    ):
        known.changes["other"] = {"report": report, **change}
        with pytest.raises(CommandError, match=named):
            known.compare("first,other", "first")
        assert known.compare("first", "other")[0]["differences"]


def test_what_does_not_decide_is_no_difference_and_the_load_of_the_host_is_one() -> None:
    request = job_document()["request"]
    same = {**request, "tolerance": 0.05, "base_micro_batch_size": 1, "target": "bexp", "device_kind": "cpu"}
    shapes = {"hidden_size": 256, "num_layers": 7, "vocab_size": 4096, "seq_length": 64}
    known = Known(first=(100.0,), same=(100.0,), other=(100.0,))
    known.changes = {
        "first": {"report": report_of(device_name="EPYC", num_devices=1)},
        "same": {
            "report": report_of(device_name="EPYC", num_devices=8),
            "request": {**same, "model": {**request["model"], "name": "renamed"}},
        },
        "other": {
            "report": report_of(device_name="EPYC"),
            "request": {**request, "model": {**request["model"], **shapes}, "batch_size": 48},
        },
    }
    known.loads = {"same": 0.5, "first": 0.02}
    said, lines = known.compare("first", "same")
    load = "load of the host by other programs: 2% of its processors in A, 50% in B"
    assert said["differences"] == [load]
    assert load in " ".join(lines.split())
    assert (said["a"]["host_busy_share"], said["b"]["host_busy_share"]) == (0.02, 0.5)
    assert (said["different_models"], said["differs"]) == (None, [])
    said, lines = known.compare("first", "other")
    sentence = "The answers are of two models called tiny. The work of their tokens differs, "
    assert said["different_models"].startswith(sentence)
    assert lines.startswith(said["different_models"])
    assert "faster" not in lines
    ratio = ("speedup", "speedup_90_percent", "probability_b_faster", "runs_needed")
    assert [said[name] for name in ratio] == [None] * 4
    assert said["next_measurement"]["runs_of_each"] is None
    assert {"field": "batch_size", "a": 24, "b": 48} in said["differs"]
    model, batch = said["differences"]
    assert model.startswith("model: 4 fields, such as model.")
    assert batch == "batch_size: 24 in A, 48 in B"


def test_a_reused_answer_has_the_curve_of_its_source_and_rates_of_two_units_have_no_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Known(source=(100.0,), reused=(), samples=(7.0,), left=())
    run = whole_run(9, 90.0)
    larger = RECOMMENDATION.candidate.model_copy(update={"micro_batch_size": 64})
    measurement = run.measurement.model_copy(update={"candidate": larger})
    run = run.model_copy(update={"measurement": measurement, "measured_peak_bytes": 1 << 50})

    def trials(job_id: str) -> Iterator[Trial]:
        if job_id == "deleted":
            raise ProblemError(404, {"title": "Not Found"})
        yield from Known.trials(known, job_id)
        if job_id == "source":
            yield run

    monkeypatch.setattr(known, "trials", trials)
    for name, source in (("reused", "source"), ("left", "deleted")):
        known.changes[name] = {"answered_from": {"exploration": source, "measured_at": "2026-01-01T00:00:00Z"}}
    said, _ = known.compare("reused", "left")
    assert [(point["micro_batch_size"], point["fits"]) for point in said["a"]["curve"]] == [
        (RECOMMENDATION.candidate.micro_batch_size, True),
        (64, False),
    ]
    assert [point["micro_batch_size"] for point in said["b"]["curve"]] == [RECOMMENDATION.candidate.micro_batch_size]
    assert said["a"]["curve"][0]["tokens_per_second"] == said["a"]["tokens_per_second"]
    best = {**RECOMMENDATION.model_dump(mode="json"), "rate_unit": "samples"}
    known.changes["samples"] = {"recommendation": best}
    assert "7.0 samples/s" in known.compare("samples", "samples")[1]
    with pytest.raises(CommandError, match="A counts tokens/s, and B counts samples/s"):
        known.compare("source", "samples")


def test_an_exploration_without_an_answer_says_why_and_what_differs() -> None:
    known = Known(first=(100.0,), failed=())
    request = {**job_document()["request"], "batch_size": 48}
    known.changes["failed"] = {"recommendation": None, "state": "failed", "error": "nothing fits", "request": request}
    for pair in (("first", "failed"), ("failed", "first")):
        with pytest.raises(CommandError, match="exploration failed has no recommendation: nothing fits") as caught:
            known.compare(*pair)
        assert "batch_size: " in caught.value.lines[1]


def test_no_probability_is_shown_as_certain_and_one_run_says_what_it_rests_on() -> None:
    known = Known(slow=(100.0,) * 9, fast=(200.0,) * 9, once=(100.0,))
    for a, b, shown in (("slow", "fast", "99%"), ("fast", "slow", "1%"), ("slow", "slow", "50%")):
        said, lines = known.compare(a, b)
        assert lines.startswith(f"B is faster than A with a probability of {shown}: ")
        assert 0.01 <= said["probability_b_faster"] <= 0.99
        assert said["not_measured"] == []
    (line,) = known.compare("once", "fast")[0]["not_measured"]
    assert line.startswith("the noise between whole runs of A, of which there is one: ")
    assert "noise that was seen elsewhere" in line


def test_a_command_that_was_not_run_again_has_the_speed_of_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"micro_batch_size": 4, "attention_backend": "own", "num_query_groups": 1, "settings": "tf32=true"}
    best = {**RECOMMENDATION.model_dump(mode="json"), "candidate": own, "alternatives": (), "whole_model": None}
    known = Known(a=(), b=())
    monkeypatch.setattr(known, "get", lambda id: Exploration.model_validate(job_document(id=id, recommendation=best)))
    said, lines = known.compare("a", "b")
    assert said["not_measured"] == [
        f"{name} in a run of its own; its speed is that of the search's steps" for name in "AB"
    ]
    assert (said["next_measurement"]["seconds"], "no whole runs, noise" in " ".join(lines.split())) == (None, True)


def test_a_comparison_is_these_lines() -> None:
    known = Known(a=(100.0, 102.0), b=(103.0, 104.0))
    candidate = RECOMMENDATION.candidate.describe()
    assert known.compare("a", "b")[1].splitlines() == [
        "B is faster than A with a probability of 97%: 1.025x its speed, 1.005x to 1.044x with 90%",
        row("A", f"tiny a, {candidate}: 101 tokens/s, 2 whole runs, noise 1.0%"),
        row("B", f"tiny b, {candidate}: 103 tokens/s, 2 whole runs, noise 0.5%"),
        row("next", "none: which one is faster is known"),
    ]
    assert "100 tokens/s, 1 whole run, noise 0.3%" in Known(a=(100.0,)).compare("a", "a")[1]


def test_further_runs_take_as_long_as_those_that_were() -> None:
    known = Known(a=(100.0, 101.0), b=(101.5, 100.5), c=(101.5, 100.5))
    known.seconds = {"a": 10.0, "b": 20.0}  # the second run of each takes a second more
    needed = known.compare("a", "b")[0]["next_measurement"]
    assert needed["runs_of_each"] > 1
    assert needed["seconds"] == needed["runs_of_each"] * (10.5 + 20.5)
    assert needed["advice"].startswith(f"{needed['runs_of_each']} more runs of each, about {needed['seconds']:.1f} s, ")


@pytest.mark.parametrize(("other", "count"), [(0.0, 1), (0.01, 0), (0.19, 0), (0.25, 1)])
def test_the_load_of_the_host_is_a_difference_from_ten_percent_on(other: float, count: int) -> None:
    known = Known(a=(100.0,), b=(100.0,))
    known.loads = {"a": 0.1, "b": other}
    assert len(known.compare("a", "b")[0]["differences"]) == count


@pytest.mark.parametrize(
    ("needed", "seconds", "begin"),
    [
        (0, 0.0, "none: which one is faster is known"),
        (1, 12.0, "1 more run of each, about 12.0 s, would tell"),
        (2, None, "2 more runs of each would tell them apart with 95% if the difference stays: explore both again"),
        (None, None, "none: so many runs would be needed"),
    ],
)
def test_what_to_measure_next_is_said_in_runs_and_seconds(
    needed: int | None, seconds: float | None, begin: str
) -> None:
    assert _advice(needed, seconds).startswith(begin)


def test_up_to_three_fields_of_a_model_are_told_one_by_one() -> None:
    request = job_document()["request"]
    known = Known(a=(100.0,), b=(100.0,))
    three = {"hidden_size": 256, "num_layers": 7, "vocab_size": 4096}
    known.changes["b"] = {"request": {**request, "model": {**request["model"], **three}}}
    assert set(known.compare("a", "b")[0]["differences"]) == {
        "model.hidden_size: 64 in A, 256 in B",
        "model.num_layers: 2 in A, 7 in B",
        "model.vocab_size: 256 in A, 4096 in B",
    }
