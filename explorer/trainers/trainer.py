"""The trainers that an answer may be for: what each can be told, and what it decides where a request does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from bexp.explorer.dimensions.candidate import CHOICES
from bexp.explorer.dimensions.execution import EXECUTION, Execution
from bexp.explorer.dimensions.kernels import KERNELS, Kernels
from bexp.explorer.dimensions.loss import LOSS, LOSSES, Loss
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.lengths import PACKED, Batching
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import LibraryOptimizer
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.model.training import LoRASpec, Precision, Sharding

TORCH_CHOICE = "sdpa"
"""torch's scaled_dot_product_attention, which chooses its kernel by itself."""
TORCH_KERNELS = frozenset({"flash", "cudnn", "efficient", "math"})
"""The kernels of torch's scaled_dot_product_attention that can be pinned."""
LIBRARY_ATTENTION = frozenset(
    {TORCH_CHOICE, "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
)
"""Attention implementations of the transformers library."""
LIBRARY_EXPERTS = frozenset({"eager", "batched_mm", "grouped_mm"})
"""Experts implementations of the transformers library that need no other package."""
HALF_NAMES: dict[str, str] = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
"""What trainers call the formats of half precision, such as the fields that switch autocast on."""
OUR_EXPERTS = ("fused", "hopper_grouped")
"""Our own expert kernels; the experts interface of the transformers library knows each with `bexp_` in front."""
DEFAULT_EXPERTS = frozenset({"grouped_mm", "loop"})
"""Expert back ends of which one is the default of a device."""
_LIBRARY_NAMES = {"loop": "eager", "bmm": "batched_mm"}
"""The transformers library's names of our reference layers' expert back ends, where they differ."""
ATTENTION_OF: Mapping[str, frozenset[str]] = {
    BEXP: TORCH_KERNELS,
    TRANSFORMERS: LIBRARY_ATTENTION | {f"{TORCH_CHOICE}:{kernel}" for kernel in TORCH_KERNELS},
}
EXPERTS_OF: Mapping[str, frozenset[str]] = {
    BEXP: DEFAULT_EXPERTS | _LIBRARY_NAMES.keys() | set(OUR_EXPERTS),
    TRANSFORMERS: LIBRARY_EXPERTS | {f"bexp_{name}" for name in OUR_EXPERTS},
}
"""The back ends of a target. One that somebody has written calls what it calls, and names none."""
RECORDED_EXPERTS = frozenset({"triton_grouped"})
"""Expert back ends that recorded tables have and this version has not: a worker that has no such table says so."""
SHARES = frozenset({Recompute.PARTIAL_25, Recompute.PARTIAL_50, Recompute.PARTIAL_75})


def library_experts(name: str) -> str:
    """Return the transformers library's name of an expert back end; ours keep their own."""
    return _LIBRARY_NAMES.get(name, name)


class TrainerName(StrEnum):
    """Who runs an answer. `bexp` is transformers' Trainer, or any loop, with `bexp.apply`."""

    BEXP = "bexp"
    TRANSFORMERS = "transformers"
    TRL = "trl"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    LIGHTNING = "lightning"
    AXOLOTL = "axolotl"
    LLAMAFACTORY = "llamafactory"
    TORCHTUNE = "torchtune"
    CEREBRAS = "cerebras"


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a trainer can be told. A candidate that asks for no more is expressible.

    `formats` are the names of the export formats that it reads, the usual one first.
    Kernels have the transformers library's names. What the trainer uses by itself need not be named: attention and
    experts of the base are always expressible. `first_layers` and `layer_groups` are the policies `layers_N` and
    `groups_N`. A share of the layers `is_every_nth`, where the first of them are measured: only layers of one kind make
    both the same. `layouts` are those of context parallelism, and `meshes` says that it can be told meshes of devices.
    `capacity` says that it can be told a capacity factor of experts, which is part of the model.
    `lora` says that it can be told adapters, in its file or in its script, `adapted_parameters` that it can be told
    those of single parameters, such as experts in one tensor, `sharded_adapters` that it can shard a model which has
    them in a number format of their own, `fractional_alpha` that their alpha need be no whole number, `optimizers` that
    it can be told those of other libraries, and `host_optimizer` that it can be told one that steps in the host's
    memory. It `flattens` a packed micro-batch into one row for any attention; `largest_packed` has the largest
    micro-batch that an attention packs as it was measured, where that is limited. `targets` are the targets whose
    measured code it runs; for others an export promises no tokens/s. The first of `precisions`, and `allocator`, are
    what it keeps where a request states nothing. Beside `upcast_attention` it casts norms, embeddings, output layer and
    routers to float32, unless it trains adapters or shards: precision `upcast`. `halves_adapters` says that it casts
    what it trains of a quantised model to bfloat16, `halves_experts` that it keeps experts in half precision which stay
    plain beside quantised weights, and `halves_shell` that it keeps norms, embeddings and output layer so. With
    `float32_gradients`, those of half-precision weights are summed in float32.
    """

    title: str
    formats: tuple[str, ...] = ()
    attention: frozenset[str] = frozenset({TORCH_CHOICE})
    experts: frozenset[str] = frozenset({"grouped_mm"})
    policies: frozenset[Recompute] = frozenset({Recompute.NONE, Recompute.FULL})
    first_layers: bool = False
    layer_groups: bool = False
    is_every_nth: bool = False
    sharding: frozenset[Sharding] = frozenset({Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3})
    layouts: frozenset[str] = frozenset()
    meshes: bool = False
    capacity: bool = False
    tiles: bool = False
    further: bool = False
    losses: frozenset[Loss] = frozenset({"library"})
    compiled_layers: bool = False
    graphs: bool = False
    liger: bool = False
    lora: bool = True
    adapted_parameters: bool = True
    sharded_adapters: bool = True
    fractional_alpha: bool = True
    optimizers: bool = False
    host_optimizer: bool = False
    targets: frozenset[str] = frozenset()
    batchings: frozenset[Batching] = frozenset({"padded", "grouped", "packed"})
    flattens: bool = False
    largest_packed: Mapping[str, int] = field(default_factory=dict, hash=False)
    precisions: tuple[Precision, ...] = ("pure", "autocast")
    upcast_attention: frozenset[str] = frozenset()
    halves_adapters: bool = False
    halves_experts: bool = False
    halves_shell: bool = False
    float32_gradients: bool = False
    allocator: Literal["default", "expandable_segments"] = "default"

    def lacks_adapters(self, lora: LoRASpec | None) -> str | None:
        """Return what of the adapters it cannot be told, in words; None if it can be told all of them."""
        if lora is not None and not self.lora:
            return "LoRA"
        if lora is not None and lora.target_parameters is not None and not self.adapted_parameters:
            return "LoRA of single parameters"
        if lora is not None and not self.fractional_alpha and not float(lora.alpha or lora.r).is_integer():
            return f"a LoRA alpha that is no whole number ({lora.alpha:g})"
        return None

    def lacks_sharded_adapters(self, lora: LoRASpec | None, level: Sharding) -> bool:
        """Return whether there are adapters, and it cannot shard a model that has them."""
        return lora is not None and level is not Sharding.NONE and not self.sharded_adapters

    def has_optimizer(self, known: LibraryOptimizer | None) -> bool:
        """Return whether it can be told an optimizer of another library; None is torch's AdamW or SGD."""
        return known is None or (self.host_optimizer if known.is_on_host else self.optimizers)

    @property
    def keeps_float32(self) -> bool:
        """Return whether it can keep all weights in float32, as weights or as master weights."""
        return not {"autocast", "master"}.isdisjoint(self.precisions)

    def kept_formats(self, dtype: DType, precision: Precision) -> tuple[DType, DType]:
        """Return the formats of gradients and of optimizer states where matrix products are in `dtype`."""
        is_summed = precision == "autocast" or (self.float32_gradients and dtype is DType.BFLOAT16)
        return DType.FLOAT32 if is_summed else dtype, dtype if precision == "pure" else DType.FLOAT32

    def has_policy(self, policy: Recompute, *, layers_differ: bool = False) -> bool:
        """Return whether it can be told a recomputation policy of a model whose layers may be of several kinds."""
        if policy.is_numbered:
            return self.first_layers if policy.first_layers is not None else self.layer_groups
        return policy in self.policies and not (layers_differ and self.is_every_nth and policy in SHARES)

    def nearest_policy(self, policy: Recompute, num_layers: int, *, layers_differ: bool = False) -> Recompute:
        """Return the policy that recomputes the fewest layers, and at least as many, so that what fitted still fits.

        A policy by operation or by groups becomes `full`. It is `none` for a trainer that recomputes nothing.
        """
        told = (one for one in self.policies if self.has_policy(one, layers_differ=layers_differ))
        by_share = sorted((one for one in told if one.layer_share > 0), key=lambda one: one.layer_share)
        if policy.first_layers is not None:
            by_share = [one for one in by_share if one.layer_share * num_layers >= policy.first_layers] or by_share[-1:]
        else:
            by_share = by_share[-1:]
        return by_share[0] if by_share else Recompute.NONE

    @property
    def expressible(self) -> Mapping[str, Collection[Any]]:
        """The values of each choice that it can express."""
        known: dict[str, Collection[Any]] = {
            LOSS.name: self.losses,
            EXECUTION.name: [
                one
                for one in Execution
                if (self.compiled_layers or not one.compiles) and (self.graphs or not one.replays)
            ],
            KERNELS.name: tuple(Kernels) if self.liger else (Kernels.LIBRARY,),
        }
        others = {choice.name: choice.values if self.further else (choice.plain,) for choice in CHOICES}
        return {**others, **known}

    def nearest_loss(self, loss: Loss) -> Loss:
        """Return the loss that it computes in place of one: another that holds no logits if it has one."""
        alike = (one for one in LOSSES if one in self.losses and not LOSSES[one].holds_logits)
        return loss if loss in self.losses else "library" if LOSSES[loss].holds_logits else next(alike, "library")

    def nearest_sharding(self, level: Sharding) -> Sharding:
        """Return the lowest level that shards at least as much, so that what fitted still fits; else `none`."""
        return next((one for one in Sharding if one.level >= level.level and one in self.sharding), Sharding.NONE)


_LIBRARY_RUNS_IT = frozenset({TRANSFORMERS})
_PADDED: frozenset[Batching] = frozenset({"padded", "grouped"})
_LIBRARY_TRAINER = Trainer(
    title="transformers' Trainer",
    formats=("transformers",),
    optimizers=True,
    attention=LIBRARY_ATTENTION,
    experts=LIBRARY_EXPERTS,
    policies=frozenset({Recompute.NONE, Recompute.PARTIAL_25, Recompute.PARTIAL_50, Recompute.FULL}),
    is_every_nth=True,
    targets=_LIBRARY_RUNS_IT,
)
_IN_CHUNKS: frozenset[Loss] = frozenset({"library", "chunked"})

TRAINERS: Mapping[TrainerName, Trainer] = {
    TrainerName.BEXP: Trainer(
        title="bexp.apply",
        formats=("python",),
        optimizers=True,
        host_optimizer=True,
        attention=LIBRARY_ATTENTION | TORCH_KERNELS,
        experts=LIBRARY_EXPERTS | {*OUR_EXPERTS, *(f"bexp_{name}" for name in OUR_EXPERTS)},
        policies=frozenset(Recompute) - {Recompute.QKV},
        first_layers=True,
        layer_groups=True,
        sharding=frozenset(Sharding),
        further=True,
        tiles=True,
        losses=frozenset(LOSSES),
        compiled_layers=True,
        graphs=True,
        batchings=frozenset({"padded", "grouped", *PACKED}),
        liger=True,
        targets=_LIBRARY_RUNS_IT,
        precisions=("pure", "autocast", "float8_tensorwise", "float8_rowwise"),
    ),
    TrainerName.TRANSFORMERS: replace(_LIBRARY_TRAINER, batchings=_PADDED),
    TrainerName.TRL: replace(
        _LIBRARY_TRAINER, title="TRL", formats=("trl",), flattens=True, halves_adapters=True, halves_experts=True
    ),
    TrainerName.ACCELERATE: Trainer(
        title="accelerate",
        formats=("accelerate",),
        optimizers=True,
        attention=LIBRARY_ATTENTION,
        experts=LIBRARY_EXPERTS,
        compiled_layers=True,
        targets=_LIBRARY_RUNS_IT,
    ),
    TrainerName.DEEPSPEED: Trainer(
        title="DeepSpeed",
        formats=("deepspeed",),
        attention=LIBRARY_ATTENTION,
        experts=LIBRARY_EXPERTS,
        sharding=frozenset(Sharding),
        targets=_LIBRARY_RUNS_IT,
        precisions=("master", "autocast"),
    ),
    TrainerName.TORCHTITAN: Trainer(
        title="torchtitan",
        formats=("torchtitan", "torchtitan-main"),
        layouts=frozenset({"zigzag"}),
        meshes=True,
        losses=_IN_CHUNKS,
        compiled_layers=True,
        lora=False,
        batchings=frozenset(),
        allocator="expandable_segments",  # its run_train.sh sets it
    ),
    TrainerName.MEGATRON: Trainer(
        title="Megatron-Core",
        formats=("megatron",),
        attention=frozenset({"flash", "cudnn", "math", TORCH_CHOICE}),
        policies=frozenset({Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL}) | SHARES,
        first_layers=True,
        layer_groups=True,
        sharding=frozenset(Sharding),
        layouts=frozenset({"zigzag"}),
        meshes=True,
        capacity=True,
        lora=False,
        batchings=frozenset(),
        precisions=("master",),
        float32_gradients=True,
    ),
    TrainerName.LIGHTNING: Trainer(
        title="Lightning",
        formats=("lightning",),
        sharded_adapters=False,  # its FSDP makes one tensor of a layer's parameters
        optimizers=True,
        attention=frozenset({TORCH_CHOICE}) | TORCH_KERNELS,
        experts=LIBRARY_EXPERTS,
        policies=frozenset({Recompute.NONE, Recompute.FULL}) | SHARES,
        first_layers=True,
        compiled_layers=True,
        targets=_LIBRARY_RUNS_IT,
    ),
    TrainerName.AXOLOTL: Trainer(
        title="Axolotl",
        formats=("axolotl",),
        fractional_alpha=False,
        optimizers=True,
        attention=LIBRARY_ATTENTION,
        experts=LIBRARY_EXPERTS,
        targets=_LIBRARY_RUNS_IT,
        precisions=("upcast", "pure"),  # it makes the weights in half precision, and computes under autocast
        upcast_attention=frozenset({TORCH_CHOICE, "eager"}),
        allocator="expandable_segments",  # its launcher sets it
    ),
    TrainerName.LLAMAFACTORY: Trainer(
        title="LLaMA-Factory",
        formats=("llamafactory",),
        fractional_alpha=False,
        optimizers=True,
        attention=frozenset({TORCH_CHOICE, "eager", "flash_attention_2", "flash_attention_3"}),
        largest_packed={"flash_attention_2": 1, "flash_attention_3": 0},  # one row alone, and another mask
        adapted_parameters=False,
        halves_experts=True,
        halves_shell=True,
        targets=_LIBRARY_RUNS_IT,
    ),
    TrainerName.TORCHTUNE: Trainer(
        title="torchtune",
        optimizers=True,
        sharding=frozenset({Sharding.NONE, Sharding.ZERO3}),
        losses=_IN_CHUNKS,
        compiled_layers=True,
        adapted_parameters=False,
        batchings=frozenset({"padded", "packed"}),
        precisions=("pure",),
    ),
    TrainerName.CEREBRAS: Trainer(
        title="Cerebras Model Zoo",
        formats=("cerebras",),
        policies=frozenset({Recompute.NONE}),
        sharding=frozenset({Sharding.NONE}),
        tiles=True,
        losses=_IN_CHUNKS,  # the system's compiler decides how the loss is computed
        lora=False,
        batchings=frozenset(),
    ),
}
