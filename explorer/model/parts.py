"""The parts of a training step, as a target describes them when it measures a model's own code.

A part is built and measured by itself. The `shell` is everything but the decoder layers: embedding, final norm, head
and loss. A layer kind stands for all layers that compute alike. Parameter counts are exact; operations and bytes are
estimates, which only decide what is worth measuring.
"""

from __future__ import annotations

import operator
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from bexp.explorer.model.amounts import RateUnit
from bexp.explorer.model.base import Frozen, is_null
from bexp.explorer.model.model import DType, ModelSpec, Variant
from bexp.explorer.model.quantization import WeightBytes
from bexp.explorer.model.target import describe_target

MAX_LAYERS = 1024
MAX_SETTINGS = 64

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]


class Part(Frozen):
    """One part of a training step.

    `flops_per_token` are the forward pass's operations in matrix products with the weights that a token meets.
    `flops_per_sequence` are those in attention's products of tokens with tokens. `saved_bytes_per_token` are kept by a
    forward pass for the backward pass, the part's output included.
    """

    num_parameters: Count
    parameter_bytes: Count
    trainable_bytes: Count = Field(description="Bytes of the parameters that receive gradients.")
    flops_per_token: Amount
    flops_per_sequence: Amount = 0.0
    saved_bytes_per_token: Amount
    transient_bytes_per_token: Amount = Field(0.0, description="Bytes alive beyond the saved bytes at the part's peak.")


class LayerPart(Part):
    """A kind of decoder layer. `name` is unique in a model and stays the same from process to process."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str = ""
    has_experts: bool = False


class Float8Layers(Frozen):
    """Layers whose linear layers are computed in float8, compared with the same layers in the model's dtype.

    Errors are norms of the differences, relative to the norms of the layer's outputs and of all its gradients. They are
    those of the kind of layer with the largest error.
    """

    num_linear: Count = Field(description="Linear layers in float8, in all decoder layers.")
    output_error: Amount
    gradient_error: Amount


class SampleLengths(Frozen):
    """The samples that a training command draws from, of which the longest ran first at each size."""

    number: Count
    num_read: Annotated[int, Field(ge=1)]
    longest: Count = Field(description="Tokens of the longest sample.")
    rows: Annotated[int, Field(ge=1)] = Field(1, description="Rows of a micro-batch that a sample takes.")
    tail: tuple[Count, ...] | None = Field(
        None,
        description="The tokens that 1 in 1, 2, 4, ... samples have at least, if rows are padded and in random order.",
        exclude_if=is_null,
    )


class EvaluationBatch(Frozen):
    """The longest texts of an evaluation in a forward pass, and what would fit if that does not."""

    batch_size: Annotated[int, Field(ge=1)]
    length: Count = Field(description="Tokens of each text; 0 if they are not known.")
    peak_bytes: Count | None = Field(description="With what is kept; null if it failed, or had no memory.")
    failure: str | None = Field(None, max_length=1000, description="How it failed.", exclude_if=is_null)
    kept_bytes: Count = Field(0, description="Outputs of other batches that are kept on the device for metrics.")
    kept_rows: Count = Field(0, description="The rows that these outputs belong to.")
    fitting_size: Annotated[int, Field(ge=1)] | None = Field(None, exclude_if=is_null)
    fitting_peak_bytes: Count | None = Field(
        None, description="Of a batch of `fitting_size` without what is kept.", exclude_if=is_null
    )
    fitting_steps: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The eval_accumulation_steps with which what is kept fits.", exclude_if=is_null
    )


class ProcessSpread(Frozen):
    """The slowest and the fullest process of a training, as multiples of the fastest and the emptiest."""

    number: Annotated[int, Field(ge=2)]
    slowest: Count
    slower: Annotated[float, Field(ge=1)]
    fullest: Count
    fuller: Annotated[float, Field(ge=1)]


class GradientComparison(Frozen):
    """The gradients of one batch in large and in small micro-batches, as a training command computes them."""

    agrees: bool | None = Field(description="Null if they were not compared.")
    keeps_size: bool = Field(False, description="Samples depend on the others of their micro-batch, which has to stay.")
    text: Annotated[str, Field(max_length=1000)]


class ModelParts(Frozen):
    """A model as the code that trains it defines it. The totals count shared parameters once."""

    target: str
    target_version: str
    name: str = Field(description="The model's type, for people.")
    class_name: str | None = Field(None, description="The class whose training step is measured, for people.")
    dtype: DType = Field(description="The number format of the matrix products.")
    seq_length: Annotated[int, Field(ge=1)]
    layers: Annotated[tuple[str, ...], Field(max_length=MAX_LAYERS)] = Field(
        description="The kind of each decoder layer in order. A model that is measured whole is all shell and has none."
    )
    kinds: tuple[LayerPart, ...]
    shell: Part
    output_bytes_per_token: Annotated[int, Field(ge=1)] = Field(description="Bytes that a layer hands to the next.")
    logits_per_token: Count | None = Field(None, description="Null where nobody knows.", exclude_if=is_null)
    num_parameters: Count
    parameter_bytes: Count
    trainable_bytes: Count
    optimizer_state_bytes: Count | None = Field(
        None, description="Of the real state after a step, where it was read.", exclude_if=is_null
    )
    optimizer_host_bytes: Count | None = Field(
        None, description="Bytes of the optimizer in the host's memory, if it steps there.", exclude_if=is_null
    )
    weights: tuple[WeightBytes, ...] = Field(
        (), description="Bytes by kind, of a model whose weights are quantised.", exclude_if=operator.not_
    )
    float8: Float8Layers | None = Field(None, exclude_if=is_null)
    adapted: dict[str, Count] = Field(
        {}, description="Trained weights of adapters by the names of their modules.", exclude_if=operator.not_
    )
    policies: tuple[str, ...] = Field(("none",), description="Recomputation policies that the code can run.")
    tiles: bool = Field(False, description="Whether attention can be tiled over the batch.")
    settings: tuple[str, ...] = Field(
        (), max_length=MAX_SETTINGS, description="The target's own choices, as text; the first is its default."
    )
    unavailable: dict[str, str] = Field({}, description="Values that the code cannot run, each with its reason.")
    batch_size: Count | None = Field(
        None, description="Sequences of an optimizer step that a training command asks for.", exclude_if=is_null
    )
    micro_batch_size: Count | None = Field(
        None, description="The size of a training command that ran first: its own, if that fits.", exclude_if=is_null
    )
    num_steps: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Optimizer steps of a training command's own run, if that is known.", exclude_if=is_null
    )
    samples: SampleLengths | None = Field(
        None, description="A training command's data, if its longest micro-batch is known and ran.", exclude_if=is_null
    )

    evaluation: EvaluationBatch | None = Field(
        None, description="The evaluation of a training command.", exclude_if=is_null
    )
    processes: ProcessSpread | None = Field(
        None, description="Of a training command, at its own size.", exclude_if=is_null
    )

    gradients: GradientComparison | None = Field(
        None, description="Whether the size may change without another training.", exclude_if=is_null
    )
    switched_off: tuple[Annotated[str, Field(max_length=200)], ...] = Field(
        (),
        max_length=64,
        description="Parts of a training command that its trials switch off.",
        exclude_if=operator.not_,
    )

    @model_validator(mode="after")
    def _known_kinds(self) -> Self:
        names = [kind.name for kind in self.kinds]
        if len(set(names)) < len(names):
            raise ValueError("two kinds of layer have the same name")
        unknown = sorted(set(self.layers) - set(names))
        if unknown:
            raise ValueError(f"layers of unknown kinds: {', '.join(unknown)}")
        return self

    @property
    def measured(self) -> str:
        """The measured code, for a person: `transformers 5.23.0, LlamaForCausalLM`."""
        return describe_target(self.target, self.target_version, self.class_name)

    @property
    def fixed_micro_batch_size(self) -> int | None:
        """The only size that leaves the training as it is; None if any does, or if that is not known."""
        return self.micro_batch_size if self.gradients is not None and self.gradients.keeps_size else None

    def largest_micro_batch_size(self, num_devices: int) -> int | None:
        """Return the largest size that the training has samples for, or its own if that is larger; None if unknown."""
        if self.samples is None:
            return None
        return max(1, self.samples.number // num_devices, self.micro_batch_size or 0)

    @property
    def rate_unit(self) -> RateUnit:
        """The unit of its rates: a model that is measured whole may not say how many tokens a sample has."""
        return RateUnit.SAMPLES if not self.layers and self.seq_length == 1 else RateUnit.TOKENS

    moe: ClassVar[None] = None
    vocab_size: ClassVar[None] = None

    @property
    def title(self) -> str:
        """A name of the explored model, for a person."""
        return f"{self.name} ({self.measured})"

    @property
    def place(self) -> str:
        """The place where its candidates must be able to run, for a person."""
        return f"with {self.measured}"

    @property
    def computes_losses(self) -> bool:
        """Whether there is a choice of the code that computes the loss; a model that is measured whole has none."""
        return bool(self.layers)

    @property
    def query_groups(self) -> int:
        """1: a model's own code has one variant, which stands under this number."""
        return 1

    @property
    def variant(self) -> Variant:
        """The one variant of a model's own code."""
        return Variant(self.query_groups)

    @property
    def head_parameters(self) -> float:
        """The number of weights of the matrix that makes the logits."""
        return self.shell.flops_per_token / 2

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return any(kind.has_experts for kind in self.kinds)

    def kind(self, name: str) -> LayerPart:
        """Return the kind with this name; raise KeyError if there is none."""
        return {kind.name: kind for kind in self.kinds}[name]

    def offers_tiles(self, *, named: bool) -> bool:
        """Return whether attention is to be tiled: only if the request names tiles and the code allows them."""
        return named and self.tiles


ExploredModel = ModelSpec | ModelParts
"""A model of our reference layers, or one that a target describes by its parts."""
