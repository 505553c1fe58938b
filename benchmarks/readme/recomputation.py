"""What the recomputation policies free and cost."""

from __future__ import annotations

from typing import Any

from benchmarks.readme.results import measured_on, table
from explorer.spec.candidate import Candidate


def recomputation(results: dict[str, Any], name: str) -> str:
    """Bytes kept and cost of a step by policy, a column a model and expert back end."""
    columns: dict[str, dict[str, str]] = {}
    for row in results["rows"]:
        candidate = Candidate.model_validate(row["candidate"])
        if candidate.bta_tile and candidate.recompute.layer_share:
            continue  # longer and larger than policies of operations; the raw results have them
        experts = f", `{candidate.expert_backend}`" if candidate.expert_backend else ""
        policy = candidate.recompute.value + (f", tile {candidate.bta_tile}" if candidate.bta_tile else "")
        cells = columns.setdefault(f"{row['name']}{experts}", {})
        cells[policy] = f"{row['bytes_share']:.0%}, {row['step_cost']:+.1%}"
    policies = list(dict.fromkeys(policy for cells in columns.values() for policy in cells))
    sizes = {row["candidate"]["micro_batch_size"] for row in results["rows"]}
    assert len(sizes) == 1, "one micro-batch size a run"
    lines = [[policy, *(cells.get(policy, "-") for cells in columns.values())] for policy in policies]
    return "".join(
        [
            "Recomputation: activations that a layer keeps, and what a micro-step takes longer, both relative to no "
            f"recomputation, composed of blocks measured at micro-batch {sizes.pop()} "
            f"(`python -m benchmarks.recomputation ... --out benchmarks/results/{name}.json`):\n\n",
            table(["policy", *columns], lines),
            f"\n{measured_on(results)}\n",
        ]
    )
