"""The composition of a step, against a walk through its timeline one layer at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, required_table
from bexp.explorer.cost.step import required_bytes
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import ON_DEVICE, Recompute, recomputed_layers
from bexp.explorer.model.model import LayerKind
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.cost import tiny
from tests.explorer.shapes import experts, shapes

MODEL = shapes(7, 64, 128, heads=4, vocab=100, length=32, moe=experts(4, 2, 64, first_k_dense=2))


def request(**changes: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate({"model": MODEL, "batch_size": 10, **changes})


def candidate(recompute: Recompute = Recompute.NONE, **changes: Any) -> Candidate:
    shape = {"micro_batch_size": 4, "attention_backend": "math", "expert_backend": "loop", "num_query_groups": 4}
    return Candidate.model_validate({**shape, "recompute": recompute, **changes})


def walk(
    req: ExplorationRequest, chosen: Candidate, sizes: dict[Component, tuple[int, int, int]], table: Composition
) -> int:
    """The highest level of allocated bytes over the training state."""
    parts = table.decompositions[0]
    output = 4 * 32 * 64 * req.shapes.dtype.itemsize
    blocks = {}
    for group in parts.layers:
        kind = LayerKind.MOE if group.blocks[1].kind.value == "moe_ffn" else LayerKind.DENSE
        blocks[kind, group.layers.recomputed] = tuple(sizes[block] for block in group.blocks)
    layers = list(zip(req.shapes.layer_kinds, recomputed_layers(req.shapes, chosen.recompute), strict=True))
    assert parts.embedding is not None
    level = sizes[parts.embedding][0]
    highest, held = level, []
    size = chosen.recompute.group_size or 1
    for index, layer in enumerate(layers):
        attention, ffn = blocks[layer]
        highest = max(highest, level + attention[1], level + attention[0] + ffn[1])
        ends_chunk = (index + 1) % size == 0 or index + 1 == len(layers)
        held.append((output if ends_chunk else 0) if layer[1] else attention[0] + ffn[0])
        level += held[-1]
    head = sizes[parts.head]
    highest = max(highest, level + head[1], level + head[2])
    for index, layer in reversed(list(enumerate(layers))):
        attention, ffn = blocks[layer]
        level -= held.pop()
        beside = sum(sum(block[0] for block in blocks[other]) for other in layers[index // size * size : index])
        at = level + output + beside
        highest = max(highest, at + attention[0] + ffn[2], at + attention[2])
        if size > 1:
            highest = max(highest, at + attention[0] + ffn[1], at + attention[1])
    return highest


@pytest.mark.parametrize("recompute", [*ON_DEVICE, *map(Recompute, ("layers_3", "groups_2", "groups_3"))])
@pytest.mark.parametrize("seed", range(5))
def test_peak_is_that_of_the_timeline(recompute: Recompute, seed: int) -> None:
    req, chosen = request(), candidate(recompute)
    table = Composition([chosen], req.shapes, req)
    rng = np.random.default_rng(seed)
    sizes: dict[Component, tuple[int, int, int]] = {}
    for component in table.components:
        saved = int(rng.integers(10_000, 60_000))
        sizes[component] = (saved, saved + int(rng.integers(0, 90_000)), saved + int(rng.integers(0, 90_000)))
        if component.kind.value == "optimizer":
            sizes[component] = (0, 0, 0)
    # Recomputation of a whole block changes nothing of what the block itself weighs.
    for component, size in list(sizes.items()):
        for other in sizes:
            if other.kind is component.kind and other.kind.value in {"attention", "dense_ffn", "moe_ffn"}:
                sizes[other] = size
    array = np.array([sizes[c] for c in table.components], dtype=float).T
    saved_C, transient_C = table.activation_bytes(*array)
    assert saved_C[0] + transient_C[0] == walk(req, chosen, sizes, table)


def test_a_host_that_falls_behind_over_the_whole_pass_decides_its_time() -> None:
    req, chosen = request(), candidate()
    table = Composition([chosen], req.shapes, req)
    device = np.full((1, len(table.components)), 0.001)
    host = np.full(len(table.components), 0.002)
    assert table.micro_step_seconds(device, host)[0, 0] == pytest.approx(16 * 0.002)
    host[table.column[table.decompositions[0].head]] = 0.0
    assert table.micro_step_seconds(device, host)[0, 0] == pytest.approx(15 * 0.002)


def tiny_candidate(size: int = 1, **changes: Any) -> Candidate:
    shape = {"micro_batch_size": size, "attention_backend": "flash", "num_query_groups": 1}
    return Candidate.model_validate({**shape, **changes})


def tiny_table(*candidates: Candidate, **changes: Any) -> Composition:
    req = tiny.request(**changes)
    return Composition(candidates or [tiny_candidate()], tiny.model_of(req), req)


@pytest.mark.parametrize("allocator", ["default", "expandable_segments"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_table_needs_the_bytes_that_a_step_needs(allocator: str, kind: Any) -> None:
    table, device = tiny_table(allocator=allocator), tiny.hardware(kind)
    activations = 10.0**9
    expected = required_bytes(table.static_parts(0).total + 10**9, device, allocator)
    assert required_table(table, np.array([activations]), device)[0] == pytest.approx(expected, abs=1)
    rows = np.array([0, 0])
    assert required_table(table, np.array([activations, 0.0]), device, rows)[0] == pytest.approx(expected, abs=1)
