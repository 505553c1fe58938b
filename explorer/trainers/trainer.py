"""The type of a trainer, which runs an answer: the values that it can express, its defaults, and its files.

A run asks its trainer for terms. A trainer lists for each the values that it can express (`Trainer.expresses`), and
`Trainer.lacks` compares. Most terms are dimensions of a candidate, and stand in their files; the others are the same
for all candidates of a request.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bexp.explorer.dimensions.candidate import DIMENSIONS
from bexp.explorer.dimensions.dimension import Term, present, unless_null
from bexp.explorer.dimensions.loss import LOSSES, Loss
from bexp.explorer.dimensions.recompute import AskedPolicy, Recompute
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import MUON
from bexp.explorer.model.target import TRANSFORMERS
from bexp.explorer.model.training import LoRASpec, OptimizerSpec, Precision, Sharding
from bexp.explorer.trainers.document import Render
from bexp.explorer.trainers.keys import ReadSideFile, TrainerFile

LORA, SINGLE_PARAMETERS, FRACTIONAL_ALPHA = "LoRA", "LoRA of single parameters", "a LoRA alpha that is no whole number"
"""Adapters; those of single parameters, such as experts in one tensor; an alpha that is no whole number."""
OTHER_LIBRARIES = "of other libraries"
"""Optimizers that are not torch's AdamW and SGD; those without a name in TrainingArguments are asked for one by one."""
MUON_WITH_EXPERTS = "of a model with experts in one tensor"
"""Muon of all weights where some have three dimensions, which it cannot step."""
CAPACITY = "a capacity factor of experts"
MODEL_PARALLELISM = "a mesh of devices"


class ShardedAdapters(NamedTuple):
    """Adapters in a number format of their own, and the level of sharding of the model that has them."""

    lora: LoRASpec | None
    level: Sharding


class SteppedWeights(NamedTuple):
    """An optimizer, and whether it steps experts in one tensor."""

    optimizer: OptimizerSpec
    has_experts: bool


def _adapters_ask(lora: LoRASpec | None) -> Iterable[Hashable]:
    if lora is not None:
        yield LORA
        if lora.target_parameters is not None:
            yield SINGLE_PARAMETERS
        if not float(lora.alpha or lora.r).is_integer():
            yield FRACTIONAL_ALPHA


def _optimizer_asks(stepped: SteppedWeights) -> Iterable[Hashable]:
    name, known = stepped.optimizer.name, stepped.optimizer.of_library
    if known is not None:
        yield OTHER_LIBRARIES if known.note is None else name
    if name == MUON and stepped.has_experts:
        yield MUON_WITH_EXPERTS


TERMS: Mapping[str, Term] = {
    **{dimension.name: dimension.term for dimension in DIMENSIONS if dimension.term is not None},
    "sharded_adapters": Term(
        lambda asked, lacking: f"LoRA with the sharding level '{asked.level}'",
        lambda asked: () if asked.lora is None or asked.level is Sharding.NONE else (LORA,),
        frozenset({LORA}),
    ),
    "optimizer": Term(
        lambda stepped, lacking: (
            f"the optimizer '{stepped.optimizer.name}'{f' {lacking}' if lacking == MUON_WITH_EXPERTS else ''}"
        ),
        _optimizer_asks,
    ),
    "adapters": Term(
        lambda lora, lacking: f"{lacking} ({lora.alpha:g})" if lacking is FRACTIONAL_ALPHA else str(lacking),
        _adapters_ask,
        frozenset({LORA, SINGLE_PARAMETERS, FRACTIONAL_ALPHA}),
    ),
    "batching": Term(lambda name, lacking: f"{name} texts", unless_null, frozenset({"padded", "grouped", "packed"})),
    "capacity_factor": Term(lambda factor, lacking: CAPACITY, present(CAPACITY)),
    "parallelism": Term(
        lambda is_shared, lacking: MODEL_PARALLELISM, lambda is_shared: (MODEL_PARALLELISM,) if is_shared else ()
    ),
}


def expresses(**others: Iterable[Hashable]) -> Mapping[str, frozenset[Hashable]]:
    """Return the values of each term that a trainer can express: those of `others`, else the usual ones.

    Raises TypeError for a name that is no term.
    """
    if unknown := others.keys() - TERMS.keys():
        raise TypeError(f"{sorted(unknown)} is nothing that a trainer can express")
    return {name: frozenset(others.get(name, term.usual)) for name, term in TERMS.items()}


LIBRARY_RUNS_IT = frozenset({TRANSFORMERS})
"""The target whose measured code a trainer of transformers' models runs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainer:
    """A trainer, which runs an answer."""

    name: str
    """The name in a request's `trainer` and in `--trainer`."""
    title: str
    """The name for people."""
    formats: Mapping[str, Render] = field(default_factory=dict)
    """The functions that write files for it, by the names of `--format`, the usual one first."""
    file: TrainerFile | None = None
    """The table of the file that people train with; None if no such file is read."""
    side_file: tuple[str, ReadSideFile] | None = None
    """The field of a document that holds a file of the training side, and the function that reads it."""

    expresses: Mapping[str, frozenset[Hashable]] = field(default_factory=expresses)
    """The values of each term that it can express. Kernels have the transformers library's names."""
    flattens: bool = False
    """Whether it makes one row of a packed micro-batch for any attention."""
    largest_packed: Mapping[str, int] = field(default_factory=dict)
    """The largest micro-batch that an attention packs as it was measured, where that is limited."""
    targets: frozenset[str] = frozenset()
    """The targets whose measured code it runs; for others an export promises no tokens/s."""

    precisions: tuple[Precision, ...] = ("pure", "autocast")
    """The precisions that it can keep; the first is its default."""
    has_deepspeed: bool = False
    """Whether it shards by DeepSpeed as well, which keeps float32 master weights at any level: `master`."""
    widens_shards: bool = False
    """Whether it shards float32 weights by FSDP, and gathers them in half precision: `master`."""
    upcast_attention: frozenset[str] = frozenset()
    """Attention with which it casts norms, embeddings, output layer and routers to float32: precision `upcast`.

    It casts nothing where it trains adapters or shards.
    """
    halves_adapters: bool = False
    """Whether it casts the trained weights of a quantised model to bfloat16."""
    halves_experts: bool = False
    """Whether it keeps experts that stay plain in a quantised model in half precision."""
    halves_shell: bool = False
    """Whether it keeps norms, embeddings and output layer of a quantised model in half precision."""
    float32_gradients: bool = False
    """Whether gradients of weights in bfloat16 are summed in float32."""
    own_loss: str | None = None
    """How it computes the loss in place of the model, which is not measured; None if it leaves that to the model."""
    lists_linear: bool = False
    """Whether it finds all linear layers for adapters by itself; the files of others have their names."""
    allocator: Literal["default", "expandable_segments"] = "default"
    """Its default."""
    awaits_losses: bool = False
    """Whether it looks at the loss of each micro-step, for which the host waits: the next one begins on an idle device.

    transformers' Trainer does, unless `logging_nan_inf_filter` is off.
    """

    def lacks(self, term: str, value: Any) -> str | None:
        """Return the words for a value of a term that the trainer cannot express; None if it can."""
        known, mine = TERMS[term], self.expresses[term]
        missing = next((asked for asked in known.asks(value) if asked not in mine), None)
        return None if missing is None else known.words(value, missing)

    def has_policy(self, policy: Recompute, *, layers_differ: bool = False) -> bool:
        """Return whether it can express a recomputation policy of a model whose layers may be of several kinds."""
        return self.lacks("recompute", AskedPolicy(policy, layers_differ)) is None

    def nearest_policy(self, policy: Recompute, num_layers: int, *, layers_differ: bool = False) -> Recompute:
        """Return the policy that recomputes the fewest layers but no fewer than `policy`, so that it still fits.

        A policy by operation or by groups becomes `full`. It is `none` for a trainer that recomputes nothing.
        """
        able = (one for one in Recompute if self.has_policy(one, layers_differ=layers_differ))
        by_share = sorted((one for one in able if one.layer_share > 0), key=lambda one: one.layer_share)
        if policy.first_layers is not None:
            by_share = [one for one in by_share if one.layer_share * num_layers >= policy.first_layers] or by_share[-1:]
        else:
            by_share = by_share[-1:]
        return by_share[0] if by_share else Recompute.NONE

    def nearest_loss(self, loss: Loss) -> Loss:
        """Return the loss that it computes in place of `loss`: another that holds no logits if it has one."""
        mine = self.expresses["loss"]
        alike = (one for one in LOSSES if one in mine and not LOSSES[one].holds_logits)
        return loss if loss in mine else "library" if LOSSES[loss].holds_logits else next(alike, "library")

    def nearest_sharding(self, level: Sharding) -> Sharding:
        """Return the lowest level that shards no less than `level`, so that memory still suffices; else `none`."""
        mine = self.expresses["sharding"]
        return next((one for one in Sharding if one.level >= level.level and one in mine), Sharding.NONE)

    def keeps(self, precision: Precision, level: Sharding, *, by_deepspeed: bool) -> bool:
        """Return whether it can keep a precision at a level of sharding."""
        if by_deepspeed and self.has_deepspeed:
            return precision == "master"
        is_wide = precision == "master" and level is not Sharding.NONE and self.widens_shards
        return precision in self.precisions or is_wide

    @property
    def keeps_float32(self) -> bool:
        """Whether it can keep all weights in float32, as weights or as master weights."""
        return not {"autocast", "master"}.isdisjoint(self.precisions)

    def kept_formats(self, dtype: DType, precision: Precision) -> tuple[DType, DType]:
        """Return the formats of gradients and of optimizer states where matrix products are in `dtype`."""
        is_summed = precision == "autocast" or (self.float32_gradients and dtype is DType.BFLOAT16)
        return DType.FLOAT32 if is_summed else dtype, dtype if precision == "pure" else DType.FLOAT32
