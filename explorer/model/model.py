"""The model that is trained: the shapes of a decoder-only language model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from bexp.explorer.model.amounts import RateUnit
from bexp.explorer.model.base import Frozen, RuleError, is_null

MAX_EXPERTS = 1023  # torch's grouped_mm takes fewer than 1024 groups
MAX_HEAD_DIM = 1024

Dimension = Annotated[int, Field(ge=1, le=1 << 20)]
CapacityFactor = Annotated[float, Field(gt=0, le=MAX_EXPERTS)]


TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
"""The names of the number of a token's experts in configurations of the transformers library."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in a config.json."""


class DType(StrEnum):
    """Number format of parameters, activations, gradients or optimizer states."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return 4 if self is DType.FLOAT32 else 2


class LayerKind(StrEnum):
    """A decoder layer is attention followed by either a dense or an expert FFN."""

    DENSE = "dense"
    MOE = "moe"


class Variant(NamedTuple):
    """One of the models that a request compares.

    `capacity_factor` is None for a model without experts, and for one whose experts drop no tokens.
    """

    num_query_groups: int
    capacity_factor: float | None = None

    def describe(self) -> str:
        """Return `num_query_groups=2,capacity_factor=1.25`; a model that drops no tokens names its groups alone."""
        groups = f"num_query_groups={self.num_query_groups}"
        return groups if self.capacity_factor is None else f"{groups},capacity_factor={self.capacity_factor:.15g}"


class MoESpec(Frozen):
    """A routed expert FFN (Shazeer et al., 2017) that replaces the dense FFN of some layers."""

    num_experts: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    top_k: Annotated[int, Field(ge=1)] = Field(description="Experts that each token is sent to.")
    expert_ffn_hidden_size: Dimension = Field(description="Hidden width of one expert.")
    shared_expert_ffn_hidden_size: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        0, description="Total hidden width of the shared experts, which see every token; 0 for none."
    )
    shared_expert_gate: bool = Field(False, description="A learned sigmoid gate scales the shared experts' output.")
    first_k_dense: Annotated[int, Field(ge=0)] = Field(0, description="The first layers keep a dense FFN.")
    moe_layer_frequency: Annotated[int, Field(ge=1)] = Field(
        1, description="After first_k_dense, every n-th layer (the last of each n) has experts."
    )
    norm_topk_prob: bool = Field(False, description="Routing weights are renormalised over the chosen experts.")
    capacity_factor: CapacityFactor | None = Field(
        None,
        description="An expert takes at most this multiple of the mean number of tokens, rounded up, in a device's "
        "micro-batch; the token-expert pairs with the smallest routing weights are dropped. Null drops none.",
        exclude_if=is_null,
    )

    def capacity(self, num_tokens: int) -> int:
        """Return the most of `num_tokens` that an expert takes (Fedus et al., 2021, arXiv:2101.03961, equation 3).

        As in Megatron-Core, the mean counts each token top_k times. Without a capacity factor an expert takes all.
        """
        if self.capacity_factor is None:
            return num_tokens
        return math.ceil(num_tokens * self.top_k / self.num_experts * self.capacity_factor)

    @model_validator(mode="after")
    def _top_k_of_experts(self) -> Self:
        if self.top_k > self.num_experts:
            message = f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})"
            raise RuleError(message, "top_k", "num_experts")
        return self


class ModelSpec(Frozen):
    """A pre-norm decoder-only transformer.

    `ffn_hidden_size` is the hidden width of the dense FFN; a model whose layers all have experts may leave it at 0.
    `num_query_groups` is the number of key/value heads: null for multi-head, 1 for multi-query, and a divisor of the
    heads for grouped-query attention (Ainslie et al., 2023).
    """

    name: str = Field("model", min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")
    num_layers: Annotated[int, Field(ge=1, le=4096)]
    hidden_size: Dimension
    ffn_hidden_size: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    num_attention_heads: Annotated[int, Field(ge=1, le=1024)]
    num_query_groups: Annotated[int, Field(ge=1, le=1024)] | None = None
    head_dim: Annotated[int, Field(ge=1, le=MAX_HEAD_DIM)] | None = Field(
        None, description="Default: hidden_size / heads."
    )
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    seq_length: Annotated[int, Field(ge=1, le=1 << 24)] = Field(description="Tokens a sequence in training.")
    dtype: DType = Field(DType.BFLOAT16, description="The format of the parameters and of the computation.")
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    position: Literal["rope", "learned", "none"] = "rope"
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 24)] | None = Field(
        None, description="Rows of a learned position embedding; default: seq_length."
    )
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    gated_mlp: bool = True
    activation: Literal["silu", "gelu", "relu"] = "silu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = Field(
        "none", description="RMSNorm of queries and keys: over each head (Qwen3) or over all heads (OLMoE)."
    )
    parallel_residual: bool = Field(False, description="Attention and FFN read the same input (GPT-NeoX).")
    tie_embeddings: bool = False
    lm_head_bias: bool = False
    moe: MoESpec | None = None

    settings: ClassVar[tuple[str, ...]] = ()
    computes_losses: ClassVar[bool] = False
    """Whether there is a choice of the code that computes the loss: only a model's own code has one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise RuleError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads}), or head_dim must be given",
                "hidden_size",
                "num_attention_heads",
                "head_dim",
            )
        if self.head_size > MAX_HEAD_DIM:
            message = f"hidden_size / num_attention_heads ({self.head_size:,}) must not exceed {MAX_HEAD_DIM:,}"
            raise RuleError(message, "hidden_size", "num_attention_heads")
        if self.num_attention_heads % self.query_groups:
            raise RuleError(
                f"num_query_groups ({self.query_groups}) must divide num_attention_heads ({self.num_attention_heads})",
                "num_query_groups",
                "num_attention_heads",
            )
        if self.position == "rope" and (self.rotary_size % 2 or self.rotary_size == 0):
            message = f"the rotary part of head_dim ({self.rotary_size}) must be even and not 0"
            raise RuleError(message, *([] if self.head_dim is None else ["head_dim"]))
        if self.position == "learned" and self.position_rows < self.seq_length:
            raise RuleError(
                f"seq_length ({self.seq_length}) exceeds max_position_embeddings ({self.position_rows})",
                "seq_length",
                "max_position_embeddings",
            )
        if self.moe is not None and self.moe.first_k_dense > self.num_layers:
            raise RuleError(
                f"moe.first_k_dense ({self.moe.first_k_dense}) exceeds num_layers ({self.num_layers})",
                "moe.first_k_dense",
                "num_layers",
            )
        if self.moe is not None and self.count_layers(LayerKind.MOE) == 0:
            raise RuleError(
                "moe.first_k_dense and moe.moe_layer_frequency leave no layer with experts",
                "moe.first_k_dense",
                "moe.moe_layer_frequency",
            )
        if self.count_layers(LayerKind.DENSE) > 0 and self.ffn_hidden_size == 0:
            message = "ffn_hidden_size must be given: this model has layers with a dense FFN"
            raise RuleError(message, "ffn_hidden_size")
        return self

    rate_unit: ClassVar[RateUnit] = RateUnit.TOKENS
    fixed_micro_batch_size: ClassVar[None] = None

    def largest_micro_batch_size(self, num_devices: int) -> None:
        """Return None: no samples are known that a size could have too few of."""

    @property
    def title(self) -> str:
        """A name of the explored model, for a person."""
        return self.name

    @property
    def place(self) -> str:
        """The place where its candidates must be able to run, for a person."""
        return "on this device"

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return self.moe is not None

    @property
    def output_bytes_per_token(self) -> int:
        """Bytes a token that one layer hands to the next."""
        return self.hidden_size * self.dtype.itemsize

    def offers_tiles(self, *, named: bool) -> bool:
        """Return whether attention can be tiled."""
        return True

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    @property
    def variant(self) -> Variant:
        """The settings that distinguish this model from the others of a request."""
        return Variant(self.query_groups, None if self.moe is None else self.moe.capacity_factor)

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Width of the leading part of each head that RoPE rotates."""
        return int(self.head_size * self.rotary_fraction)

    @property
    def position_rows(self) -> int:
        """Rows of the learned position embedding."""
        return self.max_position_embeddings if self.max_position_embeddings is not None else self.seq_length

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, from the embedding to the head."""
        if self.moe is None:
            return (LayerKind.DENSE,) * self.num_layers
        return _layer_kinds(self.num_layers, self.moe.first_k_dense, self.moe.moe_layer_frequency)

    def count_layers(self, kind: LayerKind) -> int:
        """Number of layers of `kind`; the time does not depend on the number of layers."""
        with_experts = 0
        if self.moe is not None:
            with_experts = max(0, self.num_layers - self.moe.first_k_dense) // self.moe.moe_layer_frequency
        return with_experts if kind is LayerKind.MOE else self.num_layers - with_experts


@lru_cache(maxsize=64)
def _layer_kinds(num_layers: int, first_k_dense: int, moe_layer_frequency: int) -> tuple[LayerKind, ...]:
    return tuple(
        LayerKind.MOE
        if i >= first_k_dense and (i - first_k_dense) % moe_layer_frequency == moe_layer_frequency - 1
        else LayerKind.DENSE
        for i in range(num_layers)
    )


def find_layer_pattern(has_experts: Sequence[bool]) -> tuple[int, int] | None:
    """Return the (first_k_dense, moe_layer_frequency) that describe the layers, or None if no such pair does.

    A layer i has experts when i >= first_k_dense and (i - first_k_dense + 1) is a multiple of moe_layer_frequency.
    """
    count = len(has_experts)
    experts = [i for i, moe in enumerate(has_experts) if moe]
    if not experts:
        return count, 1
    following = experts[1] if len(experts) > 1 else count
    frequency = 1 if experts[0] == count - 1 else following - experts[0]
    first = experts[0] - frequency + 1
    described = [i >= first and (i - first + 1) % frequency == 0 for i in range(count)]
    return (first, frequency) if first >= 0 and described == list(has_experts) else None
