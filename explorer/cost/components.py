"""A component: one block of a model under one setting and the code of it, timed once and shared between candidates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import CoreSchema, core_schema

from bexp.explorer.dimensions.candidate import CHOICES, Candidate
from bexp.explorer.dimensions.dimension import Choice, CodePart
from bexp.explorer.dimensions.execution import COMPILED
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.base import Frozen, is_null, is_zero
from bexp.explorer.model.training import Sharding


class BackEnd(NamedTuple):
    """The code of a component, of any shapes; as text, `sdpa+grouped_mm+liger+compiled`.

    `attention` and `experts` name kernels. `marks` are those of the choices that change the code of a layer. `setting`
    is the loss of a shell, or the choice that the target itself offers for a model that is measured whole.
    """

    attention: str | None = None
    experts: str | None = None
    marks: tuple[str, ...] = ()
    setting: str | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """Write it as text. Its component reads that text, because the meaning depends on the component's kind."""
        return core_schema.no_info_plain_validator_function(
            cls._check,
            serialization=core_schema.to_string_ser_schema(when_used="always"),
            json_schema_input_schema=core_schema.str_schema(),
        )

    @classmethod
    def _check(cls, given: Any) -> BackEnd:
        if not isinstance(given, cls):
            raise ValueError("must be text")  # noqa: TRY004 - a broken rule to pydantic
        return given

    @classmethod
    def of_layer(cls, text: str) -> BackEnd:
        """Return the back end of a layer, which names its attention first."""
        attention, *others = text.split("+")
        experts = [name for name in others if not _is_mark(name)]
        return cls(attention, experts[0] if experts else None, tuple(filter(_is_mark, others)))

    @classmethod
    def of_block(cls, text: str, *, has_experts: bool) -> BackEnd:
        """Return the back end of a reference block, which names its experts or its attention, if any, before its marks.

        A back end of experts may have the name of a mark.
        """
        own, *marks = text.split("+")
        if has_experts:
            return cls(experts=own, marks=tuple(marks))
        return cls(marks=(own, *marks)) if _is_mark(own) else cls(attention=own, marks=tuple(marks))

    @property
    def plain(self) -> BackEnd:
        """The same kernels without the compiler."""
        return self._replace(marks=tuple(mark for mark in self.marks if mark != COMPILED))

    @property
    def compiled(self) -> bool:
        """Whether the compiler makes the code."""
        return COMPILED in self.marks

    @property
    def unmarked(self) -> BackEnd:
        """The same kernels of attention and experts, in the plain code."""
        return self._replace(marks=())

    def __str__(self) -> str:
        """Return the text that recordings contain."""
        return "+".join(filter(None, (self.attention, self.experts, *self.marks, self.setting)))


def marks_of(candidate: Candidate, part: CodePart) -> tuple[str, ...]:
    """Return the marks of a part of a candidate, in the order of the list of choices."""
    return tuple(
        mark
        for choice in CHOICES
        if choice.part is part and (value := getattr(candidate, choice.fields[0])) is not None
        if (mark := choice.mark(value)) is not None
    )


def marked_values(part: CodePart, marks: Iterable[str]) -> Iterator[tuple[Choice[Any], Any]]:
    """Yield each choice that changes a part, with its value in a component of these marks; None for the plain code."""
    known = tuple(marks)
    for choice in CHOICES:
        if choice.part is part:
            yield choice, next((value for mark in known if (value := choice.of_mark(mark)) is not None), None)


def _is_mark(name: str) -> bool:
    return any(value is not None for _, value in marked_values(CodePart.LAYER, (name,)))


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations and bytes moved of one pass."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class ComponentBytes:
    """Bytes above the level before the component's forward pass, as `ComponentMeasurement` defines them."""

    saved: int
    forward_peak: int
    backward_peak: int


class ComponentKind(StrEnum):
    """A part of a training step that is built and timed by itself.

    The reference layers consist of embedding, attention, FFN and head. A model of another target consists of `shell`,
    which is everything but its decoder layers, and `layer`.
    """

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    DENSE_FFN = "dense_ffn"
    MOE_FFN = "moe_ffn"
    HEAD = "head"
    SHELL = "shell"
    LAYER = "layer"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    EXCHANGE = "exchange"


class BlockRecompute(StrEnum):
    """The operations of one block that run again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    """The attention core."""
    ACTIVATIONS = "activations"
    """All but matrix products, attention and routing."""
    PROJECTIONS = "projections"
    """The same and the first matrix product: that of queries, keys and values, or into the FFN's hidden size."""
    FULL = "full"
    """The whole block."""
    TO_THE_END = "to_the_end"
    """The whole block with its last results, from which later layers of the same chunk run again."""
    OFFLOAD = "offload"
    """No operation: the tensors that the block keeps lie in the host's memory."""

    @property
    def by_operation(self) -> bool:
        """Whether some operations of the block run again and others do not."""
        return self is BlockRecompute.ACTIVATIONS or self is BlockRecompute.PROJECTIONS

    @property
    def is_whole(self) -> bool:
        """Whether the whole block runs again."""
        return self is BlockRecompute.FULL or self is BlockRecompute.TO_THE_END


_BLOCKS: dict[Recompute, dict[ComponentKind, BlockRecompute]] = {
    Recompute.SELECTIVE: {ComponentKind.ATTENTION: BlockRecompute.SELECTIVE},
    Recompute.ACTIVATIONS: {
        ComponentKind.ATTENTION: BlockRecompute.ACTIVATIONS,
        ComponentKind.DENSE_FFN: BlockRecompute.ACTIVATIONS,
        ComponentKind.MOE_FFN: BlockRecompute.ACTIVATIONS,
    },
    Recompute.QKV: {ComponentKind.ATTENTION: BlockRecompute.PROJECTIONS},
    Recompute.EXPERTS: {ComponentKind.MOE_FFN: BlockRecompute.PROJECTIONS},
    Recompute.PROJECTIONS: {
        ComponentKind.ATTENTION: BlockRecompute.PROJECTIONS,
        ComponentKind.DENSE_FFN: BlockRecompute.PROJECTIONS,
        ComponentKind.MOE_FFN: BlockRecompute.PROJECTIONS,
    },
}


def block_recompute(recompute: Recompute, kind: ComponentKind, bta_tile: int | None) -> BlockRecompute:
    """Return the recomputation of one block by a policy, in a layer that is not recomputed as a whole.

    A tile recomputes its attention already, so a policy by operation has nothing to do in a tiled block.
    """
    asked = _BLOCKS.get(recompute, {}).get(kind, BlockRecompute.NONE)
    return BlockRecompute.NONE if asked.by_operation and bta_tile is not None else asked


def whole_recompute(recompute: Recompute) -> BlockRecompute:
    """Return the recomputation of the last block of a layer that a policy recomputes as a whole."""
    return BlockRecompute.FULL if recompute.group_size is None else BlockRecompute.TO_THE_END


class Operation(StrEnum):
    """What devices do to exchange something.

    In `all_to_all` the first device gets twice the bytes of any other. In `send` each device sends to the next. In
    `broadcast` the first device sends to all others.
    """

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    BROADCAST = "broadcast"


class ExchangeSpec(Frozen):
    """An operation of groups of `size` devices, `stride` apart, which run it at the same time.

    `num_bytes` are those of a device after a gather or before a scatter, those that it sends to one or to all others,
    or, in `all_to_all`, those that the first device receives, with its own.
    """

    operation: Operation
    size: Annotated[int, Field(ge=2)]
    stride: Annotated[int, Field(ge=1)]
    num_bytes: Annotated[int, Field(ge=1)]


def _is_one(size: int) -> bool:
    """Most components are stored without these sizes: no devices share the model."""
    return size == 1


class Component(Frozen):
    """One block of the model under one setting; equal components of different candidates are measured once.

    `micro_batch_size` is 0 for the optimizer and for the communication of gradients and parameters, which do not depend
    on it. A device has the share 1 / `context_parallel_size` of each sequence. Only attention reaches beyond that
    share, so only attention depends on the layout. `sharding` is set for optimizer and communication if the level may
    be chosen. For the optimizer it is `none` or `zero1`, because higher levels leave it the same share.

    Where devices share the model, one has 1 / `tensor_parallel_size` of a block, or one of the `expert_parallel_size`
    shares of the experts beside copies of the `shadowed_experts`, and exchanges its rows in `overlap_degree` chunks.

    `num_query_groups` and `capacity_factor` are set where a block depends on them, so that variants of a model share
    all other blocks.

    `part` names the kind of a `layer`. The `backend` of a layer names attention and experts, as in `sdpa+grouped_mm`;
    that of a `shell` names the loss, or the target's own choice for a model that is measured whole.
    """

    kind: ComponentKind
    part: str | None = None
    micro_batch_size: Annotated[int, Field(ge=0)]
    bta_tile: int | None = None
    recompute: BlockRecompute = BlockRecompute.NONE
    backend: BackEnd | None = None
    num_query_groups: int | None = None
    capacity_factor: float | None = Field(None, exclude_if=is_null)
    context_parallel_size: Annotated[int, Field(ge=1)] = 1
    context_parallel_layout: str | None = None
    sharding: Sharding | None = None
    overlap_degree: Annotated[int, Field(ge=1)] = Field(1, exclude_if=_is_one)
    shadowed_experts: Annotated[int, Field(ge=0)] = Field(0, exclude_if=is_zero)
    tensor_parallel_size: Annotated[int, Field(ge=1)] = Field(1, exclude_if=_is_one)
    expert_parallel_size: Annotated[int, Field(ge=1)] = Field(1, exclude_if=_is_one)
    exchange: ExchangeSpec | None = Field(None, exclude_if=is_null)

    @field_validator("backend", mode="before")
    @classmethod
    def _read_backend(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, str):
            return given
        kind = info.data.get("kind")
        if kind is ComponentKind.LAYER:
            return BackEnd.of_layer(given)
        if kind is ComponentKind.SHELL:
            return BackEnd(setting=given)
        return BackEnd.of_block(given, has_experts=kind is ComponentKind.MOE_FFN)

    @model_validator(mode="after")
    def _layout_of_attention(self) -> Self:
        spread = self.kind is ComponentKind.ATTENTION and self.context_parallel_size > 1
        if (self.context_parallel_layout is None) is spread:
            raise ValueError("a context_parallel_layout belongs to attention with a context_parallel_size above 1")
        return self

    @property
    def attention(self) -> str | None:
        """The back end of its attention."""
        return None if self.backend is None else self.backend.attention

    @property
    def experts(self) -> str | None:
        """The back end of its experts."""
        return None if self.backend is None else self.backend.experts

    @property
    def setting(self) -> str | None:
        """The loss of a shell, or the choice that the target itself offers."""
        return None if self.backend is None else self.backend.setting

    @property
    def is_compiled(self) -> bool:
        """Whether the compiler makes its code."""
        return self.backend is not None and self.backend.compiled

    @property
    def is_fused(self) -> bool:
        """Whether its code is not the plain one; such code, as the compiler's or liger's, fuses small operations."""
        return self.backend is not None and bool(self.backend.marks)

    @property
    def variant(self) -> tuple[int | None, float | None]:
        """The settings of the model variant on which its work depends."""
        return self.num_query_groups, self.capacity_factor

    @property
    def sequences(self) -> float:
        """Tokens that a device has, in whole sequences."""
        return self.micro_batch_size / self.context_parallel_size

    @property
    def communicates(self) -> bool:
        """Whether several processes, which share sequences, compute it together."""
        return self.context_parallel_layout is not None

    @property
    def is_joint(self) -> bool:
        """Whether it needs several processes, which share sequences or exchange gradients and parameters."""
        return self.communicates or self.kind in {ComponentKind.COMMUNICATION, ComponentKind.EXCHANGE}

    @property
    def key(self) -> str:
        """A text that names the component, unique within a job."""
        size, layout, asked = self.context_parallel_size, self.context_parallel_layout, self.exchange
        named = {
            "part": self.part,
            "m": self.micro_batch_size or None,
            "tile": self.bta_tile,
            "recompute": None if self.recompute is BlockRecompute.NONE else self.recompute,
            "backend": self.backend,
            "groups": self.num_query_groups,
            "capacity": None if self.capacity_factor is None else f"{self.capacity_factor:.15g}",
            "cp": (f"{size}" if layout is None else f"{size}:{layout}") if size > 1 else None,
            "tp": self.tensor_parallel_size if self.tensor_parallel_size > 1 else None,
            "ep": self.expert_parallel_size if self.expert_parallel_size > 1 else None,
            "chunks": self.overlap_degree if self.overlap_degree > 1 else None,
            "shadowed": self.shadowed_experts or None,
            "sharding": self.sharding,
            "exchange": asked and f"{asked.operation},{asked.size}x{asked.stride},{asked.num_bytes}",
        }
        plain = {"part", "backend", "sharding", "exchange"}
        parts = [f"{value}" if name in plain else f"{name}={value}" for name, value in named.items() if value]
        return f"{self.kind}({','.join(parts)})"
