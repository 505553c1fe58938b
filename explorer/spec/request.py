"""A request: the model, what may vary, and how long the exploration may take."""

from __future__ import annotations

import re
from typing import Any, Self

from pydantic import model_validator

from bexp.explorer.spec.candidate import Candidate, Recompute, distinct_policies
from bexp.explorer.spec.context_parallel import ALONE, Sharing
from bexp.explorer.spec.device_rules import find_sharing_problem
from bexp.explorer.spec.execution import Execution, Kernels
from bexp.explorer.spec.model import ModelSpec, MoESpec
from bexp.explorer.spec.options import LADDER, MAX_MICRO_BATCH_SIZE, ExploreRange, divisors, ladder_between, tiles_of
from bexp.explorer.spec.request_fields import RequestFields
from bexp.explorer.spec.request_rules import MESH_RULES, RULES
from bexp.explorer.spec.target import BEXP, LOCAL, TRANSFORMERS
from bexp.explorer.spec.training import Sharding
from bexp.explorer.spec.variant import Variant


class ExplorationRequest(RequestFields):
    """An exploration to run.

    A dimension that is left out is explored in full. Context parallelism and sharding are the exceptions: they are
    explored where the request asks for it. `batch_size` is the effective batch over all devices. It weighs the
    optimizer's share of a step, and `auto` and `bta.max_tile` refer to it. In training no micro-batch is larger than
    what a group of devices gets of it.

    The devices are num_devices / c groups of c devices, where c is the context-parallel size. A group processes one
    micro-batch at a time, and each of its devices processes 1 / c of every sequence. The groups are data-parallel, so
    the effective batch is micro-batch x accumulation steps x groups.

    `model` describes the model of target `bexp`, `hf_config` that of target `transformers`. A target that a worker has
    registered may take either, or neither.
    """

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        for rule in MESH_RULES if self.has_mesh else RULES:
            rule(self)
        return self

    @property
    def is_plan(self) -> bool:
        """Whether it is a plan: its devices are described, and one device measures the parts of each."""
        return self.fabric is not None

    @property
    def is_mesh(self) -> bool:
        """Whether its devices form meshes and the worker has all of them."""
        return self.fabric is None and self.num_devices > 1 and self.parallelism.needs_mesh is not None

    @property
    def has_mesh(self) -> bool:
        """Whether its devices form meshes, described or real."""
        return self.is_plan or self.is_mesh

    @property
    def plan_micro_batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that a plan considers, ascending. A plan takes what divides, so `auto` has them all."""
        return LADDER if self.micro_batch_size == "auto" else self.named_micro_batch_sizes(1)

    @property
    def target_name(self) -> str:
        """The target, with the default filled in."""
        return self.target or (BEXP if self.hf_config is None else TRANSFORMERS)

    @property
    def model_name(self) -> str:
        """The model's name: of the ModelSpec, of the config.json, or of the target or its file, if there is neither."""
        if self.model is not None:
            return self.model.name
        if self.hf_config is not None:
            return name_of_config(self.hf_config)
        return self.target_name.removeprefix(f"{LOCAL}.")

    @property
    def seq_length(self) -> int:
        """Tokens a sequence in training; 1 for a target that has no sequences, so that its rates are in samples."""
        return self.model.seq_length if self.model is not None else self.hf_seq_length or 1

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes to consider, ascending, before memory is looked at."""
        return tuple(sorted({m for size in self.context_parallel_sizes for m in self.micro_batch_sizes_over(size)}))

    def micro_batch_sizes_over(self, context_parallel_size: int) -> tuple[int, ...]:
        """The micro-batch sizes to consider where so many devices share a sequence: `auto` depends on it.

        In training, sizes above what such a group of devices gets of the batch are left out.
        """
        sizes = self.named_micro_batch_sizes(context_parallel_size)
        most = self.largest_useful_micro_batch(context_parallel_size)
        return sizes if most is None else tuple(m for m in sizes if m <= most)

    def largest_useful_micro_batch(self, context_parallel_size: int) -> int | None:
        """Whole sequences of the batch that a group of so many devices gets; null in eval mode, which has no batch."""
        return None if self.mode == "eval" else self.batch_size // self.data_parallel_size(context_parallel_size)

    def named_micro_batch_sizes(self, context_parallel_size: int) -> tuple[int, ...]:
        """The micro-batch sizes that the request names, ascending, whatever the batch; `auto` has those that divide."""
        choice = self.micro_batch_size
        if isinstance(choice, ExploreRange):
            return ladder_between(choice.explore.min, choice.explore.max)
        if isinstance(choice, int):
            return (choice,)
        if isinstance(choice, tuple):
            return tuple(sorted(set(choice)))
        if choice == "auto":
            share = self.batch_size // self.data_parallel_size(context_parallel_size)
            return tuple(m for m in divisors(share) if m <= MAX_MICRO_BATCH_SIZE)
        return LADDER

    def tiles_for(self, micro_batch_size: int) -> tuple[int | None, ...]:
        """The attention tiles to consider for one micro-batch size; null is no tiling."""
        untiled: tuple[int | None, ...] = () if self.bta.enable else (None,)
        if self.bta.enable is False:
            return untiled
        tiles = tiles_of(
            micro_batch_size, max_tile=self.bta.max_tile, allowed=self.bta.tiles, training=self.mode == "train"
        )
        return (*untiled, *tiles)

    @property
    def recompute_policies(self) -> tuple[Recompute, ...]:
        """The recomputation policies to consider, without those that amount to another; in eval mode only `none`."""
        allowed = self._all_policies if self.recompute is None else self.recompute
        if self.mode == "eval":
            return (Recompute.NONE,) if Recompute.NONE in allowed else ()
        return distinct_policies(self.model, allowed)

    def policies_for(self, bta_tile: int | None) -> tuple[Recompute, ...]:
        """The recomputation policies to consider with one attention tile; null is no tiling."""
        if bta_tile is None or self.mode == "eval":
            return self.recompute_policies
        return tuple(policy for policy in self.recompute_policies if not policy.untiled_only)

    @property
    def admitted_executions(self) -> tuple[Execution, ...]:
        """The executions that candidates may have, eager first."""
        if self.executions is None:
            return (self.execution,)
        return tuple(execution for execution in Execution if execution in self.executions)

    @property
    def execution_choices(self) -> tuple[Execution | None, ...]:
        """What `Candidate.execution` may be: the admitted executions, or null where there is no choice."""
        return (None,) if self.executions is None else self.admitted_executions

    @property
    def kernel_choices(self) -> tuple[Kernels | None, ...]:
        """The kernels to choose among, the model's own first; null alone if they are the only ones."""
        found = tuple(kernels for kernels in Kernels if kernels in self.kernels)
        return (None,) if found == (Kernels.LIBRARY,) else found

    @property
    def compiles(self) -> bool:
        """Whether code may be compiled for some candidates."""
        return any(execution.compiles for execution in self.admitted_executions)

    @property
    def replays(self) -> bool:
        """Whether some candidates may be replayed as CUDA graphs."""
        return any(execution.replays for execution in self.admitted_executions)

    @property
    def always_compiles(self) -> bool:
        """Whether the code of every candidate is compiled."""
        return all(execution.compiles for execution in self.admitted_executions)

    def execution_of(self, candidate: Candidate) -> Execution:
        """Return how a candidate runs."""
        return candidate.execution or self.execution

    @property
    def _all_policies(self) -> tuple[Recompute, ...]:
        return tuple(
            policy
            for policy in Recompute
            if not (self.always_compiles and policy.by_operation)
            and (policy is not Recompute.EXPERTS or self.model is None or self.model.moe is not None)
        )

    @property
    def context_parallel_sizes(self) -> tuple[int, ...]:
        """How many devices may share a sequence, ascending."""
        asked = self.context_parallel.sizes
        if asked == "explore":
            return tuple(size for size in divisors(self.num_devices) if find_sharing_problem(self, size) is None)
        return tuple(sorted(set(asked)))

    @property
    def sharings(self) -> tuple[Sharing, ...]:
        """The sizes with the layouts that the sequence length admits; a sequence on one device has none."""
        found = []
        for size in self.context_parallel_sizes:
            layouts = self.context_parallel.layouts_over(size, self.seq_length)
            found += [ALONE] if size == 1 else [Sharing(size, layout) for layout in layouts]
        return tuple(found)

    @property
    def sharding_choices(self) -> tuple[Sharding | None, ...]:
        """What `Candidate.sharding` may be: the levels of sharding, lowest first, or null where there is no choice."""
        if self.sharding_levels is None or self.mode == "eval":
            return (None,)
        if self.sharding_levels == "explore":
            return tuple(Sharding) if self.num_devices > 1 else (Sharding.NONE,)
        return tuple(level for level in Sharding if level in self.sharding_levels)

    @property
    def highest_sharding(self) -> Sharding:
        """The level, among those that may be chosen, that leaves the least training state on a device."""
        return self.sharding_choices[-1] or self.training.sharding

    def sharded(self, level: Sharding | None) -> ExplorationRequest:
        """Return this request with the level of sharding of a candidate or component; null keeps the request's own."""
        if level is None:
            return self
        training = self.training.model_copy(update={"sharding": level})
        return self.model_copy(update={"training": training, "sharding_levels": None})

    def devices_needed(self, available: int | None = None) -> int:
        """Return how many devices a worker must have to explore this. A plan needs one.

        It needs the largest of the listed context-parallel sizes. With `explore` it needs two devices that can share a
        sequence, or as many as it began with, which `available` says, so that a resumed exploration finds the same.
        An exploration that began with all its devices needs them all, because what they exchange is part of what it
        learns. So does one that chooses a level of sharding, because the levels differ by what they exchange.
        """
        if self.is_plan:
            return 1
        if self.is_mesh:
            return self.num_devices
        sizes = self.context_parallel_sizes
        if len(self.sharding_choices) > 1:
            return self.num_devices
        if available is not None and self.mode == "train" and available >= self.num_devices:
            return self.num_devices
        if self.context_parallel.sizes != "explore":
            return max(sizes)
        if available is None:
            return next((size for size in sizes if size > 1), 1)
        return max((size for size in sizes if size <= available), default=1)

    @property
    def optimizer_shards(self) -> int:
        """Number of devices that share one optimizer step.

        Training state is sharded over all devices. This includes devices that share sequences, because their gradients
        are reduced together anyway.
        """
        return self.num_devices if self.training.sharding.level >= 1 else 1

    def variants(self) -> tuple[ModelSpec, ...]:
        """The models to explore, one for each distinct num_query_groups and capacity factor; the first is the main one.

        There is none for a target without a ModelSpec.
        """
        if self.model is None:
            return ()
        models: dict[Variant, ModelSpec] = {}
        for groups in self.num_query_groups or (self.model.num_query_groups,):
            for moe in self._expert_layers(self.model.moe):
                model = self.model.model_copy(update={"num_query_groups": groups, "moe": moe})
                models.setdefault(model.variant, model)
        return tuple(models.values())

    def _expert_layers(self, moe: MoESpec | None) -> tuple[MoESpec | None, ...]:
        """The expert layers of the variants that are compared."""
        if moe is None or self.capacity_factors is None:
            return (moe,)
        return tuple(moe.model_copy(update={"capacity_factor": factor}) for factor in self.capacity_factors)

    @property
    def drops_tokens(self) -> bool:
        """Whether the experts of some variant have a capacity."""
        return any(model.variant.capacity_factor is not None for model in self.variants())

    @property
    def device_batch_size(self) -> float:
        """A device's share of the effective batch, as a real number of whole sequences.

        It is the same for every context-parallel size, because c devices that share sequences process c times as many.
        """
        return self.batch_size / self.num_devices

    def data_parallel_size(self, context_parallel_size: int) -> int:
        """Number of groups of devices that process sequences of their own."""
        return self.num_devices // context_parallel_size

    def group_batch_size(self, context_parallel_size: int) -> float:
        """Sequences of the effective batch that one such group processes, as a real number."""
        return self.device_batch_size * context_parallel_size


def name_of_config(config: dict[str, Any]) -> str:
    """Return the name of a Hugging Face config.json: the last part of `_name_or_path`, else its model type."""
    path = config.get("_name_or_path")
    tail = re.sub(r"[^A-Za-z0-9._ -]", "-", path.rstrip("/").split("/")[-1])[:128] if isinstance(path, str) else ""
    return tail if re.match(r"[A-Za-z0-9]", tail) else str(config.get("model_type"))[:128]
