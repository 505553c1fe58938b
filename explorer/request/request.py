"""A request: the model, what may vary in it and on its devices, and how long the exploration may take."""

from __future__ import annotations

import hashlib
import json
import operator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AliasChoices, Field, field_validator, model_validator

from bexp.explorer.dimensions.candidate import Candidate, DimensionsAsked
from bexp.explorer.dimensions.execution import EXECUTION, Execution
from bexp.explorer.dimensions.micro_batch_size import LADDER, MICRO_BATCH_SIZE, MicroBatch, MicroBatchChoice
from bexp.explorer.dimensions.parallelism import ParallelismSpec
from bexp.explorer.dimensions.place import Place, ReportedPlace
from bexp.explorer.dimensions.recompute import RECOMPUTE, Recompute
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.model.base import Frozen, is_false, is_null
from bexp.explorer.model.config_rules import check_hugging_face_config, check_size
from bexp.explorer.model.hardware import DeviceSupport
from bexp.explorer.model.lengths import Batching, Lengths
from bexp.explorer.model.model import ModelSpec, MoESpec, Variant
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.model.quantization import Quantization, QuantizationName, quantization_of
from bexp.explorer.model.routing import RoutingSpec
from bexp.explorer.model.target import BEXP, LOCAL, TRANSFORMERS, TargetName
from bexp.explorer.model.training import Sharding, TrainingSpec
from bexp.explorer.request.explored import Explored, name_of_config
from bexp.explorer.request.labels import Labels
from bexp.explorer.request.request_rules import rules_of
from bexp.explorer.request.shorthands import expand_shorthands
from bexp.explorer.trainers.registry import DEFAULT_TRAINER, TRAINERS, TrainerName
from bexp.explorer.trainers.trainer import Trainer

WEIGHING_BATCH_SIZE = 512
"""The effective batch that weighs the optimizer where nobody states one."""

Count = Annotated[int, Field(ge=1, le=1 << 20)]


class Budget(Frozen):
    """The end of a search: at the confidence target, or when a limit is reached.

    The base is measured in any case. Twice the limits hold until there is a candidate to recommend, and for the
    comparisons of the answer. Whole models of recommended candidates come on top, until one has run well.
    """

    confidence_target: Annotated[int, Field(ge=1, le=99)] = 95
    max_trials: Annotated[int, Field(ge=1, le=2000)] = 200
    """Each variant has an equal share of both limits, and what earlier variants left over."""
    max_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """The time of all trials together, those of earlier leases included.

    A trial counts from its choice until its result is learnt. Trials in flight at once each count in full. Starting a
    job, enumerating the space and storing results come on top, and a running trial is not cut short. After a whole
    model that ran well, whole models have a third of it. A search that noise keeps from its confidence has an eighth.
    """
    trial_timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 120.0


class ExplorationRequest(DimensionsAsked):
    """An exploration to run.

    A dimension that is left out is explored in full. Context parallelism and sharding are exceptions: they are explored
    where the request asks for it.

    The devices are num_devices / c groups of c devices, where c is the context-parallel size. A group processes one
    micro-batch at a time, and each of its devices processes 1 / c of every sequence. The groups are data-parallel, so
    the effective batch is micro-batch x accumulation steps x groups.
    """

    target: TargetName | None = Field(
        None,
        description="The code whose training step is measured: `bexp` (reference layers), `transformers`, or a name "
        "that a worker has registered. Null: `transformers` for `hf_config`, else `bexp`.",
    )
    model: ModelSpec | None = None
    hf_config: Annotated[dict[str, Any], AfterValidator(check_hugging_face_config)] | None = Field(
        None, description="A Hugging Face config.json as it came, for target `transformers`; at most 256 KiB."
    )
    hf_seq_length: Annotated[int, Field(ge=1, le=1 << 24)] | None = Field(
        None, description="Tokens a sequence in training, for `hf_config`."
    )
    lengths: Lengths | None = Field(
        None,
        description="How long texts are, for `hf_config`, which cuts them at hf_seq_length: a histogram, or "
        "`lognormal(mean, sigma)`. Null: every sequence is full.",
        exclude_if=is_null,
    )
    batching: Batching | None = Field(
        None,
        description="How they become micro-batches: `padded` to the longest, `grouped` by length and padded, or "
        "`packed` into full sequences, with attention within each text, or `token_budget`: as many whole texts in one "
        "row as micro_batch_size full sequences have tokens. Null: `padded`.",
        exclude_if=is_null,
    )
    quantization: QuantizationName | None = Field(
        None,
        description="Weights of `hf_config` in four or eight bits, as transformers loads them with bitsandbytes; "
        "`bnb_4bit` is QLoRA's NF4 with quantised scales. `none`: plain weights, whatever the config.json says. Null: "
        "as its `quantization_config` says.",
        exclude_if=is_null,
    )
    target_config: dict[str, Any] | None = Field(
        None, description="What a registered target builds its model from; at most 256 KiB as JSON."
    )
    mode: Literal["train", "eval"] = Field("train", description="Whole training steps, or forward passes alone.")
    batch_size: Count | None = Field(
        None,
        description="The effective batch of an optimizer step in sequences, over all devices. Null: the optimizer is "
        f"weighed as in a batch of {WEIGHING_BATCH_SIZE}, and accumulation is left to the trainer.",
    )
    num_devices: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, validation_alias=AliasChoices("num_devices", "num_csx"), description="`num_csx` is accepted as an alias."
    )
    device_kind: Literal["cpu", "cuda"] | None = Field(None, description="Null: a GPU goes before a CPU.")
    routing: RoutingSpec = RoutingSpec()
    quick: bool = Field(
        False,
        description="Explore eager execution and the library's own loss alone, where the request names no others. A "
        "CPU explores no more in any case.",
        exclude_if=is_false,
    )
    allocator: Literal["default", "expandable_segments"] = Field(
        "default", description="The setting of PyTorch's CUDA allocator that the training run will use."
    )
    trainer: TrainerName | None = Field(
        None,
        description="Who will run the answer: only what this trainer can express is explored, with its precision, loss "
        "and allocator where the request states none. Null: everything is explored, for `bexp.apply`.",
    )
    training: TrainingSpec = TrainingSpec()
    parallelism: ParallelismSpec = ParallelismSpec()
    memory_limit_gib: Annotated[float, Field(gt=0, le=4096)] | None = Field(
        None,
        description="Explore as if the device had only so much; default: the device's own memory, on CPU a share of "
        "the RAM. Devices with less, by more than a tenth, are left out.",
    )
    headroom: Annotated[float, Field(ge=0, le=0.9)] = Field(
        0.0, description="Share of the memory limit to leave free, beyond the margin that is always kept."
    )
    base_micro_batch_size: MicroBatch | None = None
    tolerance: Annotated[float, Field(gt=0, le=0.2)] = 0.01
    prefer: Literal["speed", "memory"] = Field(
        "speed",
        description="`speed` recommends the fastest candidate. `memory` recommends the smallest peak among those that "
        "are expected to be within the tolerance of it.",
    )
    budget: Budget = Budget()
    fresh: bool = Field(
        False,
        description="Measure everything again. False: measurements of earlier explorations on the same hardware and "
        "versions may be used.",
    )
    verify: bool = Field(True, description="Run the whole model at the recommended candidate when it fits.")
    seed: Annotated[int, Field(ge=0, le=(1 << 31) - 1)] = 0
    sampler: Literal["bexp", "tpe", "gp", "random"] = Field(
        "bexp",
        description="The Optuna sampler that suggests trials: our own, or one of Optuna's to compare with. "
        "Recommendation and confidence are computed alike for all.",
    )
    labels: Labels = Field(
        default_factory=dict, description="Texts by which people search for the exploration; they change nothing else."
    )
    kept: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Of the files of trainers, by their names: what an exploration leaves as it is, and an export has "
        "again; at most 256 KiB as JSON.",
        exclude_if=operator.not_,
    )
    notices: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=8)] = Field(
        (), description="What was noted when the configuration was read, such as keys that were ignored."
    )

    @field_validator("target_config", "kept")
    @classmethod
    def _check_free_fields(cls, config: dict[str, Any] | None) -> dict[str, Any] | None:
        if config is not None:  # what its keys mean is left to the target, or to the trainer
            check_size(config)
        return config

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthands(cls, data: Any) -> Any:
        return expand_shorthands(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        for rule in rules_of(self):
            rule(self)
        return self

    @property
    def explored(self) -> Explored:
        """The model that is explored. One that its target alone knows has the name of that target, or of its file."""
        if self.model is not None:
            return Explored(self.model.name, self.model.seq_length, shapes=self.model)
        if self.hf_config is not None:
            return Explored(name_of_config(self.hf_config), self.hf_seq_length, config=self.hf_config)
        return Explored((self.target or BEXP).removeprefix(f"{LOCAL}."))

    @property
    def shapes(self) -> ModelSpec:
        """The shapes of the model, of a request that has them."""
        assert self.model is not None, "the request has a model section"
        return self.model

    @property
    def target_name(self) -> str:
        """The target, with the default filled in."""
        return self.target or (TRANSFORMERS if self.model is None and self.hf_config is not None else BEXP)

    @property
    def is_own_code(self) -> bool:
        """Whether the target is a person's own, whose code decides precision, recomputation and kernels."""
        return self.target_name not in (BEXP, TRANSFORMERS)

    @property
    def batching_of_texts(self) -> Batching | None:
        """The way in which texts of unequal length become micro-batches; None if every sequence is full."""
        return None if self.lengths is None else self.batching or "padded"

    @property
    def seq_length(self) -> int:
        """Tokens a sequence in training; 1 for a target that has no sequences, so that its rates are in samples."""
        return self.explored.seq_length or 1

    @property
    def quantized(self) -> Quantization | None:
        """The quantisation of a transformers model's weights; None for plain ones."""
        return quantization_of(self.quantization, self.hf_config) if self.target_name == TRANSFORMERS else None

    @property
    def runner(self) -> Trainer:
        """The trainer that will run the answer; that of `bexp.apply` if none is named."""
        return DEFAULT_TRAINER if self.trainer is None else TRAINERS[self.trainer]

    @property
    def flattens(self) -> bool:
        """Whether any attention gets a packed micro-batch as one row."""
        return self.runner.flattens or self.batching == "token_budget"

    @property
    def effective_batch_size(self) -> int:
        """Sequences of an optimizer step over all devices; the weighing batch if none is stated."""
        return WEIGHING_BATCH_SIZE if self.batch_size is None else self.batch_size

    @property
    def micro_batch_choice(self) -> MicroBatchChoice:
        """The value of `micro_batch_size`, with the default filled in."""
        return MICRO_BATCH_SIZE.choice(self.space.place)

    @property
    def keeps_batch(self) -> bool:
        """Whether micro-batches must divide the stated batch: with `auto` and with one size."""
        return MICRO_BATCH_SIZE.keeps_batch(self.space.place)

    @property
    def space(self) -> RequestedSpace:
        """The dimensions that may vary."""
        return RequestedSpace(self)

    @property
    def devices(self) -> RequestedDevices:
        """The devices, and the way in which they share the work."""
        return RequestedDevices(self)

    def space_on(self, device_kind: str) -> RequestedSpace:
        """Return the dimensions that may vary on a kind of device."""
        return RequestedSpace(self, device_kind)

    @property
    def plain_execution(self) -> Execution:
        """The execution of candidates that name none."""
        return self.execution or Execution.EAGER

    def execution_of(self, candidate: Candidate) -> Execution:
        """Return the execution of a candidate."""
        return candidate.execution or self.plain_execution

    @property
    def by_deepspeed(self) -> bool:
        """Whether a person's file trains with DeepSpeed, be it on one device."""
        return "deepspeed" in self.kept

    def sharded(self, level: Sharding | None) -> ExplorationRequest:
        """Return this request with the sharding of a candidate or component; None keeps the request's own level."""
        if level is None:
            return self
        training = self.training.model_copy(update={"sharding": level})
        return self.model_copy(update={"training": training, "sharding_levels": None})


@dataclass(frozen=True, slots=True)
class RequestedDevices:
    """The devices of a request: data-parallel groups of c devices that share sequences, or a model."""

    asked: ExplorationRequest

    @property
    def share_model(self) -> bool:
        """Whether devices may share a model by tensor, pipeline or expert parallelism."""
        return self.asked.num_devices > 1 and self.asked.parallelism.shares_model

    @property
    def context_parallel_sizes(self) -> tuple[int, ...]:
        """The numbers of devices that may share a sequence, ascending."""
        return self.asked.context_parallel.sizes_at(self.asked.space.place)

    def needed(self, available: int | None = None) -> int:
        """Return how many devices a worker must have to explore this.

        The number is the largest of the listed context-parallel sizes. With `explore` it is two, if two devices can
        share a sequence. An exploration that has begun needs as many as it began with (`available`), so that a resumed
        one enumerates the same candidates.

        An exploration that began with all its devices needs them all, because it measures what they exchange. So does
        one that chooses a level of sharding, because the levels differ by what devices exchange.
        """
        every = self.asked.num_devices
        if self.share_model or len(self.asked.space.sharding_choices) > 1:
            return every
        if available is not None and self.asked.mode == "train" and available >= every:
            return every
        sizes = self.context_parallel_sizes
        if self.asked.context_parallel.sizes != "explore":
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
        return self.asked.num_devices if self.asked.training.sharding.level >= 1 else 1

    @property
    def hold_buckets(self) -> bool:
        """Whether buckets hold copies of all gradients: those of replicas that a trainer of transformers wraps."""
        replicas = self.asked.num_devices > 1 and self.asked.training.sharding is Sharding.NONE
        return replicas and self.asked.mode == "train" and self.asked.target_name == TRANSFORMERS

    @property
    def batch_share(self) -> float:
        """One device's share of the effective batch, as a real number of whole sequences.

        It is the same for every context-parallel size, because c devices that share sequences process c times as many.
        """
        return self.asked.effective_batch_size / self.asked.num_devices

    def data_parallel_size(self, context_parallel_size: int) -> int:
        """Number of groups of devices that process sequences of their own."""
        return self.asked.num_devices // context_parallel_size


NOT_ASKED = {"labels", "fresh", "notices", "kept", "budget", "target"}
"""Fields that do not say what is asked. The budget says how well it must be known, which is judged by the answer."""


def request_key(request: ExplorationRequest) -> str | None:
    """Return a text that is equal for requests that ask the same, whatever their labels and budgets.

    None for a target that somebody has written: its code can change while its version does not.
    """
    if request.is_own_code:
        return None
    document = request.model_dump(mode="json", exclude=NOT_ASKED)
    document["target"] = request.target_name
    document["trial_timeout_seconds"] = request.budget.trial_timeout_seconds
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


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
