"""What trials and recommendations of devices that share a model say in addition; an extension defines the values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import Field

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Parallelism
from bexp.explorer.model.base import Frozen


class SharedRun(Frozen, ABC):
    """How devices share a whole model that a trial runs."""

    @property
    @abstractmethod
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The groups of devices that exchange something: their size, and how far apart their members are."""


class Plan(Frozen, ABC):
    """How devices share the recommended model."""

    num_micro_batches: int = Field(description="Of one replica, in a step.")
    layers_per_stage: tuple[int, ...]

    @property
    @abstractmethod
    def parallelism(self) -> Parallelism:
        """The sizes that a trainer is given."""

    @abstractmethod
    def rows(self) -> Iterable[tuple[str, str]]:
        """Labels and texts of an answer's rows. All but the first are parts of the first."""

    @abstractmethod
    def describe_base(self, base: Candidate) -> str:
        """Return the base in a line."""

    @abstractmethod
    def header_line(self) -> str:
        """Return the line above an export."""

    @abstractmethod
    def replacement(self) -> Replacement | None:
        """Return what is exported in place of a recommendation that no trainer can express; None if trainers can."""

    @abstractmethod
    def lost_lines(self, trainer: str) -> list[str]:
        """Return the lines above an export to `trainer` that say what the replacement costs."""


class Replacement(NamedTuple):
    """What is exported in place of a recommendation."""

    plan: Plan
    candidate: Candidate
    tokens_per_second: float
