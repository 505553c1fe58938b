from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bexp.explorer.records.recommendation import Alternative, Role
from bexp.explorer.records.run_report import ReportedRun, RunReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.reported_runs import is_same_training, peak_factor, summarize_reports
from tests.explorer.alternatives import alternative
from tests.explorer.search.small import MODEL, REPORT, candidate, recommendation, small_request

HARDWARE = REPORT.hardware


def run(**changes: Any) -> RunReport:
    made = {
        "tokens_per_second": 1000.0,
        "peak_bytes": 1 << 30,
        "steps": 20,
        "micro_batch_size": 4,
        "seconds": 10.0,
        "hardware": HARDWARE.device_name,
        "versions": {"torch": HARDWARE.versions.torch},
        "finished_at": datetime(2026, 3, 1, tzinfo=UTC),
    }
    return RunReport.model_validate(made | changes)


def test_reached_figures_are_compared_with_the_composed_ones() -> None:
    best = recommendation(tokens_per_second=1000.0, composed_tokens_per_second=1250.0)
    reports = [run(tokens_per_second=each) for each in (1100.0, 1200.0, 1150.0)]
    (found,) = summarize_reports("e1", best, HARDWARE, [*reports, run(peak_bytes=None), run(peak_bytes=3 << 29)])
    assert found.candidate == candidate(4)
    assert (found.num_reports, found.peak_ratio) == (5, 1.5)
    assert found.speed_ratio == pytest.approx(1100 / 1250)


def dividing(**changes: Any) -> Alternative:
    made = {"tokens_per_second": 900.0, "composed_tokens_per_second": 1000.0, "measured_peak_bytes": 1 << 29}
    return alternative(Role.DIVIDING, candidate(2), **(made | changes))


def test_runs_of_the_candidate_that_divides_the_batch_count_for_that_one() -> None:
    best = recommendation(tokens_per_second=1000.0, alternatives=(dividing(),))
    of_it = run(micro_batch_size=2, tokens_per_second=950.0)
    (found,) = summarize_reports("e1", best, HARDWARE, [of_it])
    assert (found.candidate, found.peak_ratio) == (candidate(2), 2.0)
    assert found.speed_ratio == pytest.approx(0.95)
    both = summarize_reports("e1", best, HARDWARE, [of_it, run()])
    assert [each.candidate for each in both] == [candidate(4), candidate(2)]
    assert not summarize_reports("e1", recommendation(alternatives=(dividing(predicted=True),)), HARDWARE, [of_it])


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 2},
        {"applied": False},
        {"hardware": "another device"},
        {"versions": {"torch": "1.0"}},
        {"tokens_per_second": 400.0},
        {"tokens_per_second": 4000.0},
    ],
)
def test_a_run_of_something_else_says_nothing(changes: dict[str, Any]) -> None:
    assert summarize_reports("e1", recommendation(), HARDWARE, [run(**changes)]) == ()


def test_two_requests_are_about_the_same_training_whatever_they_explore() -> None:
    one = small_request()
    assert is_same_training(
        one, small_request(micro_batch_size=[8], batch_size=64, seed=3, model=MODEL | {"name": "x"})
    )
    assert not is_same_training(one, small_request(model=MODEL | {"num_layers": 3}))
    assert not is_same_training(one, small_request(training={"optimizer": {"name": "sgd"}}))
    assert not is_same_training(one, small_request(execution="compile"))
    alone, together = (small_request(num_devices=2, parallelism={"tensor": size}) for size in (1, 2))
    assert not is_same_training(alone, together), "a device has half of each block"
    config: dict[str, Any] = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 8}
    plain, padded, packed = (
        ExplorationRequest.model_validate(config | texts)
        for texts in ({}, {"lengths": {8: 1}}, {"lengths": {8: 1}, "batching": "packed"})
    )
    assert not is_same_training(plain, padded)
    assert not is_same_training(padded, packed)
    of_adapters = config | {"target": "transformers", "training": {"lora": {"r": 8, "target_modules": "all-linear"}}}
    whole, quantised = (
        ExplorationRequest.model_validate(of_adapters | weights) for weights in ({}, {"quantization": "bnb_4bit"})
    )
    assert not is_same_training(whole, quantised), "4-bit weights are another speed and another peak"


@pytest.mark.parametrize(
    ("ratios", "factor"), [([], 1.0), ([None], 1.0), ([0.9], 1.0), ([1.1, 1.2, 0.8], 1.1), ([9.0], 1.25)]
)
def test_memory_is_only_ever_made_scarcer(ratios: list[float | None], factor: float) -> None:
    runs = [
        ReportedRun(exploration_id="e", candidate=candidate(), num_reports=1, speed_ratio=1.0, peak_ratio=ratio)
        for ratio in ratios
    ]
    assert peak_factor(runs) == pytest.approx(factor)
