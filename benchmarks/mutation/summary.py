"""The share of killed mutants with its interval, by folder, module and operator, and the survivors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment
from benchmarks.mutation.mutants import EXCLUDED, Mutant

SHOWN_CHARACTERS = 200
Z_95 = 1.959964


def wilson(killed: int, total: int) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927)."""
    if total == 0:
        return 0.0, 1.0
    share, weight = killed / total, Z_95 * Z_95 / total
    centre = (share + weight / 2) / (1 + weight)
    half = Z_95 / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return centre - half, centre + half


def summarise(
    settings: Mapping[str, Any],
    every: Sequence[Mutant],
    excluded: Counter[str],
    sample: Sequence[Mutant],
    outcomes: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """What a run found. A mutant that takes all the processor time, or ends its process, counts as killed."""
    judged = [(mutant, outcomes[mutant.key]) for mutant in sample]
    survivors = [(mutant, row) for mutant, row in judged if row["outcome"] == "survived"]
    return {
        "environment": {**describe_environment(), "mutmut": version("mutmut"), "libcst": version("libcst")},
        "settings": dict(settings),
        "num_mutants": len(every),
        "excluded": [{"rule": rule, "what": what, "num_nodes": excluded[rule]} for rule, what in EXCLUDED.items()],
        "outcomes": dict(Counter(row["outcome"] for _, row in judged)),
        **_share(judged),
        "folders": _by(judged, lambda mutant: str(Path(mutant.path).parent)),
        "modules": _by(judged, lambda mutant: mutant.path),
        "operators": _by(judged, lambda mutant: mutant.operator),
        "survivors": [
            {
                "file": mutant.path,
                "line": mutant.line,
                "operator": mutant.operator,
                "before": mutant.before[:SHOWN_CHARACTERS],
                "after": mutant.after[:SHOWN_CHARACTERS],
                "num_tests": row["num_tests"],
            }
            for mutant, row in sorted(survivors, key=lambda pair: (pair[0].path, pair[0].line))
        ],
    }


def _share(judged: Sequence[tuple[Mutant, Mapping[str, Any]]]) -> dict[str, Any]:
    killed = sum(row["outcome"] != "survived" for _, row in judged)
    low, high = wilson(killed, len(judged))
    share = killed / len(judged)
    return {
        "sample": len(judged),
        "killed": killed,
        "share": round(share, 4),
        "wilson_95": [round(low, 4), round(high, 4)],
    }


def _by(
    judged: Sequence[tuple[Mutant, Mapping[str, Any]]], group: Callable[[Mutant], str]
) -> dict[str, dict[str, Any]]:
    groups = sorted({group(mutant) for mutant, _ in judged})
    return {name: _share([pair for pair in judged if group(pair[0]) == name]) for name in groups}
