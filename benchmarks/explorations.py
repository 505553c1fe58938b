"""Whole explorations by a real worker: from submit to the final answer.

    python -m benchmarks.explorations examples/olmoe-1b-7b.yaml ... --device cuda:0 --out results/NAME.json
    python -m benchmarks.explorations benchmarks/published/*.json --set hf_seq_length=4096 --set batch_size=64 --out F

Starts one worker on a new SQLite database and waits until it is ready. Then it submits each configuration a few seconds
after the one before has ended, and follows its events as any command does. All seconds are those of the submitter: from
just before the submission until the event was read. The worker keeps a profiler process ready for the next job, as it
does in a service. `process_start` and `queue` say how long a job had to wait. A configuration measures everything
itself, unless it says `fresh: false`: then it starts from what the ones before it learnt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, kernels_digest, write_results
from bexp.api.cli.connection import open_current
from bexp.api.local_worker import child_environment
from bexp.api.stored import StoredExplorations
from bexp.child_process import module_command
from bexp.client.explorations import Exploration
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.event import Event, EventCode, render_line
from bexp.explorer.records.recommendation import Answer, Recommendation, Role
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.request.request import ExplorationRequest

COMPARED = (Role.LARGEST_WITHOUT_RECOMPUTE, Role.LARGEST_MICRO_BATCH, Role.STOCK)
SURE = 90
"""A confidence at which runs with different confidence targets can be compared."""

WARM_SECONDS = 40.0
"""How long a worker is idle before the first job. It imports libraries meanwhile and builds the kernels of checks."""
IDLE_SECONDS = 15.0
"""How long it is idle before every other job: nobody submits the next one in the moment in which the last has ended."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--device", default=None, help="cpu, cuda:0, ...; default: what `bexp worker` takes")
    parser.add_argument("--group", action="store_true", help="one worker for all of the devices")
    parser.add_argument("--num-devices", type=int, help="instead of the configurations' own")
    parser.add_argument("--max-seconds", type=float, help="of the budget, instead of the configurations' own")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=NUMBER", dest="fields", help="of all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--repeat", type=int, default=1, help="run each configuration this many times, with other seeds"
    )
    parser.add_argument("--warm-seconds", type=float, default=WARM_SECONDS, help="idle seconds before the first job")
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS, help="idle seconds before every other job")
    parser.add_argument("--resume", action="store_true", help="keep the runs in --out, and leave out those names")
    options = parser.parse_args(arguments)
    runs: list[dict[str, Any]] = []
    if options.resume and options.out.exists():
        runs = json.loads(options.out.read_text())["runs"]
    done = {run["name"] for run in runs}
    configs = [path for path in options.configs if path.stem not in done]
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/bexp.db"
        stored = StoredExplorations(open_current(url))
        chosen = [*(["--device", options.device] if options.device else []), *(["--group"] if options.group else [])]
        worker = subprocess.Popen(module_command("bexp.workers", *chosen), env=child_environment(url))
        try:
            await_worker(worker, stored, options.warm_seconds)
            for path in configs:
                for seed in range(options.repeat):
                    document = load_document(path.read_text())
                    if "model_type" in document:
                        document = {"hf_config": document, "target": "transformers"}
                    document |= {
                        name: int(value) for name, _, value in (field.partition("=") for field in options.fields)
                    }
                    if options.num_devices is not None:
                        document["num_devices"] = options.num_devices
                    if options.max_seconds is not None:
                        document["budget"] = (document.get("budget") or {}) | {"max_seconds": options.max_seconds}
                    request = parse_request({"fresh": True, **document}).model_copy(update={"seed": seed})
                    time.sleep(options.idle_seconds if runs else 0.0)
                    runs.append(explore(stored, path.stem, request))
                    results = {"environment": describe_environment(), "hardware": runs[0]["hardware"], "runs": runs}
                    results["kernels"] = kernels_digest()
                    write_results(options.out, results)
        finally:
            worker.terminate()
            worker.wait()
            stored.database.dispose()
    return 0 if all(run["state"] == "succeeded" for run in runs) else 1


def await_worker(worker: subprocess.Popen[bytes], stored: StoredExplorations, warm_seconds: float) -> None:
    """Wait until the worker asks for jobs, and then until its profiler has prepared for one."""
    while not stored.workers():
        if worker.poll() is not None:
            sys.exit("the worker has ended; its log above says why")
        time.sleep(0.05)
    time.sleep(warm_seconds)


def explore(client: StoredExplorations, name: str, request: ExplorationRequest) -> dict[str, Any]:
    """Submit, follow to the end, and collect everything that is stored of the job."""
    started = time.perf_counter()
    job = client.submit(request)
    lines, moments, first_recommendation, confident, sure = [], [], None, None, None
    for event in client.events(job.id):
        seconds = time.perf_counter() - started
        lines.append(render_line(event))
        moments.append(round(seconds, 3))
        print(f"{seconds:6.1f} s  {lines[-1]}", flush=True)
        if event.code is EventCode.RECOMMENDATION:
            first_recommendation = first_recommendation or seconds
            if confident is None and _confidence(event) >= request.budget.confidence_target:
                confident = seconds
            if sure is None and _confidence(event) >= SURE:
                sure = seconds
    seconds = time.perf_counter() - started
    job, trials = client.get(job.id), client.trials(job.id)
    answer = job.answer
    return {
        "name": name,
        "request": request.model_dump(mode="json"),
        "hardware": _hardware(job),
        "state": job.state,
        "submit_to_final_seconds": seconds,
        "submit_to_first_recommendation_seconds": first_recommendation,
        "submit_to_confidence_target_seconds": confident,
        f"submit_to_confidence_{SURE}_seconds": sure,
        "overheads": overheads(answer, trials),
        "lines": lines,
        "line_seconds": moments,
        "answer": answer.model_dump(mode="json") if answer else None,
        "comparisons": comparisons(answer.variants[0].recommendation) if answer else None,
        "trials": [trial.model_dump(mode="json") for trial in trials],
    }


def comparisons(recommendation: Recommendation | None) -> dict[str, Any] | None:
    """Return the gain of the recommended candidate over each alternative, and whether a part of it is predicted."""
    if recommendation is None:
        return None
    alternatives = {role.value: recommendation.alternative(role) for role in COMPARED}
    return {name: None if other is None else other.model_dump(mode="json") for name, other in alternatives.items()}


def overheads(answer: Answer | None, trials: tuple[Trial, ...]) -> dict[str, Any]:
    """Return how many trials there were, and where their seconds went."""
    return {
        "num_trials": len(trials),
        "num_whole_model_trials": sum(trial.kind is TrialKind.WHOLE_MODEL for trial in trials),
        "timings": answer.timings if answer else {},
    }


def _hardware(job: Exploration) -> dict[str, Any] | None:
    return job.report.hardware.model_dump(mode="json") if job.report else None


def _confidence(event: Event) -> int:
    return int(event.data["recommendation"]["confidence"])


if __name__ == "__main__":
    sys.exit(main())
