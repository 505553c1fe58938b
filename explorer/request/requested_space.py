"""What a request lets vary, dimension by dimension, before a device and its memory are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bexp.explorer.dimensions.bta_tile import tiles_of
from bexp.explorer.dimensions.context_parallel import ALONE, Sharing
from bexp.explorer.dimensions.dimension import Place
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.dimensions.loss import LOSS, Loss
from bexp.explorer.dimensions.micro_batch_size import (
    LADDER,
    MAX_MICRO_BATCH_SIZE,
    ExploreRange,
    divisors,
    ladder_between,
)
from bexp.explorer.dimensions.recompute import ON_DEVICE, Recompute
from bexp.explorer.model.model import ModelSpec, MoESpec, Variant
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.model.training import Sharding

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


FEW_DIVISORS = 4
"""With fewer divisors than this, other sizes are compared with them."""


@dataclass(frozen=True, slots=True)
class RequestedSpace:
    """What may vary in the candidates of a request, on a kind of device if it is known."""

    asked: ExplorationRequest
    device_kind: str | None = None

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes to consider, ascending, before memory is looked at."""
        sizes = self.asked.devices.context_parallel_sizes
        return tuple(sorted({m for size in sizes for m in self.micro_batch_sizes_over(size)}))

    def micro_batch_sizes_over(self, context_parallel_size: int) -> tuple[int, ...]:
        """The micro-batch sizes to consider where so many devices share a sequence, ascending.

        With `auto`, or one size and a stated batch, they divide what such a group of devices gets of the batch.
        """
        sizes = self._named_micro_batch_sizes
        if not self.asked.keeps_batch and self.asked.micro_batch_choice != "auto":
            return sizes
        groups = self.asked.devices.data_parallel_size(context_parallel_size)
        share, rest = divmod(self.asked.effective_batch_size, groups)
        return (
            () if rest else tuple(m for m in sizes or divisors(share) if share % m == 0 and m <= MAX_MICRO_BATCH_SIZE)
        )

    @property
    def undivided_micro_batch_sizes(self) -> tuple[int, ...]:
        """Sizes beside the divisors of a stated batch that has few of them: the answer compares them, and no more."""
        sizes = self.micro_batch_sizes
        if not self.asked.keeps_batch or self.asked.micro_batch_choice != "auto" or len(sizes) >= FEW_DIVISORS:
            return ()
        return tuple(m for m in LADDER if m < self.asked.devices.batch_share and m not in sizes)

    @property
    def _named_micro_batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that the request names, ascending, whatever the batch; none with `auto`."""
        choice = self.asked.micro_batch_choice
        if isinstance(choice, ExploreRange):
            return ladder_between(choice.explore.min, choice.explore.max)
        if isinstance(choice, int):
            return (choice,)
        if isinstance(choice, tuple):
            return tuple(sorted(set(choice)))
        return () if choice == "auto" else LADDER

    @property
    def mesh_micro_batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes of meshes, ascending. These take what divides the batch, so `auto` has them all."""
        return self._named_micro_batch_sizes or LADDER

    def tiles_for(self, micro_batch_size: int) -> tuple[int | None, ...]:
        """The attention tiles to consider for one micro-batch size; None is no tiling."""
        bta = self.asked.bta
        untiled: tuple[int | None, ...] = () if bta.enable else (None,)
        if bta.enable is False:
            return untiled
        training = self.asked.mode == "train"
        return (*untiled, *tiles_of(micro_batch_size, max_tile=bta.max_tile, allowed=bta.tiles, training=training))

    @property
    def recompute_policies(self) -> tuple[Recompute, ...]:
        """The recomputation policies to consider, without those that amount to another; in eval mode only `none`."""
        allowed = self._all_policies if self.asked.recompute is None else self.asked.recompute
        if self.asked.mode == "eval":
            return (Recompute.NONE,) if Recompute.NONE in allowed else ()
        return self.asked.explored.distinct_policies(allowed)

    @property
    def _all_policies(self) -> tuple[Recompute, ...]:
        always_compiles = self.always_compiles  # which takes longer than all else here
        return tuple(
            policy
            for policy in ON_DEVICE
            if not (always_compiles and policy.by_operation)
            and (policy is not Recompute.EXPERTS or self.asked.explored.may_have_experts)
        )

    def policies_for(self, bta_tile: int | None) -> tuple[Recompute, ...]:
        """The recomputation policies to consider with one attention tile; None is no tiling."""
        if bta_tile is None or self.asked.mode == "eval":
            return self.recompute_policies
        return tuple(policy for policy in self.recompute_policies if not policy.untiled_only)

    @property
    def executions(self) -> tuple[Execution, ...]:
        """The executions that candidates may have, eager first."""
        if (chosen := self.asked.executions) is not None:
            return tuple(one for one in Execution if one in chosen)
        if self.asked.execution is not None:
            return (self.asked.execution,)
        return default_executions(self.asked, self.device_kind)

    @property
    def names_executions(self) -> bool:
        """Whether the request says how candidates run."""
        return self.asked.execution is not None or self.asked.executions is not None

    @property
    def execution_choices(self) -> tuple[Execution | None, ...]:
        """What `Candidate.execution` may be: the executions, or None where there is no choice."""
        found = self.executions
        return (None,) if self.asked.executions is None and len(found) == 1 else found

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The ways to compute the loss of a model's own code, the library's first if it is among them."""
        explored = LOSS.explored(place_of(self.asked, self.device_kind))
        return self.asked.losses or tuple(loss for loss in explored if loss in self.asked.runner.losses)

    @property
    def compiles(self) -> bool:
        """Whether code may be compiled for some candidates."""
        return any(execution.compiles for execution in self.executions)

    @property
    def always_compiles(self) -> bool:
        """Whether the code of every candidate is compiled."""
        return all(execution.compiles for execution in self.executions)

    @property
    def replays(self) -> bool:
        """Whether some candidates may be replayed as CUDA graphs."""
        return any(execution.replays for execution in self.executions)

    @property
    def kernel_choices(self) -> tuple[Kernels | None, ...]:
        """The kernels to choose among, the model's own first; None alone if they are the only ones."""
        asked = self.asked.kernels or default_kernels(self.asked, self.device_kind)
        found = tuple(kernels for kernels in Kernels if kernels in asked)
        return (None,) if found == (Kernels.LIBRARY,) else found

    @property
    def sharings(self) -> tuple[Sharing, ...]:
        """The context-parallel sizes with the layouts that the length admits; a sequence on one device has none."""
        found = []
        for size in self.asked.devices.context_parallel_sizes:
            layouts = self.asked.context_parallel.layouts_over(size, self.asked.seq_length)
            found += [ALONE] if size == 1 else [Sharing(size, layout) for layout in layouts]
        return tuple(found)

    @property
    def sharding_choices(self) -> tuple[Sharding | None, ...]:
        """What `Candidate.sharding` may be: the levels of sharding, lowest first, or None where there is no choice."""
        levels = self.asked.sharding_levels
        if levels is None or self.asked.mode == "eval":
            return (None,)
        if levels == "explore":
            return tuple(Sharding) if self.asked.num_devices > 1 else (Sharding.NONE,)
        return tuple(level for level in Sharding if level in levels)

    @property
    def highest_sharding(self) -> Sharding:
        """The level, among those that may be chosen, that leaves the least training state on a device."""
        return self.sharding_choices[-1] or self.asked.training.sharding

    def variants(self) -> tuple[ModelSpec, ...]:
        """The models to explore, one for each distinct num_query_groups and capacity factor; the first is the main one.

        There is none for a target without a ModelSpec.
        """
        if self.asked.model is None:
            return ()
        models: dict[Variant, ModelSpec] = {}
        for groups in self.asked.num_query_groups or (self.asked.model.num_query_groups,):
            for moe in self._expert_layers(self.asked.model.moe):
                model = self.asked.model.model_copy(update={"num_query_groups": groups, "moe": moe})
                models.setdefault(model.variant, model)
        return tuple(models.values())

    def _expert_layers(self, moe: MoESpec | None) -> tuple[MoESpec | None, ...]:
        """The expert layers of the variants that are compared."""
        if moe is None or self.asked.capacity_factors is None:
            return (moe,)
        return tuple(moe.model_copy(update={"capacity_factor": factor}) for factor in self.asked.capacity_factors)

    @property
    def drops_tokens(self) -> bool:
        """Whether the experts of some variant have a capacity."""
        return any(model.variant.capacity_factor is not None for model in self.variants())


def default_executions(request: ExplorationRequest, device_kind: str | None) -> tuple[Execution, ...]:
    """Return the executions to explore on a kind of device; None is one that is not known yet.

    CUDA graphs are for training on one GPU. Lengths that differ from batch to batch would be compiled and captured
    anew, so texts of unequal length run eagerly, as does what several devices compute together.
    """
    if _is_quick(request, device_kind) or request.lengths is not None or request.devices.is_mesh:
        return (Execution.EAGER,)
    if max(request.devices.context_parallel_sizes, default=1) > 1:
        return (Execution.EAGER,)
    trainer = request.runner
    replays = trainer.graphs and request.num_devices == 1 and request.mode == "train" and not request.space.drops_tokens
    return tuple(
        execution
        for execution in Execution
        if (trainer.compiled_layers or not execution.compiles) and (replays or not execution.replays)
    )


def place_of(request: ExplorationRequest, device_kind: str | None) -> Place:
    """Return where the candidates of a request would run."""
    is_quick = _is_quick(request, device_kind)
    return Place(request.target_name, device_kind or request.device_kind, is_quick)


def default_kernels(request: ExplorationRequest, device_kind: str | None) -> tuple[Kernels, ...]:
    """Return what may compute norms, rotation and gated activations of a transformers model."""
    if _is_quick(request, device_kind) or request.target_name != TRANSFORMERS or not request.runner.liger:
        return (Kernels.LIBRARY,)
    return tuple(Kernels)


def _is_quick(request: ExplorationRequest, device_kind: str | None) -> bool:
    """Whether only eager code and the library's own loss are explored: on a CPU, if asked, and for other targets."""
    is_cpu = "cpu" in (device_kind, request.device_kind)
    return request.quick or is_cpu or request.target_name not in (BEXP, TRANSFORMERS)
