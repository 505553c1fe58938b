"""The seconds of a micro-step in the mean over all data, from a few timed ones of very unequal length."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from bexp.explorer.cost.text_batches import LEAST_ERROR, Epoch, Figures, expect
from bexp.tune import clock as tune_clock
from bexp.tune import link, own_loop
from bexp.tune import micro_batches as tune_micro_batches
from bexp.tune.clock import Clock, MicroStep
from bexp.tune.hf_trainer import _epoch
from bexp.tune.lengths import FEWEST_BATCHES, WORST_TIMES, Lengths, WorstFirst
from bexp.tune.micro_batches import MicroBatches, epoch_of, order_of, positions_of
from bexp.tune.own_loop import _parameters
from bexp.tune.peak import peak_bytes, reset_peak
from bexp.tune.ranks import Ranks

SIZE = 4
Seconds = Callable[[Figures, Figures], Figures]


def texts(number: int = 5000, longest: int = 2048) -> Lengths:
    """Many short texts and a long tail, as a library's files have it."""
    tokens = np.exp(np.random.default_rng(1).normal(4.5, 1.3, number)).clip(8, longest).astype(int).tolist()
    return Lengths(tuple(tokens), number, tuple(tokens))


def shuffled(lengths: Lengths) -> Epoch:
    return lambda seed: np.random.default_rng(seed).permutation(len(lengths.tokens))


def padded(lengths: Lengths, places: list[int], multiple: int = 1) -> int:
    longest = max(lengths.widths[place] for place in places)
    return len(places) * lengths.rows * -(-longest // multiple) * multiple


def linear(x: Figures, pairs: Figures) -> Figures:
    return 2e-3 + 2e-5 * x + 6e-9 * pairs


def with_a_floor(x: Figures, pairs: Figures) -> Figures:
    """A device that waits for its host where there is little work."""
    return np.maximum(0.02, linear(x, pairs))


def timed(
    micro_batches: MicroBatches,
    lengths: Lengths,
    seconds: Seconds,
    rng: np.random.Generator,
    number: int,
    multiple: int,
) -> list[MicroStep]:
    """What the clock notes of the first micro-steps of a trial, padded to the longest; two in a hundred are noise."""
    order = list(itertools.islice(micro_batches.sampler, number * SIZE))
    steps = []
    for i in range(number):
        places = order[i * SIZE : (i + 1) * SIZE]
        x = padded(lengths, places, multiple)
        took = float(seconds(np.array(float(x)), np.array(x * x / SIZE))) * (1 + 0.02 * rng.standard_normal())
        steps.append(MicroStep(took, i >= WORST_TIMES + 2, i, x))
    return steps


@pytest.mark.parametrize(("seconds", "multiple"), [(linear, 64), (with_a_floor, 1)])
def test_thirteen_micro_steps_tell_the_mean_over_all_data(seconds: Seconds, multiple: int) -> None:
    lengths, rng = texts(), np.random.default_rng(2)
    epochs = [rng.permutation(len(lengths.tokens)).reshape(-1, SIZE).tolist() for _ in range(8)]
    x = np.array([padded(lengths, places, multiple) for epoch in epochs for places in epoch], float)
    all_seconds = seconds(x, x * x / SIZE)
    truth = all_seconds.mean()
    off, plain_off, within = [], [], []
    for _ in range(20):
        micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
        found = micro_batches.expect(timed(micro_batches, lengths, seconds, rng, WORST_TIMES + 2 + 13, multiple))
        assert found is not None
        off.append(abs(found.seconds / truth - 1))
        within.append(abs(found.seconds - truth) < 3 * found.error)
        plain_off.append(abs(rng.choice(all_seconds, 6).mean() / truth - 1))
    assert np.mean(off) < 0.02
    assert max(off) < 0.04
    assert np.mean(plain_off) > 0.2
    assert np.mean(within) >= 0.9


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_micro_batches, "planned", {})


@pytest.mark.parametrize("grows", [False, True])
def test_spans_of_unlike_lengths_are_no_sign_of_a_pace_that_varies(grows: bool) -> None:
    """Also where a position takes longer in a longer row; each micro-step takes most of a span."""
    lengths, rng = texts(), np.random.default_rng(2)
    clock = Clock(torch.device("cpu"), Ranks(), 1)
    clock.micro_batches = micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
    steps = timed(micro_batches, lengths, linear, rng, WORST_TIMES + 2 + 13, 1)
    by_length = [20 * (step.positions or 0) / 8000 if grows else 20 for step in steps]
    clock._micro_steps = [
        replace(step, seconds=step.seconds * times) for step, times in zip(steps, by_length, strict=True)
    ]
    expected, figures = micro_batches.expect(clock._micro_steps), clock.figures()
    assert expected is not None
    assert figures["span_seconds"] is not None
    assert figures["standard_error_seconds"] <= 1.5 * expected.error


@pytest.mark.parametrize("longest", [2048, 128])
def test_a_width_that_is_new_takes_longer_as_often_as_an_epoch_has_new_ones(longest: int) -> None:
    """Also if most micro-batches have the same width, the longest."""
    lengths, rng = texts(longest=longest), np.random.default_rng(2)
    micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
    known = timed(micro_batches, lengths, linear, rng, WORST_TIMES + 26, 1)
    met = [step.positions for step in known]
    steps = [replace(step, is_first=step.positions not in met[:i]) for i, step in enumerate(known)]
    steps = [replace(step, is_timed=not step.is_first and i >= WORST_TIMES) for i, step in enumerate(steps)]
    planned = [replace(step, seconds=step.seconds + 0.5) if step.is_first else step for step in steps]
    plain = micro_batches.expect(steps)
    tune_micro_batches.planned.clear()
    found, again = micro_batches.expect(planned), micro_batches.expect(steps)
    assert plain is not None
    assert found is not None
    assert again is not None
    assert again.seconds == pytest.approx(found.seconds, rel=1e-3), "this process has planned them"
    widths = np.array(lengths.widths)[rng.permutation(5000)].reshape(-1, SIZE).max(axis=1)
    share = len(np.unique(widths)) / len(widths)
    assert share > (0.3 if longest == 2048 else 0.05)
    assert found.seconds - plain.seconds == pytest.approx(0.5 * share, rel=0.15)


@pytest.mark.parametrize("longer", [0.2, 0.0])
def test_what_a_new_width_takes_is_alike_on_a_host_whose_pace_varies(longer: float) -> None:
    """Its first ones take three times as long, which is no figure for the others."""
    lengths, rng, found = texts(), np.random.default_rng(4), []
    for _ in range(20):
        tune_micro_batches.planned.clear()
        micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
        known = timed(micro_batches, lengths, linear, rng, WORST_TIMES + 26, 1)
        met = [step.positions for step in known]
        steps = [replace(step, is_first=step.positions not in met[:i]) for i, step in enumerate(known)]
        firsts = itertools.accumulate(step.is_first for step in steps)
        steps = [
            replace(
                step,
                seconds=step.seconds * rng.uniform(0.8, 1.2) + step.is_first * longer * (3 if number < 5 else 1),
                is_timed=not step.is_first and i >= WORST_TIMES,
            )
            for i, (step, number) in enumerate(zip(steps, firsts, strict=True))
        ]
        expected = micro_batches.expect(steps)
        assert expected is not None
        found.append(expected.new_width_seconds)
        assert expected.new_width_share > 0.3
    assert np.mean(found) == pytest.approx(longer, rel=0.15, abs=2e-4)
    assert abs(np.mean([each > 0.0 for each in found]) - (longer > 0.0)) <= 0.1


def test_noise_is_no_new_width() -> None:
    lengths, rng, found = texts(), np.random.default_rng(4), []
    for _ in range(40):
        tune_micro_batches.planned.clear()
        micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
        known = timed(micro_batches, lengths, lambda *_: np.array(rng.uniform(0.9, 1.1)), rng, WORST_TIMES + 26, 1)
        met = [step.positions for step in known]
        steps = [replace(step, is_first=step.positions not in met[:i]) for i, step in enumerate(known)]
        expected = micro_batches.expect([replace(step, is_timed=i >= WORST_TIMES) for i, step in enumerate(steps)])
        assert expected is not None
        found.append(expected.new_width_seconds)
    assert np.mean(found) < 0.01


def test_what_a_new_width_takes_is_told_by_all_sizes_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one was measured while the host was slow."""
    lengths, rng = texts(), np.random.default_rng(4)
    monkeypatch.setattr(tune_micro_batches, "planned", {SIZE // 2: [0.2] * 6, 2 * SIZE: [0.21] * 7})
    micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
    known = timed(micro_batches, lengths, linear, rng, WORST_TIMES + 26, 1)
    met = [step.positions for step in known]
    steps = [
        replace(step, is_first=step.positions not in met[:i], is_timed=i >= WORST_TIMES) for i, step in enumerate(known)
    ]
    steps = [replace(step, seconds=step.seconds + 0.9 * step.is_first) for step in steps]
    expected = micro_batches.expect(steps)
    assert expected is not None
    assert expected.new_width_seconds == pytest.approx(0.21, rel=0.05)


def test_a_width_that_is_new_to_another_process_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_clock, "PRECISE_SECONDS", 0)
    lengths, rng = texts(), np.random.default_rng(2)
    micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE, processes=2)
    order, met, clock = list(micro_batches.sampler), set(), VirtualClock()
    clock.micro_batches = micro_batches
    clock.begin_micro_step()
    for number in range(2 * (WORST_TIMES + 20)):
        places = order[2 * number * SIZE : 2 * (number + 1) * SIZE]
        parts = [padded(lengths, places[:SIZE]), padded(lengths, places[SIZE:])]
        clock.at += 0.2 + 0.5 * any((rank, part) not in met for rank, part in enumerate(parts))
        met |= set(enumerate(parts))
        clock.end_micro_step(number, parts[0])
        if number % 2:
            clock.end_step()
    timed = [step.seconds for step in clock._micro_steps if step.is_timed]
    assert max(timed) == pytest.approx(0.2)
    widths = np.array(lengths.widths)[rng.permutation(5000)].reshape(-1, 2, SIZE).max(axis=2)
    new = {place for own in widths.T for place in np.unique(own, return_index=True)[1]}
    found = micro_batches.expect(clock._micro_steps)
    assert found is not None
    assert found.seconds - 0.2 == pytest.approx(0.5 * len(new) / len(widths), rel=0.15)


def test_no_noise_leaves_no_doubt_of_the_coefficients_but_some_error() -> None:
    rng = np.random.default_rng(0)
    work = np.column_stack([x := rng.uniform(10, 1000, 14), x * x])
    population = np.column_stack([x := rng.uniform(10, 1000, 500), x * x])
    seconds = linear(work[:, 0], work[:, 1])
    mean, error, fitted = expect(work, seconds, np.arange(14) >= 2, population)
    assert fitted == pytest.approx(seconds, rel=1e-6)
    assert mean == pytest.approx(linear(population[:, 0], population[:, 1]).mean(), rel=1e-6)
    assert error == pytest.approx(LEAST_ERROR * mean)


def test_no_factor_of_the_work_is_negative() -> None:
    work = np.column_stack([x := np.array([1.0, 2.0, 3.0, 4.0]), x * x])
    population = np.column_stack([x := np.array([100.0]), x * x])
    mean, *_ = expect(work, np.array([1.04, 1.03, 1.02, 1.01]), np.full(4, True), population)
    assert mean == pytest.approx(1.025), "more work does not take less time"


def test_packed_samples_are_told_from_padded_ones() -> None:
    lengths = texts()
    micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
    order = list(micro_batches.sampler)
    steps = []
    for i in range(20):
        tokens = sum(lengths.tokens[place] for place in order[i * SIZE : (i + 1) * SIZE])
        steps.append(MicroStep(1e-5 * tokens, i >= WORST_TIMES, i, tokens))
    found = micro_batches.expect(steps)
    assert found is not None
    assert found.seconds == pytest.approx(1e-5 * SIZE * lengths.mean, rel=0.01)


def test_positions_that_the_lengths_do_not_explain_tell_nothing() -> None:
    lengths, rng = texts(), np.random.default_rng(0)
    micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
    steps = timed(micro_batches, lengths, linear, rng, 20, 1)
    assert micro_batches.expect([MicroStep(each.seconds, True, each.number, 777) for each in steps]) is None
    assert micro_batches.expect([MicroStep(each.seconds, True, each.number) for each in steps]) is None
    assert micro_batches.expect(steps[: WORST_TIMES + 2 + 3]) is None, "three are too few"


def test_the_longest_come_first_and_any_few_of_the_others_have_the_mean_of_all() -> None:
    lengths = texts()
    micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE, longest_at={0, 1, 6, 7})
    order = np.array(list(micro_batches.sampler)).reshape(-1, SIZE)
    again = MicroBatches(lengths, shuffled(lengths), SIZE, longest_at={0, 1, 6, 7})
    assert order.tolist() == np.array(list(again.sampler)).reshape(-1, SIZE).tolist(), "each trial takes the same"
    widest = np.array(lengths.widths)[order].max(axis=1)
    assert [i for i in range(9) if order[i].tolist() == lengths.longest(SIZE)] == [0, 1, 6, 7]
    assert [micro_batches.is_longest(i) for i in range(9)] == [i in {0, 1, 6, 7} for i in range(9)]
    for first in (2, 8, 100, 300):
        some = np.array([widest[i] for i in range(first, first + 14) if i not in {6, 7}])
        assert some.mean() == pytest.approx(widest.mean(), rel=0.25)


def test_the_number_of_a_micro_batch_tells_its_samples_however_long_a_trial_runs() -> None:
    lengths = texts(200)
    micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
    order = [place for _ in range(2) for place in micro_batches.sampler]
    for number in range(len(order) // SIZE):
        assert list(micro_batches._places(number)) == order[number * SIZE : (number + 1) * SIZE], number


def test_data_of_one_length_and_unknown_orders_stay_as_they_are() -> None:
    equal = Lengths((8,) * 100, 100, (8,) * 100)
    sampler, micro_batches = order_of(range(100), shuffled(equal), equal, 2)
    assert micro_batches is None
    assert list(sampler)[2 * WORST_TIMES :][:4] == [0, 1, 2, 3]
    weighted = WeightedRandomSampler([1.0] * 100, 100)
    assert epoch_of(weighted, equal) is None
    assert order_of(weighted, None, texts(100), 2)[1] is None
    in_order, at_random = (
        epoch_of(sampler, equal) for sampler in (SequentialSampler(equal.tokens), RandomSampler(equal.tokens))
    )
    assert in_order is not None
    assert at_random is not None
    assert list(in_order(0)) == list(range(100)) == sorted(at_random(3))


def test_lengths_are_grouped_as_the_library_groups_them() -> None:
    lengths = texts()
    sampler = LengthGroupedSampler(16, lengths=list(lengths.tokens))
    epoch = _epoch(sampler, lengths, 16)
    assert epoch is not None
    assert list(epoch(1)) == list(epoch(1)) != list(epoch(2))
    tokens = np.array(lengths.tokens)

    def positions(order: Iterable[int]) -> float:
        return float(tokens[list(order)].reshape(-1, SIZE).max(axis=1).mean())

    assert positions(epoch(1)) == pytest.approx(positions(sampler), rel=0.05)
    assert positions(epoch(1)) < 0.7 * positions(shuffled(lengths)(1)), "rows of one length need no padding"


def test_a_micro_batch_may_be_larger_than_the_data() -> None:
    few = Lengths((8, 9, 30), 3, (8, 9, 30))
    assert len(list(MicroBatches(few, shuffled(few), 8).sampler)) % 8 == 0


@pytest.mark.parametrize("numbers", [range(1000), [0, 1] * 500])
def test_steps_are_timed_after_the_longest_and_some_others_even_if_there_are_no_others(
    numbers: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WARM_UP_SECONDS", "LEAST_SECONDS", "SETTLING_SECONDS"):
        monkeypatch.setattr(tune_clock, name, 0)
    lengths, clock = texts(), VirtualClock()
    clock.micro_batches = MicroBatches(lengths, shuffled(lengths), SIZE)
    left = iter(numbers)
    clock.begin_micro_step()
    while not clock.is_over:
        for number in (next(left), next(left)):
            places = list(clock.micro_batches._places(number))
            positions = padded(lengths, places)
            clock.at += 1e-5 * positions
            clock.end_micro_step(number, positions)
        clock.end_step()
    timed = [step for step in clock._micro_steps if step.is_timed]
    fewest = tune_clock.FEWEST_VARIED if numbers[2] > 0 else 2 * tune_clock.FEWEST_STEPS
    assert fewest <= len(timed) <= fewest + 1, "each step has two"
    order = [step.positions for step in clock._micro_steps]
    places = [place for place, step in enumerate(clock._micro_steps) if step.is_timed]
    assert all(order[place] in order[:place] for place in places)
    assert places[0] >= WORST_TIMES
    assert clock.figures()["repeats"] == len(timed)


class VirtualClock(Clock):
    """Runs micro-steps of given seconds in no time, two for each step of the optimizer."""

    def __init__(self) -> None:
        self.at = 0.0
        super().__init__(torch.device("cpu"), Ranks(), WORST_TIMES // 2)

    def _now(self) -> float:
        return self.at

    def run(self, seconds: Iterator[float]) -> float:
        self.begin_micro_step()
        while not self.is_over:
            assert self.at < 1000, "it ends"
            for _ in range(2):
                self.at += next(seconds)
                self.end_micro_step()
            self.end_step()
        return float(self.figures()["micro_step_seconds"])


@pytest.mark.parametrize("slow", [1.0, 5.0])
def test_timing_begins_anew_while_micro_steps_become_faster(slow: float) -> None:
    rng, clock = np.random.default_rng(0), VirtualClock()
    paces = (0.2 * (1 + (slow - 1) * 0.9**i) * (1 + 0.02 * rng.standard_normal()) for i in itertools.count())
    assert clock.run(paces) == pytest.approx(0.2, rel=0.05 if slow == 1.0 else 0.15)
    assert clock.at < (3.0 if slow == 1.0 else 20.0), "it is not repeated without need"


def test_micro_steps_that_are_long_and_alike_are_few() -> None:
    clock = VirtualClock()
    assert clock.run(itertools.chain([8.0], itertools.repeat(5.0))) == 5.0, "the first one also loads kernels"
    assert clock.at == 8.0 + 3 * 5.0
    clock = VirtualClock()
    clock.are_alike = False  # the first ones are the longest, and no other is known
    clock.run(itertools.repeat(5.0))
    assert clock.at > 30.0


def test_the_mean_of_unknown_lengths_is_timed_until_it_is_known() -> None:
    rng, equal, varied = np.random.default_rng(1), VirtualClock(), VirtualClock()
    equal.run(itertools.repeat(0.1))
    found = varied.run(float(0.1 * rng.lognormal(-0.5, 1.0)) for _ in itertools.count())
    assert varied.at > 2 * equal.at
    assert found == pytest.approx(0.1, rel=0.4)


@pytest.mark.parametrize(
    ("batch", "positions"),
    [
        ({"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 5, dtype=torch.long)}, 10),
        (
            {name: torch.ones(2, 5, dtype=torch.long) for name in ("chosen_input_ids", "rejected_input_ids", "labels")},
            20,
        ),
        ((torch.ones(3, 4, dtype=torch.long), torch.ones(3, dtype=torch.long)), 12),
        ({"input_ids": torch.ones(2, 5).long(), "attention_mask": torch.ones(2, 1, 5, 5).long()}, 10),
        ({"pixel_values": torch.ones(2, 3, 8, 8)}, None),
        ([{"prompt": "words"}], None),
        (torch.ones(2, 2), None),
    ],
)
def test_the_positions_of_a_micro_batch_are_those_of_its_tokens(batch: object, positions: int | None) -> None:
    assert positions_of(batch) == positions


def samples(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": [1] * length} for length in lengths]


def test_the_longest_samples_come_first_and_then_all_in_a_fixed_order() -> None:
    lengths = Lengths.of(samples(5, 9, 2, 7))
    assert (lengths.is_known, lengths.mean) == (True, 5.75)
    order = list(WorstFirst(lengths, 2, range(4)))
    assert order[: 2 * WORST_TIMES] == [1, 3] * WORST_TIMES
    assert order[2 * WORST_TIMES :][:6] == [0, 1, 2, 3, 0, 1]
    assert len(order) == len(WorstFirst(lengths, 2, range(4))) >= 2 * FEWEST_BATCHES


def test_a_micro_batch_larger_than_the_data_takes_samples_again() -> None:
    order = list(islice(WorstFirst(Lengths.of(samples(1, 3)), 5, range(2)), 5))
    assert order == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("sample", "tokens"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2]}, (2,)),
        ({"prompt_ids": [1], "chosen_ids": [1, 2], "rejected_ids": [1, 2, 3]}, (6,)),
        ({"chosen_input_ids": [1, 2], "rejected_input_ids": [1], "chosen_attention_mask": [1, 1]}, (3,)),
        ({"text": "words"}, ()),
        ((1, 2), ()),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 3, 4, 5]}, (8,)),
        ({"input_ids": torch.ones(3), "labels": torch.tensor([1.0, 0.0])}, (3,)),
        ({"input_ids": [1, 2, 3], "labels": torch.tensor([1])}, (3,)),
        ({"input_ids": []}, (0,)),
        ({"pixel_values": torch.ones(3, 8, 8), "labels": 1}, ()),
        ({"pixel_values": [[[0.0] * 8] * 8] * 3}, ()),
        ({"input_features": torch.ones(80, 300), "labels": [1, 2, 3]}, (3,)),
        ({"input_features": [[0.0] * 8] * 30}, (30,)),
    ],
)
def test_a_samples_length_is_that_of_its_tokens(sample: Any, tokens: tuple[int, ...]) -> None:
    lengths = Lengths.of([sample])
    assert lengths.tokens == tokens
    assert lengths.number == 1


class Whole(list[Any]):
    """Whose samples can only be read as a batch."""

    def __getitem__(self, _: Any) -> Any:
        raise RuntimeError("read __getitems__")


@pytest.mark.parametrize(("dataset", "number"), [(iter(samples(1)), None), (Whole(samples(1)), 1)])
def test_what_cannot_be_read_one_by_one_has_no_lengths(dataset: Any, number: int | None) -> None:
    lengths = Lengths.of(dataset)
    assert not lengths.is_known
    assert (lengths.mean, lengths.number) == (1.0, number)


def test_a_sample_of_several_texts_takes_a_row_for_each() -> None:
    pairs = [
        {"chosen_ids": [1] * chosen, "rejected_ids": [1] * rejected, "prompt_ids": [1, 1]}
        for chosen, rejected in ((5, 5), (1, 8), (4, 4))
    ]
    lengths = Lengths.of(pairs)
    assert (lengths.rows, lengths.widths, lengths.tokens) == (2, (7, 10, 6), (12, 11, 10))
    assert lengths.longest(2) == [1, 0], "all rows are padded to the longest of them"
    assert lengths.describe() == {"mean": 11.0, "samples": {"number": 3, "num_read": 3, "longest": 10, "rows": 2}}


def test_inputs_and_targets_are_padded_one_by_one_and_the_longest_of_both_come_first() -> None:
    given = [(5, 9), (9, 3), (8, 8), (4, 4), (3, 10)]
    lengths = Lengths.of([{"input_ids": [1] * i, "labels": torch.ones(t, dtype=torch.long)} for i, t in given])
    assert (lengths.rows, lengths.widths, lengths.tokens) == (1, (9, 9, 8, 4, 10), (14, 12, 16, 8, 13))
    assert lengths.longest(3) == [4, 1, 2]


CPU = torch.device("cpu")
LARGE = 100 << 20
PIECE = 1 << 16
"""Small enough for the heap, and larger than most holes that other tests have left there: their edges are resident."""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts nothing anew")
def test_a_size_has_a_peak_of_its_own_whatever_larger_ones_have_left_behind() -> None:
    reset_peak(CPU)
    before, _ = peak_bytes(CPU)
    texts = [b"-" * PIECE for _ in range(LARGE // PIECE)]
    after_it = b"-" * PIECE  # so that the heap does not shrink by itself
    cycle: list[object] = [texts]
    cycle.append(cycle)
    del texts, cycle
    large, _ = peak_bytes(CPU)
    assert large - before > 0.9 * LARGE
    reset_peak(CPU)
    assert peak_bytes(CPU)[0] - before < 0.1 * LARGE
    assert after_it


def test_an_optimizer_that_a_trainer_drops_is_gone_with_its_state() -> None:
    loop = own_loop._Loop()
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    link.serving.append(object())
    try:
        loop.before_step(optimizer)
        loop.after_step(optimizer)
    finally:
        link.serving.pop()
    kept = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert kept() is None


def test_the_optimizer_that_steps_counts_even_if_the_command_has_frozen_its_objects() -> None:
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    first, second = (torch.optim.SGD(layer.parameters(), 0.1) for layer in layers)
    both = {id(parameter) for layer in layers for parameter in layer.parameters()}
    assert both <= {id(parameter) for parameter in _parameters(first, torch.optim.Optimizer)}
    gc.freeze()
    try:
        alone = _parameters(second, torch.optim.Optimizer)
    finally:
        gc.unfreeze()
    assert {id(parameter) for parameter in layers[1].parameters()} == {id(parameter) for parameter in alone}


@pytest.mark.parametrize(
    ("numbers", "seconds", "accumulation"),
    [
        ([0, 1], 0.5, 2),
        ([0, 0, 0, 1, 1, 1], 1.5, 2),
        ([1, 1], 0.5, None),
    ],
    ids=["one call each", "three calls each", "all drawn before the first call"],
)
def test_calls_of_backward_for_one_micro_batch_are_one_micro_step(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], seconds: float, accumulation: int | None
) -> None:
    """As of adversarial training, or of an optimizer that evaluates a closure several times.

    Micro-batches that are drawn before the first call all have the number of the last one, and are not one.
    """
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock(torch.device("cpu"), Ranks(), 1)
    clock.begin_micro_step()
    for step in range(6):
        for number in numbers:
            now[0] += 0.5
            clock.end_micro_step(2 * step + number, 64)
        clock.end_step()
    clock.end_early()
    assert clock.figures()["micro_step_seconds"] == pytest.approx(seconds)
    assert accumulation in (None, clock.accumulation)
