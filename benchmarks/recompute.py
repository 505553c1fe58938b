"""Computes the summaries of stored results again from their raw rows, after their definition has changed.

    python -m benchmarks.recompute            # rewrites benchmarks/results/*.json
    python -m benchmarks.recompute --check    # fails if a stored summary is not what its rows say

Nothing is measured. A figure that the raw rows do not hold stays as it was recorded.
Explorations are given their own stored trials as history, so that today's comparisons (with the largest micro-batch
that fits, and with the best of stock back ends) are computed from what was measured then; `--check` leaves them out.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import context_parallel_margins, context_parallel_summary, gemm_summary
from benchmarks.bta import Bench
from benchmarks.environment import write_results
from benchmarks.explorations import comparisons
from benchmarks.moe_summary import compare_with_dense
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import Trial, TrialPlan
from bexp.explorer.search.explore import explore
from bexp.explorer.spec.hardware import DeviceReport, HardwareSpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.replay.recording import Recording

RESULTS = Path(__file__).parent / "results"
Results = dict[str, Any]

BACK_ENDS_OF = {
    "olmoe-1b-7b": "olmoe-zipf",
    "cerebras-gpt-1.3b": "cerebras-gpt",
    "llama-3.2-1b": "llama-8k",
    "qwen3-30b-a3b-8-layers": "qwen3-8-layers",
}
"""The recorded table of the same model and device whose header says which back ends there are."""


class NotStoredError(RuntimeError):
    """A search asked for a measurement that its stored trials do not hold."""


def main(arguments: list[str] | None = None) -> int:
    """Rewrite or check the results that are here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    stale = []
    for name, summarize in (CHEAP if options.check else CHEAP | EXPLORATIONS).items():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        stored = json.loads(path.read_text())
        found = copy.deepcopy(stored)
        summarize(found)
        if found != stored:
            stale.append(name)
            if not options.check:
                write_results(path, found)
    print(f"{'not what their rows say' if options.check else 'computed again'}: {', '.join(stale) or 'none'}")
    return int(options.check and bool(stale))


def grouped_gemm(results: Results) -> None:
    """Ratios on the device and with the host."""
    results["summary"] = gemm_summary.summarize(results["cells"])


def moe_layer(results: Results) -> None:
    """Relative throughput on the device and with the host."""
    compare_with_dense(results["rows"])


def bta(results: Results) -> None:
    """Rates on the device alone beside those by the clock, and what is relative to dense."""
    Bench(argparse.Namespace(**results["shape"]), None, results).compare_again()


def attention(results: Results) -> None:
    """Margins beside their spreads."""
    results["summary"] = context_parallel_margins.summarize(results["cells"])


def steps(results: Results) -> None:
    """Layouts and choices from the runs."""
    for cell in results["cells"]:
        context_parallel_summary.summarize(cell)


def explorations(results: Results) -> None:
    """Compute today's comparisons from the stored trials of each run."""
    for run in results["runs"]:
        run["comparisons"] = from_trials(run)


def from_trials(run: Results) -> dict[str, Any] | None:
    """Return what today's search says about the stored trials of a run.

    Raises:
        NotStoredError: it cannot say anything without measuring.
    """
    trials = [Trial.model_validate(trial) for trial in run["trials"]]
    given = ExplorationRequest.model_validate(run["request"])
    budget = given.budget.model_copy(update={"max_trials": len(trials), "confidence_target": 1})
    request = given.model_copy(update={"budget": budget, "verify": False})
    found = None
    for step in explore(request, device_report(run), _refuse, history=trials):
        found = step.recommendation or found
    return comparisons(found)


def device_report(run: Results) -> DeviceReport:
    """The device of a run, with the back ends that a table of the same model was recorded with."""
    table = RESULTS / "tables" / f"{BACK_ENDS_OF[run['name']]}.jsonl"
    report = Recording.read(table).header.report
    return report.model_copy(update={"hardware": HardwareSpec.model_validate(run["hardware"])})


def _refuse(plan: TrialPlan) -> Measurement:
    raise NotStoredError(f"the stored trials do not hold {plan.candidate.describe()}")


CHEAP: dict[str, Callable[[Results], None]] = {
    "h200-grouped-gemm": grouped_gemm,
    "h200-moe-layer": moe_layer,
    "h100-grouped-gemm": grouped_gemm,
    "h100-moe-turns": moe_layer,
    "h200-bta": bta,
    "h200-bta-math": bta,
    "h200x4-context-parallel": attention,
    "h200x4-context-parallel-step": steps,
    "h200x4-context-parallel-sizes": steps,
}
EXPLORATIONS: dict[str, Callable[[Results], None]] = {
    "h200-explorations": explorations,
    "h200-olmoe-fused": explorations,
}

if __name__ == "__main__":
    sys.exit(main())
