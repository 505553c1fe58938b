"""Whole explorations, and their compositions against whole models."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.readme.results import load, measured_on
from explorer.spec.candidate import Candidate

SHOWN_CODES = ("BEXP102", "BEXP202", "BEXP203", "BEXP401")


def log_of_olmoe() -> str:
    """The lines that a person sees of one run, as they were."""
    (run,) = load("h200-olmoe-fused")["runs"]
    lines = [line for line in run["lines"] if line.startswith(SHOWN_CODES)]
    return "```\n" + "\n".join(lines) + "\n```\n"


def explorations() -> str:
    """One row a model, with the back ends of that day."""
    return _explorations("h200-explorations")


def explorations_fused() -> str:
    """The same for the run that had the fused experts among its back ends."""
    return _explorations("h200-olmoe-fused")


def explorations_of_devices(results: dict[str, Any], name: str) -> str:
    """Of models trained on several devices, with what these exchange."""
    parts = []
    for run in results["runs"]:
        found = run["answer"]["variants"][0]["recommendation"]
        request, step = run["request"], found["step_seconds"]
        exchange = found["communication_seconds"]
        parts.append(
            f"{run['name']} on {request['num_devices']} devices ({_sharding(request, found)}): a step takes "
            f"{step:.1f} s; {exchange:.1f} s of it ({100 * exchange / step:.1f}%) are exchange that nothing hides."
        )
    return f"{_explorations(name)}\n{' '.join(parts)}\n"


def _sharding(request: dict[str, Any], found: dict[str, Any]) -> str:
    """As recommended, where the request leaves a choice."""
    chosen = found["candidate"].get("sharding")
    return str(request["training"]["sharding"]) if chosen is None else f"{chosen}, as recommended"


def _explorations(name: str) -> str:
    results = load(name)
    rows = [
        "| model | submit to final | to confidence 95 | recommended | x base | confidence | over the largest that fits "
        "| trials | composed step, peak against the whole model |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in results["runs"]:
        found = run["answer"]["variants"][0]["recommendation"]
        largest, check = found["largest_micro_batch"], found["whole_model"]
        confident = run["submit_to_confidence_target_seconds"]
        cells = [
            run["name"],
            f"{run['submit_to_final_seconds']:.0f} s",
            "-" if confident is None else f"{confident:.0f} s",
            _short(Candidate.model_validate(found["candidate"])),
            f"{found['performance']:.2f}",
            str(found["confidence"]),
            "-" if largest is None else f"{largest['gain']:.2f}x",
            str(run["overheads"]["num_trials"]),
            "-" if check is None else f"{100 * check['step_error']:+.1f}%, {100 * check['peak_error']:+.1f}%",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    trials = [trial for run in results["runs"] for trial in run["trials"] if trial["kind"] == "components"]
    suggest = statistics.median(trial["suggest_seconds"] for trial in trials)
    messaging = statistics.median(trial["measurement"]["phases"]["messaging"] for trial in trials)
    storage = statistics.mean(run["overheads"]["storage_mean_seconds"] for run in results["runs"])
    idle = max(run["overheads"]["profiler_idle_share"] for run in results["runs"])
    starts = max(run["overheads"]["process_starts"] for run in results["runs"])
    rows.append(
        f"\nA trial's overhead: suggest {1e3 * suggest:.0f} ms and messages {1e3 * messaging:.1f} ms in the median, "
        f"storage {1e3 * storage:.0f} ms in the mean. Process starts a job: {starts}. "
        f"The profiler was idle {100 * idle:.0f}% of a job at most. {measured_on(results)}"
    )
    return "\n".join(rows) + "\n"


def fidelity() -> str:
    """Errors of composed steps, by configuration."""
    results = load("h200-fidelity")
    rows = [
        "| model | candidates | step: median, largest error | peak: median, largest error |",
        "| --- | --- | --- | --- |",
    ]
    names = dict.fromkeys(row["name"] for row in results["rows"])
    for name in names:
        checks = [row["check"] for row in results["rows"] if row["name"] == name and row["check"]]
        cells = []
        for what in ("step_error", "peak_error"):
            errors = [abs(check[what]) for check in checks]
            cells.append(f"{100 * statistics.median(errors):.1f}%, {100 * max(errors):.1f}%")
        rows.append(f"| {name} | {len(checks)} | {' | '.join(cells)} |")
    rows.append(f"\n{measured_on(results)}")
    return "\n".join(rows) + "\n"


def _short(candidate: Candidate) -> str:
    parts = [f"m={candidate.micro_batch_size}"]
    parts += [f"tile {candidate.bta_tile}"] if candidate.bta_tile else []
    parts += [f"recompute {candidate.recompute}"] if candidate.recompute != "none" else []
    parts += [candidate.attention_backend]
    parts += [candidate.expert_backend] if candidate.expert_backend else []
    if candidate.context_parallel_layout is not None:
        parts.append(f"{candidate.context_parallel_size} devices a sequence ({candidate.context_parallel_layout})")
    parts += [candidate.sharding] if candidate.sharding is not None else []
    return ", ".join(parts)
