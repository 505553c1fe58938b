"""Passes of small modules whose gradients are known by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bexp.measure.passes import ModulePasses

ROWS, WIDTH = 4, 3


class Scale(nn.Module):
    """x * weight, with a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x)
        return x * self.weight


class Layer(nn.Module):
    """Takes what a transformers layer takes: keywords, a tuple of tensors, flags; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.seen: list[Any] = []

    def forward(
        self, hidden_states: Tensor, *, rotary: tuple[Tensor, Tensor], use_cache: bool
    ) -> tuple[Tensor, None, Tensor]:
        self.seen.append((hidden_states, rotary, use_cache))
        cos, sin = rotary
        out = hidden_states * self.weight * self.frozen * cos + sin
        return out, None, out.sum(-1)


def states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(ROWS * WIDTH, dtype=dtype).view(ROWS, WIDTH).requires_grad_()


def run(passes: ModulePasses) -> None:
    passes.prepare_forward()
    passes.forward()
    passes.prepare_backward()
    passes.backward()


def input_of(passes: ModulePasses) -> Tensor:
    (x,) = [tensor for tensor in passes.existing_tensors() if tensor.shape == (ROWS, WIDTH) and tensor.is_leaf][:1]
    return x


def test_gradients_are_accumulated_and_those_of_the_hidden_states_begin_anew() -> None:
    torch.manual_seed(0)
    module, x = Scale(), states()
    passes = ModulePasses(module, (x,), training=True)
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, torch.zeros(WIDTH)), "gradients exist before the first pass"
    run(passes)
    once = module.weight.grad.clone()
    own = input_of(passes)
    assert own.grad is not None
    first = own.grad.clone()
    assert once.abs().sum() > 0
    run(passes)
    torch.testing.assert_close(module.weight.grad, 2 * once, msg="the same incoming gradient, added")
    assert own.grad is not None
    torch.testing.assert_close(own.grad, first)
    assert x.grad is None, "the caller's tensor is left alone"


def test_a_layer_with_keywords_nested_tensors_and_a_tuple_of_outputs() -> None:
    layer = Layer()
    rotary = (torch.full((WIDTH,), 0.5), torch.zeros(WIDTH))
    keywords = {"hidden_states": states(), "rotary": rotary, "use_cache": False}
    passes = ModulePasses(layer, (), keywords, training=True, chained="hidden_states")
    run(passes)
    _, seen_rotary, use_cache = layer.seen[0]
    assert use_cache is False
    assert [torch.equal(a, b) for a, b in zip(seen_rotary, rotary, strict=True)] == [True, True]
    assert not any(tensor.requires_grad for tensor in seen_rotary)
    assert layer.frozen.grad is None, "a frozen parameter gets no gradient"
    assert layer.weight.grad is not None
    outputs = passes.metered_forward()
    assert [tuple(out.shape) for out in outputs] == [(ROWS, WIDTH), (ROWS,)], "both outputs receive gradients"
    shapes = [tuple(t.shape) for t in passes.existing_tensors()]
    assert shapes.count((ROWS, WIDTH)) == 2, "the hidden states and their gradient"
    assert shapes.count((WIDTH,)) == 5, "two parameters, one gradient, two rotary tensors"


def test_a_loss_gets_no_incoming_gradient() -> None:
    class Loss(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    module = Loss()
    passes = ModulePasses(module, (states(),), training=True)
    run(passes)
    own = input_of(passes)
    assert own.grad is not None
    assert torch.equal(own.grad, torch.full((ROWS, WIDTH), 2.0))
    run(passes)
    assert torch.equal(own.grad, torch.full((ROWS, WIDTH), 2.0))


def test_gradients_in_another_dtype_have_tensors_of_their_own() -> None:
    module = Scale().to(torch.bfloat16)
    passes = ModulePasses(module, (states(torch.bfloat16),), training=True, gradient_dtype=torch.float32)
    run(passes)
    assert module.weight.grad is None, "freed as soon as it was added"
    (main,) = [t for t in passes.existing_tensors() if t.dtype is torch.float32]
    once = main.clone()
    assert once.abs().sum() > 0
    run(passes)
    torch.testing.assert_close(main, 2 * once)


def test_a_chain_feeds_the_output_back_and_runs_backward_through_all() -> None:
    module = Scale()
    passes = ModulePasses(module, (states(),), training=True, chained=0)
    assert passes.is_chainable
    passes.run_chain(3)
    assert len(module.calls) == 3
    assert torch.equal(module.calls[2], 4 * module.calls[0])
    own = input_of(passes)
    assert own.grad is not None
    assert torch.equal(own.grad, torch.full((ROWS, WIDTH), 8.0)), "ones times 2 * 2 * 2"
    layer = Layer()
    rotary = (torch.ones(WIDTH), torch.zeros(WIDTH))
    passes = ModulePasses(
        layer,
        (),
        {"hidden_states": states(), "rotary": rotary, "use_cache": True},
        training=False,
        chained="hidden_states",
    )
    passes.run_chain(2)
    assert torch.equal(layer.seen[1][0], 2 * layer.seen[0][0])
    assert layer.weight.grad is None


def test_what_cannot_be_chained_says_so() -> None:
    assert not ModulePasses(Scale(), (states(),), training=True).is_chainable
    with pytest.raises(AssertionError, match="an argument that the output can replace"):
        ModulePasses(Scale(), (states(),), training=True).run_chain(2)
    together = ModulePasses(Scale(), (states(),), training=True, chained=0, meet=lambda: None)
    assert not together.is_chainable, "processes that wait for each other"


def test_processes_meet_before_each_pass() -> None:
    module = Scale()
    met: list[int] = []
    passes = ModulePasses(module, (states(),), training=True, meet=lambda: met.append(len(module.calls)))
    run(passes)
    assert met == [0, 1], "once before the forward, once before the backward"
