"""Trials through Ray: the overhead of each, and the throughput of two workers relative to one.

    python -m benchmarks.cluster --out results/cpu-cluster.json [--trials 24]

Starts a cluster on this host, with one CPU per node, and gives it trials of a tiny model. Real profilers measure them,
with one thread each. Throughput is trials per second with as many in flight as there are workers. Overhead is the time
from submission to answer, less the time that the profiler process itself reports.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, write_results
from bexp.explorer.cost_model.candidate_table import SpaceTable
from bexp.explorer.cost_model.components import Component
from bexp.explorer.cost_model.search_space import enumerate_candidates
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import TrialKind, TrialPlan
from bexp.explorer.search.trial_executor import TrialExecutor
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.ray.pool import RayDevicePool

ROOT = Path(__file__).parent.parent
MOST_OVERHEAD_SECONDS, LEAST_SPEED_UP = 0.1, 1.7
REQUEST: dict[str, Any] = {
    "model": {
        "name": "small",
        "num_layers": 2,
        "hidden_size": 256,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 4,
        "vocab_size": 1024,
        "seq_length": 256,
        "dtype": "float32",
    },
    "micro_batch_size": [1, 2, 3, 4],
    "batch_size": 48,
    "bta": {"enable": False},
    "recompute": ["none"],
    "device_kind": "cpu",
}


def main(arguments: list[str] | None = None) -> int:
    """Measure with one node and with two, and write one JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description="Trials through Ray.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}  # of the actors: these files
    request = ExplorationRequest.model_validate(REQUEST)
    rounds: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    with _cluster() as address:
        pool = RayDevicePool(address, ("cpu",))
        try:
            pool.start()
            report = pool.begin(request)
            deadline = time.monotonic() + 60
            while pool.capacity < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            space = enumerate_candidates(request, report, request.model)
            plans = tiny_plans(SpaceTable(space.candidates, request.model, request), options.trials)
            run_trials(pool, plans[:4], 2)  # warm
            for _ in range(options.rounds):
                for in_flight, results in rounds.items():
                    results.append(run_trials(pool, plans, in_flight))
        finally:
            pool.close()
    alone, both = (statistics.median(r["trials_per_second"] for r in rounds[n]) for n in (1, 2))
    overhead = statistics.median(s for r in rounds[1] for s in r["overhead_seconds"])
    found: dict[str, Any] = {
        "environment": describe_environment(),
        "hardware": report.hardware.model_dump(mode="json"),
        "num_trials": options.trials,
        "rounds": {str(n): results for n, results in rounds.items()},
        "trials_per_second": {"1": alone, "2": both},
        "goals": {
            "speed_up": {"found": both / alone, "met": both / alone >= LEAST_SPEED_UP},
            "overhead_seconds": {"found": overhead, "met": overhead <= MOST_OVERHEAD_SECONDS},
        },
    }
    write_results(options.out, found)
    for goal, outcome in found["goals"].items():
        print(f"{'met   ' if outcome['met'] else 'MISSED'} {goal}: {outcome['found']:.4f}")
    return 0


@contextmanager
def _cluster() -> Iterator[str]:
    import ray  # noqa: PLC0415 - an extra
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - an optional dependency

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def tiny_plans(table: SpaceTable, number: int) -> list[TrialPlan]:
    """Return plans of one component each, going through the most expensive kinds of the space in turn."""
    found: list[tuple[Candidate, Component]] = []
    for candidate, decomposition in zip(table.candidates, table.decompositions, strict=True):
        found += [(candidate, group.blocks[1]) for group in decomposition.layers]
    return [
        TrialPlan(
            number=i,
            kind=TrialKind.COMPONENTS,
            model=table.model,
            candidate=found[i % len(found)][0],
            components=(found[i % len(found)][1],),
            timeout_seconds=60,
        )
        for i in range(number)
    ]


def run_trials(pool: TrialExecutor, plans: list[TrialPlan], in_flight: int) -> dict[str, Any]:
    """Run all plans, with up to `in_flight` at a time."""
    submitted: dict[int, float] = {}
    overheads = []
    waiting = list(reversed(plans))
    started = time.perf_counter()
    while waiting or submitted:
        while waiting and len(submitted) < in_flight:
            plan = waiting.pop()
            submitted[plan.number] = time.perf_counter()
            pool.submit(plan)
        plan, measurement = pool.wait()
        assert measurement.outcome is Outcome.OK, measurement.reason
        phases = measurement.phases
        own = phases.build + phases.warm_up + phases.timed
        overheads.append(time.perf_counter() - submitted.pop(plan.number) - own)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "trials_per_second": len(plans) / seconds, "overhead_seconds": overheads}


if __name__ == "__main__":
    raise SystemExit(main())
