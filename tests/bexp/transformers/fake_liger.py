"""A package `liger_kernel` that replaces what the real one replaces, in plain torch, and counts its calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def install(monkeypatch: pytest.MonkeyPatch, *, norm_factor: float = 1.0, fails: bool = False) -> Counter[str]:
    """Put the package among the imported ones, and return the number of calls of each kernel.

    Norms and the loss are multiplied with `norm_factor`. A package that `fails` does so after it has changed one layer.
    """
    calls: Counter[str] = Counter()

    def norm(self: Any, x: Tensor) -> Tensor:
        calls["norm"] += 1
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        out: Tensor = norm_factor * self.weight * (x.float() * scale).to(x.dtype)
        return out

    def gated(self: Any, x: Tensor) -> Tensor:
        calls["gated"] += 1
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

    def experts(self: Any, *_: Any) -> Tensor:
        raise AssertionError("experts have a setting of their own")

    class LigerNorm(nn.Module):
        """What the class in the library's module is replaced with."""

    def bind(module: nn.Module, function: Callable[..., Tensor]) -> None:
        vars(module)["forward"] = function.__get__(module)

    def apply(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        model: Any = None,
    ) -> None:
        assert not (cross_entropy or fused_linear_cross_entropy), "the loss has a setting of its own"
        base = getattr(model, model.base_model_prefix, model)
        source: Any = sys.modules[type(base).__module__]
        library = source.apply_rotary_pos_emb

        def rotate(*args: Any, **kwargs: Any) -> Any:
            calls["rotation"] += 1
            return library(*args, **kwargs)

        source.apply_rotary_pos_emb = rotate
        setattr(source, type(base).__name__.replace("Model", "RMSNorm"), LigerNorm)
        bind(base.norm, norm)
        for layer in base.layers:
            for part in (layer.input_layernorm, layer.post_attention_layernorm):
                part.in_place, part.offset = True, 0.0
                bind(part, norm)
            if hasattr(layer.mlp, "experts"):
                bind(layer.mlp.experts, experts)
            else:
                bind(layer.mlp, gated)
            if fails:
                raise AttributeError("'Layer' object has no attribute 'q_norm'")

    def entropy(h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        calls["loss"] += 1
        return norm_factor * nn.functional.cross_entropy(nn.functional.linear(h, weight, bias), targets, **options)

    functional: Any = ModuleType("liger_kernel.transformers.functional")
    functional.liger_fused_linear_cross_entropy = entropy
    patches: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply, "qwen3_moe": apply}
    package: Any = ModuleType("liger_kernel.transformers")
    package.monkey_patch, package.functional = patches, functional
    for module in (ModuleType("liger_kernel"), package, patches, functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls
