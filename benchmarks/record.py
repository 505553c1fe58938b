"""Records the measurements of every candidate of a request on a device, so that searches can be replayed on them.

    python -m benchmarks.record examples/olmoe-1b-7b.yaml --out tables/olmoe.jsonl --device cuda:0 --seconds 120

The profiler is that of the service, with one component per trial. First each component is measured once, in ascending
micro-batch size. Then whole models of a share of the candidates (or all) are run, `--whole-runs` times in turns. Then
every component is measured again, in random order, until there are `--runs` of each, so that the noise between runs is
known. If a component ran out of memory, larger ones are inferred to do so as well, and their rows say that. A timing on
a shared or throttled device is recorded as contaminated and repeated, up to twice. A second start continues the file
where the first one ended. With several configurations, `--out` is the folder of their tables. `--plan` only counts.
`--reuse` takes over the component runs of tables of the same model on the same device that differ only in limits or
choices.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.recorded_candidates import compose, composed_tokens_per_second, fitting_rows
from benchmarks.recording_file import RecordingFile, component_row, whole_model_row
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.roofline import predict_component_seconds
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Measurement, Outcome, judge
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.knowledge import at_least
from bexp.workers.process.interface import DeviceProfiler, ProfilerError
from bexp.workers.process.profiler import Profiler
from bexp.workers.replay.profiler import mismatch
from bexp.workers.replay.recording import ComponentRow, Recording, RecordingError, RecordingHeader

NOISE = (
    "Each run of a component builds it anew, in a profiler process that has measured others before it; run 0 goes "
    "through the micro-batch sizes in ascending order, later runs in random order, minutes apart. device_seconds is "
    "the median of `repeats`, standard_error_seconds the standard error of that median within the run."
)
TRIAL_SECONDS, PASSES, EFFICIENCY = 0.35, 12, 0.5
"""Of one component, for the estimate: its set-up, how often it is run, and how near the roofline it comes."""
WHOLE_MODELS = 16


def estimate_seconds(table: Composition, hardware: HardwareSpec) -> float:
    """Estimate the seconds that one run of every component takes."""
    request = table.request
    expected = [predict_component_seconds(c, table.model, request, hardware).device for c in table.components]
    return TRIAL_SECONDS * len(expected) + PASSES / EFFICIENCY * sum(expected)


def open_table(
    path: Path, name: str, request: ExplorationRequest, profiler: DeviceProfiler, start_seconds: float
) -> RecordingFile:
    """A new table, or the same one continued.

    Raises:
        RecordingError: the file is a table of something else.
    """
    header = RecordingHeader(
        name=name,
        request=request,
        report=profiler.begin(request),
        recorded_at=datetime.now(UTC).replace(microsecond=0),
        process_start_seconds=round(start_seconds, 3),
        noise=NOISE,
    )
    if path.exists():
        recorded = Recording.read(path).header
        if recorded.request != request:
            raise RecordingError(f"{path} records another request: give another --out")
        if recorded.report.hardware.fingerprint != header.report.hardware.fingerprint:
            raise RecordingError(f"{path} was begun on {recorded.report.hardware.describe()}")
    return RecordingFile(path, header)


def take_over(file: RecordingFile, others: Iterable[Path]) -> int:
    """Copy the component runs that other tables share with this one; returns how many.

    Raises:
        RecordingError: another table is of another model, device or kind of training.
    """
    count = 0
    header = file.recording.header
    for path in others:
        other = Recording.read(path)
        if other.header.report.hardware.fingerprint != header.report.hardware.fingerprint:
            raise RecordingError(f"{path} was recorded on another device")
        cut = header.request.model_copy(update={"micro_batch_size": other.header.request.space.micro_batch_sizes})
        reason = mismatch(cut.model_copy(update={"base_micro_batch_size": None}), other)
        if reason is not None and "lacks components" not in reason:
            raise RecordingError(f"nothing of {path} can be taken over: {reason}")
        wanted = _components(file.recording, header.request)
        for component, rows in other.components.items():
            if component in wanted and component not in file.recording.components and rows[0].outcome is Outcome.OK:
                for row in rows:
                    file.append(row)
                count += len(rows)
    return count


def _components(recording: Recording, request: ExplorationRequest) -> set[Component]:
    tables = [recording.prune(request, model).table for model in request.space.variants()]
    return {component for table in tables if table is not None for component in table.components}


def _tables(recording: Recording, models: Iterable[ModelSpec]) -> list[Composition]:
    tables = [recording.prune(recording.header.request, model).table for model in models]
    return [table for table in tables if table is not None]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the table; of several configurations, their folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--whole", choices=("none", "share", "all"), default="share")
    parser.add_argument("--whole-models", type=int, default=WHOLE_MODELS, help="how many, with --whole share")
    parser.add_argument("--whole-runs", type=int, default=1, help="of each whole model, in turns")
    parser.add_argument("--runs", type=int, default=3, help="of each component")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop a table after this long")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds that one trial may take")
    parser.add_argument("--reuse", type=Path, nargs="*", default=[], help="tables to take component runs from")
    parser.add_argument("--plan", action="store_true", help="say what would be measured, and end")
    options = parser.parse_args(arguments)
    several = len(options.configs) > 1
    failed = False
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    profiler = Profiler(options.device)
    try:
        profiler.start()
        start_seconds = time.monotonic() - started
        for config in options.configs:
            out = options.out / f"{config.stem}.jsonl" if several else options.out
            try:
                done = record_table(config, out, profiler, start_seconds, options)
                print(f"{out}: {'complete' if done else 'not complete'}, {out.stat().st_size / 1e6:.2f} MB", flush=True)
            except (RecordingError, EmptySpaceError) as error:
                print(f"{out}: {error}", file=sys.stderr)
                failed = True
    except ProfilerError as error:
        print(f"{options.device}: {error}", file=sys.stderr)
        return 1
    finally:
        profiler.close()
    return 1 if failed else 0


def record_table(
    config: Path, out: Path, profiler: Profiler, start_seconds: float, options: argparse.Namespace
) -> bool:
    """Record, or continue, the table of one configuration; returns whether nothing of it is missing.

    Raises:
        RecordingError: the file is a table of something else.
        EmptySpaceError: the configuration admits no candidate.
        ProfilerError: the device cannot be used.
    """
    request = parse_request(load_document(config.read_text()))
    started = time.monotonic()
    file = open_table(out, config.stem, request, profiler, start_seconds)
    try:
        if options.reuse:
            print(f"{take_over(file, options.reuse)} runs taken over", flush=True)
        budget = options.seconds - (time.monotonic() - started)
        recorder = Recorder(file, profiler, deadline_seconds=options.deadline, budget_seconds=budget)
        tables = _tables(file.recording, request.space.variants())
        for table in tables:
            seconds = estimate_seconds(table, file.recording.header.report.hardware)
            print(
                f"{config.stem}: {len(table.candidates)} candidates, {len(table.components)} components: "
                f"about {seconds:.0f} s a run of each",
                flush=True,
            )
        done = not options.plan
        for table in tables if not options.plan else ():
            recorded = recorder.record(
                table,
                runs=options.runs,
                whole=options.whole,
                whole_models=options.whole_models,
                whole_runs=options.whole_runs,
            )
            done = recorded and done
    finally:
        file.close()
    return done


if __name__ == "__main__":
    sys.exit(main())


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
