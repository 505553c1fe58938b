"""Steps on meshes: equal to a single device's where there is one, and to counts by hand elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.step import static_parts
from bexp.explorer.meshes.knowledge import MeshKnowledge
from bexp.explorer.meshes.layers import MeshCandidate
from bexp.explorer.meshes.shards import SPREAD_EXPERTS, expert_rows
from bexp.explorer.meshes.step import MeshStep
from bexp.explorer.meshes.transfers import ASSUMED_BYTES_PER_SECOND
from bexp.explorer.model.model import MoESpec
from bexp.explorer.model.routes import draw_batch_routes
from bexp.explorer.model.routing import RoutingSpec
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.measurements import measured
from tests.explorer.shapes import shapes
from tests.explorer.simulator import report

MODEL = shapes(8, 512, 2048, heads=8, vocab=1024, length=512)
MOE = {**MODEL, "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 512}}


def space(parallelism: Any, *, experts: bool = False, **changes: Any) -> MeshKnowledge:
    values = {"model": MOE if experts else MODEL, "batch_size": 32, "micro_batch_size": [2]}
    asked = ExplorationRequest.model_validate({**values, "recompute": ["none"], "parallelism": parallelism, **changes})
    return MeshKnowledge(asked, report(experts=experts))


def only(found: MeshKnowledge) -> MeshCandidate:
    (one,) = found.candidates
    return one


def learned(found: MeshKnowledge, **of_experts: float) -> MeshStep:
    """Return the step if every block takes 1 ms forward and 2 ms backward; `of_experts` are more of shared experts."""
    one = only(found)
    found.learn(
        measured(component, 3e-3, host_seconds=1e-4, **(of_experts if component.part == SPREAD_EXPERTS else {}))
        for component in found.composer.components(one)
    )
    return found.step(one)


def test_a_mesh_of_one_device_takes_the_step_of_one_device() -> None:
    found = space({}, num_devices=1, recompute=["full"])
    one = only(found)
    step, request = found.step(one), found.request
    table = Composition([one.candidate], request.shapes, request)
    costs = [found.predicted(component) for component in table.components]
    device = np.array([[cost.device_seconds for cost in costs]])
    host = np.array([cost.host_seconds for cost in costs])
    assert step.tokens_per_second == pytest.approx(float(table.tokens_per_second(device, host)[0, 0]), rel=0.02)
    assert step.exchange_share == 0.0
    assert step.bubble_share == pytest.approx(0.0)
    state = static_parts(request.shapes, request)
    memory = step.memory
    assert memory.parameters == state.parameters
    assert memory.optimizer_states == state.optimizer_states
    assert sum(step.makeup.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("level", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_data_parallel_ranks_of_a_mesh_need_the_memory_of_devices_without_one(level: str, recompute: str) -> None:
    """Sequences are short, so that buffers of gradients are most of it."""
    asked: dict[str, Any] = {"sharding_levels": [level], "recompute": [recompute], "model": {**MODEL, "seq_length": 16}}
    found = space({"tensor": 1, "pipeline": 1}, num_devices=2, **asked)
    one = only(found)
    table = Composition([one.sharded], found.request.shapes, found.request)
    is_block = [c.kind not in (ComponentKind.OPTIMIZER, ComponentKind.COMMUNICATION) for c in table.components]
    costs = [found.predicted(c) for c, counts in zip(table.components, is_block, strict=True) if counts]
    sizes = []
    for name in ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes"):
        sizes.append(np.zeros(len(is_block)))
        sizes[-1][is_block] = [getattr(cost, name) for cost in costs]
    saved, transient = table.activation_bytes(*sizes)
    memory = found.step(one).memory
    assert memory.activations + memory.transient == saved[0] + transient[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_experts_that_devices_have_run_together_need_no_exchange_besides(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their seconds count as they are, with what runs again in backward, however slow the links are taken to be."""
    for rate in (1e6, 1e11):
        monkeypatch.setitem(ASSUMED_BYTES_PER_SECOND, "cuda", rate)
        found = space({"expert": 2, "sharding": "none"}, experts=True, num_devices=2, recompute=[recompute])
        times = {"waiting_forward_seconds": 0.0, "together_backward_seconds": 9e-3}
        steps = [learned(found, **times, together_forward_seconds=6e-3)]
        steps += [learned(found, **times, together_forward_seconds=7e-3)]
        layers = 8 * steps[0].num_micro_batches
        assert steps[1].seconds - steps[0].seconds == pytest.approx(layers * 1e-3)
        experts = next(each for each in steps[0].makeup if isinstance(each, Component) and each.part == SPREAD_EXPERTS)
        reduced = steps[0].communication_seconds
        ends = 2 * steps[0].num_micro_batches * 3e-3 + steps[0].optimizer_seconds
        expected = layers * (3e-3 + 6e-3 + 9e-3) + ends + reduced
        assert steps[0].seconds == pytest.approx(expected)
        assert steps[0].makeup[experts] <= layers * 3e-3 / steps[0].seconds
    slow = learned(found, **times, together_forward_seconds=6e-3, together_host_backward_seconds=5e-2)
    assert slow.host_bound


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("rate", [1e6, 1e11])
def test_of_experts_that_devices_have_run_together_only_what_computation_does_not_hide_counts_as_exchange(
    rate: float, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own computation is what it is alone, less the copies that were made there in place of exchanges."""
    monkeypatch.setitem(ASSUMED_BYTES_PER_SECOND, "cuda", rate)
    found = space({"expert": 2, "sharding": "none"}, experts=True, num_devices=2, recompute=[recompute])
    step = learned(found, together_forward_seconds=6e-3, together_backward_seconds=9e-3, waiting_forward_seconds=0.0)
    blocks = found.composer._decompose(only(found))
    spread = next(block for sort in blocks.blocks.values() for block in sort if block.overlap is not None)
    assert spread.overlap is not None
    copied = spread.overlap.local_bytes / found.hardware.memory_bandwidth_bytes_per_second
    assert copied > 0
    again = recompute == "full"  # forward runs again in backward, with its copies
    computed = max(0.5e-3, 1e-3 - copied) + max(1e-3, 2e-3 - (2 if again else 1) * copied)
    layers = 8 * step.num_micro_batches
    assert step.makeup[spread.component] == pytest.approx(layers * computed / step.seconds)
    exposed = layers * (6e-3 + 9e-3 - computed) + step.communication_seconds
    assert step.makeup[None] == pytest.approx(exposed / step.seconds)
    assert step.exchange_share == pytest.approx(exposed / step.seconds)
    assert sum(step.makeup.values()) == pytest.approx(1.0)


def test_a_norm_over_all_heads_adds_one_exchange_of_two_numbers_a_token() -> None:
    exchanged = []
    for norm in ("head", "full"):
        found = space({"tensor": 2}, num_devices=2, model={**MODEL, "qk_norm": norm})
        blocks = found._decompose()(only(found))
        (attention, _), *_ = blocks.blocks.values()
        exchanged.append([transfer.seconds for transfer in attention.transfers])
    assert exchanged[1][:2] == exchanged[0]
    assert exchanged[1][2] == pytest.approx(exchanged[0][0] * 2 * 4 * 2 / (512 * 2))


@pytest.mark.parametrize("shadowed", [0, 2])
def test_experts_with_a_capacity_get_the_rows_that_are_left(shadowed: int) -> None:
    """As many as the router of a rank keeps: those of each of its experts, up to the capacity."""
    moe = {**MOE["moe"], "capacity_factor": 0.75}
    mode = {"expert_mode": "shadowed", "shadowed_experts": shadowed} if shadowed else {}
    asked: dict[str, Any] = {"num_devices": 4, "routing": {"kind": "zipf"}}
    dropping = space({"expert": 4, **mode}, experts=True, **asked, model={**MOE, "moe": moe})
    found = space({"expert": 4, **mode}, experts=True, **asked)
    rows, all_rows = (
        expert_rows(component, one.request.shapes, one.request)
        for one in (dropping, found)
        for component in one.composer.components(only(one))
        if component.part == SPREAD_EXPERTS
    )
    experts = dropping.request.shapes.moe
    assert experts is not None
    tokens, capacity = 2 * 512, experts.capacity(2 * 512)
    assert capacity == 192
    routes = draw_batch_routes(MoESpec.model_validate(MOE["moe"]), RoutingSpec(kind="zipf"), tokens, found.request.seed)
    counts = np.bincount(routes.ravel(), minlength=8)
    copied = np.argsort(-counts)[:shadowed]
    kept = np.minimum(counts, capacity)
    assert rows.home == pytest.approx(kept[copied].sum(), abs=1)
    kept[copied] = 0
    assert rows.received == pytest.approx(4 * kept.reshape(4, 2).sum(axis=1).max(), abs=1)
    assert rows.computed < all_rows.computed
    assert kept.sum() / 2 <= rows.moved_out <= min(kept.sum() + 1, all_rows.moved_out), "a row has one pair or two"
    steps = [one.step(only(one)) for one in (dropping, found)]
    assert steps[0].exchange_share < steps[1].exchange_share
    assert only(dropping).candidate.capacity_factor == 0.75


def test_copies_of_experts_on_tensor_parallel_devices_are_summed_after_backward() -> None:
    asked = {"tensor": 4, "expert": 2, "sharding": "none"}
    found = space(asked, num_devices=4, experts=True)
    own = found.request.shapes.num_layers * 8 * 3 * 512 * 512 // 2
    repeated = (2 * 8 + 1) * 512 + 8 * 8 * 512  # norms and routers
    summed = 2 * 2 * (own + repeated) / ASSUMED_BYTES_PER_SECOND["cuda"]
    assert found.step(only(found)).communication_seconds == pytest.approx(summed), "nothing is divided"


def test_the_copies_of_a_tied_embedding_sum_their_gradients_after_backward() -> None:
    asked = {"pipeline": 2, "tensor": 2, "schedule": "1f1b"}
    tied, apart = (space(asked, num_devices=4, model={**MODEL, "tie_embeddings": is_tied}) for is_tied in (True, False))
    step = tied.step(only(tied))
    summed = 2 * (1024 // 2) * 512 / ASSUMED_BYTES_PER_SECOND["cuda"]
    assert step.communication_seconds - apart.step(only(apart)).communication_seconds == pytest.approx(summed)
    assert sum(step.makeup.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("asked", "model", "repeated"),
    [
        # Two norms of each layer, and that of the head.
        ({"tensor": 4}, MODEL, (2 * 8 + 1) * 512),
        ({"tensor": 4}, {**MODEL, "norm": "layernorm"}, (2 * 8 + 1) * 2 * 512),
        ({"tensor": 4}, {**MODEL, "mlp_bias": True, "attention_output_bias": True}, (4 * 8 + 1) * 512),
        ({"tensor": 4}, {**MODEL, "qk_norm": "head"}, (2 * 8 + 1) * 512 + 8 * 2 * 64),
        ({"tensor": 4}, {**MODEL, "qk_norm": "full"}, (2 * 8 + 1) * 512),
        ({"tensor": 4}, {**MODEL, "position": "learned"}, (2 * 8 + 1) * 512 + 512 * 512),
        # Four layers of each stage; the second one has the head's norm.
        ({"tensor": 4, "pipeline": 2, "schedule": "1f1b"}, MODEL, (2 * 4 + 1) * 512),
        # Routers have 8 rows.
        ({"tensor": 4}, MOE, (2 * 8 + 1) * 512 + 8 * 8 * 512),
        ({"tensor": 4, "expert": 4}, MOE, (2 * 8 + 1) * 512 + 8 * 8 * 512),
        ({"tensor": 1, "pipeline": 2, "schedule": "1f1b"}, MODEL, 0),
    ],
)
def test_gradients_of_what_tensor_parallel_devices_have_whole_are_summed_once_a_step(
    asked: dict[str, Any], model: dict[str, Any], repeated: int
) -> None:
    devices = asked["tensor"] * asked.get("pipeline", 1)
    found = space(asked, num_devices=devices, experts="moe" in model, model=model)
    step = found.step(only(found))
    summed = 2 * 2 * repeated / ASSUMED_BYTES_PER_SECOND["cuda"]
    assert step.communication_seconds == pytest.approx(summed), "a sum passes all twice, in bfloat16"
    assert sum(step.makeup.values()) == pytest.approx(1.0)
