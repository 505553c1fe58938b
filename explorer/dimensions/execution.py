"""The way in which torch runs the code of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from bexp.explorer.dimensions.dimension import Choice, CodePart, named
from bexp.explorer.dimensions.place import Place
from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.target import BEXP, TRANSFORMERS

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate


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
        """The execution whose kernels the graphs replay; the execution itself without graphs."""
        return Execution.COMPILE if self.compiles else Execution.EAGER


class ExecutionOf(Frozen):
    """The execution of a candidate."""

    execution: Execution | None = Field(None, description="Null: the request's execution.")


class ExecutionAsked(Frozen):
    """The fields of a request about the execution."""

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
    """Return all executions that the device can have. Code whose shapes differ has eager execution alone.

    It would be compiled and captured anew each time.
    """
    is_joint = place.shares_model or max(place.asked.context_parallel.sizes_at(place), default=1) > 1
    if place.is_quick or is_joint or place.batching is not None:
        return (Execution.EAGER,)
    return tuple(execution for execution in Execution if place.replays or not execution.replays)


class ExecutionChoice(Choice[Execution]):
    """The executions, eager first."""

    def always_compiles(self, place: Place) -> bool:
        """Return whether the code of every candidate is compiled."""
        return all(execution.compiles for execution in self.considered(place))

    def asked_of_trainer(self, candidate: Candidate, place: Place) -> Execution:
        """Return the execution of a candidate."""
        return candidate.execution or place.asked.execution or Execution.EAGER

    def field(self, place: Place) -> str:
        """Return the field of the request that names executions."""
        return "execution" if place.asked.executions is None else "executions"

    def check(self, place: Place) -> None:
        """Check that an execution is either given or chosen, and that the target and the device have it."""
        asked, field = place.asked, self.field(place)
        if asked.executions is not None and asked.execution not in (None, Execution.EAGER):
            message = "executions take the place of execution: give one of them"
            raise RuleError(message, "executions", "execution")
        is_ours = place.target in (BEXP, TRANSFORMERS)
        if asked.executions is not None and not is_ours:
            message = f"a choice of executions needs target '{TRANSFORMERS}' or '{BEXP}'"
            raise RuleError(message, field, "target")
        considered = self.considered(place)
        if place.batching is not None and considered != (Execution.EAGER,):
            raise RuleError(
                "texts of unequal length run with execution 'eager': other lengths would be compiled or captured anew",
                field,
                "lengths",
            )
        graphs = next((execution for execution in considered if execution.replays), None)
        if graphs is None:
            return
        refused = (
            (not is_ours, "target", f"target '{TRANSFORMERS}' or '{BEXP}'"),
            (not place.is_training, "mode", "mode 'train'"),
            (place.device_kind == "cpu", "device_kind", "a GPU; a CPU has 'eager' and 'compile'"),
            (
                place.num_devices > 1,
                "num_devices",
                "num_devices 1, because gradients are not exchanged within a graph; several devices have 'eager' and "
                "'compile'",
            ),
        )
        for wrong, other, needed in refused:
            if wrong:
                raise RuleError(f"execution '{graphs}' needs {needed}", field, other)


EXECUTION = ExecutionChoice(
    name="execution",
    fields=("execution",),
    asked="executions",
    values=tuple(Execution),
    plain=Execution.EAGER,
    explored=_explored,
    stated=lambda place: place.asked.execution,
    words=lambda execution: f"execution '{execution}'",
    part=CodePart.LAYER,
    mark=lambda execution: COMPILED if execution.compiles else None,
    of_mark=lambda mark: Execution.COMPILE if mark == COMPILED else None,
    is_tried=lambda execution: False,  # a layer is captured instead
    settings=lambda execution: {"compile": execution.compiles, "graph": execution.replays},
    decides_support=True,
    **named("execution", "execution"),
)
