"""Which mutants there are, and what is said of the ones that were judged."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutation import summary
from benchmarks.mutation.mutants import Mutant, MutantFinder
from benchmarks.mutation.summary import summarise, wilson
from benchmarks.mutation.tests import Reached

SOURCE = '''"""Text."""

from __future__ import annotations

LIMIT = 3


def count(values: list[int] | None = None) -> int:
    """Text."""
    assert values is not None, f"{values} of {LIMIT}"
    return len(values) + LIMIT
'''


def mutant(path: str = "a/b.py", line: int = 1, **changes: Any) -> Mutant:
    found = {"column": 0, "lines": (line, line), "imported": False, "operator": "number", "before": "1", "after": "2"}
    return Mutant(**{"path": path, "line": line, "source": str, **found, **changes})


def test_the_interval_is_that_of_wilson() -> None:
    assert wilson(340, 400) == pytest.approx((0.8117, 0.8817), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_shares_and_survivors_are_those_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "version", lambda _: "1")
    sample = [mutant(line=line) for line in (1, 2, 3)] + [mutant("c/d.py")]
    found = ("killed", "survived", "timeout", "survived")
    outcomes = {m.key: {"outcome": o, "num_tests": 5} for m, o in zip(sample, found, strict=True)}
    result = summarise({"seed": 2}, [*sample, mutant(line=9)], Counter(text=4), sample, outcomes)
    assert (result["num_mutants"], result["sample"], result["killed"], result["share"]) == (5, 4, 2, 0.5)
    assert {name: share["killed"] for name, share in result["folders"].items()} == {"a": 2, "c": 0}
    assert [(s["file"], s["line"]) for s in result["survivors"]] == [("a/b.py", 2), ("c/d.py", 1)]
    assert result["settings"] == {"seed": 2}


def test_tests_of_the_module_run_first_and_then_the_quickest_within_the_limit() -> None:
    seconds = {
        "t/test_b.py::slow": 5.0,
        "t/test_x.py::quick": 1.0,
        "t/test_x.py::slower": 2.0,
        "t/test_y.py::last": 9.0,
    }
    reached = Reached(seconds, {"a/b.py": {1: [*seconds], 2: ["t/test_y.py::last"]}})
    assert reached.tests(mutant(), 8.0) == [*seconds][:3]
    assert reached.tests(mutant(), 6.0) == [*seconds][:2]
    assert reached.tests(mutant(line=2), 1.0) == ["t/test_y.py::last"], "at least one"
    assert reached.tests(mutant(line=3), 8.0) == []
    assert reached.tests(mutant(line=3, imported=True), 99.0) == [*seconds]


def test_what_cannot_change_the_program_has_no_mutants(tmp_path: Path) -> None:
    pytest.importorskip("mutmut")
    (tmp_path / "a.py").write_text(SOURCE)
    finder = MutantFinder(tmp_path, "a.py")
    found = list(finder.find())
    assert {(m.line, m.before, m.after) for m in found} == {
        (5, "LIMIT = 3", "LIMIT = None"),
        (5, "3", "4"),
        (10, "is not", "is"),
        (11, "len(values) + LIMIT", "len(values) - LIMIT"),
    }
    assert [m.imported for m in found] == [True, True, False, False]
    assert finder.excluded["docstrings"] == 2
    assert next(m for m in found if m.line == 11).source().endswith("return len(values) - LIMIT\n")
