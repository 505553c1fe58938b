"""Layers that round otherwise, so that two orders of the same samples show what rounding alone can do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from bexp.tune.switched_off import LOSS_SCALE, rounded_otherwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_returns_what_is_off_by_about_one_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, dtype=dtype)
    x = torch.randn(64, 64).to(dtype)
    plain: list[torch.Tensor] = []
    layer.register_forward_hook(lambda _, __, out: plain.append(out.detach()))
    with rounded_otherwise(nn.Sequential(layer, nn.Tanh())):
        rounded = layer(x).detach()
    share = ((rounded - plain[0]).double() / plain[0].double()).abs()
    assert float(share.max()) <= 1.01 * torch.finfo(dtype).eps
    assert 0.05 < float((share > 0).double().mean()) < 0.95
    assert torch.equal(layer(x), plain[1]), "nothing is added afterwards"


def test_gradients_flow_as_if_nothing_was_added() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with rounded_otherwise(layer):
        layer(x).sum().backward()
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((4,), 2.0))


def test_what_a_layer_returns_beside_numbers_stays() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> Any:
            return x.argmax(), "text"

    with rounded_otherwise(model := Chooses()):
        assert model(torch.arange(3)) == (2, "text")


def test_the_losss_scale_changes_mantissas() -> None:
    assert math.frexp(LOSS_SCALE)[0] != 0.5
