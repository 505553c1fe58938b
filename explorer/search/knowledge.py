"""All measurements of the candidates of one device: components, failures and whole models, each by its trial."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bexp.explorer.cost.components import BlockRecompute, Component
from bexp.explorer.cost.composition import Composition, Floats, Mask
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.device_report import EarlierRuns, ReusedComponents
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.run_report import ReportedRun
from bexp.explorer.search.earlier_check import ComponentReuse, EarlierCheck
from bexp.explorer.search.suggestion import PreparingSeconds, Suggestion
from bexp.explorer.surrogate.observations import ObservationLog, age_run
from bexp.explorer.surrogate.whole_model_error import WholeModelRuns

SOUND = frozenset({Outcome.OK, Outcome.CONTAMINATED})
"""Outcomes of a trial that ran to its end."""


class Knowledge:
    """Everything that trials have said about the candidates of a table, whatever their order."""

    def __init__(
        self, table: Composition, device_kind: str, reported: Sequence[ReportedRun], earlier: EarlierRuns | None
    ) -> None:
        self.table = table
        self.reported = tuple(run for run in reported if run.candidate in table.row)
        """Real runs of candidates in the table."""
        self.earlier = earlier or EarlierRuns()
        usable = [run for run in self.earlier.runs if run.measurement.component in table.column]
        self.log = ObservationLog([age_run(run, device_kind) for run in usable])
        """The runs of components. Those of `earlier` explorations count with a wider error."""
        self.failures = Failures()
        self.whole_models = WholeModelRuns()
        """The whole models that were timed."""
        self.reuse: ComponentReuse | None = None
        """The check of the earlier components; None if the table has none of them."""
        self.preparing = PreparingSeconds(device_kind, is_whole=table.candidates[0].is_whole)
        """The seconds before a component could be timed."""
        self.pending: dict[int, Suggestion] = {}
        """The suggestions in flight, by trial, until it is learnt; they are not suggested again meanwhile."""
        self.version = 0
        """Grows when something is learnt."""

    @property
    def reused(self) -> ReusedComponents | None:
        """The knowledge from earlier explorations alone; None if there is none."""
        return None if self.reuse is None else self.reuse.describe(len(self.log.earlier))

    def begin_reuse(self, check: EarlierCheck | None) -> None:
        """Reuse earlier components once they are checked; without a check, forget them."""
        if check is not None:
            self.reuse = ComponentReuse(self.earlier, check, len(self.log.earlier))
        else:
            self.log.drop_earlier()
            self.version += 1

    def learn(self, number: int, measurement: Measurement) -> None:
        """Learn what trial `number` has measured; a component counts once a trial."""
        self.pending.pop(number, None)
        self.failures.learn(measurement)
        self.preparing.learn(number, measurement)
        self.learn_shared(number, measurement.components, failed=measurement.outcome not in SOUND)

    def learn_shared(self, number: int, measurements: Sequence[ComponentMeasurement], *, failed: bool = False) -> None:
        """Learn components that a trial, also one of another variant, has measured and that this table has."""
        self.log.add(number, [each for each in measurements if each.component in self.table.column])
        if self.reuse is not None and not self.reuse.is_decided:
            self.reuse.judge(self.log, failed=failed)
            if self.reuse.is_dropped:
                self.log.drop_earlier()
        self.version += 1

    def learn_whole_model(
        self,
        candidate: Candidate,
        tokens_per_second: float,
        standard_error: float,
        peak_bytes: int | None = None,
        number: int = 0,
    ) -> None:
        """Learn a whole model's throughput, with its relative standard error, and its peak: both correct the others.

        Runs of one candidate by several trials count together; `number` is the trial's.
        """
        self.whole_models.learn(self.table.row[candidate], number, (tokens_per_second, standard_error), peak_bytes)
        self.version += 1

    def reject(self, candidate: Candidate, reason: str, *, too_large: bool = False) -> None:
        """Rule `candidate` out. If it was `too_large`, others that need as many bytes are less likely to fit."""
        self.failures.reject(candidate, reason, too_large=too_large)
        self.version += 1

    def reject_alike(self, candidate: Candidate, reason: str) -> None:
        """Rule out all candidates whose whole model is unsupported if that of `candidate` is."""
        self.failures.reject_alike(candidate, reason)
        self.version += 1


BREAKING = frozenset({Outcome.CRASHED, Outcome.TIMED_OUT})
"""Outcomes that do not depend on memory, so that a recomputing block fails as well."""
MOST_TOO_LARGE = 4
"""After so many whole models that were too large, no candidate that needs as much as composed is tried."""


@dataclass(slots=True)
class Failures:
    """Failed components and rejected candidates, each with the reason that was given first."""

    components: dict[Component, str] = field(default_factory=dict)
    candidates: dict[Candidate, str] = field(default_factory=dict)
    _broken: set[Component] = field(default_factory=set)
    _too_large: set[Candidate] = field(default_factory=set)
    _unsupported: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.components) + len(self.candidates)

    def learn(self, measurement: Measurement) -> None:
        """Record why a trial failed. A trial that ran, or whose device was disturbed, is not a failure."""
        if measurement.outcome in SOUND:
            return
        reason = measurement.reason or measurement.outcome.value
        if measurement.failed_component is None:
            self.candidates.setdefault(measurement.candidate, reason)
            return
        self.components.setdefault(measurement.failed_component, reason)
        if measurement.outcome in BREAKING:
            self._broken.add(measurement.failed_component)

    def reject(self, candidate: Candidate, reason: str, *, too_large: bool = False) -> None:
        """Rule a candidate out. If its whole model was `too_large`, others that need as much may be ruled out, too."""
        self.candidates.setdefault(candidate, reason)
        if too_large:
            self._too_large.add(candidate)

    def reject_alike(self, candidate: Candidate, reason: str) -> None:
        """Rule out the candidates whose whole model is unsupported if that of `candidate` is."""
        self._unsupported.setdefault(candidate.support, reason)

    def none_runs_whole(self, table: Composition, ran: Collection[int] = ()) -> bool:
        """Return whether no whole model is supported: all are ruled out, or two unlike ones failed for one reason.

        Where the rows that `ran` whole are some, others may as well.
        """
        reasons = list(self._unsupported.values())
        alike = not ran and len(set(reasons)) < len(reasons)
        return alike or all(c.support in self._unsupported for c in table.candidates)

    def too_large(self, table: Composition) -> list[int]:
        """Return the rows whose whole model ran out of memory."""
        return sorted(table.row[c] for c in self._too_large if c in table.row)

    def rejected(
        self, table: Composition, required_C: Floats, explained: Collection[int] = (), ran: Collection[int] = ()
    ) -> Mask:
        """Return the rows that are ruled out, given their composed bytes, shape (C,).

        A whole model that was too large rules out all that need as much as composed, but for those that `ran` whole. If
        the error of its composed peak explains that it was (`explained`), the error of another may be smaller. Then a
        few others are tried. Where no whole model is supported, this says nothing of the candidates.
        """
        rejected_C = np.zeros(len(table.candidates), dtype=np.bool_)
        too_large = self.too_large(table)
        if len(too_large) < MOST_TOO_LARGE:
            too_large = [row for row in too_large if row not in explained]
        if too_large:
            rejected_C |= required_C >= required_C[too_large].min()
            rejected_C[list(ran)] = False
        rejected_C[[table.row[c] for c in self.candidates if c in table.row]] = True
        if self._unsupported and not self.none_runs_whole(table, ran):
            rejected_C |= np.array([c.support in self._unsupported for c in table.candidates])
        return rejected_C

    def failing(self, table: Composition, log: ObservationLog) -> Mask:
        """Return the rows that use a component that failed, or a larger one of the same kind, shape (C,)."""
        if not self.components and not log.num_contaminated:
            return np.zeros(len(table.candidates), dtype=np.bool_)
        failing_K = np.array([self._fails(c, log) for c in table.components])
        return np.asarray((table.used_CP & failing_K[table.columns_CP]).any(axis=1))

    def _fails(self, component: Component, log: ObservationLog) -> bool:
        if log.count(component):
            return False
        if log.count_contaminated(component) >= CONTAMINATED_ATTEMPTS:
            return True
        return any(at_least(component, failed, broken=failed in self._broken) for failed in self.components)


def at_least(component: Component, failed: Component, *, broken: bool = False) -> bool:
    """Return whether `component` does at least the work at which `failed` failed.

    A recomputing block runs everything that the plain block runs. So it may help if memory was short, and not if the
    block is `broken`.
    """
    if component == failed:
        return True
    if component.kind is not failed.kind or component.micro_batch_size == 0:
        return False
    runs_it = component.recompute is failed.recompute or (broken and failed.recompute is BlockRecompute.NONE)
    same = (component.part, component.backend, component.variant) == (failed.part, failed.backend, failed.variant)
    if not (same and runs_it) or (component.bta_tile is None) != (failed.bta_tile is None):
        return False
    if component.communicates or failed.communicates:
        ring = (component.context_parallel_layout, component.context_parallel_size)
        if ring != (failed.context_parallel_layout, failed.context_parallel_size):
            return False
    return component.sequences >= failed.sequences and (component.bta_tile or 0) >= (failed.bta_tile or 0)
