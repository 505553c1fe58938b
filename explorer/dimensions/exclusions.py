"""Rules between two dimensions: which values no candidate has together, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bexp.explorer.dimensions.dimension import Point
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.experts import WAITING_EXPERTS
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.dimensions.loss import LOSSES
from bexp.explorer.dimensions.recompute import Recompute


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Values of some fields of a candidate that exclude each other."""

    fields: frozenset[str]
    applies: Callable[[Point, Execution], bool]
    """Of the fields, and of how the candidate runs: by its own execution, or the request's if it names none."""
    reason: Callable[[Point, Execution], str]


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        frozenset({"bta_tile", "recompute"}),
        lambda point, runs: point["bta_tile"] is not None and point["recompute"].untiled_only,
        lambda point, runs: (
            "tiling with policies that keep a part of attention only: a tile recomputes attention already"
        ),
    ),
    Exclusion(
        frozenset({"recompute", "execution"}),
        lambda point, runs: point["recompute"] is Recompute.OFFLOAD and runs is not Execution.EAGER,
        lambda point, runs: (
            f"recompute '{Recompute.OFFLOAD}' takes activations to the host operation by operation, in eager execution"
        ),
    ),
    Exclusion(
        frozenset({"recompute", "execution"}),
        lambda point, runs: (
            point["execution"] is not None
            and point["execution"].compiles
            and (point["recompute"].by_operation or point["recompute"].group_size is not None)
        ),
        lambda point, runs: (
            f"recompute '{point['recompute']}' with execution '{point['execution']}': the compiler chooses "
            "what runs again, and compiled layers cannot run again as a group"
        ),
    ),
    Exclusion(
        frozenset({"execution", "kernels"}),
        lambda point, runs: point["kernels"] is Kernels.LIGER and runs.compiles,
        lambda point, runs: (
            f"kernels '{Kernels.LIGER}' with execution '{runs}': the compiler makes kernels of its "
            "own from the same operations"
        ),
    ),
    Exclusion(
        frozenset({"expert_backend", "execution"}),
        lambda point, runs: point["expert_backend"] in WAITING_EXPERTS and runs.replays,
        lambda point, runs: (
            f"execution '{runs}' with expert back end '{point['expert_backend']}', which waits for "
            "the device to count tokens"
        ),
    ),
    Exclusion(
        frozenset({"loss", "execution"}),
        lambda point, runs: point["loss"] is not None and LOSSES[point["loss"]].waits and runs.replays,
        lambda point, runs: (
            f"execution '{runs}' with the {point['loss']} loss, which waits for the device to count targets"
        ),
    ),
)


def exclusions_after(columns: Sequence[Sequence[str]]) -> list[list[Exclusion]]:
    """Return, for each of the columns of fields, the rules that can be asked once its fields are known."""
    known: set[str] = set()
    rules_after = []
    for fields in columns:
        known |= set(fields)
        rules_after.append([rule for rule in EXCLUSIONS if rule.fields <= known and not rule.fields.isdisjoint(fields)])
    if {rule for rules in rules_after for rule in rules} != set(EXCLUSIONS):
        raise TypeError(f"rules name fields that are none of {sorted(known)}")
    return rules_after
