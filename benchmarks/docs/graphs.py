"""Whole training steps in eager execution, compiled, and as CUDA graphs."""

from __future__ import annotations

from benchmarks.docs.results import GIB, Row, measured_on, ratio, table


def steps(results: Row) -> str:
    """A line for each run, model and execution: a micro-step and a step by the clock, each over eager, and the peak."""
    runs = results["runs"]
    rows = [
        (run["launch_us"], name, case, execution)
        for run in runs
        for name, case in run["results"].items()
        for execution in case["step_seconds"]
    ]
    shown = table(
        rows,
        {
            "model": lambda row: row[1],
            "launch": lambda row: f"{row[0]:.1f} us",
            "execution": lambda row: f"`{row[3]}`",
            "micro-step": lambda row: _spread(row[2]["micro_step_seconds"][row[3]]),
            "over eager": lambda row: _gain(row[2]["micro_step_seconds"], row[3]),
            "step": lambda row: _spread(row[2]["step_seconds"][row[3]]),
            "step over eager": lambda row: _gain(row[2]["step_seconds"], row[3]),
            "peak": lambda row: f"{row[2]['peak_bytes'][row[3]] / GIB:.1f} GiB",
        },
    )
    first, *others = (run["environment"] for run in runs)
    about = {"device": results["device"], "environment": first, "continued": [each["date"] for each in others]}
    return shown + measured_on(about)


def _spread(seconds: Row) -> str:
    return f"{1e3 * seconds['median']:.1f} ms ({1e3 * seconds['least']:.1f} to {1e3 * seconds['most']:.1f})"


def _gain(seconds: Row, execution: str) -> str:
    return ratio(seconds["eager"]["median"] / seconds[execution]["median"])
