"""What a step costs beside its components, with every figure worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.cost.step import (
    GIB,
    MARGIN_BYTES,
    GatheredBytes,
    combine_seconds,
    gathered_bytes,
    memory_limit,
    required_bytes,
    static_parts,
)
from tests.explorer.cost.tiny import EMBEDDING, LAYER, TOTAL, hardware, model_of, request

MIB = 2**20


def sharded(level: str, num_devices: int = 5, model: dict[str, Any] | None = None, **changes: Any) -> Any:
    training = {"sharding": level, **changes}
    return request(model, num_devices=num_devices, batch_size=4 * num_devices, training=training)


def test_the_hand_count_of_the_model_is_right() -> None:
    assert count_parameters(model_of(request())) == TOTAL == 1704


@pytest.mark.parametrize(("allocator", "percent"), [("default", 105), ("expandable_segments", 102)])
def test_a_gpu_needs_the_peak_with_fragmentation_the_context_and_half_a_gib(allocator: str, percent: int) -> None:
    assert required_bytes(100 * GIB, hardware(), allocator) == percent * GIB + 70 + GIB // 2


def test_a_cpu_keeps_64_mib_free() -> None:
    assert required_bytes(100 * GIB, hardware("cpu"), "default") == 105 * GIB + 70 + 64 * MIB
    assert MARGIN_BYTES == {"cuda": 512 * MIB, "cpu": 64 * MIB}


def test_a_step_is_its_micro_steps_the_optimizer_and_the_communication() -> None:
    req = request(num_devices=2, batch_size=20)
    step = combine_seconds(0.5, 0.25, 4, model_of(req), req, communication=0.125)
    assert step.step == pytest.approx(10 / 4 * 0.5 + 0.25 + 0.125)
    assert step.tokens_per_second == pytest.approx(10 * 16 / step.step)
    assert (step.micro_step, step.optimizer, step.communication) == (0.5, 0.25, 0.125)
    assert combine_seconds(0.5, 0.25, 4, model_of(req), req).step == pytest.approx(1.5)


def test_float32_parameters_have_no_master_weights() -> None:
    req = request({"dtype": "float32"})
    found = static_parts(model_of(req), req)
    assert (found.parameters, found.master_weights, found.optimizer_states) == (4 * TOTAL, 0, 8 * TOTAL)


def test_the_limit_is_the_devices_unless_less_is_asked_for() -> None:
    gpu = hardware(memory_bytes=10 * GIB, memory_limit_bytes=8 * GIB)
    assert memory_limit(request(), gpu) == 8 * GIB
    assert memory_limit(request(memory_limit_gib=2.5), gpu) == 2.5 * GIB
    assert memory_limit(request(memory_limit_gib=9), gpu) == 8 * GIB, "others hold the rest"
    assert memory_limit(request(headroom=0.25), gpu) == 6 * GIB
    assert memory_limit(request(headroom=0.25, memory_limit_gib=2), gpu) == 1.5 * GIB


def test_on_a_cpu_a_person_may_ask_for_all_the_memory() -> None:
    cpu = hardware("cpu", memory_bytes=10 * GIB, memory_limit_bytes=8 * GIB)
    assert memory_limit(request(), cpu) == 8 * GIB
    assert memory_limit(request(memory_limit_gib=9), cpu) == 9 * GIB
    assert memory_limit(request(memory_limit_gib=11), cpu) == 10 * GIB


def test_nothing_is_gathered_without_sharding_or_training() -> None:
    for req in (request(), sharded("none"), request(mode="eval", num_devices=2, training={"sharding": "zero3"})):
        assert gathered_bytes(model_of(req), req) == GatheredBytes(0, 0)


def test_the_buffer_of_a_large_head_lasts_into_the_first_layer() -> None:
    req = sharded("zero2", model={"vocab_size": 1000})
    assert gathered_bytes(model_of(req), req).at_layer == (LAYER + 8008) * 2 + LAYER * 2


def test_a_tied_head_is_gathered_with_the_embedding() -> None:
    tied = {"tie_embeddings": True}
    whole = (EMBEDDING + 8) * 2
    found = {level: sharded(level, model=tied) for level in ("zero1", "zero2", "zero3")}
    at_head = {level: gathered_bytes(model_of(req), req).at_head for level, req in found.items()}
    assert at_head == {"zero1": whole, "zero2": whole, "zero3": 2 * whole}
