from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from bexp.kernels.autograd import applied, differentiable_once


class Square(Function):
    """x^2, whose backward is computed without a graph."""

    modes: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x * x

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        Square.modes.append(torch.is_grad_enabled())
        return 2 * ctx.factor * x * grad, None


square = applied(Square)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_is_computed_without_a_graph(create_graph: bool) -> None:
    Square.modes.clear()
    x = torch.tensor([3.0], requires_grad=True)
    (grad,) = torch.autograd.grad(square(x, 0.5), x, create_graph=create_graph)
    assert grad.item() == 3.0
    assert Square.modes == [False]


def test_a_second_derivative_is_refused() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    start = torch.ones(1, requires_grad=True)
    (grad,) = torch.autograd.grad(square(x, 1.0), x, start, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.backward()


@pytest.mark.filterwarnings("ignore")  # torch's tracer warns about its own use of deprecated parts
def test_a_compiler_and_a_transform_see_the_usual_call() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    compiled = torch.compile(lambda x: square(x, 2.0), backend="eager", fullgraph=True)
    assert compiled(x.detach()).item() == 18.0
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: square(x, 1.0).sum())(x.detach())
