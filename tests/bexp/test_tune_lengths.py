"""The lengths of samples, and the order in which a trial takes them."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from bexp.tune.lengths import FEWEST_BATCHES, WORST_TIMES, Lengths, WorstFirst


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
    assert lengths.describe() == {
        "mean": 11.0,
        "samples": {"number": 3, "num_read": 3, "longest": 10, "rows": 2},
    }
