"""Batches of the wrong size and steps without a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bexp.measure.step_checks import BatchShapes, StepError, check_gradients, is_finite, shapes_of


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


def test_a_step_without_a_backward_pass_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StepError, match="no gradients"):
        check_gradients(model.parameters(), lambda: model(torch.ones(1, 2)).sum())


def test_gradients_that_a_library_keeps_elsewhere_count() -> None:
    model, kept = nn.Linear(2, 2), list[Tensor]()

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            kept.append(parameter.grad)
            parameter.grad = None

    step()
    check_gradients(model.parameters(), step)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_a_step_is_not_run_again_where_gradients_are_there_or_none_can_be() -> None:
    def again() -> None:
        raise AssertionError

    model = nn.Linear(2, 2)
    model.bias.grad = torch.zeros(2)
    check_gradients(model.parameters(), again)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    check_gradients(frozen.parameters(), again)
    check_gradients([], again)


def test_hooks_are_removed_from_a_step_that_fails() -> None:
    model = nn.Linear(2, 2)

    def again() -> None:
        model(torch.ones(1, 2)).sum().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check_gradients(model.parameters(), again)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


@pytest.mark.parametrize(
    ("loss", "finite"),
    [
        (torch.tensor(1.0, requires_grad=True), True),
        (torch.tensor([1.0, float("nan")]), False),
        (torch.tensor(float("inf")), False),
        (2, True),
        (-0.5, True),
        (float("inf"), False),
        (float("nan"), False),
        (None, True),
        ("a dictionary of losses, for all that is known", True),
    ],
)
def test_a_loss_is_finite_if_all_of_it_is(loss: Any, finite: bool) -> None:
    assert is_finite(loss) is finite


def test_only_tensors_have_shapes_and_all_of_them_count() -> None:
    batch = {"tokens": torch.zeros(2, 8), "more": [torch.zeros(3), 5, None, "text"]}
    assert shapes_of(batch) == [torch.Size([2, 8]), torch.Size([3])]
    assert shapes_of(5) == []


@pytest.mark.parametrize(
    ("earlier", "later", "reason"),
    [
        ([(2, 8)], [(1, 16)], None),  # packed into one row
        ([(2, 8)], [(3, 8)], "batch(4) returns 3 sequences: it must return 4"),
        ([(3, 8)], [(5, 8)], None),  # its first dimension was not the size before
        ([(2, 8)], [(3, 4)], None),  # one of its dimensions is the size
        ([(2, 8)], [(3, 8), (3, 8)], None),  # another structure
        ([(2, 8), (2,)], [(1, 8), (3,)], "batch(4) returns 3 sequences: it must return 4"),
        ([(), (2, 1)], [(), (3, 1)], "batch(4) returns 3 sequences: it must return 4"),
        ([(2, 8)], [()], None),
        ([(2, 8)], [(2, 8)], "batch(4) has the shapes of batch(2): it must return 4 sequences"),
    ],
)
def test_a_batch_is_judged_beside_one_of_another_size(
    earlier: list[tuple[int, ...]], later: list[tuple[int, ...]], reason: str | None
) -> None:
    shapes = BatchShapes()
    shapes.check(2, [torch.zeros(shape) for shape in earlier])
    batch = [torch.zeros(shape) for shape in later]
    if reason is None:
        shapes.check(4, batch)
        return
    with pytest.raises(StepError) as caught:
        shapes.check(4, batch)
    assert str(caught.value) == reason
