"""A package `torchao.float8` that swaps what the real one swaps, and rounds to float8 with a scale for each tensor."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Float8Linear(nn.Linear):
    """A linear layer whose inputs and weights are rounded; gradients pass as if they were not."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(rounded(input), rounded(self.weight), self.bias)


def rounded(tensor: Tensor) -> Tensor:
    scale = 448 / tensor.detach().abs().max().clamp(min=1e-12)
    in_float8 = ((tensor.detach() * scale).to(torch.float8_e4m3fn).to(tensor.dtype)) / scale
    return tensor + (in_float8 - tensor).detach()


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put it in place of the package, and return the recipes that are asked for."""
    recipes: list[str] = []

    def convert(module: nn.Module, *, config: Any, module_filter_fn: Callable[[nn.Module, str], bool]) -> None:
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and module_filter_fn(child, name):
                    with torch.device("meta"):
                        new = Float8Linear(child.in_features, child.out_features, bias=child.bias is not None)
                    new.weight, new.bias = child.weight, child.bias
                    setattr(parent, name, new)

    config = SimpleNamespace(from_recipe_name=recipes.append)
    package = SimpleNamespace(Float8LinearConfig=config, convert_to_float8_training=convert)
    monkeypatch.setattr("bexp.transformers.float8.import_module", lambda _: package)
    return recipes
