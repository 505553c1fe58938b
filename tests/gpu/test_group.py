"""Profilers of several CUDA devices, over NCCL."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from bexp.explorer.cost.collectives import CommunicationUnits
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.model.training import OptimizerSpec, Sharding, TrainingSpec
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.profiler import Profiler
from tests.gpu.needs import visible
from tests.gpu.test_profiler import MODEL, REQUEST

pytestmark = visible(2)

LONG = MODEL.model_copy(update={"seq_length": 1 << 16})


@pytest.fixture(scope="module")
def group() -> Iterator[Profiler]:
    with Profiler(("cuda:0", "cuda:1")) as shared:
        yield shared


def measure(
    group: Profiler,
    kind: TrialKind,
    *components: Component,
    layout: str | None = None,
    m: int = 4,
    size: int = 2,
    model: ModelSpec = MODEL,
) -> Measurement:
    """A trial of `size` devices, which share sequences if there is a layout."""
    candidate = candidate_of(m, layout, size)
    fields = {"number": 0, "kind": kind, "model": model, "candidate": candidate, "components": components}
    return group.measure(TrialTask.model_validate({**fields, "timeout_seconds": 120.0, "num_processes": size}))


def candidate_of(m: int, layout: str | None, size: int) -> Candidate:
    return Candidate(
        micro_batch_size=m,
        attention_backend="flash",
        expert_backend="grouped_mm",
        num_query_groups=MODEL.query_groups,
        context_parallel_size=1 if layout is None else size,
        context_parallel_layout=layout,
    )


def run(group: Profiler, layout: str, m: int = 1, size: int = 2) -> Measurement:
    """All components of long sequences that devices share."""
    components = Decomposer(LONG, training=True)(candidate_of(m, layout, size)).components
    return measure(group, TrialKind.COMPONENTS, *components, layout=layout, m=m, size=size, model=LONG)


def test_layouts_on_two_devices(group: Profiler) -> None:
    assert group.hardware().num_devices == 2
    group.begin(REQUEST)
    seconds = {}
    for layout in ("ring", "striped", "zigzag"):
        result = run(group, layout)
        assert result.outcome is Outcome.OK, result.reason
        attention = result.components[1]
        assert attention.standard_error_seconds < 0.1 * attention.device_seconds
        seconds[layout] = attention.device_seconds
    assert seconds["zigzag"] < seconds["ring"], "the ring's last rank has most of the work"
    whole = measure(group, TrialKind.WHOLE_MODEL, layout="zigzag", m=1)
    assert whole.outcome is Outcome.OK, whole.reason


def trained(sharding: Sharding, gradients: DType | None = None) -> ExplorationRequest:
    training = TrainingSpec(sharding=sharding, optimizer=OptimizerSpec(grad_dtype=gradients))
    return REQUEST.model_copy(update={"num_devices": 2, "training": training})


@pytest.mark.parametrize("sharding", Sharding)
def test_traffic_on_two_devices(group: Profiler, sharding: Sharding) -> None:
    group.begin(trained(sharding))
    component = Component(kind=ComponentKind.COMMUNICATION, micro_batch_size=0, num_query_groups=MODEL.query_groups)
    result = measure(group, TrialKind.COMPONENTS, component)
    assert result.outcome is Outcome.OK, result.reason
    (found,) = result.components
    units = CommunicationUnits.of(MODEL)
    ends = [units.first, *([units.last] if units.last else [])]
    number = sum(unit.count * unit.num_parameters for unit in (*units.layers, *ends))
    sent = number * MODEL.dtype.itemsize / 2  # half of it each time it is gathered or reduced
    times = {Sharding.NONE: 2, Sharding.ZERO3: 3}.get(sharding, 2)
    assert 1e9 < times * sent / found.device_seconds < 1e12, "bytes/s of a link between GPUs"
    assert found.standard_error_seconds < 0.2 * found.device_seconds
    assert (found.forward_device_seconds < 0.1 * found.device_seconds) is (sharding is Sharding.NONE)
    assert found.slowdown is not None
    assert found.slowdown < 1.0, "nothing passes beside computation"
    assert found.host_once_seconds is not None
    assert found.host_seconds < 0.1, "of the host, for a model of few layers"
    if sharding is Sharding.ZERO3:
        assert found.host_seconds > 1e-4 * units.number, "hooks gather and reduce every unit in every micro-step"


@pytest.mark.parametrize("gradients", [None, DType.FLOAT32])
@pytest.mark.parametrize("sharding", Sharding)
def test_whole_models_train_together(group: Profiler, sharding: Sharding, gradients: DType | None) -> None:
    group.begin(trained(sharding, gradients))
    for layout in (None, "zigzag"):
        result = measure(group, TrialKind.WHOLE_MODEL, layout=layout)
        assert result.outcome is Outcome.OK, result.reason
        whole = result.whole_model
        assert whole is not None
        assert whole.micro_step_seconds > 0
        assert whole.communication_seconds is not None
    assert result.phases.process_start == 0, "the model before has left nothing that a new process must be begun for"


def test_sharding_spares_memory(group: Profiler) -> None:
    peaks = {}
    for sharding in Sharding:
        group.begin(trained(sharding))
        result = measure(group, TrialKind.WHOLE_MODEL)
        assert result.whole_model is not None, result.reason
        peaks[sharding] = result.whole_model.peak_bytes
    assert peaks[Sharding.ZERO3] < peaks[Sharding.ZERO1] < peaks[Sharding.NONE]
    assert peaks[Sharding.ZERO2] < peaks[Sharding.NONE]


def test_out_of_memory_and_a_killed_rank_end_the_group_and_the_next_trial_works(group: Profiler) -> None:
    group.begin(REQUEST)
    assert run(group, "zigzag").outcome is Outcome.OK
    exhausted = run(group, "zigzag", 256)
    assert exhausted.outcome is Outcome.OUT_OF_MEMORY, exhausted.reason
    assert run(group, "zigzag").outcome is Outcome.OK
    assert group._process.current is not None
    pid = group._process.current._ranks[1].pid
    threading.Timer(0.5, os.kill, (pid, signal.SIGSEGV)).start()
    killed = run(group, "striped", 4)
    assert killed.outcome is Outcome.CRASHED
    assert "rank 1 (cuda:1) was killed by SIGSEGV" in (killed.reason or "")
    assert run(group, "zigzag").outcome is Outcome.OK
