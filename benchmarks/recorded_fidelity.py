"""Composed steps against whole models, from recorded tables.

    python -m benchmarks.recorded_fidelity results/tables/*.jsonl --out results/NAME.json

Every candidate of a table that was run whole is composed of its components' runs in that table; errors are
(composed - whole) / whole. A row is `host_bound` if its micro-step
is composed of the host's time, which is longer there than the device's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe_environment, write_results
from benchmarks.recorded_candidates import compose, composed_tokens_per_second, known_rows
from bexp.explorer.cost.step import combine_seconds
from bexp.explorer.records.measurement import WholeModelMeasurement
from bexp.workers.replay.recording import Recording, RecordingError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        recordings = {path.stem: Recording.read(path) for path in options.tables}
    except (RecordingError, OSError) as error:
        parser.error(str(error))
    rows = [row for name, recording in recordings.items() for row in compare(name, recording)]
    first = next(iter(recordings.values())).header
    results = {
        "environment": describe_environment(),
        "hardware": first.report.hardware.model_dump(mode="json"),
        "recorded_at": first.recorded_at.isoformat(),
        "rows": rows,
    }
    write_results(options.out, results)
    return 0


def compare(name: str, recording: Recording) -> list[dict[str, Any]]:
    """A row for every candidate of the table's main model that was run whole."""
    request = recording.header.request
    table = recording.prune(request, request.shapes).table
    if table is None:
        return []
    figures = compose(recording, table)
    known_C = known_rows(table, figures)
    tokens_C = composed_tokens_per_second(table, figures)
    activations_C = np.add(*table.activation_bytes(*figures.sizes))
    seconds_C = table.micro_step_seconds(figures.device_seconds[None, :], figures.host_seconds)[0]
    device_C = table.micro_step_seconds(figures.device_seconds[None, :], np.zeros_like(figures.host_seconds))[0]
    rows = []
    for candidate, runs in recording.whole_models.items():
        row = table.row.get(candidate)
        if row is None or not known_C[row]:
            continue
        whole = next((run.figures for run in runs if run.figures is not None), None)
        entry: dict[str, Any] = {
            "name": name,
            "model": request.shapes.name,
            "candidate": candidate.model_dump(mode="json"),
            "host_bound": bool(seconds_C[row] > device_C[row]),
            "outcome": runs[0].outcome.value,
            "reason": runs[0].reason,
            "check": None,
        }
        if whole is not None:
            tokens = _tokens_per_second(whole, candidate.micro_batch_size, recording)
            peak = int(table.static_bytes_C[row]) + round(float(activations_C[row]))
            entry["check"] = {
                "tokens_per_second": tokens,
                "peak_bytes": whole.peak_bytes,
                "step_error": tokens / float(tokens_C[row]) - 1.0,
                "peak_error": peak / whole.peak_bytes - 1.0,
            }
        rows.append(entry)
    return rows


def _tokens_per_second(whole: WholeModelMeasurement, micro_batch_size: int, recording: Recording) -> float:
    request = recording.header.request
    micro_step, optimizer = whole.micro_step_seconds, whole.optimizer_seconds
    seconds = combine_seconds(micro_step, optimizer, micro_batch_size, request.shapes, request)
    return seconds.tokens_per_second


if __name__ == "__main__":
    sys.exit(main())
