"""The dimensions that a request lets vary, before a device and its memory are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bexp.explorer.dimensions.execution import EXECUTION, Execution
from bexp.explorer.dimensions.micro_batch_size import LADDER, MICRO_BATCH_SIZE
from bexp.explorer.dimensions.place import Place, ReportedPlace
from bexp.explorer.dimensions.recompute import RECOMPUTE, Recompute
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.model.hardware import DeviceSupport
from bexp.explorer.model.model import ModelSpec, MoESpec, Variant
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.model.training import Sharding

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


@dataclass(frozen=True, slots=True)
class RequestedSpace:
    """The values that candidates of a request may have, on a kind of device if it is known."""

    asked: ExplorationRequest
    device_kind: str | None = None

    @property
    def place(self) -> Place:
        """The request as its dimensions see it."""
        return place_of(self.asked, self.device_kind)

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes to consider, ascending, before memory is looked at."""
        return MICRO_BATCH_SIZE.considered(self.place)

    @property
    def all_micro_batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes of the request whatever the batch, ascending; with `auto` all sizes of the ladder."""
        return MICRO_BATCH_SIZE.named(self.place) or LADDER

    @property
    def recompute_policies(self) -> tuple[Recompute, ...]:
        """The recomputation policies to consider."""
        return RECOMPUTE.considered(self.place)

    @property
    def executions(self) -> tuple[Execution, ...]:
        """The executions that candidates may have, eager first."""
        return EXECUTION.considered(self.place)

    @property
    def compiles(self) -> bool:
        """Whether code may be compiled for some candidates."""
        return any(execution.compiles for execution in self.executions)

    @property
    def replays(self) -> bool:
        """Whether some candidates may be replayed as CUDA graphs."""
        return any(execution.replays for execution in self.executions)

    @property
    def sharding_choices(self) -> tuple[Sharding | None, ...]:
        """The values of `Candidate.sharding`: the levels, lowest first, or None where there is no choice."""
        return SHARDING.considered(self.place)

    @property
    def highest_sharding(self) -> Sharding:
        """The level, among those that may be chosen, that leaves the least training state on a device."""
        return SHARDING.highest(self.place)

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


def place_of(request: ExplorationRequest, device_kind: str | None = None, report: DeviceSupport | None = None) -> Place:
    """Return where the candidates of a request would run, for all that is known of the device."""
    is_training = request.mode == "train"
    return Place(
        asked=request,
        target=request.target_name,
        shapes=request.model,
        may_have_experts=request.explored.may_have_experts,
        seq_length=request.seq_length,
        training=request.training,
        is_training=is_training,
        num_devices=request.num_devices,
        shares_model=request.devices.share_model,
        batch_size=request.effective_batch_size,
        states_batch=request.batch_size is not None,
        base_micro_batch_size=request.base_micro_batch_size,
        device_kind=device_kind or request.device_kind,
        is_quick=_is_quick(request, device_kind),
        batching=request.batching_of_texts,
        replays=request.num_devices == 1 and is_training and not request.space.drops_tokens,
        expressible=request.runner.expresses,
        report=report,
    )


def reported_place(request: ExplorationRequest, report: DeviceSupport, model: ExploredModel) -> ReportedPlace:
    """Return the place of a device that has reported, for one variant of a model."""
    place = place_of(request, report.hardware.device_kind, report)
    return ReportedPlace(**vars(place), model=model)


def _is_quick(request: ExplorationRequest, device_kind: str | None) -> bool:
    """Whether only eager code and the library's own loss are explored: on a CPU, if asked, and for other targets."""
    is_cpu = "cpu" in (device_kind, request.device_kind)
    return request.quick or is_cpu or request.is_own_code
