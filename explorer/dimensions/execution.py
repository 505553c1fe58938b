"""How torch runs the code of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from bexp.explorer.dimensions.dimension import Choice, CodePart, Place, named
from bexp.explorer.model.base import Frozen


class Execution(StrEnum):
    """Operation by operation, compiled by torch.compile, or either of them replayed as CUDA graphs.

    The base (1.00x) is the first that a request admits.
    """

    EAGER = "eager"
    COMPILE = "compile"
    GRAPH = "graph"
    COMPILE_GRAPH = "compile+graph"

    @property
    def compiles(self) -> bool:
        """Whether torch.compile makes the kernels."""
        return self in {Execution.COMPILE, Execution.COMPILE_GRAPH}

    @property
    def replays(self) -> bool:
        """Whether the host issues a micro-step as two CUDA graphs instead of operation by operation."""
        return self in {Execution.GRAPH, Execution.COMPILE_GRAPH}

    @property
    def captured(self) -> Execution:
        """What runs when the graphs are captured, and whose kernels they replay; itself without graphs."""
        return Execution.COMPILE if self.compiles else Execution.EAGER


class ExecutionOf(Frozen):
    """The execution of a candidate."""

    execution: Execution | None = Field(None, description="Null: the request's execution.")


class ExecutionAsked(Frozen):
    """What a request says of the execution."""

    execution: Execution | None = Field(
        None,
        description="How layers run: operation by operation, compiled by torch.compile, or either of them with the "
        "micro-step replayed as CUDA graphs (training on one GPU). Null: all that the device and the trainer can have "
        "are explored.",
    )
    executions: Annotated[tuple[Execution, ...], Field(min_length=1, max_length=len(Execution))] | None = Field(
        None,
        description="Executions to choose among in place of `execution`; a list or `explore` there means the same.",
    )


COMPILED = "compiled"
"""Marks a component that is compiled where others are not."""


def _explored(place: Place) -> Sequence[Execution]:
    """All that the device can have: code whose shapes differ would be compiled and captured anew each time."""
    if place.is_quick or place.is_eager:
        return (Execution.EAGER,)
    return tuple(execution for execution in Execution if place.replays or not execution.replays)


EXECUTION: Choice[Execution] = Choice(
    name="execution",
    fields=("execution",),
    asked="executions",
    values=tuple(Execution),
    plain=Execution.EAGER,
    explored=_explored,
    words=lambda execution: f"execution '{execution}'",
    part=CodePart.LAYER,
    mark=lambda execution: COMPILED if execution.compiles else None,
    of_mark=lambda mark: Execution.COMPILE if mark == COMPILED else None,
    is_tried=lambda execution: False,  # a layer is captured instead
    settings=lambda execution: {"compile": execution.compiles, "graph": execution.replays},
    **named("execution", "execution"),
)
