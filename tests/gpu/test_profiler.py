"""A real profiler process on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.model import DType, ModelSpec, MoESpec
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.profiler import Profiler
from tests.gpu.needs import visible

pytestmark = visible(1)

MODEL = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=1024,
    ffn_hidden_size=2048,
    num_attention_heads=8,
    num_query_groups=2,
    vocab_size=8192,
    seq_length=1024,
    dtype=DType.BFLOAT16,
    moe=MoESpec(num_experts=8, top_k=2, expert_ffn_hidden_size=512, first_k_dense=1),
)
REQUEST = ExplorationRequest(model=MODEL)


@pytest.fixture(scope="module")
def profiler() -> Iterator[Profiler]:
    with Profiler("cuda:0") as shared:
        yield shared


def plan(
    candidate: Candidate, *components: Component, kind: TrialKind = TrialKind.COMPONENTS, model: ModelSpec = MODEL
) -> TrialTask:
    return TrialTask(
        number=0, kind=kind, model=model, candidate=candidate, components=components, timeout_seconds=120.0
    )


def candidate_for(profiler: Profiler, micro_batch_size: int, experts: str | None = None) -> Candidate:
    report = profiler.begin(REQUEST)
    return Candidate(
        micro_batch_size=micro_batch_size,
        attention_backend=report.default_attention,
        expert_backend=experts or report.default_experts,
        num_query_groups=2,
    )


def test_the_device_is_measured(profiler: Profiler) -> None:
    hardware = profiler.hardware()
    assert hardware.device_kind == "cuda"
    assert 100 << 20 < hardware.context_bytes < 4 << 30
    peaks = hardware.matmul_flops_per_second
    assert peaks[DType.BFLOAT16] > peaks[DType.FLOAT32] > 1e12
    assert hardware.memory_bandwidth_bytes_per_second > 1e11
    assert hardware.versions.cuda
    assert hardware.versions.driver


@pytest.mark.parametrize("experts", ["grouped_mm", "loop", "bmm"])
def test_components_compose_to_less_than_they_peak_at(profiler: Profiler, experts: str) -> None:
    chosen = candidate_for(profiler, 4, experts)
    result = profiler.measure(plan(chosen, *Decomposer(MODEL, training=True)(chosen).components))
    assert result.outcome is Outcome.OK, result.reason
    assert profiler.restarts == 0, "a trial leaves the device as it found it"
    for found in result.components:
        assert 0 < found.forward_device_seconds <= found.device_seconds
        assert found.standard_error_seconds < 0.2 * found.device_seconds
        if found.component.kind is not ComponentKind.OPTIMIZER:
            assert 0 < found.saved_bytes <= found.forward_peak_bytes


def test_the_whole_model_runs(profiler: Profiler) -> None:
    chosen = candidate_for(profiler, 2)
    result = profiler.measure(plan(chosen, kind=TrialKind.WHOLE_MODEL))
    assert result.outcome is Outcome.OK, result.reason
    assert result.whole_model is not None
    assert result.whole_model.peak_bytes > 16 * count_parameters(MODEL)
    assert result.whole_model.reserved_bytes >= result.whole_model.peak_bytes


def test_out_of_memory_is_an_outcome_and_the_process_stays(profiler: Profiler) -> None:
    profiler.begin(REQUEST.model_copy(update={"memory_limit_gib": 2.0}))
    pid = profiler.pid
    chosen = Candidate(micro_batch_size=128, attention_backend="math", expert_backend="grouped_mm", num_query_groups=2)
    (attention,) = (c for c in Decomposer(MODEL, training=True)(chosen).components if c.kind is ComponentKind.ATTENTION)
    result = profiler.measure(plan(chosen, attention))
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    assert result.failed_component == attention
    small = candidate_for(profiler, 1)
    embedding = Decomposer(MODEL, training=True)(small).components[0]
    assert profiler.measure(plan(small, embedding)).outcome is Outcome.OK
    assert profiler.pid == pid


TENANT = """
import sys, torch
held = torch.ones(6 << 30, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


def test_timings_carry_the_clocks_and_the_power_of_the_device(profiler: Profiler) -> None:
    candidate = candidate_for(profiler, 4)
    components = Decomposer(MODEL, training=True)(candidate).components
    measured = profiler.measure(plan(candidate, *components))
    assert measured.outcome is Outcome.OK
    for found in measured.components:
        assert found.conditions is not None
        assert found.conditions.sm_clock_mhz is not None
        assert found.conditions.sm_clock_max_mhz is not None
        assert 0 < found.conditions.sm_clock_mhz <= found.conditions.sm_clock_max_mhz
        assert found.conditions.power_watts is not None
        assert found.contamination is None, "the device is ours alone"
    whole = profiler.measure(plan(candidate, kind=TrialKind.WHOLE_MODEL)).whole_model
    assert whole is not None
    assert whole.conditions is not None
    assert whole.contamination is None


def test_another_process_on_the_device_taints_until_it_is_gone(profiler: Profiler) -> None:
    candidate = candidate_for(profiler, 1)
    (component, *_) = Decomposer(MODEL, training=True)(candidate).components
    assert profiler.measure(plan(candidate, component)).contamination is None
    with subprocess.Popen(
        [sys.executable, "-c", TENANT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as foreign_process:
        assert foreign_process.stdout is not None
        assert foreign_process.stdin is not None
        assert foreign_process.stdout.readline() == "ready\n"
        assert "shared with another process" in str(profiler.measure(plan(candidate, component)).contamination)
        foreign_process.stdin.close()
        foreign_process.wait(60)
    assert profiler.measure(plan(candidate, component)).contamination is None
