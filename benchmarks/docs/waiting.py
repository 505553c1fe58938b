"""How long a person waits: from submit to a confidence of 90 and to the final answer, and where the seconds go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from benchmarks.docs.results import Columns, Row, measured_on, table

CONFIDENT_SECONDS = 20.0
OTHER_GOALS = {"kernels-not-built": 60.0, "like": 10.0, "transformers": 40.0}
"""By the end of a run's name: an expert model whose kernels were not built yet, a second model like an earlier one,
and transformers' own classes."""
PHASES = ("queue", "process_start", "build", "warm_up", "timed", "suggest")


def waiting(results: Row) -> str:
    """Return a line a run, with the seconds of each phase until its end."""
    columns: Columns = {
        "model": lambda run: run["name"],
        "to confidence 90": lambda run: _seconds(run["submit_to_confidence_90_seconds"]),
        "to the final answer": lambda run: _seconds(_final(run)),
        **{phase.replace("_", " "): partial(_spent, phase) for phase in PHASES},
    }
    return table(results["runs"], columns) + measured_on(results)


def of_waiting(results: Row) -> Iterator[tuple[str, str, bool, str]]:
    """Judge each kind of run: its name's end decides which."""
    titles = {
        "": "submit to confidence 90 on a warm worker, one H100",
        "kernels-not-built": "the same, an expert model whose kernels are not built",
        "like": "the same, a model like an earlier one",
        "transformers": "the same, transformers' own classes",
    }
    for kind, title in titles.items():
        times = {run["name"]: run["submit_to_confidence_90_seconds"] for run in _of(results, kind)}
        if times:
            goal = OTHER_GOALS.get(kind, CONFIDENT_SECONDS)
            text = "; ".join(f"{name} {_seconds(seconds) or 'never'}" for name, seconds in times.items())
            yield title, f"<= {goal:.0f} s each", all(s is not None and s <= goal for s in times.values()), text


def in_short(results: Row) -> list[tuple[str, str]]:
    """Return the few figures of the README; each says what was measured, where and when."""
    runs, others = _of(results, ""), _of(results, "transformers")
    day = results["environment"]["date"][:10]
    where = f"{len(runs)} models on one H100, {day}"
    short = [
        (f"submit to confidence 90, warm worker, {where}", _confident(runs)),
        (f"submit to final answer, warm worker, {where}", _range(map(_final, runs))),
    ]
    if others:
        short.insert(1, (f"the same, {len(others)} models in transformers' own classes", _confident(others)))
    return short


def _of(results: Row, kind: str) -> list[Row]:
    """The runs of one kind; the kind without a name are those of the README's examples."""
    found = {run["name"]: next((k for k in OTHER_GOALS if run["name"].endswith(k)), "") for run in results["runs"]}
    return [run for run in results["runs"] if found[run["name"]] == kind]


def _final(run: Row) -> float | None:
    """Seconds to the final answer; null for a run without whole models, which ended early on purpose."""
    found: float = run["submit_to_final_seconds"]
    return found if run["request"]["verify"] else None


def _confident(runs: list[Row]) -> str:
    """From the least to the most seconds to a confidence of 90, and how many runs ended below it."""
    seconds = [run["submit_to_confidence_90_seconds"] for run in runs]
    never = seconds.count(None)
    found = _range(seconds) if never < len(seconds) else "never"
    return f"{found}; {never} of {len(seconds)} never" if 0 < never < len(seconds) else found


def _range(seconds: Iterable[float | None]) -> str:
    known = [one for one in seconds if one is not None]
    return f"{min(known):.0f} to {max(known):.0f} s"


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.1f} s"


def _spent(phase: str, run: Row) -> str:
    return f"{run['overheads']['timings'][phase]:.1f} s"
