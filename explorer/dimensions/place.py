"""The place of a candidate: the request's settings, the device and the model, as the dimensions see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bexp.explorer.model.base import RuleError
from bexp.explorer.model.hardware import BackendSupport, DeviceSupport
from bexp.explorer.model.lengths import Batching
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.model.spelling import did_you_mean
from bexp.explorer.model.training import TrainingSpec

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import DimensionsAsked


class EmptySpaceError(ValueError):
    """The request admits no candidate on this device; the message says which dimension is empty and why."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The request's settings, and where candidates would run, before a device is asked."""

    asked: DimensionsAsked
    """The fields of the request about its dimensions."""
    target: str
    shapes: ModelSpec | None
    """The request's model section; None if the target knows the model."""
    may_have_experts: bool
    seq_length: int
    training: TrainingSpec
    is_training: bool
    """Whole training steps, or forward passes alone."""
    num_devices: int
    shares_model: bool
    """Devices may share the model by tensor, pipeline or expert parallelism."""
    batch_size: int
    """The effective batch; that by which the optimizer is weighed if none is stated."""
    states_batch: bool
    base_micro_batch_size: int | None
    device_kind: str | None
    """None: not known yet."""
    is_quick: bool
    """Only eager code and the library's own functions are explored."""
    batching: Batching | None
    """How texts of unequal length become micro-batches; None if every sequence is full."""
    replays: bool
    """A micro-step may be replayed as CUDA graphs: training on one device that drops no tokens."""
    expressible: Mapping[str, Collection[Any]]
    """The values that the trainer can express, by dimension; all where none are named."""
    report: DeviceSupport | None = None

    def groups_of(self, size: int) -> int:
        """Return the number of groups of so many devices; each group processes sequences of its own."""
        return self.num_devices // size


@dataclass(frozen=True, kw_only=True)
class ReportedPlace(Place):
    """A place whose device has reported, with the variant of the model that is explored."""

    report: DeviceSupport
    model: ExploredModel


def check_names(what: str, names: Collection[str], known: Collection[str], place: Place) -> None:
    """Raise RuleError if the target has no such kernel. The worker says which of the kernels a device can use."""
    for name in names:
        if name not in known:
            there = f"there are {', '.join(sorted(known))}" if known else "its code chooses by itself"
            message = f"target '{place.target}' has no {what} back end '{name}'{did_you_mean(name, known)}; {there}"
            raise RuleError(message, f"{what}_backends", "target")


def usable_backends(
    what: str, supported: Sequence[BackendSupport], allowed: Collection[str] | None, where: str
) -> list[str]:
    """Return the usable ones of the kernels that the request names, or else of those that are explored by default.

    Raises:
        EmptySpaceError: none is left.
    """
    usable = [backend.name for backend in supported if backend.usable]
    if allowed is None:
        names = [backend.name for backend in supported if backend.usable and not backend.only_when_named]
    else:
        known = {backend.name: backend for backend in supported}
        for name in allowed:
            if name not in known:
                there = ", ".join(sorted(known)) or "none"
                raise EmptySpaceError(f"unknown {what} '{name}'; {where} there is {there}")
        names = [name for name in usable if name in allowed]
    if not names:
        asked = [b for b in supported if not b.usable and (allowed is None or b.name in allowed)]
        reasons = "; ".join(f"{b.name}: {b.reason}" for b in asked)
        raise EmptySpaceError(f"no usable {what} {where} ({reasons})")
    return names
