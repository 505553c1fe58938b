"""What is said of a command's longest micro-batch, of larger sizes, of its evaluation and of its processes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bexp.api.cli.worst_batch import (
    describe_evaluation,
    describe_larger,
    describe_processes,
    describe_worst,
    fitting_size,
    share_longer,
)
from bexp.explorer.spec.parts import EvaluationBatch, ProcessSpread, SampleLengths
from bexp.tune.lengths import Lengths
from bexp.tune.micro_batches import MicroBatches
from tests.tune_commands.with_trainer import Texts


def known(number: int, size: int) -> tuple[np.ndarray, SampleLengths]:
    """The lengths of texts with a long tail, and what a trial of a size tells of them."""
    texts = Texts(number, long_tail=True)
    widths = np.array([len(texts[place]["input_ids"]) for place in range(number)])
    lengths = Lengths.of(texts)
    made = MicroBatches(lengths, lambda seed: np.random.default_rng(seed).permutation(number), size)
    made.is_random, made._padding = True, 1
    samples = SampleLengths(number=number, num_read=number, longest=int(widths.max()), tail=tuple(made.tail or ()))
    return widths, samples


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
        ({}, {1}, 1.0),
    ],
)
def test_the_size_that_just_fits_follows_from_the_peaks(peaks: dict[int, int], failed: set[int], fits: float) -> None:
    assert fitting_size(peaks, failed, 2000) == pytest.approx(fits)


def test_an_evaluation_that_does_not_fit_says_what_to_lower() -> None:
    fits = EvaluationBatch(batch_size=8, length=2048, peak_bytes=1 << 30)
    assert describe_evaluation(fits) == "one batch of 8 x 2,048 tokens, the longest there is, has a peak of 1.0 GiB"
    fails = EvaluationBatch(batch_size=8, length=0, peak_bytes=None)
    assert describe_evaluation(fails) == "one batch of 8 has no memory: lower per_device_eval_batch_size"


def test_the_slowest_and_the_fullest_process_are_named() -> None:
    spread = ProcessSpread(number=4, slowest=2, slower=1.31, fullest=1, fuller=1.02)
    assert describe_processes(spread) == "4: rank 2 is the slowest, with 1.31x the seconds of the fastest"
    alike = ProcessSpread(number=2, slowest=0, slower=1.01, fullest=1, fuller=1.0)
    assert describe_processes(alike) == "2: none is slower or fuller than another by 5%"
