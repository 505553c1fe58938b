"""Which share of changes to the source the tests notice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.docs.results import Row, table


def mutation(result: Row) -> str:
    """The share of killed mutants by folder, and how they were drawn."""
    rows: list[tuple[str, Mapping[str, Any]]] = [*result["folders"].items(), ("all", result)]
    shares = table(
        rows,
        {
            "folder": lambda row: row[0] if row[0] == "all" else f"`{row[0]}`",
            "mutants": lambda row: row[1]["sample"],
            "killed": lambda row: row[1]["killed"],
            "share": lambda row: f"{row[1]['share']:.1%}",
            "95% interval (Wilson)": lambda row: "{:.1%} to {:.1%}".format(*row[1]["wilson_95"]),
        },
    )
    settings, packages = result["settings"], result["environment"]
    return (
        f"{shares}\n{result['sample']} of {result['num_mutants']} mutants, drawn by seed {settings['seed']} at commit "
        f"{settings['commit'][:12]} with the operators of mutmut {packages['mutmut']}. A mutant that takes "
        f"{settings['processor_seconds']} s of processor time, or ends its process, counts as killed.\n"
    )
