"""What formulas say of many requests, as recorded: a changed formula shows here, and what it reaches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.collectives import Overlap, is_communication_timed
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, predict_component_table, predict_memory
from bexp.explorer.cost.roofline import predict_component_seconds
from bexp.explorer.meshes.knowledge import MeshKnowledge
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import enumerate_candidates
from tests.explorer.cost import described
from tests.explorer.shapes import shapes
from tests.explorer.simulator import SimulatedDevice, report
from tests.recordings import check_recorded

COSTS = Path(__file__).parent / "costs"
DENSE = shapes(6, 1024, 2816, heads=16, vocab=32000, length=1024, num_query_groups=4)
BIASED = {**DENSE, "gated_mlp": False, "activation": "gelu", "qkv_bias": True, "mlp_bias": True, "tie_embeddings": True}
EXPERTS = {"num_experts": 16, "top_k": 2, "expert_ffn_hidden_size": 704, "first_k_dense": 1}
MOE = {**DENSE, "moe": EXPERTS}
SHARED = {**DENSE, "moe": {**EXPERTS, "shared_expert_ffn_hidden_size": 1408, "capacity_factor": 1.25}}
TABLES: dict[str, dict[str, Any]] = {
    "dense": {"model": DENSE, "batch_size": 64, "num_devices": 2},
    "biased": {"model": BIASED, "batch_size": 64, "training": {"loss": {"kind": "full"}}},
    "experts": {"model": MOE, "batch_size": 64, "routing": {"kind": "zipf"}},
    "plain-experts": {"model": {**BIASED, "moe": EXPERTS}, "batch_size": 64, "bta": {"enable": False}},
    "shared-experts": {"model": SHARED, "num_devices": 4, "training": {"sharding": "zero3"}, "batch_size": 64},
    "evaluation": {"model": MOE, "mode": "eval"},
    "sequences-shared": {"model": DENSE, "num_devices": 4, "batch_size": 64, "context_parallel": {"sizes": [1, 2, 4]}},
    "compiled": {"model": DENSE, "batch_size": 64, "execution": "compile", "num_devices": 2},
}
MESHES: dict[str, dict[str, Any]] = {
    "biased": {
        "model": BIASED,
        "num_devices": 8,
        "training": {"loss": {"kind": "full"}},
        "parallelism": {
            "tensor": [1, 4],
            "pipeline": [2],
            "virtual_stages": [1, 3],
            "schedule": ["1f1b", "interleaved"],
            "sharding": "zero1",
        },
    },
    "experts": {
        "model": MOE,
        "num_devices": 16,
        "routing": {"kind": "zipf"},
        "parallelism": {"tensor": [1, 2], "expert": "explore", "expert_mode": "explore", "sharding": ["none", "zero1"]},
    },
    "shared-experts": {
        "model": SHARED,
        "num_devices": 8,
        "parallelism": {"pipeline": [1, 2], "expert": [1, 4], "expert_mode": "explore", "sharding": ["none", "zero3"]},
    },
    "there": {"model": DENSE, "num_devices": 4, "parallelism": {"tensor": "explore", "pipeline": [1, 2]}},
}
COMPONENTS = 90
ROWS = 24
"""About so many components, and candidates, of each request are recorded, and the first component of each sort."""


def table_rows(request: ExplorationRequest, parts: bool = False) -> list[Any]:
    """Each component's seconds and bytes, and some candidates' steps as these compose them."""
    there = report(memory_gib=80, num_devices=4)
    rep = there.model_copy(update={"parts": described.parts()}) if parts else there
    model = request.shapes if rep.parts is None else rep.parts
    space = enumerate_candidates(request, rep, model)
    table = Composition(space.candidates, model, request, communicates=is_communication_timed(request, rep.hardware))
    rows: list[Any] = []
    every: list[tuple[float, float]] = []
    sorts: set[str] = set()
    for i, component in enumerate(table.components):
        seconds = predict_component_seconds(component, model, request, rep.hardware)
        size = predict_component_bytes(component, model, request)
        every.append((seconds.device, seconds.host))
        sort = re.sub(r"\d+", "", component.key)
        if i % max(1, len(table.components) // COMPONENTS) == 0 or sort not in sorts:
            sorts.add(sort)
            figures = [*every[-1], size.saved, size.forward_peak, size.backward_peak]
            rows.append([component.key, *figures])
    device_K, host_K = np.array(every).T
    some = np.arange(0, len(table.candidates), max(1, len(table.candidates) // ROWS))
    micro = table.micro_step_seconds(device_K[None, :], host_K, some)[0]
    optimizer = table.optimizer_seconds(device_K[None, :], host_K, some)[0]
    number = len(device_K)
    host_2K = np.stack([np.full(number, 2e-4), np.full(number, 1e-3)])
    overlap = Overlap(np.full(number, 0.35), np.full(number, 0.2), host_2K) if table.communications else None
    tokens = table.tokens_per_second(device_K[None, :], host_K, rows=some, overlap=overlap)[0]
    memory, bytes_3K = predict_memory(table, rep.hardware), predict_component_table(table)
    activations = np.stack(table.activation_bytes(*bytes_3K))
    for i, row in enumerate(some):
        static = table.static_parts(int(row)).model_dump()
        composed = [micro[i], optimizer[i], tokens[i], memory[row], *activations[:, row]]
        rows.append([table.candidates[row].describe(), *(float(each) for each in composed), static])
    return rows


def mesh_rows(request: ExplorationRequest) -> list[Any]:
    """Some candidates' steps by formulas alone, and once half of the blocks are measured."""
    known = MeshKnowledge(request, report(memory_gib=80, num_devices=4))
    some = known.candidates[:: max(1, len(known.candidates) // ROWS)]
    rows: list[Any] = [known.summarize(), [component.key for component in known.transfers]]
    rows += [["by formulas", found.describe(), _step(known, found)] for found in some]
    measured = tuple(dict.fromkeys(c for found in some[::2] for c in known.missing(found)))
    task = TrialTask(
        number=0,
        kind=TrialKind.COMPONENTS,
        model=request.shapes,
        candidate=some[0].candidate,
        components=(*known.transfers, *measured),
        timeout_seconds=1.0,
    )
    known.learn(SimulatedDevice(request, noise=0.0)(task).components)
    rows += [["measured", found.describe(), _step(known, found)] for found in some]
    return rows


def _step(known: MeshKnowledge, found: Any) -> dict[str, Any]:
    step = known.step(found, simulate=True)
    makeup = {"devices" if part is None else part.key: share for part, share in step.makeup.items()}
    names = ("seconds", "tokens_per_second", "micro_step_seconds", "optimizer_seconds", "communication_seconds")
    shares = ("compute_share", "exchange_share", "bubble_share", "num_micro_batches", "fullest_rank", "layers")
    return {
        **{name: getattr(step, name) for name in (*names, *shares)},
        "memory": step.memory.model_dump(),
        "makeup": dict(sorted(makeup.items(), key=lambda item: -item[1])[:6]),
        "estimated": known.step(found).seconds,
        "spared": known.spared_share(found),
        "errors": [known.error(part) for part in step.makeup if isinstance(part, Component)][:4],
    }


@pytest.mark.parametrize("name", TABLES)
def test_the_costs_of_candidates_are_as_recorded(name: str) -> None:
    request = ExplorationRequest.model_validate({"micro_batch_size": "explore", **TABLES[name]})
    check_recorded(COSTS / f"{name}.json", table_rows(request), relative=1e-6)


PARTS: dict[str, dict[str, Any]] = {
    "parts": {},
    "parts-sharded": {"num_devices": 2, "training": {"sharding": "zero3"}},
    "parts-evaluated": {"mode": "eval"},
}


@pytest.mark.parametrize("name", PARTS)
def test_the_costs_of_a_model_of_parts_are_as_recorded(name: str) -> None:
    rows = table_rows(described.request(**PARTS[name]), parts=True)
    check_recorded(COSTS / f"{name}.json", rows, relative=1e-6)


@pytest.mark.parametrize("name", MESHES)
def test_the_costs_of_meshes_are_as_recorded(name: str) -> None:
    values = {"batch_size": 96, "micro_batch_size": [1, 2], "recompute": ["none", "selective", "full"], **MESHES[name]}
    check_recorded(COSTS / f"meshes-{name}.json", mesh_rows(ExplorationRequest.model_validate(values)), relative=1e-6)
