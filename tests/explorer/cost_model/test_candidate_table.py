"""The composition of a step, against a walk through its timeline one layer at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from explorer.cost_model.candidate_table import SpaceTable
from explorer.cost_model.components import Component, ComponentKind
from explorer.cost_model.parameters import count_embedding, count_head
from explorer.cost_model.step import gathered_bytes
from explorer.spec.candidate import Candidate, Recompute, recomputed_layers
from explorer.spec.model import LayerKind
from explorer.spec.request import ExplorationRequest

MODEL: dict[str, Any] = {
    "num_layers": 7,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "seq_length": 32,
    "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 64, "first_k_dense": 2},
}


def request(**changes: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate({"model": MODEL, "batch_size": 10, **changes})


def candidate(recompute: Recompute = Recompute.NONE, **changes: Any) -> Candidate:
    shape = {"micro_batch_size": 4, "attention_backend": "math", "expert_backend": "loop", "num_query_groups": 4}
    return Candidate.model_validate({**shape, "recompute": recompute, **changes})


def walk(
    req: ExplorationRequest, chosen: Candidate, sizes: dict[Component, tuple[int, int, int]], table: SpaceTable
) -> int:
    """The highest level of allocated bytes over the training state."""
    parts = table.decompositions[0]
    output = 4 * 32 * 64 * req.model.dtype.itemsize
    blocks = {}
    for group in parts.layers:
        kind = LayerKind.MOE if group.blocks[1].kind.value == "moe_ffn" else LayerKind.DENSE
        blocks[kind, group.recomputed] = tuple(sizes[block] for block in group.blocks)
    layers = list(zip(req.model.layer_kinds, recomputed_layers(req.model, chosen.recompute), strict=True))
    assert parts.embedding is not None
    level = sizes[parts.embedding][0]
    highest, held = level, []
    for layer in layers:
        attention, ffn = blocks[layer]
        highest = max(highest, level + attention[1], level + attention[0] + ffn[1])
        held.append(output if layer[1] else attention[0] + ffn[0])
        level += held[-1]
    head = sizes[parts.head]
    highest = max(highest, level + head[1], level + head[2])
    for layer in reversed(layers):
        attention, ffn = blocks[layer]
        level -= held.pop()
        highest = max(highest, level + output + attention[0] + ffn[2], level + output + attention[2])
    return highest


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("seed", range(5))
def test_peak_is_that_of_the_timeline(recompute: Recompute, seed: int) -> None:
    req, chosen = request(), candidate(recompute)
    table = SpaceTable([chosen], req.model, req)
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


def test_optimizer_transient_counts_where_it_is_the_peak() -> None:
    req, chosen = request(), candidate()
    table = SpaceTable([chosen], req.model, req)
    array = np.ones((3, len(table.components)))
    array[:, table.column[table.components[-1]]] = 1e9
    saved_C, transient_C = table.activation_bytes(*array)
    assert saved_C[0] == 0
    assert transient_C[0] == 1e9


def test_a_step_is_its_micro_steps_by_a_real_ratio_and_one_optimizer_step() -> None:
    req, chosen = request(), candidate()
    table = SpaceTable([chosen], req.model, req)
    device = np.full((1, len(table.components)), 0.001)
    host = np.zeros(len(table.components))
    micro_step = (2 + 2 * 7) * 0.001  # embedding, head, and two blocks a layer
    step = 10 / 4 * micro_step + 0.001
    assert table.tokens_per_second(device, host)[0, 0] == pytest.approx(10 * 32 / step)


def test_a_host_that_falls_behind_over_the_whole_pass_decides_its_time() -> None:
    req, chosen = request(), candidate()
    table = SpaceTable([chosen], req.model, req)
    device = np.full((1, len(table.components)), 0.001)
    host = np.full(len(table.components), 0.002)
    assert table.micro_step_seconds(device, host)[0, 0] == pytest.approx(16 * 0.002)
    host[table.column[table.decompositions[0].head]] = 0.0
    assert table.micro_step_seconds(device, host)[0, 0] == pytest.approx(15 * 0.002)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_gathered_counts_where_it_is_gathered(sharding: str, tied: bool) -> None:
    model = {**MODEL, "vocab_size": 5000, "tie_embeddings": tied}
    req = request(num_devices=5, training={"sharding": sharding}, model=model)
    gathered = gathered_bytes(req.model, req)
    table, plain = (SpaceTable([candidate()], req.model, r) for r in (req, request(model=model)))
    head = (count_head(req.model) + (count_embedding(req.model) if tied else 0)) * 2
    assert gathered.at_head == {"zero1": head if tied else 0, "zero2": head, "zero3": 2 * head}[sharding]
    for kind, found in ((ComponentKind.HEAD, gathered.at_head), (ComponentKind.MOE_FFN, gathered.at_layer)):
        sizes = np.array([1e9 if component.kind is kind else 1.0 for component in table.components])
        saved = np.ones(len(table.components))
        peaks = [np.add(*t.activation_bytes(saved, sizes, sizes))[0] for t in (table, plain)]
        assert peaks[0] - peaks[1] == pytest.approx(found)


def test_sharded_gradients_still_exist_whole_for_a_layer() -> None:
    plain = request(num_devices=5)
    sharded = request(num_devices=5, training={"sharding": "zero2"})
    ones = [np.ones(len(SpaceTable([candidate()], r.model, r).components)) for r in (plain, sharded)]
    tables = [SpaceTable([candidate()], r.model, r) for r in (plain, sharded)]
    peaks = [np.add(*t.activation_bytes(o, o, o))[0] for t, o in zip(tables, ones, strict=True)]
    assert peaks[1] - peaks[0] > 2 * 64 * 64 * 4 * 3  # more than the experts of one layer in bf16
    assert tables[1].static_parts(0).gradients * 5 == pytest.approx(tables[0].static_parts(0).gradients, rel=0.01)
