"""The pool on a stand-in for Ray: who is admitted, what is lost, and what begins again."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from bexp.explorer.records.event import EventDraft
from bexp.explorer.records.measurement import Outcome
from bexp.workers.process.interface import ProfilerError
from bexp.workers.ray.pool import MOST_LOSSES, RayDevicePool
from tests.contracts.samples import make_report, make_request
from tests.waits import wait_until
from tests.workers.ray import fakes
from tests.workers.ray.fakes import BROKEN, CRASHING, SLOW, FakeRay, UnlikeProfilers, open_fake, plan


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def pool(ray: FakeRay) -> Iterator[RayDevicePool]:
    pool = RayDevicePool("auto", ("cpu",), open_profiler=open_fake)
    pool.start()
    pool.begin(make_request())
    yield pool
    pool.close()


def test_each_device_runs_a_trial(pool: RayDevicePool) -> None:
    wait_until(lambda: pool.capacity == 2)
    assert pool.hardware() == make_report().hardware
    for number in range(4):
        pool.submit(plan(number))
    assert sorted(pool.wait()[0].number for _ in range(4)) == [0, 1, 2, 3]
    assert pool.measure(plan(4, CRASHING)).outcome is Outcome.CRASHED
    assert pool.restarts == 1
    assert pool.take_events() == []


def test_a_pool_is_taken_once_a_device_is_ready_and_has_none_at_rest(
    pool: RayDevicePool, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: pool.capacity == 2)
    hardware = pool.hardware()
    assert pool.take()
    pool.finish_job()
    assert ray.num_killed == 2
    others_end = threading.Event()
    monkeypatch.setattr(fakes.FakeActorProfiler, "start", lambda _: others_end.wait(60))
    assert not pool.take()
    assert pool.held_by == "no device of the Ray cluster auto is ready; others may have all"
    others_end.set()
    pool.rest()
    assert ray.num_killed == 4
    deadline = time.monotonic() + 60
    while not pool.take():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pool.begin(make_request())
    assert pool.measure(plan(0)).outcome is Outcome.OK
    assert pool.hardware() == hardware


@pytest.mark.parametrize(("late_seconds", "num_killed"), [(11.0 + 240.0, 0), (21.0 + 240.0, 1)])
def test_a_trial_has_the_time_to_run_twice_before_its_actor_counts_as_lost(
    pool: RayDevicePool, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, late_seconds: float, num_killed: int
) -> None:
    monkeypatch.setattr(fakes, "SLOW_SECONDS", 0.2)
    pool.submit(plan(0, SLOW).model_copy(update={"timeout_seconds": 10.0}))
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + late_seconds, sleep=time.sleep)
    monkeypatch.setattr("bexp.workers.ray.pool.time", later)
    assert pool.wait()[1].outcome is Outcome.OK
    assert ray.num_killed == num_killed


def test_a_trial_that_loses_every_actor_has_that_as_its_outcome(pool: RayDevicePool, ray: FakeRay) -> None:
    found = pool.measure(plan(0, BROKEN))
    assert found.outcome is Outcome.CRASHED
    assert f"{MOST_LOSSES + 1} devices of the cluster were lost" in (found.reason or "")
    assert "the device is broken" in (found.reason or "")
    assert len(pool.take_events()) == ray.num_killed == MOST_LOSSES + 1
    assert pool.measure(plan(1)).outcome is Outcome.OK


def test_a_device_unlike_the_first_is_left_out_with_an_event(ray: FakeRay) -> None:
    pool = RayDevicePool("auto", ("cpu",), open_profiler=UnlikeProfilers())
    pool.start()
    events: list[EventDraft] = []

    def told() -> bool:
        events.extend(pool.take_events())
        assert pool.capacity == 1
        return bool(events)

    wait_until(told)
    assert "is left out: its hardware is" in events[0].message
    pool.close()
    assert ray.num_killed == 2


def test_a_cluster_without_such_a_device_is_an_error(ray: FakeRay) -> None:
    pool = RayDevicePool("auto", ("cuda:0", "cuda:1"))
    with pytest.raises(ProfilerError, match="has no GPU"):
        pool.start()
    pool.close()
