"""Fills a table with the measurements of a request's candidates, within a budget of seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.recorded_candidates import compose, composed_tokens_per_second, fitting_rows
from benchmarks.recording_file import RecordingFile, component_row, whole_model_row
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Measurement, Outcome, judge
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.search.knowledge import at_least
from bexp.workers.process.interface import DeviceProfiler
from bexp.workers.replay.recording import ComponentRow

WHOLE_MODEL_SHARE = 0.4  # of the budget that is left after run 0, unless all candidates are to be timed whole
WITHIN = 0.9  # half of the whole models are drawn among candidates with this share of the best composed throughput


class Recorder:
    """Fills one table within a budget of seconds."""

    def __init__(
        self,
        file: RecordingFile,
        profiler: DeviceProfiler,
        *,
        deadline_seconds: float,
        budget_seconds: float,
    ) -> None:
        self._file = file
        self._recording = file.recording
        self._profiler = profiler
        self._deadline_seconds = deadline_seconds
        self._ends_at = time.monotonic() + budget_seconds
        self._rng = np.random.default_rng(0)
        self._started = time.monotonic()
        self._reported_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() >= self._ends_at

    def record(self, table: Composition, *, runs: int, whole: str, whole_models: int, whole_runs: int = 1) -> bool:
        """Everything that is not recorded yet; returns whether nothing is missing."""
        first = sorted(table.components, key=lambda c: c.micro_batch_size)
        done = self._components(table, [c for c in first if self._runs(c) == 0], "components")
        for run in range(whole_runs if whole != "none" else 0):
            done = self._whole_models(table, whole, whole_models, run) and done
        for run in range(1, runs):
            again = [c for c in table.components if 0 < self._runs(c) <= run and self._is_ok(c)]
            order = self._rng.permutation(len(again))
            done = self._components(table, [again[i] for i in order], f"run {run}") and done
        return done

    def _components(self, table: Composition, components: list[Component], what: str) -> bool:
        done = True
        for index, component in enumerate(components):
            if self.is_over:
                return False
            self._tell(what, index, len(components))
            inferred = self._infer(component)
            if inferred is not None:
                self._file.append(inferred)
            else:
                done = self._measure(table, component) and done
        self._tell(what, len(components), len(components), last=True)
        return done

    def _measure(self, table: Composition, component: Component) -> bool:
        """Measure a component, and again while it is contaminated; returns whether the last run was not."""
        candidate = table.candidates[int(np.flatnonzero(table.uses_CK[:, table.column[component]])[0])]
        task = TrialTask(
            number=0,
            kind=TrialKind.COMPONENTS,
            model=table.model,
            candidate=candidate,
            components=(component,),
            timeout_seconds=self._deadline_seconds,
        )
        for measurement, replaced in self._attempts(task):
            row = component_row(component, self._runs(component), measurement, replaced=replaced)
            self._file.append(row)
        return row.outcome is not Outcome.CONTAMINATED

    def _attempts(self, task: TrialTask) -> Iterator[tuple[Measurement, bool]]:
        """Yield measurements until one is not contaminated, and whether each one ended the profiler's process."""
        for _ in range(CONTAMINATED_ATTEMPTS):
            restarts = self._profiler.restarts
            measurement = judge(self._profiler.measure(task))
            yield measurement, self._profiler.restarts > restarts
            if measurement.outcome is not Outcome.CONTAMINATED or self.is_over:
                return

    def _infer(self, component: Component) -> ComponentRow | None:
        for smaller, rows in self._recording.components.items():
            first = rows[0]
            if smaller != component and first.outcome is Outcome.OUT_OF_MEMORY and at_least(component, smaller):
                reason = first.reason if first.inferred else f"as {smaller.key}: {first.reason}"
                return ComponentRow(
                    component=component,
                    run=0,
                    outcome=first.outcome,
                    reason=reason,
                    phases=first.phases,
                    inferred=True,
                    replaced=first.replaced,
                )
        return None

    def _whole_models(self, table: Composition, whole: str, number: int, run: int) -> bool:
        rows = [int(r) for r in self._choose(table, whole, number, run)]
        ends_at = self._ends_at
        if whole == "share":
            now = time.monotonic()
            ends_at = now + WHOLE_MODEL_SHARE * (self._ends_at - now)
        done = True
        for index, row in enumerate(rows):
            if time.monotonic() >= ends_at:
                return False
            self._tell("whole models", index, len(rows))
            candidate = table.candidates[row]
            task = TrialTask(
                number=0,
                kind=TrialKind.WHOLE_MODEL,
                model=table.model,
                candidate=candidate,
                timeout_seconds=self._deadline_seconds,
            )
            for measurement, replaced in self._attempts(task):
                self._file.append(whole_model_row(candidate, run, measurement, replaced=replaced))
            if measurement.outcome is Outcome.UNSUPPORTED:
                print(f"no whole models: {measurement.reason}", flush=True)
                return True
            done = done and measurement.outcome is not Outcome.CONTAMINATED
        self._tell("whole models", len(rows), len(rows), last=True)
        return done

    def _choose(self, table: Composition, whole: str, number: int, run: int) -> list[int]:
        """Return rows that fit as composed and lack this run, in random order; of a share half are near the best."""
        figures = compose(self._recording, table)
        rows = fitting_rows(table, figures, self._recording.header.report.hardware)
        order = list(self._rng.permutation(rows))
        if whole == "share":
            tokens = composed_tokens_per_second(table, figures)
            near = [r for r in order if tokens[r] >= WITHIN * tokens[order].max()][: number // 2]
            order = near + [r for r in order if r not in near][: number - len(near)]
        known = [(r, self._recording.whole_models.get(table.candidates[r], ())) for r in order]
        return [r for r, made in known if len(made) <= run and all(row.outcome is Outcome.OK for row in made)]

    def _runs(self, component: Component) -> int:
        return len(self._recording.components.get(component, ()))

    def _is_ok(self, component: Component) -> bool:
        return all(row.outcome is Outcome.OK for row in self._recording.components[component])

    def _tell(self, what: str, done: int, of: int, *, last: bool = False) -> None:
        now = time.monotonic()
        if now - self._reported_at >= 5 or last:
            self._reported_at = now
            left = max(0.0, self._ends_at - now)
            print(f"{what}: {done} of {of}; {now - self._started:.0f} s, {left:.0f} s left", flush=True)
