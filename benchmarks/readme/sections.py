"""Which section of README.md shows which results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from benchmarks.readme.attention import attention_choice, bta
from benchmarks.readme.cluster import cluster
from benchmarks.readme.context_parallel import attention, steps
from benchmarks.readme.explorations import (
    explorations,
    explorations_fused,
    explorations_of_devices,
    fidelity,
    log_of_olmoe,
)
from benchmarks.readme.goals import goals
from benchmarks.readme.kernels import grouped_gemm, variable_gemm
from benchmarks.readme.layers import moe_layer
from benchmarks.readme.recomputation import recomputation
from benchmarks.readme.replay import reliability, strategies
from benchmarks.readme.results import exists, load
from benchmarks.readme.transformers import transformers


def fill(text: str) -> str:
    """`text` with every marked section replaced by what the results say; nothing for results that do not exist.

    Raises:
        ValueError: a section of SECTIONS is missing, or one is marked that is neither there nor in OPTIONAL.
    """
    for name in re.findall(r"<!-- /(.*?) -->", text):
        if name not in SECTIONS | OPTIONAL:
            raise ValueError(f"README.md has a section {name}, which nothing fills")
    for name, render in (SECTIONS | OPTIONAL).items():
        section = re.compile(rf"<!-- {name} -->\n.*?<!-- /{name} -->", re.DOTALL)
        if not section.search(text):
            if name in OPTIONAL and f"<!-- {name} -->" not in text:
                continue
            raise ValueError(f"README.md has no section {name}")
        head, tail = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        text = section.sub((head + render() + tail).replace("\\", r"\\"), text)
    return text


def _of(render: Callable[[dict[str, Any], str], str], *names: str) -> Callable[[], str]:
    """A section of the first of these results that exists."""

    def section() -> str:
        return next((render(load(name), name) for name in names if exists(name)), "")

    return section


def _of_all(render: Callable[[dict[str, Any], str], str], *names: str) -> Callable[[], str]:
    """A section of all of these results that exist."""

    def section() -> str:
        return "\n".join(render(load(name), name) for name in names if exists(name))

    return section


SECTIONS: dict[str, Callable[[], str]] = {
    "log": log_of_olmoe,
    "explorations": explorations,
    "fidelity": fidelity,
    "explorations-fused": explorations_fused,
    "explorations-devices": _of(explorations_of_devices, "h200x4-explorations"),
    "grouped-gemm": _of(grouped_gemm, "h200-grouped-gemm"),
    "variable-gemm": _of(variable_gemm, "h200-variable-gemm"),
    "moe-layer": _of(moe_layer, "h200-moe-layer", "h200-moe-layer-quick"),
    "bta": _of(bta, "h200-bta"),
    "bta-math": _of(bta, "h200-bta-math"),
    "recomputation": _of(recomputation, "h200-recomputation"),
    "attention-choice": _of(attention_choice, "h200-attention-choice"),
}

OPTIONAL: dict[str, Callable[[], str]] = {
    "cluster": cluster,
    "context-parallel": _of_all(attention, "h200x4-context-parallel", "h200x8-context-parallel"),
    "context-parallel-step": _of_all(steps, "h200x4-context-parallel-step", "h200x8-context-parallel-step"),
    "context-parallel-sizes": _of_all(steps, "h200x4-context-parallel-sizes"),
    "goals": goals,
    "strategies": _of(strategies, "h200-replay"),
    "reliability": _of(reliability, "h200-replay"),
    "transformers": _of(transformers, "h200-transformers"),
}
"""Filled where README.md marks them, and not asked for."""
