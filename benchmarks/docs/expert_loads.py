"""How evenly layers use their experts, in whole models and alone."""

from __future__ import annotations

from benchmarks.docs.results import Row, table


def expert_loads(result: Row) -> str:
    """One row for each model and micro-batch size."""
    return table(
        result["rows"],
        {
            "model": lambda row: row["model_type"],
            "experts": lambda row: f"{row['whole']['num_experts']:.0f}",
            "micro-batch": lambda row: row["micro_batch_size"],
            "whole model, median (mean) of its layers": lambda row: (
                f"{row['whole_median']:.1f} ({row['whole']['busiest']:.1f})"
            ),
            "a layer alone, embedding's output": lambda row: f"{row['of_embedding']['busiest']:.1f}",
            "a layer alone, typical depth": lambda row: f"{row['of_part']['busiest']:.1f}",
            "experts with tokens: whole, embedding's, typical": lambda row: ", ".join(
                f"{row[name]['used']:.0f}" for name in ("whole", "of_embedding", "of_part")
            ),
        },
    )
