"""What a request lets vary, dimension by dimension, before a device and its memory are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from bexp.explorer.dimensions.bta_tile import tiles_of
from bexp.explorer.dimensions.context_parallel import ALONE, Sharing
from bexp.explorer.dimensions.dimension import Choice, Place
from bexp.explorer.dimensions.execution import EXECUTION, Execution
from bexp.explorer.dimensions.micro_batch_size import (
    LADDER,
    MAX_MICRO_BATCH_SIZE,
    ExploreRange,
    divisors,
    ladder_between,
)
from bexp.explorer.dimensions.recompute import ON_DEVICE, Recompute
from bexp.explorer.model.model import ModelSpec, MoESpec, Variant
from bexp.explorer.model.training import Sharding

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


V = TypeVar("V")

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
    def all_micro_batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes of the request whatever the batch, ascending; with `auto` all sizes of the ladder."""
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

    @property
    def executions(self) -> tuple[Execution, ...]:
        """The executions that candidates may have, eager first."""
        return self.values_of(EXECUTION)

    @property
    def names_executions(self) -> bool:
        """Whether the request says how candidates run."""
        return self.asked.execution is not None or self.asked.executions is not None

    def values_of(self, choice: Choice[V]) -> tuple[V, ...]:
        """The values of a choice to consider before the device is asked, the base's first."""
        return choice.considered(self.asked, place_of(self.asked, self.device_kind))

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


def place_of(request: ExplorationRequest, device_kind: str | None) -> Place:
    """Return where the candidates of a request would run; `device_kind` is None if that is not known yet."""
    devices = request.devices
    is_joint = devices.share_model or max(devices.context_parallel_sizes, default=1) > 1
    replays = request.num_devices == 1 and request.mode == "train" and not request.space.drops_tokens
    return Place(
        request.target_name,
        device_kind or request.device_kind,
        is_quick=_is_quick(request, device_kind),
        is_eager=is_joint or request.lengths is not None,
        replays=replays,
        stated={EXECUTION.name: request.execution},
        expressible=request.runner.expresses,
    )


def _is_quick(request: ExplorationRequest, device_kind: str | None) -> bool:
    """Whether only eager code and the library's own loss are explored: on a CPU, if asked, and for other targets."""
    is_cpu = "cpu" in (device_kind, request.device_kind)
    return request.quick or is_cpu or request.is_own_code
