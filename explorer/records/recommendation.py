"""The answer: the best known candidate, its gain over others, and the confidence in it."""

from __future__ import annotations

import operator
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from bexp.explorer.cost.step import MemoryParts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Parallelism
from bexp.explorer.model.amounts import RateUnit, is_in_tokens
from bexp.explorer.model.base import Frozen, is_null
from bexp.explorer.model.extensions import Extended
from bexp.explorer.model.lengths import Batching
from bexp.explorer.model.quantization import WeightBytes
from bexp.explorer.records.device_report import ReusedComponents
from bexp.explorer.records.measurement import Outcome, WholeModelMeasurement
from bexp.explorer.records.plan import Plan

ROUNDING = 1e-9
"""The error by rounding of a ratio of 1."""


def beside_whole(composed: float, reached: float | None) -> float:
    """Return the tokens/s to state of a candidate that was not run whole: at most those `reached` by one that was.

    A composition of blocks is no ground to call a candidate faster than one that was run whole.
    """
    return composed if reached is None else min(composed, reached)


class WholeModelCheck(Frozen):
    """A candidate, run as a whole model. Errors are (composed - whole) / whole.

    In an answer, tokens/s and seconds are those of all runs together, and bytes those of one run. In an event, all are
    those of one run.
    """

    measurement: WholeModelMeasurement
    tokens_per_second: float
    step_seconds: float
    step_error: float
    peak_error: float


class CandidateFigures(Frozen):
    """The figures of one candidate. Tokens/s are those of one device."""

    candidate: Candidate
    tokens_per_second: float
    composed_tokens_per_second: float = Field(description="Composed of the measured components alone.")
    measured_peak_bytes: int = Field(
        description="Allocated at the peak, composed of the training state and of measured activations."
    )
    required_bytes: int = Field(description="The peak with fragmentation, the runtime's context and a margin.")
    grad_accum_steps: int | None = Field(
        description="Micro-batches of a device in the stated batch; null if none is stated, or if the candidate does "
        "not divide it."
    )
    confidence: Annotated[int, Field(ge=0, le=99)] | None = None
    whole_model: WholeModelCheck | None = Field(None, description="Null if it did not run as a whole model.")

    @property
    def is_measured_whole(self) -> bool:
        """Whether whole steps were measured, and not only its parts."""
        return self.whole_model is not None or self.candidate.is_whole

    @property
    def expected_tokens_per_second(self) -> float:
        """The tokens/s to expect of one device: those of the whole model if it was run, else the composed ones."""
        return self.tokens_per_second if self.whole_model is None else self.whole_model.tokens_per_second

    @property
    def expected_peak_bytes(self) -> int:
        """The peak to expect of one device: that of the whole model if it was run, else the composed one."""
        return self.measured_peak_bytes if self.whole_model is None else self.whole_model.measurement.peak_bytes


class Role(StrEnum):
    """The relation of an alternative to the recommended candidate. An answer lists alternatives in this order.

    Each has the label of its row, its meaning, and a remark.
    """

    DIVIDING = (
        "dividing",
        "for the batch",
        "the best that divides the batch",
        "trainers and exports take it; it may be the recommended one. Its confidence is that among those that divide, "
        "and may be low, because the search does not aim at it",
    )
    FASTEST = "fastest", "memory or speed", "the fastest", "the recommended one, unless memory is preferred"
    WITHIN_1_PERCENT = "within_1_percent", "within 1%", "the smallest peak that loses at most 1% of the fastest's speed"
    WITHIN_3_PERCENT = "within_3_percent", "within 3%", "the smallest peak that loses at most 3%"
    LARGEST_WITHOUT_RECOMPUTE = (
        "largest_without_recompute",
        "largest that fits",
        "the largest that fits with neither batch tiling nor recomputation",
        "with its fastest settings",
    )
    LARGEST_MICRO_BATCH = (
        "largest_micro_batch",
        "if recomputed",
        "the largest that fits without batch tiling",
        "with its fastest settings, which may recompute",
    )
    STOCK = "stock", "stock best", "the best with stock back ends and no batch tiling"
    UNTILED = (
        "untiled",
        "tiling",
        "the best without batch tiling",
        "for a request that names tiles, if the answer is tiled",
    )
    UNDIVIDED = (
        "undivided",
        "whatever the batch",
        "the best that does not divide the batch",
        "where that has fewer than four divisors",
    )
    RUNNER_UP = (
        "runner_up",
        "runner-up",
        "the fastest other candidate whose whole model ran",
        "or the last one that failed to run",
    )
    EXPERT_MODE = (
        "expert_mode",
        "expert mode",
        "the best of another expert mode on the same mesh",
        "or of experts that no devices share",
    )
    OTHER_MESH = "other_mesh", "other mesh", "the best of another mesh"

    label: str
    meaning: str
    more: str

    def __new__(cls, value: str, label: str, meaning: str, more: str = "") -> Self:
        """Return a role with its words."""
        role = str.__new__(cls, value)
        role._value_ = value
        role.label, role.meaning, role.more = label, meaning, more
        return role


WITHIN = {Role.WITHIN_1_PERCENT: 0.01, Role.WITHIN_3_PERCENT: 0.03}
"""The share of the fastest candidate's tokens/s that a smaller peak may cost."""
_ROLES = "; ".join(f"`{role}`: {', '.join(filter(None, (role.meaning, role.more)))}" for role in Role)


class Alternative(CandidateFigures):
    """Another candidate that the recommended one is compared with.

    `tokens_per_second` are those of its whole model if that was run, else at most those of the recommended one's.
    """

    role: Role = Field(description=f"{_ROLES}.")
    ratio: float = Field(description="Throughput of the recommended candidate relative to this one.")
    predicted: bool = Field(False, description="Whether a part of its throughput is predicted and not measured.")
    outcome: Outcome | None = Field(None, description="Of the run of its whole model; null if there was none.")
    reason: str | None = Field(None, description="Why its whole model did not run.", exclude_if=is_null)
    mesh: Annotated[Parallelism, Extended()] | None = Field(
        None, description="Of its devices, where they share the model.", exclude_if=is_null
    )

    @property
    def name(self) -> str:
        """The candidate in a line, and how devices share the model, if they do."""
        return self.candidate.describe() if self.mesh is None else self.mesh.describe_candidate(self.candidate)

    @property
    def loss(self) -> float:
        """The share of the recommended candidate's tokens/s that it loses; negative if it is faster."""
        return 1.0 - 1.0 / self.ratio


class NoteCode(StrEnum):
    """The subject of a note."""

    EXECUTION = "execution"
    COMPILATION = "compilation"
    CONFIG = "config"
    WEIGHTS = "weights"
    NUMBERS = "numbers"
    GRADIENTS = "gradients"
    LEFT_OUT = "left_out"
    MEASURED_LAYERS = "measured_layers"
    HOST_MEMORY = "host_memory"
    HOST_PACE = "host_pace"
    COMMUNICATION = "communication"
    DEVICES = "devices"
    SHARDING = "sharding"
    WHOLE_MODEL = "whole_model"
    DEFAULT_ATTENTION = "default_attention"
    SHARED_CORES = "shared_cores"
    PREDICTED = "predicted"
    RUNNER_UP = "runner_up"
    REAL_RUNS = "real_runs"
    REUSED = "reused"
    VOCABULARY = "vocabulary"
    WIDTHS = "widths"
    NOTHING_UNTILED = "nothing_untiled"
    NOISE = "noise"
    BUDGET = "budget"
    CONFIDENCE = "confidence"
    MESH = "mesh"


class Note(Frozen):
    """A remark on an answer in addition to its figures."""

    code: NoteCode
    text: str

    def __str__(self) -> str:
        return self.text


class TextFigures(Frozen):
    """The effects of texts of unequal length on the recommended candidate.

    Peaks are those of one micro-batch. They are composed of measured blocks, and scaled to the whole model where that
    was run.
    """

    batching: Batching
    num_texts: int = Field(description="Texts of an epoch.")
    num_cut: int = Field(description="Those that are longer than a sequence and are cut at its length.")
    counted: bool = Field(description="False if the texts follow from a distribution, whose epoch is assumed.")
    budget_tokens: int | None = Field(None, description="The most tokens of a micro-batch, where that is the rule.")
    tokens_per_sequence: float = Field(description="Tokens of texts in a padded or packed row, in the mean.")
    padding_share: float = Field(description="Share of the computed tokens that are padding.")
    expected_peak_bytes: int
    high_peak_bytes: int = Field(description="999 of 1000 micro-batches have at most this peak.")
    out_of_memory_probability: float = Field(description="Of one epoch, to meet a micro-batch that does not fit.")

    @property
    def rows_are_full(self) -> bool:
        """Whether no row is padded: its lengths are not known, or each text fills it."""
        return self.padding_share < 1e-6  # and not 0, because of rounding


class Figures(NamedTuple):
    """The figures of a recommended candidate in lists; tokens/s and peak are those to expect."""

    micro_batch_size: int
    performance: float
    tokens_per_second: float
    confidence: int
    peak_bytes: int


class Recommendation(CandidateFigures):
    """The best candidate so far.

    `tokens_per_second` and the seconds are those of one device. They are composed of its components, and corrected by
    whole models that were run and by reports of real runs. With texts of unequal lengths, tokens are those of texts
    without padding, and peaks are those of the longest micro-batch.
    """

    base: Candidate
    rate_unit: RateUnit = Field(
        RateUnit.TOKENS, description="What each tokens_per_second counts.", exclude_if=is_in_tokens
    )
    performance: float = Field(description="Throughput relative to the base candidate.")
    confidence: Annotated[int, Field(ge=0, le=99)] = Field(
        description="The probability in percent, rounded down, that the whole model's tokens/s with this candidate is "
        "within the request's tolerance of the best in the legal space."
    )
    step_seconds: float = Field(
        description="Of its micro-steps (batch_size x context_parallel_size / num_devices / micro_batch_size, a real "
        "number), the optimizer, the communication, and the bubbles of a pipeline."
    )
    micro_step_seconds: float = Field(description="Of the slowest rank, if there is a pipeline.")
    optimizer_seconds: float
    communication_seconds: float | None = Field(
        None,
        description="The time that the exchange of gradients and parameters adds to a step. `micro_step_seconds` do "
        "not contain it. Null if it was not timed.",
    )
    nearest_batch_sizes: tuple[int, ...] = Field(
        (), description="If the candidate does not divide the stated batch: the nearest batch sizes that it divides."
    )
    predicted_peak_bytes: int = Field(description="From formulas alone.")
    memory_limit_bytes: int
    memory: MemoryParts
    alternatives: tuple[Alternative, ...] = Field(
        (), description="Candidates to compare with, in the order of their roles. Some are known only at the end."
    )
    notes: tuple[Note, ...] = ()
    dividing_batch_sizes: tuple[int, ...] = Field(
        (), description="If no candidate divides the stated batch: the nearest batch sizes that one which fits divides."
    )
    prefer: Literal["speed", "memory"] = Field("speed", description="The preference of the request.")
    headroom: float = Field(0.0, description="Share of the memory that the request leaves free.")
    reused: ReusedComponents | None = Field(
        None, description="Components that earlier explorations measured; null if this one measured all that it used."
    )
    dropped_share: float | None = Field(
        None,
        description="Share of the token-expert pairs of a micro-batch that experts with a capacity drop under the "
        "stated routing; null if experts have none.",
        exclude_if=is_null,
    )
    run_noise: float | None = Field(
        None,
        description="Relative standard deviation between two runs of a micro-step, as its components show it; null "
        "where devices share the model.",
        exclude_if=is_null,
    )
    confidences: dict[str, int] = Field(
        default_factory=dict,
        description="The confidence for other tolerances: a share of the best's tokens/s, with two decimals; empty "
        "where `run_noise` is null.",
        exclude_if=operator.not_,
    )
    expected_regret: float | None = Field(
        None,
        description="The expected share of tokens/s by which the best candidate is faster. No further measurement can "
        "gain more in the mean. Null where `run_noise` is null.",
        exclude_if=is_null,
    )
    texts: TextFigures | None = Field(None, description="Null if every sequence is full.", exclude_if=is_null)
    weights: tuple[WeightBytes, ...] = Field(
        (), description="Bytes by kind, of a model whose weights are quantised.", exclude_if=operator.not_
    )
    plan: Annotated[Plan, Extended()] | None = Field(
        None, description="How devices share the model; null if they do not."
    )

    @model_validator(mode="after")
    def _what_was_not_run_whole_is_not_faster(self) -> Self:
        """Refuse an alternative that was not run whole and is called faster than a recommended candidate that was."""
        if self.is_measured_whole:
            for other in self.alternatives:
                if not other.is_measured_whole and other.ratio < 1.0 - ROUNDING:
                    raise ValueError(f"{other.role}: what was not run whole is not known to be faster than what was")
        return self

    @property
    def is_shared(self) -> bool:
        """Whether no device has the whole model, apart from what is sharded."""
        return self.plan is not None and not self.plan.parallelism.is_data_parallel

    def alternative(self, role: Role) -> Alternative | None:
        """Return the alternative with this role; None if there is none."""
        return next(iter(self.alternatives_of(role)), None)

    def alternatives_of(self, role: Role) -> tuple[Alternative, ...]:
        """Return all alternatives with this role."""
        return tuple(each for each in self.alternatives if each.role is role)

    @property
    def for_batch(self) -> CandidateFigures:
        """The candidate for trainers and exports: the best that divides the stated batch, else the recommended one."""
        return self.alternative(Role.DIVIDING) or self

    def says(self, code: NoteCode) -> bool:
        """Return whether a note has this code."""
        return any(note.code is code for note in self.notes)

    @property
    def figures(self) -> Figures:
        """The figures of lists, rows and texts."""
        return Figures(
            self.candidate.micro_batch_size,
            self.performance,
            self.expected_tokens_per_second,
            self.confidence,
            self.expected_peak_bytes,
        )


class RelaxationKind(StrEnum):
    """The kind of change of a relaxation, in order of preference."""

    MICRO_BATCH_SIZE = "micro_batch_size"
    RECOMPUTE = "recompute"
    OPTIONS = "options"
    CONTEXT_PARALLEL = "context_parallel"
    PARALLELISM = "parallelism"
    NUM_DEVICES = "num_devices"
    SHARDING = "sharding"
    SEVERAL = "several"


class Relaxation(Frozen):
    """A change to a request for which nothing fits; after it, something is predicted to fit."""

    kind: RelaxationKind = Field(
        description="`options` admits what the request excludes, `parallelism` is how devices share the model, and "
        "`several` are changes together."
    )
    change: str = Field(description="In words.")
    settings: dict[str, Any] = Field(description="Fields of the request by name, with the values to set.")
    predicted_peak_bytes: int = Field(description="Allocated at the peak by the smallest candidate.")
    required_bytes: int = Field(description="The peak with fragmentation, the runtime's context and a margin.")


class VariantAnswer(Frozen):
    """The outcome for one setting of num_query_groups and capacity_factor; `recommendation` is null if nothing fits.

    `remedies` are then the changes after which something would fit, the preferred one first.
    """

    num_query_groups: int
    capacity_factor: float | None = Field(
        None, description="Null for a model whose experts drop no tokens.", exclude_if=is_null
    )
    num_parameters: int
    recommendation: Recommendation | None
    reason: str | None = None
    remedies: tuple[Relaxation, ...] = ()
    completed_target: int | None = Field(
        None,
        description="The confidence target of a search that ended by its own rule; null if its budget or failing "
        "trials ended it.",
    )

    importance: dict[str, float] = Field(
        default_factory=dict,
        description="For each dimension that varies, the share of the variance of log throughput that it explains by "
        "itself (the first-order Sobol' index), over the candidates that are expected to fit, measured or predicted. "
        "Empty if only one varies, and for devices that share the model.",
        exclude_if=operator.not_,
    )

    @classmethod
    def without_model(cls, reason: str) -> VariantAnswer:
        """Return the outcome for a model that cannot be built here."""
        return cls(num_query_groups=1, num_parameters=0, recommendation=None, reason=reason)


class Answer(Frozen):
    """The result of a job. Variants are separate models and are not ranked; their order is that of the request."""

    variants: tuple[VariantAnswer, ...]
    timings: dict[str, float] = Field(default_factory=dict, description="The job's seconds by activity.")

    @property
    def recommendation(self) -> Recommendation | None:
        """The recommendation of the main variant."""
        return self.variants[0].recommendation

    @property
    def serves_up_to(self) -> int:
        """The highest confidence target of a request that this answers; 0 if a variant has no recommendation.

        A search that ended by its own rule answers its own target, although whole models may have lowered the
        confidence afterwards.
        """
        return min(
            0 if each.recommendation is None else max(each.recommendation.confidence, each.completed_target or 0)
            for each in self.variants
        )
