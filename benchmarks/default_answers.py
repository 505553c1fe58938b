"""What `bexp explore CONFIG --seq-length 4096 --batch-size 32` takes from the command to its answer.

    python -m benchmarks.default_answers benchmarks/published/*.json --device cuda:0 --out results/NAME.json
    python -m benchmarks.default_answers benchmarks/published/llama-3.2-1b.json --again --device cuda:0 --out F
    python -m benchmarks.default_answers CONFIG --device cuda:0-3 --num-devices 4 --set parallelism=explore --out F

Each configuration runs as a person runs it, in a process of its own, with a new database and with empty caches of
kernels. `--again` runs it a second time with the kernels of the first one and nothing that was measured. All seconds
count from the start of the command. `provisional` is what the answer says of itself.
`checks` are the whole models that ran: how far each one's composed step and peak were off.
Runs in an existing FILE are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_commit, describe_environment, write_results
from bexp.api.cli.connection import open_current
from bexp.api.stored import StoredExplorations
from bexp.child_process import module_command
from bexp.explorer.answers.uses import is_provisional
from bexp.explorer.records.event import EventCode, render_line
from bexp.workers.process.kernel_cache import FOLDER_VARIABLE

Row = dict[str, Any]
FIRST_EVENTS = {
    "queued": EventCode.QUEUED,
    "started": EventCode.STARTED,
    "first_trial": EventCode.TRIAL,
    "first_line": EventCode.RECOMMENDATION,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the configurations, and write what was found after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.default_answers", description=__doc__)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-devices", type=int, default=1)
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields", help="of the request"
    )
    parser.add_argument("--again", action="store_true", help="also with the kernels of the first run")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which a run is ended")
    parser.add_argument("--until", type=float, default=3600.0, help="begin no run after these seconds")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    runs: list[Row] = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    for config in options.configs:
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("empty", "filled") if options.again else ("empty",):
                asked = {"num_devices": options.num_devices, "fields": options.fields}
                key = {"name": config.stem, "caches": caches, **asked}
                done = any(key == ONE_DEVICE | {name: run[name] for name in key if name in run} for run in runs)
                if not done and time.monotonic() - begun < options.until:
                    row = answer(config, options, Path(folder))
                    runs.append({**key, "commit": describe_commit(), **row})
                    print({name: value for name, value in runs[-1].items() if name not in UNPRINTED}, flush=True)
                    found = {"environment": describe_environment(), "summary": summarize(runs), "runs": runs}
                    write_results(options.out, found)
    return 0


ONE_DEVICE: Row = {"num_devices": 1, "fields": []}
"""What runs asked for that do not say it."""

CHECKED = ("role", "mesh", "candidate", "tokens_per_second", "step_error", "peak_error")
"""What is noted of each whole model."""
UNPRINTED = ("printed", "hardware", "lines", "answer", "trials")


def answer(config: Path, options: argparse.Namespace, folder: Path) -> Row:
    """Run the command with a new database, and return its seconds, its lines and its answer."""
    database = tempfile.mkdtemp(dir=folder)
    url = f"sqlite:///{database}/bexp.db"
    own = {"BEXP_DATABASE_URL": url, FOLDER_VARIABLE: str(folder / "kernels")}
    names = ("seq_length", "batch_size", "num_devices", "device")
    asked = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    asked += [word for field in options.fields for word in ("--set", field)]
    command = module_command("bexp.api.cli", "explore", str(config.resolve()), *asked)
    begun_at, begun = time.time(), time.monotonic()
    with subprocess.Popen(command, cwd=database, env=os.environ | own, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate(timeout=options.limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            printed, _ = process.communicate()
    row: Row = {"seconds": time.monotonic() - begun, "rc": process.returncode, "printed": printed.splitlines()}
    return row | stored_row(url, begun_at)


def stored_row(url: str, begun_at: float) -> Row:
    """Return what a database knows about its only exploration."""
    stored = StoredExplorations(open_current(url))
    try:
        job = stored.get(next(iter(stored.list())).id)
        events, trials = stored.stored_events(job.id), stored.trials(job.id)
    finally:
        stored.database.dispose()
    seconds = {name: _first(events, code, begun_at) for name, code in FIRST_EVENTS.items()}
    found: Row = {"state": job.state, "hardware": job.report and job.report.hardware.model_dump(mode="json")}
    recommendation = None if job.answer is None else job.answer.variants[0].recommendation
    if recommendation is not None and job.request is not None:
        confidence = recommendation.confidence
        found |= {"confidence": confidence, "provisional": is_provisional(confidence, job.request)}
    whole = [event.data | event.data["check"] for event in events if event.code is EventCode.WHOLE_MODEL]
    return {
        **found,
        "seconds_to": seconds,
        "num_trials": len(trials),
        "checks": [{name: check.get(name) for name in CHECKED} for check in whole],
        "lines": [f"{_since(event.at, begun_at):6.1f} s  {render_line(event)}" for event in events],
        "answer": job.answer and job.answer.model_dump(mode="json"),
        "trials": [trial.model_dump(mode="json") for trial in trials],
    }


def _first(events: Sequence[Any], code: EventCode, begun_at: float) -> float | None:
    return next((_since(event.at, begun_at) for event in events if event.code is code), None)


def _since(moment: datetime, begun_at: float) -> float:
    return moment.timestamp() - begun_at


def summarize(runs: Sequence[Mapping[str, Any]]) -> Row:
    """Return the seconds of the last run of each name, by its caches, and the names of those that are firm."""
    summary: Row = {}
    for caches in ("empty", "filled"):
        of_one = list({_name(run): run for run in runs if run["caches"] == caches}.values())
        if of_one:
            seconds = {_name(run): run["seconds"] for run in of_one}
            firm = [_name(run) for run in of_one if run.get("provisional") is False]
            summary[caches] = {"seconds": seconds, "median": statistics.median(seconds.values()), "firm": firm}
    return summary


def _name(run: Mapping[str, Any]) -> str:
    asked = ONE_DEVICE | {name: run[name] for name in ONE_DEVICE if name in run}
    devices = [] if asked["num_devices"] == 1 else [f"{asked['num_devices']} devices"]
    return " ".join([run["name"], *devices, *asked["fields"]])


if __name__ == "__main__":
    sys.exit(main())
