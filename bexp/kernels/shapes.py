"""The shapes from which a kernel decides whether it supports a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer of causal attention: `num_query_groups` (a divisor of `num_heads`) counts the heads of keys and values.

    `seq_length` is the number of tokens in a sequence.
    """

    num_heads: int
    num_query_groups: int
    head_size: int
    dtype: torch.dtype
    seq_length: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_query_groups:
            raise ValueError(f"{self.num_query_groups} key heads do not divide {self.num_heads} query heads")


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """One layer of routed experts: a token runs through `top_k` of `num_experts` FFNs of width `ffn_hidden_size`.

    `gated` tells whether the first matrix holds a gate beside the up projection. `activation` is the name that the
    model's configuration gives; the kernels know those of `bexp.kernels.activations.Activation`.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    gated: bool = True
    activation: str = "silu"

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})")


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a back end serves a shape on a device. `reason` is None if it does, otherwise it says why not.

    `stock` marks back ends that torch itself has.
    """

    name: str
    reason: str | None
    stock: bool

    @property
    def usable(self) -> bool:
        """Whether the back end serves the shape."""
        return self.reason is None
