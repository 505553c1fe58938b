"""The marked sections of README.md and docs/, each with the function that fills it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks.docs import (
    attention,
    campaigns,
    context_parallel,
    expert_gemms,
    expert_loads,
    fields,
    goals,
    graphs,
    kernel_goals,
    kernels,
    launches,
    meshes,
    models,
    mutation,
    published_plans,
    results,
    search,
    trainer_goals,
    trainers,
    waiting,
)
from benchmarks.docs.results import ROOT, Row
from benchmarks.environment import is_of_these_kernels

MARKER = re.compile(r"<!-- (?P<name>[a-z0-9-]+) -->\n(?P<old>.*?)<!-- /(?P=name) -->", re.DOTALL)
CLOSING = re.compile(r"<!-- /?([a-z0-9-]+) -->")


def of_result(render: Callable[[Row], str], *names: str) -> str:
    """Return the tables of those results that exist, each with its file and age; an empty text if there are none."""
    return _of_results(render, names)


def of_kernels(render: Callable[[Row], str], *names: str) -> str:
    """Return the same for figures of our expert kernels; a table of earlier kernels begins with a line that says so."""
    return _of_results(lambda found: _kernels_age(found) + render(found), names)


def _of_results(render: Callable[[Row], str], names: Iterable[str]) -> str:
    return "\n".join(
        f"{render(found)}\nRaw rows: `benchmarks/results/{name}.json`{_age(found)}.\n"
        for name in names
        if (found := results.find(name)) is not None
    )


def _kernels_age(found: Row) -> str:
    """Say if the sources of the expert kernels have changed since the measurement."""
    if is_of_these_kernels(found):
        return ""
    return "**Earlier kernels.** The sources of the expert kernels have changed since this was measured.\n\n"


def _age(found: Row) -> str:
    """Return when a result was measured, and at which commit, as far as it says so: code may be newer than a figure."""
    environment = found.get("environment")
    stated = {**environment, **found} if isinstance(environment, dict) else found
    date, commit = stated.get("date"), stated.get("commit")
    at = f" at commit `{commit[:7]}`" if isinstance(commit, str) else ""
    return f", begun on {date[:10]}{at}" if isinstance(date, str) else ""


SECTIONS: dict[str, Callable[[], str]] = {
    "goals": goals.goals,
    "kernel-goals": kernel_goals.goals,
    "goals-in-short": goals.in_short,
    "log": partial(of_result, models.log, "h200-olmoe-fused"),
    "explorations": partial(of_result, models.explorations, "h200-explorations"),
    "waiting": partial(of_result, waiting.waiting, "h100-explorations"),
    "explorations-fused": partial(of_result, models.explorations, "h200-olmoe-fused"),
    "explorations-devices": partial(of_result, models.explorations_of_devices, "h200x4-explorations"),
    "gains": partial(of_result, models.gains, "h200-gains"),
    "fidelity": partial(of_result, models.fidelity, "h200-fidelity"),
    "transformers": partial(of_result, models.transformers, "h200-transformers"),
    "trainer-goals": partial(of_result, trainer_goals.goals, "h100-real-trainers"),
    "compositions": partial(of_result, trainers.compositions, "h100-real-trainers"),
    "real-trainers": partial(of_result, trainers.trainers, "h100-real-trainers"),
    "real-trainers-fields": partial(of_result, trainers.chosen_fields, "h100-real-trainers"),
    "trainer-runs-by-hand": partial(of_result, trainers.set_by_hand, "h100-real-trainers"),
    "expert-loads": partial(of_result, expert_loads.expert_loads, "cpu-expert-loads"),
    "strategies": partial(of_result, search.strategies, "h200-replay"),
    "rivals": partial(of_result, search.rivals, "h200-replay"),
    "reliability": partial(of_result, search.reliability, "h200-replay"),
    "strategies-drawn": partial(of_result, search.strategies, "replay-drawn"),
    "reliability-drawn": partial(of_result, search.reliability, "replay-drawn"),
    "unseen": partial(of_result, search.unseen, "replay-unseen"),
    "executions": partial(of_result, search.executions, "replay-executions"),
    "in-flight": partial(of_result, search.in_flight, "replay-in-flight"),
    "second-job": partial(of_result, search.second_job, "replay-second-job"),
    "cluster": partial(of_result, search.cluster, "cpu-cluster"),
    "context-parallel": partial(
        of_result, context_parallel.attention, "h200x4-context-parallel", "h200x8-context-parallel"
    ),
    "context-parallel-step": partial(
        of_result, context_parallel.steps, "h200x4-context-parallel-step", "h200x8-context-parallel-step"
    ),
    "context-parallel-sizes": partial(of_result, context_parallel.steps, "h200x4-context-parallel-sizes"),
    "published-plans": partial(of_result, published_plans.published_plans, "h100-published-plans"),
    "mesh-fidelity": partial(of_result, meshes.mesh_fidelity, "h100x2-mesh-fidelity", "h100x2-mesh-fidelity-experts"),
    "grouped-gemm": partial(of_kernels, kernels.grouped_gemm, "h200-grouped-gemm"),
    "variable-gemm": partial(of_kernels, kernels.variable_gemm, "h200-variable-gemm"),
    "auto-gemm": partial(of_kernels, kernels.auto_gemm, "h100-grouped-gemm"),
    "launch-cost": partial(of_kernels, launches.launch_cost, "h100-launch-cost"),
    "moe-turns": partial(of_kernels, kernels.moe_turns, "h100-moe-turns"),
    "quack": partial(of_kernels, expert_gemms.quack, "h100-quack"),
    "fused-choice": partial(of_kernels, expert_gemms.fused_choice, "h100-fused-choice"),
    "moe-layer": partial(of_kernels, kernels.moe_layer, "h200-moe-layer", "h100-moe-layer"),
    "bta": partial(of_result, attention.bta, "h200-bta"),
    "bta-math": partial(of_result, attention.bta, "h200-bta-math"),
    "recomputation": partial(of_result, attention.recomputation, "h200-recomputation"),
    "attention-choice": partial(of_result, attention.attention_choice, "h200-attention-choice"),
    "graph-steps": partial(of_result, graphs.steps, "h100-graph-steps"),
    "campaigns": campaigns.campaigns,
    "device-faults": campaigns.device_faults,
    "reliability-figures": campaigns.figures,
    "mutation": partial(of_result, mutation.mutation, "mutation"),
    "request-fields": fields.request_fields,
}


def pages() -> list[Path]:
    """README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill(text: str) -> str:
    """Return `text` with every marked section filled again.

    Raises:
        ValueError: a marker has no partner, or names a section that nothing fills.
    """
    found = MARKER.sub(_section, text)
    marked = [match["name"] for match in MARKER.finditer(found)]
    markers = CLOSING.findall(text)
    lonely = sorted({name for name in markers if markers.count(name) != 2})
    if lonely or len(set(marked)) != len(marked):
        raise ValueError(f"a section needs one opening and one closing marker: {', '.join(lonely or marked)}")
    return found


def _section(match: re.Match[str]) -> str:
    name = match["name"]
    if name not in SECTIONS:
        raise ValueError(f"nothing fills the section {name}")
    return f"<!-- {name} -->\n{SECTIONS[name]()}<!-- /{name} -->"
