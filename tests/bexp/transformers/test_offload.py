"""What a layer keeps for backward lies in the host's memory, and its weights do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from bexp.transformers.recompute import OnHost
from tests.bexp.kernels.references import assert_same_values


def test_weights_stay_where_they_are_and_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
    x = torch.randn(10, 24, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    taken: list[Tensor] = []
    run = OnHost(layer)
    pack = run._host.pack_hook

    def noted(tensor: Tensor) -> Any:
        taken.append(tensor)
        return pack(tensor)

    run._host.pack_hook = noted
    out = run(x)
    weights = {parameter.data_ptr() for parameter in layer.parameters()}
    assert [tuple(tensor.shape) for tensor in taken] == [(10, 24), (10, 24), (10, 24)], (
        "input, and the activation twice"
    )
    assert weights.isdisjoint(tensor.data_ptr() for tensor in taken)
    assert run.host_bytes == 3 * 1024, "960 bytes each, rounded up to a power of two"
    found = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    assert_same_values(found, expected)
    with save_on_cpu(), torch.no_grad():
        run(x)
    assert run.host_bytes == 3 * 1024, "without gradients nothing is kept"
