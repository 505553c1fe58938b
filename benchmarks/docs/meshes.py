"""Composed steps of meshes beside whole models on the same devices."""

from __future__ import annotations

from benchmarks.docs.results import GIB, Row, measured_on, table


def mesh_fidelity(result: Row) -> str:
    """One row for each model, mesh and micro-batch; errors are those of the composed figures."""
    figures = table(
        result["rows"],
        {
            "model": lambda row: f"{row['model']}, {row['num_layers']} layers",
            "mesh": lambda row: row["mesh"],
            "micro-batch": lambda row: row["micro_batch_size"],
            "whole step": lambda row: _of(row, "whole_step_seconds", 1e3, ".1f", " ms"),
            "standard error": lambda row: _of(row, "standard_error_seconds", 1e3, ".1f", " ms"),
            "composed step": lambda row: _of(row, "composed_step_seconds", 1e3, ".1f", " ms"),
            "error": lambda row: _of(row, "step_error", 1e2, "+.1f", "%") or row["reason"] or row["outcome"],
            "whole peak": lambda row: _of(row, "whole_peak_bytes", 1 / GIB, ".1f", " GiB"),
            "error of the peak": lambda row: _of(row, "peak_error", 1e2, "+.1f", "%"),
            "commit": lambda row: row.get("commit", result["commit"]),
        },
    )
    return f"{figures}{measured_on(result)}"


def _of(row: Row, key: str, scale: float, form: str, unit: str) -> str | None:
    return None if row.get(key) is None else f"{row[key] * scale:{form}}{unit}"
