"""Batches of the wrong size and steps without a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bexp.measure.step_checks import BatchShapes, StepError, check_gradients


def check(batch: Callable[[int], Any], sizes: tuple[int, ...]) -> None:
    shapes = BatchShapes()
    for size in sizes:
        shapes.check(size, batch(size))


@pytest.mark.parametrize(
    "batch",
    [
        lambda m: torch.zeros(m, 8),
        lambda m: torch.zeros(1, 8 * m),  # packed into one row
        lambda m: torch.zeros(4, m, 3),  # the length of the sequences comes first
        lambda m: {"tokens": torch.zeros(m, 8), "images": torch.zeros(1 if m == 1 else 5 * m - 3, 3)},
        lambda m: [torch.zeros(8) for _ in range(m)],
        lambda m: {"tokens": torch.zeros(1, 8 * m), "ends": torch.zeros(m + 1)},
        range,
    ],
)
def test_batches_of_the_size_that_was_asked_for_are_accepted(batch: Callable[[int], Any]) -> None:
    check(batch, (1, 2, 4, 3, 2))


def test_batches_whose_lengths_vary_may_be_as_long_as_those_of_another_size() -> None:
    shapes, packed = BatchShapes(), torch.zeros(1, 8)
    for size in (1, 2):
        shapes.check(size, packed, lengths_vary=True)
    with pytest.raises(StepError, match="has the shapes of"):
        shapes.check(3, packed)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (lambda m: torch.zeros(3, 8), r"batch\(2\) has the shapes of batch\(1\): it must return 2 sequences"),
        (lambda m: torch.zeros(10, 8)[:m], r"batch\(12\) returns 10 sequences: it must return 12"),
        (lambda m: {"x": torch.zeros(min(m, 4), 8 + m)}, r"batch\(12\) returns 4 sequences"),
    ],
)
def test_a_batch_with_fewer_sequences_than_asked_for_is_refused(batch: Callable[[int], Any], reason: str) -> None:
    with pytest.raises(StepError, match=reason):
        check(batch, (1, 2, 12))


def test_a_step_is_not_run_again_where_gradients_are_there_or_none_can_be() -> None:
    def again() -> None:
        raise AssertionError

    model = nn.Linear(2, 2)
    model.bias.grad = torch.zeros(2)
    check_gradients(model.parameters(), again)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    check_gradients(frozen.parameters(), again)
    check_gradients([], again)
