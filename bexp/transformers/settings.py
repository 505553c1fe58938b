"""What can be set on a model: one value for each dimension that a recommendation decides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from bexp.explorer.dimensions.candidate import CHOICES
from bexp.explorer.dimensions.execution import EXECUTION
from bexp.explorer.dimensions.loss import LOSSES, Loss
from bexp.explorer.dimensions.recompute import Recompute

Kernels = Literal["library", "liger"]
Float8 = Literal["tensorwise", "rowwise"]
Allocator = Literal["default", "expandable_segments"]

POLICIES = tuple(policy for policy in Recompute if policy is not Recompute.QKV)
"""Recomputation policies that a transformers model can have, without those with a number."""
_ATTENTION = re.compile(r"[a-z][a-z0-9_]*(:(flash|cudnn|efficient|math))?")
_EXPERTS = re.compile(r"[a-z][a-z0-9_]*")


class SettingsError(ValueError):
    """The setting does not exist, or this model or device does not support it; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What is set on a model. Each default leaves the model as the library has it.

    `attention`: None for the model's own, a name that transformers knows (`eager`, `sdpa`, `flex_attention`,
    `flash_attention_2`), or `sdpa:flash`, `sdpa:cudnn`, `sdpa:efficient`, `sdpa:math` for one pinned back end of torch.
    `experts`: None for the model's own, a name that transformers knows (`eager`, `batched_mm`, `grouped_mm`), or one of
    ours (`bexp_fused`, `bexp_hopper_grouped`).
    `recompute`: `none`; by layer `full`, `layers_N` (the first N) or `partial_25`, `partial_50`, `partial_75`;
    `groups_N` (groups of N consecutive layers, each recomputed as one); by operation `activations` (keeps the results
    of matrix products and attention) and `projections` (keeps those of attention); by part `selective` (recomputes the
    attention core) and `experts`; `offload` recomputes nothing and keeps what layers save in the host's memory.
    `bta_tile`: sequences of an attention tile, None for no tiling.
    `loss`: as `bexp.explorer.dimensions.loss` has them. `compile` compiles every decoder layer.
    `graph` replays the micro-step of a whole model as CUDA graphs.
    `kernels`: `liger` computes norms, rotation and gated activations of the decoder layers by liger-kernel.
    `float8`: the recipe of torchao by which linear layers of the decoder layers are computed, None for their own dtype.
    `others`: values of further dimensions by name, which `bexp.transformers.NAME.set_up` sets.
    """

    attention: str | None = None
    experts: str | None = None
    recompute: str = "none"
    bta_tile: int | None = None
    loss: Loss = "library"
    compile: bool = False
    allocator: Allocator = "default"
    kernels: Kernels = "library"
    graph: bool = False
    float8: Float8 | None = None
    others: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, choices: Mapping[str, Any], **fields: Any) -> Settings:
        """Return the settings of these values of choices, by dimension, and of these fields."""
        others = []
        for choice in CHOICES:
            value = choices.get(choice.name, choice.plain)
            if choice.settings is not None:
                fields |= choice.settings(value)
            elif value != choice.plain:
                others.append((choice.name, value))
        return cls(**fields, others=tuple(others))

    def run_as(self, execution: str) -> Settings:
        """Return these settings with another execution: `eager`, `compile`, `graph` or `compile+graph`."""
        try:
            runs = EXECUTION.read(execution)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        return replace(self, compile=runs.compiles, graph=runs.replays)

    def __post_init__(self) -> None:
        """Raise `SettingsError` for a value that no model can have."""
        if self.attention is not None and not _ATTENTION.fullmatch(self.attention):
            raise SettingsError(f"'{self.attention}' is not the name of an attention implementation")
        if self.attention is not None and ":" in self.attention and not self.attention.startswith("sdpa:"):
            raise SettingsError(f"only sdpa has back ends that can be pinned, not '{self.attention}'")
        if self.experts is not None and not _EXPERTS.fullmatch(self.experts):
            raise SettingsError(f"'{self.experts}' is not the name of an experts implementation")
        try:
            policy = self.policy
        except ValueError:
            policy = Recompute.QKV
        if policy not in POLICIES and not policy.is_numbered:
            known = ", ".join((*POLICIES, "layers_N", "groups_N"))
            raise SettingsError(f"'{self.recompute}' is not a recomputation policy of a transformers model: {known}")
        if policy.group_size is not None and self.compile:
            raise SettingsError(f"compiled layers cannot be recomputed in groups ('{policy}')")
        if policy is Recompute.OFFLOAD and (self.compile or self.graph):
            raise SettingsError(f"activations go to the host ('{policy}') operation by operation, in eager execution")
        if self.bta_tile is not None and self.bta_tile < 1:
            raise SettingsError(f"an attention tile has at least one sequence, not {self.bta_tile}")
        if self.loss not in LOSSES:
            raise SettingsError(f"the loss is one of {', '.join(LOSSES)}, not '{self.loss}'")
        if self.kernels not in {"library", "liger"}:
            raise SettingsError(f"the kernels are 'library' or 'liger', not '{self.kernels}'")
        if self.float8 not in {None, "tensorwise", "rowwise"}:
            raise SettingsError(f"the recipe of float8 is 'tensorwise' or 'rowwise', not '{self.float8}'")
        if self.allocator not in {"default", "expandable_segments"}:
            raise SettingsError(f"the allocator is 'default' or 'expandable_segments', not '{self.allocator}'")

    @property
    def policy(self) -> Recompute:
        """The recomputation policy."""
        return Recompute(self.recompute)
