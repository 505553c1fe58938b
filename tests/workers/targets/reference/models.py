"""Small models for the tests of the layers, and how their blocks are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bexp.explorer.model.model import ModelSpec, MoESpec

CPU = torch.device("cpu")


def small_model(**fields: Any) -> ModelSpec:
    """A dense model in float32; `fields` replace its own."""
    base: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 48,
        "ffn_hidden_size": 80,
        "num_attention_heads": 4,
        "head_dim": 16,
        "vocab_size": 101,
        "seq_length": 12,
        "dtype": "float32",
    }
    return ModelSpec(**{**base, **fields})


def small_moe(**fields: Any) -> MoESpec:
    """Six experts, two a token."""
    return MoESpec(**{"num_experts": 6, "top_k": 2, "expert_ffn_hidden_size": 32, **fields})


def shake(module: nn.Module, generator: torch.Generator) -> None:
    """Replace every parameter by larger random numbers, norms and biases included, so that each one matters."""
    with torch.no_grad():
        for parameter in module.parameters():
            centre = 1.0 if parameter.ndim == 1 and parameter[0] == 1 else 0.0
            parameter.normal_(centre, 0.2, generator=generator)


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the parameters of `source`."""
    target.load_state_dict(source.state_dict())


def outcome(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """Output and every gradient of one forward and backward of `run`, whose parameters are `module`'s."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    (out * weight).sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(module.parameters()))
    return {"out": out.detach(), "x": x.grad, **gradients}
