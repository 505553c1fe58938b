from __future__ import annotations

import pytest

from bexp.measure.gpu_processes import APPEARED_BYTES, ForeignProcesses, GpuProcessMonitor
from tests.workers.profiler.fakes import MIB, FakeGpu


def begun(gpu: FakeGpu) -> GpuProcessMonitor:
    watch = gpu.foreign_processes()
    watch.begin(None)
    return watch


def timed(watch: GpuProcessMonitor) -> ForeignProcesses:
    watch.start()
    return watch.find()


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


@pytest.mark.parametrize(("more", "is_foreign"), [(0, False), (1, True)])
def test_some_memory_may_be_our_own(more: int, is_foreign: bool) -> None:
    """A quarter of a gibibyte within a timing, two between two timings, and a quarter between processes of a job."""
    gpu = FakeGpu()
    watch = begun(gpu)
    watch.start()
    gpu.others = 256 * MIB + more
    assert bool(watch.find()) is is_foreign
    gpu = FakeGpu()
    watch = begun(gpu)
    assert not timed(watch)
    gpu.others = 2048 * MIB + more
    assert bool(timed(watch)) is is_foreign
    came = APPEARED_BYTES + more
    watch = FakeGpu(others=(1 << 30) + came).foreign_processes(used_before=(1 << 30) + came)
    assert watch.begin(others_bytes=1 << 30) == 1 << 30
    assert timed(watch).held_bytes == (came if is_foreign else 0)


def test_what_others_hold_is_unknown_if_nobody_looked_before_the_context() -> None:
    for gpu in (FakeGpu(others=3 << 30), FakeGpu(others=None, pids=None, shares=None)):
        watch = gpu.foreign_processes(used_before=None)
        assert watch.begin(None) is None
        assert watch.begin(others_bytes=1 << 30) is None
        assert not timed(watch)


def test_nobody_is_there_unless_something_is_known_of_them() -> None:
    assert not ForeignProcesses()
    assert ForeignProcesses(processes=1)
    assert ForeignProcesses(held_bytes=1)
    assert not ForeignProcesses(busy_share=1.0), "processes that were there before may be busy"


def test_memory_that_shrank_before_our_context_counts_as_none_of_ours() -> None:
    gpu = FakeGpu(others=1 << 30)
    watch = gpu.foreign_processes(used_before=8 << 30)
    assert watch.begin(None) == (1 << 30) + gpu.own, "what was freed meanwhile is no context"


def test_a_process_that_grows_further_is_told_with_the_most_it_held() -> None:
    gpu = FakeGpu()
    watch = begun(gpu)
    watch.start()
    for held in (600, 900, 700):
        gpu.others = held * MIB
        watch.look()
    assert watch.find().held_bytes == 900 * MIB
    gpu.others = 900 * MIB - APPEARED_BYTES
    assert watch.find().held_bytes == 0, "most of it is free again"
