"""What one variant's search stands on: its space, its state, its study, and what earlier leases stored of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study

from explorer.cost_model.candidate_table import SpaceTable, predict_memory
from explorer.cost_model.collectives import is_exchange_timed
from explorer.cost_model.search_space import LegalSpace, base_candidates, enumerate_candidates
from explorer.cost_model.step import memory_limit
from explorer.records.event import EventDraft
from explorer.records.trial import TrialKind
from explorer.search.event_messages import space_event, variant_event
from explorer.search.history import TrialHistory
from explorer.search.optuna_sampler import ComponentSampler, admits, distributions, reconcile
from explorer.search.search_state import SearchState
from explorer.spec.candidate import Candidate
from explorer.spec.hardware import DeviceReport
from explorer.spec.model import ModelSpec
from explorer.spec.request import ExplorationRequest

OPTIMISTIC_ACTIVATIONS = 0.7
"""A candidate is left out unmeasured only if it would not fit with this share of its predicted activations."""

OpenStudy = Callable[[str, BaseSampler], Study]


@dataclass(frozen=True, slots=True)
class PrunedSpace:
    """The space of a variant before anything is measured; it depends on neither seed nor budget.

    `legal` holds the candidates that may fit, `num_predicted_out` counts the others. `table` has a row for each of
    `legal` and of those `bases` that may fit; null if nothing may.
    """

    legal: LegalSpace
    num_predicted_out: int
    bases: tuple[Candidate, ...]
    table: SpaceTable | None


PruneSpace = Callable[[ModelSpec, ExplorationRequest, DeviceReport], PrunedSpace]


@dataclass(slots=True)
class Opening:
    """What is told with the first stored step of a variant; empty after a resume, when it has been told."""

    events: list[EventDraft] = field(default_factory=list)
    space: dict[str, Any] | None = None

    def take(self) -> tuple[list[EventDraft], dict[str, Any] | None]:
        """Everything, once."""
        taken = (self.events, self.space)
        self.events, self.space = [], None
        return taken


@dataclass(frozen=True, slots=True)
class VariantSetup:
    """A variant with at least one candidate that may fit. `bases` are in order of preference, `plainest` the first."""

    table: SpaceTable
    state: SearchState
    study: Study
    distributions: dict[str, BaseDistribution]
    bases: tuple[Candidate, ...]
    plainest: Candidate


def prune_space(model: ModelSpec, request: ExplorationRequest, report: DeviceReport) -> PrunedSpace:
    """Enumerate the space of a variant and drop what is predicted not to fit.

    Raises:
        EmptySpaceError: the request admits no candidate on this device.
    """
    space = enumerate_candidates(request, report, model)
    members = set(space.candidates)
    bases = base_candidates(request, report, model)
    exchanges = is_exchange_timed(request, report.hardware)
    others = (c for c in bases if c not in members)
    everything = SpaceTable((*space.candidates, *others), model, request, exchanges=exchanges)
    required = predict_memory(everything, report.hardware, activation_share=OPTIMISTIC_ACTIVATIONS)
    limit = memory_limit(request, report.hardware)
    fitting = [c for c, need in zip(everything.candidates, required, strict=True) if need <= limit]
    legal = space.restrict(c for c in fitting if c in members)
    table = SpaceTable(fitting, model, request, exchanges=exchanges) if legal.candidates else None
    return PrunedSpace(legal, len(space.candidates) - len(legal.candidates), bases, table)


def open_variant(
    index: int,
    model: ModelSpec,
    request: ExplorationRequest,
    report: DeviceReport,
    history: TrialHistory,
    open_study: OpenStudy,
    prune: PruneSpace = prune_space,
) -> tuple[Opening, VariantSetup | None]:
    """PrunedSpace the space and take in what is stored; null if no candidate is predicted to fit.

    Raises:
        EmptySpaceError: the request admits no candidate on this device.
    """
    hardware = report.hardware
    found = prune(model, request, report)
    past = history.trials_of(model.query_groups)
    opening = Opening()
    if not past:
        if len(request.variants()) > 1:
            opening.events.append(variant_event(model))
        opening.events.append(space_event(found.legal, found.num_predicted_out, memory_limit(request, hardware)))
        opening.space = found.legal.summarize() if index == 0 else None
    table, bases = found.table, found.bases
    if table is None:
        return opening, None

    state = SearchState(table, found.legal.candidates, request, hardware)
    dimensions = distributions(table.candidates)
    name = "" if index == 0 else f"num_query_groups={model.query_groups}"
    study = open_study(name, ComponentSampler(state))
    if not admits(study, dimensions):  # begun by a version that had other choices: a new projection of the same trials
        study = open_study(f"{name} {len(table.candidates)} candidates".lstrip(), ComponentSampler(state))
    reconcile(study, past, dimensions)
    state.learn_trials((t.number, t.measurement) for t in past if t.kind is TrialKind.COMPONENTS)
    state.absorb((t.number, t.measurement.components) for t in history.trials)
    fitting_bases = tuple(c for c in bases if c in table.row)
    return opening, VariantSetup(table, state, study, dimensions, fitting_bases, bases[0])
