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
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.recorder import Recorder
from benchmarks.recording_file import RecordingFile
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.roofline import predict_component_seconds
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.interface import DeviceProfiler, ProfilerError
from bexp.workers.process.profiler import Profiler
from bexp.workers.replay.profiler import mismatch
from bexp.workers.replay.recording import Recording, RecordingError, RecordingHeader

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
    """Record tables, one after the other."""
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
