"""Profilers of several ranks on the CPU: what they measure together, and what becomes of them all when one fails."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.meshes.mesh import Mesh, MeshRun
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.training import Sharding, TrainingSpec
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.workers.devices.lock import DeviceBusyError
from bexp.workers.process.interface import ProfilerInterruptedError
from bexp.workers.process.profiler import Profiler
from tests.forked_profilers import forked_profilers
from tests.waits import wait_until
from tests.workers.process.conftest import Act
from tests.workers.process.profilers import ENVIRONMENT, HUGE, measured_whole
from tests.workers.profiler.samples import MODEL, REQUEST, candidate, components_of, plan, whole_model_plan

pytestmark = pytest.mark.slow(together="forked")

LARGE = HUGE.model_copy(update={"num_attention_heads": 16, "num_query_groups": 16})
"""At a large micro-batch: seconds to run, most of them in rings."""


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiler]:
    """Two ranks, for tests that leave them well, or replaced."""
    locks = tmp_path_factory.mktemp("locks")
    with forked_profilers(), Profiler(("cpu", "cpu"), environment=ENVIRONMENT, lock_directory=locks) as shared:
        yield shared
        left = processes(shared) if shared.pid is not None else []
    assert not any(is_alive(process) for process in left), "a process outlives the group"


def processes(profiler: Profiler) -> list[psutil.Process]:
    """The one that speaks for the ranks, then the ranks in their order."""
    process = profiler._process.current
    assert process is not None
    return [psutil.Process(process.pid), *process._ranks]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def works(profiler: Profiler) -> bool:
    """Whether the ranks can attend together."""
    chosen = candidate(1, layout="ring", size=2)
    return profiler.measure(plan(chosen, components_of(chosen)[1:2], num_processes=2)).outcome is Outcome.OK


def long_trial(profiler: Profiler, m: int = 8, **fields: float) -> Measurement:
    chosen = candidate(m, layout="zigzag", size=2)
    attention = components_of(chosen, LARGE)[1:2]
    return profiler.measure(plan(chosen, attention, model=LARGE, num_processes=2, **fields))


def train(profiler: Profiler, mesh: Mesh, model: ModelSpec, number: int) -> Measurement:
    """Run a whole model on the ranks, with so many micro-batches in a step."""
    run = MeshRun(mesh=mesh, layers_per_stage=(2, model.num_layers - 2), num_micro_batches=number)
    whole = whole_model_plan(candidate(1), model=model, num_processes=2)
    return profiler.measure(whole.model_copy(update={"shared_run": run}))


def test_ranks_measure_together_what_they_share_and_what_they_do_not(group: Profiler) -> None:
    assert group.hardware().num_devices == 2
    group.begin(REQUEST)
    chosen = candidate(2, layout="zigzag", size=2)
    components = components_of(chosen)
    result = group.measure(plan(chosen, components, num_processes=2))
    assert result.outcome is Outcome.OK, result.reason
    assert tuple(m.component for m in result.components) == components
    spread = {m.component.kind: m for m in result.components}
    for found in result.components:
        assert found.device_seconds > 0
        assert found.repeats >= 2
    alone = group.measure(plan(candidate(2), components_of(candidate(2))))
    assert alone.outcome is Outcome.OK, alone.reason
    whole = {m.component.kind: m for m in alone.components}
    for kind in (ComponentKind.EMBEDDING, ComponentKind.ATTENTION, ComponentKind.DENSE_FFN):
        assert 0.3 < spread[kind].saved_bytes / whole[kind].saved_bytes < 0.7, "a rank has half of the tokens"


def test_every_layout_runs_as_a_component_and_as_a_whole_model(group: Profiler) -> None:
    group.begin(REQUEST)
    for layout in ("ring", "striped", "zigzag"):
        chosen = candidate(2, layout=layout, size=2)
        assert group.measure(plan(chosen, components_of(chosen)[1:2], num_processes=2)).outcome is Outcome.OK
    for chosen in (candidate(2), candidate(2, layout="striped", size=2)):
        assert measured_whole(group, whole_model_plan(chosen, num_processes=2)).micro_step_seconds > 0
    assert train(group, Mesh(pipeline=2, schedule=Schedule.ONE_F_ONE_B), MODEL, 2).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("sharding", "chosen_among"), [(Sharding.ZERO3, None), (Sharding.ZERO1, "explore"), (Sharding.NONE, "explore")]
)
def test_ranks_exchange_and_train_together(group: Profiler, sharding: Sharding, chosen_among: str | None) -> None:
    """As the request says, or as the candidate does where the request leaves a choice."""
    training = TrainingSpec(sharding=sharding if chosen_among is None else Sharding.NONE)
    group.begin(REQUEST.model_copy(update={"num_devices": 2, "training": training, "sharding_levels": chosen_among}))
    level = None if chosen_among is None else sharding
    chosen = candidate(1, sharding=level)
    component = Component(kind=ComponentKind.COMMUNICATION, micro_batch_size=0, num_query_groups=2, sharding=level)
    for _ in range(5):
        result = group.measure(plan(chosen, (component,), num_processes=2))
        assert result.outcome is Outcome.OK, result.reason
        (traffic,) = result.components
        if sharding is not Sharding.ZERO3 or traffic.host_seconds > 1e-4:
            break  # else the noise of a busy host hides what the hooks take
    assert traffic.component == component
    assert traffic.device_seconds > 0
    assert traffic.repeats >= 2
    assert traffic.slowdown is not None
    assert traffic.host_once_seconds is not None
    assert traffic.host_seconds < 5.0, "for two layers and the ends of the model"
    if sharding is Sharding.ZERO3:
        assert traffic.host_seconds > 1e-4, "hooks gather and reduce in every micro-step"
    gathered = traffic.forward_device_seconds / traffic.device_seconds
    assert (gathered < 0.05) is (sharding is Sharding.NONE), "parameters are gathered where they are sharded"
    for together in (chosen, candidate(2, layout="ring", size=2, sharding=level)):
        whole = measured_whole(group, whole_model_plan(together, num_processes=2))
        assert whole.communication_seconds is not None


def test_a_sharded_model_needs_all_its_devices(group: Profiler) -> None:
    training = TrainingSpec(sharding=Sharding.ZERO3)
    group.begin(REQUEST.model_copy(update={"num_devices": 4, "training": training}))
    result = group.measure(whole_model_plan(candidate(1), num_processes=2))
    assert result.outcome is Outcome.UNSUPPORTED
    assert "needs 4 devices; the profiler has 2 of them" in (result.reason or "")


def test_what_cannot_be_shared_is_unsupported_and_the_group_goes_on(group: Profiler) -> None:
    group.begin(REQUEST)
    before = group.pid
    odd = MODEL.model_copy(update={"seq_length": 66})
    chosen = candidate(2, layout="zigzag", size=2)
    result = group.measure(plan(chosen, components_of(chosen, odd)[1:2], model=odd, num_processes=2))
    assert result.outcome is Outcome.UNSUPPORTED
    assert "multiple of 4" in (result.reason or "")
    result = group.measure(plan(candidate(2, layout="ring", size=4), num_processes=4))
    assert result.outcome is Outcome.UNSUPPORTED
    assert "4 devices; the profiler has 2" in (result.reason or "")
    assert works(group)
    assert group.pid == before


def test_one_rank_that_runs_out_of_memory_ends_the_trial_once_and_the_next_works(group: Profiler) -> None:
    group.begin(REQUEST)
    assert works(group)
    restarts, before = group.restarts, processes(group)
    small = before[2].memory_info().data + (48 << 20)  # what the limit counts
    before[2].rlimit(psutil.RLIMIT_DATA, (small, small))
    result = long_trial(group, 16)
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    assert "rank 1" in (result.reason or "")
    assert result.failed_component is not None
    assert group.restarts == restarts + 1
    assert not any(is_alive(process) for process in before)
    assert group.pid is None, "nothing was started again"
    assert works(group)


def test_ranks_that_run_out_of_memory_by_themselves_go_on(group: Profiler) -> None:
    group.begin(REQUEST)
    assert works(group)
    restarts, before = group.restarts, processes(group)
    limits = [process.rlimit(psutil.RLIMIT_DATA) for process in before[1:]]
    for process in before[1:]:
        small = process.memory_info().data + (48 << 20)
        process.rlimit(psutil.RLIMIT_DATA, (small, limits[0][1]))
    chosen = candidate(16)
    result = group.measure(plan(chosen, components_of(chosen, LARGE)[1:2], model=LARGE, num_processes=2))
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    assert result.failed_component is not None
    for process, limit in zip(before[1:], limits, strict=True):
        process.rlimit(psutil.RLIMIT_DATA, limit)
    assert works(group)
    assert group.restarts == restarts
    assert processes(group) == before


def test_a_killed_rank_is_a_crash_that_names_it_and_is_not_started_again(group: Profiler, in_the_middle: Act) -> None:
    group.begin(REQUEST)
    assert works(group)
    restarts, before = group.restarts, processes(group)
    in_the_middle(lambda: os.kill(before[2].pid, signal.SIGSEGV))
    result = long_trial(group)
    assert result.outcome is Outcome.CRASHED, result.reason
    assert "rank 1 (cpu) was killed by SIGSEGV" in (result.reason or "")
    assert result.failed_component is not None
    assert group.restarts == restarts + 1
    assert not any(is_alive(process) for process in before)
    assert works(group)
    assert group.pid != before[0].pid


def test_interrupt_ends_every_rank_at_once(group: Profiler, in_the_middle: Act) -> None:
    group.begin(REQUEST)
    assert works(group)
    before = processes(group)
    in_the_middle(lambda: threading.Thread(target=group.interrupt).start())
    with pytest.raises(ProfilerInterruptedError):
        long_trial(group)
    assert not any(is_alive(process) for process in before)
    group.start()


@pytest.mark.parametrize("who", [0, 1])
def test_whoever_dies_between_trials_takes_the_others_along_and_is_replaced_in_silence(
    group: Profiler, who: int
) -> None:
    group.begin(REQUEST)
    process, before = group._process.current, processes(group)
    assert process is not None
    os.kill(before[who].pid, signal.SIGKILL)
    wait_until(lambda: not process.alive and not any(map(is_alive, before)), "the others stay")
    assert works(group)


def test_a_hanging_rank_times_out_with_the_group(
    group: Profiler, in_the_middle: Act, pass_time: Callable[[float], None]
) -> None:
    group.begin(REQUEST)
    assert works(group)
    directory = group._process.locks._locks[0].device._stem.parent
    with pytest.raises(DeviceBusyError):
        Profiler("cpu", environment=ENVIRONMENT, lock_directory=directory, lock_timeout_seconds=0.1).start()
    before = processes(group)

    def hang() -> None:
        os.kill(before[2].pid, signal.SIGSTOP)
        pass_time(1000)

    in_the_middle(hang)
    result = long_trial(group, timeout_seconds=600.0)
    assert result.outcome is Outcome.TIMED_OUT
    assert result.failed_component is not None
    assert not any(is_alive(process) for process in before)


def test_a_group_is_of_one_kind_of_device(tmp_path: Path) -> None:
    for devices in ((), ("cpu", "cuda:0")):
        with pytest.raises(ValueError, match="of one kind"):
            Profiler(devices, lock_directory=tmp_path)
