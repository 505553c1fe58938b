"""What is said of a command's longest micro-batch, of larger sizes, of its evaluation and of its processes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bexp.api.cli.tune_answer import (
    describe_evaluation,
    describe_larger,
    describe_processes,
    describe_training,
    describe_worst,
    fitting_size,
    share_longer,
)
from bexp.explorer.model.parts import EvaluationBatch, ProcessSpread, SampleLengths
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.tune.lengths import Lengths
from bexp.tune.micro_batches import MicroBatches
from tests.explorer.exports.samples import PARTS, candidate
from tests.tune_commands.texts import Texts


def known(number: int, size: int) -> tuple[np.ndarray, SampleLengths]:
    """The lengths of texts with a long tail, and what a trial of a size tells of them."""
    texts = Texts(number, long_tail=True)
    widths = np.array([len(texts[place]["input_ids"]) for place in range(number)])
    lengths = Lengths.of(texts)
    made = MicroBatches(lengths, lambda seed: np.random.default_rng(seed).permutation(number), size)
    made.is_random, made._padding = True, 1
    samples = SampleLengths(number=number, num_read=number, longest=int(widths.max()), tail=tuple(made.tail or ()))
    return widths, samples


def told(stored: Any) -> list[list[str]]:
    """The lines about the micro-batch of 4, in two columns."""
    return [
        [cell.strip() for cell in line.split("\t")] for line in describe_training(stored, "job", candidate(4), 1700)
    ]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (SampleLengths(number=900, num_read=900, longest=2048), "4 x 2,048 tokens ran first: no micro-batch of"),
        (
            SampleLengths(number=9000, num_read=900, longest=64, rows=2),
            "8 x 64 tokens ran first: .* 900 .*, of 9,000. One of the others is longer with a chance of 90%",
        ),
        (None, "not known"),
    ],
)
def test_the_worst_micro_batch_is_told_as_far_as_it_is_known(samples: SampleLengths | None, said: str) -> None:
    assert re.match(said, describe_worst(samples, 4))


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("tokens", [60, 120, 240, 400])
def test_the_share_of_micro_batches_that_are_too_long_is_that_of_drawn_ones(size: int, tokens: int) -> None:
    widths, samples = known(20_000, size)
    rng = np.random.default_rng(0)
    drawn = np.mean([widths[rng.permutation(20_000)].reshape(-1, size).max(axis=1) > tokens for _ in range(5)])
    assert share_longer(samples, size, tokens) == pytest.approx(drawn, rel=0.2)


def test_a_size_that_fails_is_told_with_how_often() -> None:
    _, samples = known(200, 4)
    assert describe_larger(samples, 4.0, {8, 16, 32}) == (
        "8 has no memory for up to 1 in 4 micro-batches, 16 has no memory for up to nearly all micro-batches; "
        "each pass over the data has one"
    )
    assert describe_larger(samples, 4.0, {8, 16}) == describe_larger(samples, 4.0, {32, 16, 8}), "two are enough"
    assert describe_larger(samples, 4.0, set()) == ""
    assert describe_larger(samples.model_copy(update={"tail": None}), 4.0, {8}) == "", "packed, or in another order"


@pytest.mark.parametrize(
    ("peaks", "failed", "fits"),
    [
        ({1: 1000, 4: 1600}, {8}, 6.0),
        ({1: 1000, 4: 1600}, {5}, 4.0),  # what has failed contradicts the line
        ({1: 1000, 4: 1600}, set(), 6.0),
        ({4: 1600}, {8}, 4.0),
        ({1: 1000, 4: 990}, {8}, 4.0),
        ({1: 2200, 4: 2100}, {8}, 4.0),
        ({}, {1}, 1.0),
    ],
)
def test_the_size_that_just_fits_follows_from_the_peaks(peaks: dict[int, int], failed: set[int], fits: float) -> None:
    assert fitting_size(peaks, failed, 2000) == pytest.approx(fits)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"length": 2048, "peak_bytes": GIB},
            "one batch of 8 x 2,048 tokens, the longest there is, has a peak of 1.0 GiB",
        ),
        ({"peak_bytes": None}, "one batch of 8 has no memory; lower per_device_eval_batch_size"),
        (
            {"peak_bytes": None, "failure": "crashed: KeyError: 'labels'"},
            "not measured: one batch of 8 crashed: KeyError: 'labels'",
        ),
        (
            {"peak_bytes": None, "fitting_size": 2, "fitting_peak_bytes": 3 * GIB},
            "one batch of 8 has no memory; per_device_eval_batch_size 2 has 3.0 GiB",
        ),
        (
            {"peak_bytes": 9 * GIB, "kept_bytes": 8 * GIB, "kept_rows": 3200, "fitting_steps": 7},
            "does not fit: one batch of 8 has a peak of 9.0 GiB of 4.0 GiB, 8.0 GiB of it the outputs of 3,200 rows "
            "kept for compute_metrics; eval_accumulation_steps 7 or preprocess_logits_for_metrics",
        ),
        (
            {"peak_bytes": 9 * GIB, "kept_bytes": GIB, "kept_rows": 5, "fitting_size": 4, "fitting_peak_bytes": GIB},
            "does not fit: one batch of 8 has a peak of 9.0 GiB of 4.0 GiB, 1.0 GiB of it the outputs of 5 rows kept "
            "for compute_metrics; per_device_eval_batch_size 4 has 1.0 GiB with preprocess_logits_for_metrics",
        ),
        (
            {"peak_bytes": 9 * GIB, "fitting_size": 4, "fitting_peak_bytes": 4 * GIB},
            "does not fit: one batch of 8 has a peak of 9.0 GiB of 4.0 GiB; per_device_eval_batch_size 4 has 4.0 GiB",
        ),
    ],
)
def test_an_evaluation_that_does_not_fit_says_why_and_what_would(batch: dict[str, Any], said: str) -> None:
    evaluation = EvaluationBatch.model_validate({"batch_size": 8, "length": 0, **batch})
    assert describe_evaluation(evaluation, 4 * GIB) == said


def test_the_slowest_and_the_fullest_process_are_named() -> None:
    spread = ProcessSpread(number=4, slowest=2, slower=1.31, fullest=1, fuller=1.02)
    assert describe_processes(spread) == "4: rank 2 is the slowest, with 1.31x the seconds of the fastest"
    alike = ProcessSpread(number=2, slowest=0, slower=1.05, fullest=1, fuller=1.05)
    assert describe_processes(alike) == "2: none is slower or fuller than another by 5%"


def test_an_evaluation_and_the_processes_are_told_with_the_answer() -> None:
    evaluation = EvaluationBatch(batch_size=8, length=0, peak_bytes=1 << 10)
    spread = ProcessSpread(number=2, slowest=1, slower=1.0, fullest=0, fuller=1.21)
    parts = PARTS.model_copy(update={"evaluation": evaluation, "processes": spread})
    job = SimpleNamespace(report=SimpleNamespace(parts=parts))
    stored: Any = SimpleNamespace(get=lambda _: job, trials=lambda _: [])
    assert told(stored) == [
        ["worst micro-batch", "not known: the lengths or the order of the samples cannot be read"],
        ["evaluation", "one batch of 8, the longest there is, has a peak of 1.0 KiB"],
        ["processes", "2: rank 0 is the fullest, with 1.21x the peak of the emptiest"],
    ]


def test_larger_sizes_are_told_by_the_peaks_and_the_failures_of_the_same_settings() -> None:
    """A size that failed while a larger one ran has failed for another reason."""

    def tried(size: int, peak: int | None, settings: str | None = None) -> Trial:
        outcome = Outcome.OK if peak is not None else Outcome.OUT_OF_MEMORY
        measurement = Measurement(candidate=candidate(size, settings=settings), outcome=outcome)
        return Trial(number=0, kind=TrialKind.WHOLE_MODEL, measurement=measurement, measured_peak_bytes=peak)

    _, samples = known(200, 4)
    parts = PARTS.model_copy(update={"samples": samples})
    trials = [tried(size, peak) for size, peak in ((1, 1000), (4, 1600), (4, 1300), (2, None), (8, None), (32, None))]
    trials += [tried(4, 1650, "tf32=true"), tried(5, None, "tf32=true")]
    report: Any = SimpleNamespace(parts=parts)
    stored: Any = SimpleNamespace(get=lambda _: SimpleNamespace(report=report), trials=lambda _: trials)
    assert told(stored) == [
        ["worst micro-batch", "4 x 474 tokens ran first: no micro-batch of this data is longer"],
        [
            "larger sizes",
            "8 has no memory for up to 1 in 5 micro-batches, 32 has no memory for up to nearly all micro-batches; "
            "each pass over the data has one",
        ],
    ]
    report = None
    assert told(stored) == []
