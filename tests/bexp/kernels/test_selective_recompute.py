"""Results that forward discards: the same gradients, and nothing computed that backward does not ask for."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bexp.kernels.selective_recompute import recomputable, selective_recompute
from tests.bexp.kernels.references import assert_same_values


class Chain:
    """norm, product, activation, product: what an FFN is made of; counts what is run."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.runs: Counter[str] = Counter()
        self.results: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        self.w_in, self.w_out = (
            torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in ((24, 8), (8, 24))
        )
        self.x = torch.randn(5, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    def counted(self, name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            self.runs[name] += 1
            out = function(x)
            self.results.setdefault(name, weakref.ref(out.untyped_storage()))
            return out

        return run

    def __call__(self) -> Tensor:
        h = recomputable(self.counted("norm", lambda x: F.layer_norm(x, (8,))), self.x)
        pre = recomputable(self.counted("product", lambda h: F.linear(h, self.w_in)), h, product=True)
        act = recomputable(self.counted("act", F.gelu), pre)
        return F.linear(act, self.w_out)

    def gradients(self, out: Tensor, *, retain_graph: bool = False) -> list[Tensor]:
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        leaves = (self.x, self.w_in, self.w_out)
        return list(torch.autograd.grad((out * weight).sum(), leaves, retain_graph=retain_graph))


def run(products: bool) -> tuple[Chain, Tensor]:
    chain = Chain()
    with selective_recompute(products=products):
        return chain, chain()


@pytest.mark.parametrize("products", [False, True])
def test_gradients_are_the_same(products: bool) -> None:
    plain = Chain()
    expected = plain.gradients(plain())
    chain, out = run(products)
    assert_same_values(chain.gradients(out), expected)
    assert plain.runs == {"norm": 1, "product": 1, "act": 1}
    assert chain.runs == {"norm": 2, "product": 2 if products else 1, "act": 2}


def test_a_retained_graph_runs_again() -> None:
    chain, out = run(products=True)
    first = chain.gradients(out, retain_graph=True)
    second = chain.gradients(out)
    assert_same_values(second, first)
    assert chain.runs["act"] == 3


def test_views_of_one_result_changed_in_place_before_it_is_kept() -> None:
    """As queries, keys and values are: parts of one projection, a part of it rotated where it lies."""
    x, w = (torch.randn(6, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        both = _Doubled.apply(x @ w)  # type: ignore[no-untyped-call]  # untyped in torch
        return tuple(both.split((2, 4), dim=1))

    def run(parted: tuple[Tensor, ...]) -> Tensor:
        a, b = parted
        return (a.t() @ a).sum() + (b.t() @ b.flip(0)).sum()

    wanted = torch.autograd.grad(run(parts(x)), (x, w))
    with selective_recompute(products=True):
        out = run(recomputable(parts, x, product=True))
    got = torch.autograd.grad(out, (x, w))
    assert_same_values(got, wanted)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2.0


def test_an_address_that_is_given_out_again_is_another_tensor() -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    with selective_recompute(products=False):
        out = x
        for _ in range(20):  # the first result is freed before the second lies where it lay
            recomputable(torch.sin, x)
            out = torch.exp(out * 0.1)
    expected = x
    for _ in range(20):
        expected = torch.exp(expected * 0.1)
    assert_same_values(*(torch.autograd.grad(o.sum(), x) for o in (out, expected)))


def test_without_the_context_nothing_is_announced() -> None:
    chain = Chain()
    chain.gradients(chain())
    assert set(chain.runs.values()) == {1}
    with selective_recompute(products=True), torch.no_grad():
        assert chain().grad_fn is None


def test_a_result_that_was_changed_in_place_is_kept() -> None:
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 4, dtype=torch.float64)
    found = []
    for products in (None, False):
        with selective_recompute(products=products) if products is not None else contextlib.nullcontext():
            h = recomputable(torch.tanh, x)
            h.add_(5.0)
            out = h @ w
        found.append(torch.autograd.grad(out.sum(), w))
    assert_same_values(*found)


def test_a_change_to_what_backward_starts_from_is_an_error() -> None:
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 4, dtype=torch.float64)
    with selective_recompute(products=False):
        out = recomputable(torch.tanh, x) @ w
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
