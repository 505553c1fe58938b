"""What was measured of the candidates of one device: components, failures and whole models, each by its trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.earlier_runs import EarlierRuns, ReusedComponents
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.run_report import ReportedRun
from bexp.explorer.search.earlier_check import ComponentReuse, EarlierCheck
from bexp.explorer.search.feasibility import Failures
from bexp.explorer.search.preparing import PreparingSeconds
from bexp.explorer.search.suggestion import Suggestion
from bexp.explorer.surrogate.observations import ObservationLog, age_run
from bexp.explorer.surrogate.whole_model_runs import WholeModelRuns

SOUND = frozenset({Outcome.OK, Outcome.CONTAMINATED})
"""Outcomes of a trial that ran to its end."""


class Knowledge:
    """Everything that trials have said about the candidates of a table, whatever their order.

    `log` has the runs of components, `whole_models` the whole models that were timed, `failures` what failed,
    `preparing` what it took before a component could be timed, and `pending` what is in flight. `reported` are real
    runs of candidates in the table. `earlier` runs of components are observations with a wider error; `reuse` says how
    they are checked, and is None if there are none in the table. `version` grows when something is learnt.
    """

    def __init__(
        self,
        table: Composition,
        device_kind: str,
        reported: Sequence[ReportedRun] = (),
        earlier: EarlierRuns | None = None,
    ) -> None:
        self.table = table
        self.reported = tuple(run for run in reported if run.candidate in table.row)
        self.earlier = earlier or EarlierRuns()
        usable = [run for run in self.earlier.runs if run.measurement.component in table.column]
        self.log = ObservationLog([age_run(run, device_kind) for run in usable])
        self.failures = Failures()
        self.whole_models = WholeModelRuns()
        self.reuse: ComponentReuse | None = None
        self.preparing = PreparingSeconds(device_kind, is_whole=table.candidates[0].is_whole)
        self.pending: dict[int, Suggestion] = {}
        self.version = 0

    @property
    def measured(self) -> Mapping[Component, ComponentMeasurement]:
        """The first run of every component that was measured."""
        return {component: runs.first for component, runs in self.log.runs.items()}

    @property
    def reused(self) -> ReusedComponents | None:
        """What is known from earlier explorations alone; None if that is nothing."""
        return None if self.reuse is None else self.reuse.describe(len(self.log.earlier))

    def begin_reuse(self, check: EarlierCheck | None) -> None:
        """Reuse earlier components once they are checked; without a check, forget them."""
        if check is not None:
            self.reuse = ComponentReuse(self.earlier, check, len(self.log.earlier))
        else:
            self.log.drop_earlier()
            self.version += 1

    def expect(self, number: int, suggestion: Suggestion) -> None:
        """Trial `number` is in flight until it is learnt; what it measures is not suggested meanwhile."""
        self.pending[number] = suggestion

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
