"""The composition of a step, against a walk through its timeline one layer at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, predict_component_table, predict_memory, required_table
from bexp.explorer.cost.step import required_bytes
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import ON_DEVICE, Recompute, recomputed_layers
from bexp.explorer.model.model import LayerKind
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.cost import tiny

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


def test_optimizer_transient_counts_where_it_is_the_peak() -> None:
    req, chosen = request(), candidate()
    table = Composition([chosen], req.shapes, req)
    array = np.ones((3, len(table.components)))
    array[:, table.column[table.components[-1]]] = 1e9
    saved_C, transient_C = table.activation_bytes(*array)
    assert saved_C[0] == 0
    assert transient_C[0] == 1e9


def test_a_step_is_its_micro_steps_by_a_real_ratio_and_one_optimizer_step() -> None:
    req, chosen = request(), candidate()
    table = Composition([chosen], req.shapes, req)
    device = np.full((1, len(table.components)), 0.001)
    host = np.zeros(len(table.components))
    micro_step = (2 + 2 * 7) * 0.001  # embedding, head, and two blocks a layer
    step = 10 / 4 * micro_step + 0.001
    assert table.tokens_per_second(device, host)[0, 0] == pytest.approx(10 * 32 / step)


def test_a_host_that_falls_behind_over_the_whole_pass_decides_its_time() -> None:
    req, chosen = request(), candidate()
    table = Composition([chosen], req.shapes, req)
    device = np.full((1, len(table.components)), 0.001)
    host = np.full(len(table.components), 0.002)
    assert table.micro_step_seconds(device, host)[0, 0] == pytest.approx(16 * 0.002)
    host[table.column[table.decompositions[0].head]] = 0.0
    assert table.micro_step_seconds(device, host)[0, 0] == pytest.approx(15 * 0.002)


def test_sharded_gradients_still_exist_whole_for_a_layer() -> None:
    plain = request(num_devices=5)
    sharded = request(num_devices=5, training={"sharding": "zero2"})
    ones = [np.ones(len(Composition([candidate()], r.shapes, r).components)) for r in (plain, sharded)]
    tables = [Composition([candidate()], r.shapes, r) for r in (plain, sharded)]
    peaks = [np.add(*t.activation_bytes(o, o, o))[0] for t, o in zip(tables, ones, strict=True)]
    assert peaks[1] - peaks[0] > 2 * 64 * 64 * 4 * 3  # more than the experts of one layer in bf16
    assert tables[1].static_parts(0).gradients * 5 == pytest.approx(tables[0].static_parts(0).gradients, rel=0.01)


def tiny_candidate(size: int = 1, **changes: Any) -> Candidate:
    shape = {"micro_batch_size": size, "attention_backend": "flash", "num_query_groups": 1}
    return Candidate.model_validate({**shape, **changes})


def tiny_table(*candidates: Candidate, **changes: Any) -> Composition:
    req = tiny.request(**changes)
    return Composition(candidates or [tiny_candidate()], tiny.model_of(req), req)


def test_the_larger_of_device_and_host_decides_for_each_candidate_by_itself() -> None:
    table = tiny_table(tiny_candidate(1), tiny_candidate(2))
    device = np.array([[float(c.micro_batch_size) for c in table.components]])
    host = np.full(len(table.components), 1.5)
    # Six blocks each: embedding, head, and attention and FFN of two layers.
    assert table.micro_step_seconds(device, host)[0].tolist() == [6 * 1.5, 6 * 2.0]
    assert table.micro_step_seconds(device, 0 * host)[0].tolist() == [6 * 1.0, 6 * 2.0]
    assert table.micro_step_seconds(0 * device, host)[0].tolist() == [9.0, 9.0]


def test_the_optimizer_takes_the_larger_of_device_and_host() -> None:
    table = tiny_table()
    device, host = np.array([[1.0] * 5, [3.0] * 5]), np.full(5, 2.0)
    assert table.optimizer_seconds(device, host)[:, 0].tolist() == [2.0, 3.0]
    still = tiny_table(mode="eval")
    assert still.optimizer_seconds(device, host).tolist() == [[0.0], [0.0]]


def test_without_training_throughput_is_that_of_one_micro_batch() -> None:
    table = tiny_table(tiny_candidate(3), mode="eval")
    device = np.full((1, len(table.components)), 0.5)
    assert table.tokens_per_second(device, np.zeros(len(table.components)))[0, 0] == pytest.approx(3 * 16 / 3.0)


def test_shares_of_a_step_count_blocks_as_often_as_they_run() -> None:
    table = tiny_table()
    seconds = {"embedding": 1.0, "attention": 2.0, "dense_ffn": 3.0, "head": 4.0, "optimizer": 99.0}
    shares = table.step_shares(np.array([seconds[c.kind.value] for c in table.components]), np.array([0]))[0]
    found = {table.components[k].kind.value: share for k, share in zip(table.columns_CP[0], shares, strict=True)}
    whole = 1.0 + 2 * 2.0 + 2 * 3.0 + 4.0
    expected = {"embedding": 1, "attention": 4, "dense_ffn": 6, "head": 4, "optimizer": 0}
    assert found == pytest.approx({kind: share / whole for kind, share in expected.items()})


def test_components_that_are_not_known_are_listed_in_the_order_of_a_step() -> None:
    table = tiny_table(tiny_candidate(2), tiny_candidate(1))
    known = np.zeros(len(table.components), dtype=bool)
    assert table.missing(1, known) == table.decompositions[1].components
    known[table.column[table.decompositions[1].head]] = True
    assert [c.kind.value for c in table.missing(1, known)] == ["embedding", "attention", "dense_ffn", "optimizer"]
    assert table.uses_CK[1].sum() == table.used_CP[1].sum() == 5


@pytest.mark.parametrize("allocator", ["default", "expandable_segments"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_table_needs_the_bytes_that_a_step_needs(allocator: str, kind: Any) -> None:
    table, device = tiny_table(allocator=allocator), tiny.hardware(kind)
    activations = 10.0**9
    expected = required_bytes(table.static_parts(0).total + 10**9, device, allocator)
    assert required_table(table, np.array([activations]), device)[0] == pytest.approx(expected, abs=1)
    rows = np.array([0, 0])
    assert required_table(table, np.array([activations, 0.0]), device, rows)[0] == pytest.approx(expected, abs=1)


def test_a_share_of_the_predicted_activations_may_be_asked_for() -> None:
    table, device = tiny_table(tiny_candidate(64)), tiny.hardware()
    saved, transient = table.activation_bytes(*predict_component_table(table))
    whole, none = (predict_memory(table, device, activation_share=share)[0] for share in (1.0, 0.0))
    assert predict_memory(table, device)[0] == whole
    assert none == pytest.approx(required_table(table, np.zeros(1), device)[0])
    assert whole == pytest.approx(required_table(table, saved + transient, device)[0])
    assert predict_memory(table, device, activation_share=0.7)[0] == pytest.approx(0.3 * none + 0.7 * whole)
