from __future__ import annotations

import psutil
import pytest

from bexp.measure.gpu_processes import APPEARED_BYTES, OWN_GROWTH_BYTES, ForeignProcesses, GpuProcessMonitor
from tests.workers.profiler.fakes import MIB, FakeGpu


def begun(gpu: FakeGpu) -> GpuProcessMonitor:
    watch = gpu.foreign_processes()
    watch.begin(None)
    return watch


def timed(watch: GpuProcessMonitor) -> ForeignProcesses:
    watch.start()
    return watch.find()


def test_our_own_memory_is_not_foreign() -> None:
    gpu = FakeGpu()
    watch = begun(gpu)
    for gib in (10, 120, 0):
        gpu.reserved = gib << 30
        assert not timed(watch)
    for _ in range(8):  # kernels that are loaded between timings
        gpu.own += OWN_GROWTH_BYTES // 2
        assert not timed(watch)


def test_a_process_from_before_the_job_is_not_foreign() -> None:
    gpu = FakeGpu(others=20 << 30, pids=frozenset({7, 99}))
    watch = gpu.foreign_processes(used_before=20 << 30)
    assert watch.begin(None) == 20 << 30
    assert not timed(watch)
    gpu.others = 0
    assert not timed(watch)
    gpu.others = 20 << 30
    assert timed(watch), "but one that comes back is"


def test_memory_that_grows_within_a_timing_is_foreign_until_it_is_free_again() -> None:
    gpu = FakeGpu()
    watch = begun(gpu)
    watch.start()
    gpu.others = 600 * MIB
    watch.look()
    gpu.others = 0
    assert watch.find().held_bytes in (0, 600 * MIB)
    watch.start()
    gpu.others = 600 * MIB
    assert watch.find().held_bytes == 600 * MIB
    assert timed(watch).held_bytes == 600 * MIB, "it is still there"
    gpu.own += 300 * MIB
    gpu.others = 0
    assert not timed(watch), "it is gone, and what our kernels took meanwhile is not its"
    assert not timed(watch)


def test_a_large_process_that_comes_between_two_timings_is_noticed() -> None:
    gpu = FakeGpu()
    watch = begun(gpu)
    assert not timed(watch)
    gpu.others = 12 << 30
    assert timed(watch).held_bytes == 12 << 30
    gpu.others = 0
    assert not timed(watch)


def test_a_new_process_is_foreign_however_small() -> None:
    gpu = FakeGpu()
    watch = begun(gpu)
    gpu.pids = frozenset({7, 8})
    assert timed(watch).processes == 1
    gpu.pids = frozenset({7})
    assert not timed(watch)


def test_the_time_that_others_use_is_told_apart_from_our_own() -> None:
    gpu = FakeGpu(shares={7: 0.9, 3: 0.25, 5: 1.0}, pids=frozenset({3}))
    watch = GpuProcessMonitor(gpu, lambda: 0, 0, frozenset({3}))
    assert timed(watch).busy_share is None, "which process is ours is not known"
    gpu.pids = frozenset({3, 7})
    watch = GpuProcessMonitor(gpu, lambda: 0, 0, frozenset({3}))
    watch.begin(None)
    assert timed(watch).busy_share == pytest.approx(0.25), "5 is gone"


def test_a_process_that_replaces_another_knows_who_came_since_the_job_began() -> None:
    gpu = FakeGpu(others=30 << 30)
    watch = gpu.foreign_processes(used_before=30 << 30)
    assert watch.begin(others_bytes=10 << 30) == 10 << 30
    assert timed(watch).held_bytes == 20 << 30
    gpu.others = 10 << 30
    assert not timed(watch)
    same = FakeGpu(others=10 << 30).foreign_processes(used_before=10 << 30)
    assert same.begin(others_bytes=(10 << 30) + APPEARED_BYTES // 2) is not None
    assert not timed(same)


def test_a_second_job_begins_with_whoever_is_there_then() -> None:
    gpu = FakeGpu()
    watch = begun(gpu)
    gpu.others, gpu.pids = 12 << 30, frozenset({7, 8})
    assert timed(watch)
    assert watch.begin(None) == 12 << 30
    assert not timed(watch)


def test_where_nvml_says_nothing_nobody_is_suspected() -> None:
    gpu = FakeGpu(others=None, pids=None, shares=None)
    watch = gpu.foreign_processes(used_before=None)
    assert watch.begin(None) is None
    assert not timed(watch)


@pytest.mark.parametrize(("grown", "foreign"), [(256 * MIB, False), (256 * MIB + 1, True)])
def test_within_a_timing_a_quarter_of_a_gibibyte_may_be_our_own(grown: int, foreign: bool) -> None:
    gpu = FakeGpu()
    watch = begun(gpu)
    watch.start()
    gpu.others = grown
    assert bool(watch.find()) is foreign


@pytest.mark.parametrize(("grown", "foreign"), [(2048 * MIB, False), (2048 * MIB + 1, True)])
def test_between_two_timings_two_gibibytes_may_be_our_own(grown: int, foreign: bool) -> None:
    gpu = FakeGpu()
    watch = begun(gpu)
    assert not timed(watch)
    gpu.others = grown
    assert bool(timed(watch)) is foreign


def test_what_others_hold_is_unknown_if_nobody_looked_before_the_context() -> None:
    watch = FakeGpu(others=3 << 30).foreign_processes(used_before=None)
    assert watch.begin(None) is None
    assert watch.begin(others_bytes=1 << 30) is None
    assert not timed(watch)


def test_our_own_children_are_not_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, pid: int = 7) -> None:
            self.pid = pid

        def children(self, *, recursive: bool) -> list[Process]:
            assert recursive
            return [Process(8)]

    monkeypatch.setattr(psutil, "Process", Process)
    gpu = FakeGpu()
    watch = begun(gpu)
    gpu.pids = frozenset({7, 8})
    assert timed(watch).processes == 0
    gpu.pids = frozenset({7, 8, 9, 10})
    assert timed(watch).processes == 2
