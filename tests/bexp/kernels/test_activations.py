from __future__ import annotations

import pytest
import torch

from bexp.kernels.activations import Activation, activate
from tests.bexp.kernels import references


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_value_and_gradients(name: Activation, gated: bool, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(7, 12, generator=generator), torch.rand(7, generator=generator)
    x, weights = references.leaves(data, torch.float32)
    x64, weights64 = references.leaves(data)
    out = activate(x, name, gated=gated, row_weights=weights if weighted else None)
    wanted = references.activation(x64, name, gated) * (weights64[:, None] if weighted else 1)
    gradient = torch.randn(out.shape, generator=generator)
    out.backward(gradient)
    wanted.backward(gradient.double())
    assert references.relative_error(out, wanted) <= 1e-6
    assert references.relative_error(x.grad, x64.grad) <= 1e-6
    if weighted:
        assert references.relative_error(weights.grad, weights64.grad) <= 1e-6
