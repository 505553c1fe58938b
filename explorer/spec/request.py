"""What a person asks for: a model, what may vary, and how long the exploration may take."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from explorer.spec.base import Frozen
from explorer.spec.candidate import Recompute, recomputed_layers
from explorer.spec.context_parallel import ALONE, LAYOUTS, ContextParallelSpec, Sharing, refuse_layout
from explorer.spec.model import ModelSpec
from explorer.spec.options import (
    LADDER,
    MAX_MICRO_BATCH_SIZE,
    BackendName,
    BTASpec,
    Budget,
    Count,
    ExploreRange,
    MicroBatch,
    MicroBatchChoice,
    ParallelismSpec,
    divisors,
    ladder_between,
    tiles_of,
)
from explorer.spec.routing import RoutingSpec
from explorer.spec.training import Sharding, TrainingSpec

MAX_NUM_QUERY_GROUPS_VARIANTS = 8
MAX_COMBINATIONS = 3072  # of micro-batch, tile and recomputation; back ends multiply them by about ten
MAX_SHARED_COMBINATIONS = 2 * MAX_COMBINATIONS  # the same, times the ways in which devices share sequences


class ExplorationRequest(Frozen):
    """An exploration to run.

    A dimension that is left out is explored in full, but for context parallelism and sharding, which are explored where
    that is asked for. `batch_size` is the effective batch over all devices; it weighs the optimizer's share of a step,
    and `auto` and `bta.max_tile` refer to it.

    The devices are num_devices / c groups of c devices, c being the context-parallel size. A group processes a
    micro-batch at a time, each of its devices 1 / c of every sequence; the groups are data-parallel. So the effective
    batch is micro-batch x accumulation steps x groups.
    """

    model: ModelSpec
    mode: Literal["train", "eval"] = "train"
    micro_batch_size: MicroBatchChoice = "explore"
    batch_size: Count = 512
    num_devices: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, validation_alias=AliasChoices("num_devices", "num_csx"), description="`num_csx` is accepted as an alias."
    )
    device_kind: Literal["cpu", "cuda"] | None = Field(None, description="Null: whichever worker claims the job.")
    num_query_groups: (
        Annotated[
            tuple[Annotated[int, Field(ge=1, le=1024)] | None, ...],
            Field(min_length=1, max_length=MAX_NUM_QUERY_GROUPS_VARIANTS),
        ]
        | None
    ) = Field(None, description="Settings to compare as separate models; they change the model.")
    bta: BTASpec = BTASpec()
    recompute: Annotated[tuple[Recompute, ...], Field(min_length=1, max_length=len(Recompute))] | None = None
    attention_backends: Annotated[tuple[BackendName, ...], Field(min_length=1, max_length=16)] | None = None
    flash_attention: bool = Field(True, description="False excludes the back end `flash` from the attention back ends.")
    expert_backends: Annotated[tuple[BackendName, ...], Field(min_length=1, max_length=16)] | None = None
    routing: RoutingSpec = RoutingSpec()
    execution: Literal["eager", "compile"] = "eager"
    training: TrainingSpec = TrainingSpec()
    sharding_levels: (
        Literal["explore"] | Annotated[tuple[Sharding, ...], Field(min_length=1, max_length=len(Sharding))] | None
    ) = Field(
        None,
        description="Levels to choose among in place of training.sharding, `explore` for all; a list or `explore` "
        "there means the same.",
    )
    parallelism: ParallelismSpec = ParallelismSpec()
    context_parallel: ContextParallelSpec = ContextParallelSpec()
    memory_limit_gib: Annotated[float, Field(gt=0, le=4096)] | None = Field(
        None, description="Plan for a smaller device; default: the device's own memory, on CPU a share of the RAM."
    )
    base_micro_batch_size: MicroBatch | None = None
    tolerance: Annotated[float, Field(gt=0, le=0.2)] = 0.01
    budget: Budget = Budget()
    verify: bool = Field(True, description="Run the whole model at the recommended candidate when it fits.")
    seed: Annotated[int, Field(ge=0, le=(1 << 31) - 1)] = 0
    sampler: Literal["bexp", "tpe", "gp", "random"] = Field(
        "bexp",
        description="What suggests the next trial: `bexp`, which learns from single components, or one of Optuna's "
        "samplers (TPE, Gaussian process, random), which see whole candidates alone.",
    )

    @model_validator(mode="before")
    @classmethod
    def _lift_query_groups(cls, data: Any) -> Any:
        """A list in model.num_query_groups names variants; the first is the model's own."""
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            return data
        groups = data["model"].get("num_query_groups")
        if isinstance(groups, list) and groups:
            if data.get("num_query_groups") is not None:
                raise ValueError("num_query_groups is given as a list twice")
            return {**data, "model": {**data["model"], "num_query_groups": groups[0]}, "num_query_groups": groups}
        return data

    @model_validator(mode="before")
    @classmethod
    def _lift_sharding(cls, data: Any) -> Any:
        """A list or `explore` in training.sharding leaves a choice. What is no level stays where it is refused."""
        if not isinstance(data, dict) or not isinstance(data.get("training"), dict):
            return data
        training = dict(data["training"])
        asked = training.get("sharding")
        levels = isinstance(asked, list | tuple) and asked and all(level in list(Sharding) for level in asked)
        if not levels and asked != "explore":
            return data
        if data.get("sharding_levels") is not None:
            raise ValueError("levels of sharding are given twice, in training.sharding and in sharding_levels")
        del training["sharding"]
        return {**data, "training": training, "sharding_levels": asked}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_sharing()
        if self.bta.max_tile is not None and self.batch_size % self.bta.max_tile:
            raise ValueError(f"bta.max_tile ({self.bta.max_tile}) must divide batch_size ({self.batch_size})")
        if self.model.moe is None:
            if self.expert_backends is not None:
                raise ValueError("expert_backends given for a model without experts")
        else:
            self.routing.check(self.model.moe)
        if self.sharding_levels is not None and self.training.sharding is not Sharding.NONE:
            raise ValueError("sharding_levels take the place of training.sharding: give one of them")
        asked = self.training.sharding if self.sharding_levels is None else self.highest_sharding
        if asked is not Sharding.NONE and self.num_devices == 1:
            raise ValueError(f"sharding '{asked}' needs num_devices > 1")
        if set(self.attention_backends or ()) == {"flash"} and not self.flash_attention:
            raise ValueError("attention_backends allows only flash, and flash_attention is false")
        if not self.micro_batch_sizes:
            raise ValueError("micro_batch_size leaves no value to explore")
        tiles = {tile for m in self.micro_batch_sizes for tile in self.tiles_for(m)}
        if not tiles:
            raise ValueError("bta leaves no tile: none of bta.tiles divides a micro-batch size of the space")
        unused = [tile for tile in self.bta.tiles or () if tile not in tiles]
        if unused:
            raise ValueError(f"bta.tiles: {unused[0]} is no factor of any micro-batch size of the space")
        self._check_policies()
        if self.recompute_policies and not any(self.policies_for(tile) for tile in tiles):
            named = "' and '".join(self.recompute_policies)
            raise ValueError(
                f"bta.enable with recompute '{named}' alone leaves nothing: a tile recomputes its attention already"
            )
        tilings = [tile for m in self.micro_batch_sizes for tile in self.tiles_for(m)]
        if (combinations := sum(len(self.policies_for(tile)) for tile in tilings)) > MAX_COMBINATIONS:
            raise ValueError(
                f"the space has {combinations} combinations of micro-batch size, tile and recomputation; "
                f"at most {MAX_COMBINATIONS} are explored: restrict one of them"
            )
        ways, levels = len(self.sharings), len(self.sharding_choices)
        if (shared := combinations * ways * levels) > max(MAX_SHARED_COMBINATIONS, combinations):
            raise ValueError(
                f"context_parallel and sharding: with {ways} pairs of a size and a layout and {levels} levels of "
                f"sharding the space has {shared} combinations; at most {MAX_SHARED_COMBINATIONS} are explored: "
                "restrict sizes, layouts, sharding_levels, micro_batch_size, bta or recompute"
            )
        if self.mode == "eval" and not self.recompute_policies:
            raise ValueError("recompute must allow 'none' in eval mode: nothing is recomputed without a backward pass")
        for groups in self.num_query_groups or ():
            if groups is not None and self.model.num_attention_heads % groups:
                raise ValueError(
                    f"num_query_groups ({groups}) must divide num_attention_heads ({self.model.num_attention_heads})"
                )
        return self

    def _check_sharing(self) -> None:
        asked = self.context_parallel.sizes
        if asked == "explore":
            if not self.sharings:
                raise ValueError(self._refuse_size(1))
            return
        for size in asked:
            reason = self._refuse_size(size)
            if reason is not None:
                raise ValueError(reason if size == 1 else f"context_parallel.sizes: {reason}")

    def _refuse_size(self, size: int) -> str | None:
        """Why sequences cannot be spread over `size` devices; null if they can."""
        if self.num_devices % size:
            return f"{size} does not divide num_devices ({self.num_devices})"
        groups = self.num_devices // size
        named = f"num_devices ({groups})" if size == 1 else f"the number of groups of {size} devices ({groups})"
        if self.micro_batch_size == "auto" and self.batch_size % groups:
            return f"micro_batch_size 'auto' needs batch_size ({self.batch_size}) to be a multiple of {named}"
        if self.batch_size < groups:
            return f"batch_size ({self.batch_size}) is smaller than {named}"
        if size > 1 and not self._layouts_over(size):
            layouts = self.context_parallel.layouts
            return "; ".join(str(refuse_layout(name, size, self.model.seq_length)) for name in layouts)
        return None

    def _layouts_over(self, size: int) -> tuple[str, ...]:
        allowed = [name for name in LAYOUTS if name in self.context_parallel.layouts]
        return tuple(name for name in allowed if refuse_layout(name, size, self.model.seq_length) is None)

    def _check_policies(self) -> None:
        for policy in self.recompute or ():
            if policy is Recompute.EXPERTS and self.model.moe is None:
                raise ValueError("recompute 'experts' given for a model without experts")
            if policy.by_operation and self.execution == "compile":
                raise ValueError(
                    f"recompute '{policy}' needs execution 'eager': within a graph, the compiler chooses which "
                    "operations to run again"
                )

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes to consider, ascending, before memory is looked at."""
        return tuple(sorted({m for size in self.context_parallel_sizes for m in self.micro_batch_sizes_over(size)}))

    def micro_batch_sizes_over(self, context_parallel_size: int) -> tuple[int, ...]:
        """The micro-batch sizes to consider where so many devices share a sequence: `auto` depends on it."""
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
        # In a shallow model some shares round to the same layers: one of them is enough, the whole before the part.
        distinct: dict[object, Recompute] = {}
        for policy in sorted(allowed, key=lambda p: p is not Recompute.FULL):
            layers = recomputed_layers(self.model, policy)
            distinct.setdefault(layers if any(layers) else policy, policy)
        return tuple(p for p in Recompute if p in distinct.values())

    def policies_for(self, bta_tile: int | None) -> tuple[Recompute, ...]:
        """The recomputation policies to consider with one attention tile; null is no tiling."""
        if bta_tile is None or self.mode == "eval":
            return self.recompute_policies
        return tuple(policy for policy in self.recompute_policies if not policy.untiled_only)

    @property
    def _all_policies(self) -> tuple[Recompute, ...]:
        compiled = self.execution == "compile"
        return tuple(
            policy
            for policy in Recompute
            if not (compiled and policy.by_operation)
            and (policy is not Recompute.EXPERTS or self.model.moe is not None)
        )

    @property
    def context_parallel_sizes(self) -> tuple[int, ...]:
        """How many devices may share a sequence, ascending."""
        asked = self.context_parallel.sizes
        if asked == "explore":
            return tuple(size for size in divisors(self.num_devices) if self._refuse_size(size) is None)
        return tuple(sorted(set(asked)))

    @property
    def sharings(self) -> tuple[Sharing, ...]:
        """The sizes with the layouts that the sequence length admits; a sequence on one device has none."""
        found = []
        for size in self.context_parallel_sizes:
            found += [ALONE] if size == 1 else [Sharing(size, layout) for layout in self._layouts_over(size)]
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
        """The level that leaves a device least of the training state, of those that may be chosen."""
        return self.sharding_choices[-1] or self.training.sharding

    def sharded(self, level: Sharding | None) -> ExplorationRequest:
        """This request with one level of sharding, as a candidate or component has it; null for the request's own."""
        if level is None:
            return self
        training = self.training.model_copy(update={"sharding": level})
        return self.model_copy(update={"training": training, "sharding_levels": None})

    def devices_needed(self, available: int | None = None) -> int:
        """Devices that a worker must have to explore this.

        As many as the largest of the listed sizes. `explore` takes what there is, two that can share at least;
        `available` says how many that was, so that a resumed exploration finds as many as it began with. One that began
        with all its devices needs them all: what they exchange is part of what it learns. So does one that is to choose
        a level of sharding, since the levels differ by what they exchange.
        """
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

        Training state is sharded over all devices, those of a group that shares sequences included: their gradients are
        reduced together anyway.
        """
        return self.num_devices if self.training.sharding.level >= 1 else 1

    def variants(self) -> tuple[ModelSpec, ...]:
        """The models to explore, one for each distinct num_query_groups asked for; the first is the main one."""
        if self.num_query_groups is None:
            return (self.model,)
        models: dict[int, ModelSpec] = {}
        for groups in self.num_query_groups:
            model = self.model.model_copy(update={"num_query_groups": groups})
            models.setdefault(model.query_groups, model)
        return tuple(models.values())

    @property
    def device_batch_size(self) -> float:
        """A device's share of the effective batch in whole sequences' worth of tokens, as a real number.

        It is the same for every context-parallel size: c devices that share sequences process c times as many of them.
        """
        return self.batch_size / self.num_devices

    def data_parallel_size(self, context_parallel_size: int) -> int:
        """Number of groups of devices that process sequences of their own."""
        return self.num_devices // context_parallel_size

    def group_batch_size(self, context_parallel_size: int) -> float:
        """Sequences of the effective batch that one such group processes, as a real number."""
        return self.device_batch_size * context_parallel_size
