"""The space of one variant before anything is measured, without what is predicted not to fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress

from bexp.explorer.cost_model.collectives import is_exchange_timed
from bexp.explorer.cost_model.composition import Composition, predict_memory
from bexp.explorer.cost_model.step import memory_limit
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.search.legal_space import LegalSpace, base_candidates, enumerate_candidates
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.options import BTASpec
from bexp.explorer.spec.parts import ExploredModel
from bexp.explorer.spec.request import ExplorationRequest

OPTIMISTIC_ACTIVATIONS = 0.7
"""A candidate is left out only if it would not fit even with this share of its predicted activations."""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Switch the garbage collector off: tens of thousands of candidates are made, and none of them is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class PrunedSpace:
    """The candidates of a variant that may fit; it depends on neither seed nor budget.

    `legal` holds those that may be recommended, `num_predicted_out` counts the ones that were left out. `bases` are in
    order of preference, whether they may fit or not. `table` has a row for each candidate of `legal` and each of the
    `bases` that may fit; it is None if nothing may. If the request excludes untiled attention, those candidates that
    may fit have rows as well: the answer says what tiling gained over them or cost.
    """

    legal: LegalSpace
    num_predicted_out: int
    bases: tuple[Candidate, ...]
    table: Composition | None


PruneSpace = Callable[[ExploredModel, ExplorationRequest, DeviceReport], PrunedSpace]


@_collector_paused()
def prune_space(model: ExploredModel, request: ExplorationRequest, report: DeviceReport) -> PrunedSpace:
    """Enumerate the space of a variant and drop the candidates that are predicted not to fit.

    Raises:
        EmptySpaceError: the request admits no candidate on this device.
    """
    space = enumerate_candidates(request, report, model)
    members = set(space.candidates)
    bases = base_candidates(request, report, model)
    exchanges = is_exchange_timed(request, report.hardware)
    compared = (*bases, *_untiled(request, report, model))
    others = [c for c in dict.fromkeys(compared) if c not in members]
    everything = Composition((*space.candidates, *others), model, request, exchanges=exchanges)
    required = predict_memory(everything, report.hardware, activation_share=OPTIMISTIC_ACTIVATIONS)
    fits = required <= memory_limit(request, report.hardware)
    legal = space.restrict(compress(space.candidates, fits))
    fitting = (*legal.candidates, *compress(others, fits[len(space.candidates) :]))
    kept = compress(everything.decompositions, fits)
    table = Composition(fitting, model, request, decompositions=kept) if legal.candidates else None
    return PrunedSpace(legal, len(space.candidates) - len(legal.candidates), bases, table)


def _untiled(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> tuple[Candidate, ...]:
    """Return what a request without tiles would explore, if this one has nothing else; they are never recommended."""
    if not request.bta.enable:
        return ()
    without = request.model_copy(update={"bta": BTASpec(enable=False)})
    return enumerate_candidates(without, report, model).candidates
