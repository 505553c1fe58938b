"""What `CudaTimer` counts, on passes whose times are made up and on a device that is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bexp.measure import cuda_timing
from bexp.measure.cuda_timing import (
    ALONE_OVER_ROW,
    FASTEST_LAUNCH_SECONDS,
    HEAT_SECONDS,
    MAX_QUEUED_LAUNCHES,
    CudaTimer,
)
from bexp.measure.passes import Passes
from bexp.measure.timing import LocalReducer, PassSample, Timing
from tests.bexp.measure.fake_cuda import FakePasses, make_timer
from tests.waits import Clock


class MadeUpTimer(CudaTimer):
    """Runs nothing."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.reducer = LocalReducer()
        self.clock, self.seconds, self.runs = clock, seconds, 0

    def _run(
        self, passes: Passes, *, repeats: int, sleep_seconds: float, sleeps_between: bool = False
    ) -> list[PassSample]:
        self.runs += repeats
        self.clock.now += repeats * self.seconds
        self._poll()
        return [PassSample(self.seconds / 3, 2 * self.seconds / 3, 0.0)] * repeats


def timed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, poll: Callable[[], None] = lambda: None
) -> tuple[Timing, int]:
    clock = Clock()
    monkeypatch.setattr(cuda_timing, "time", clock)
    timer = MadeUpTimer(clock, seconds)
    return timer.time(None, poll), timer.runs  # type: ignore[arg-type]  # a stand-in


@pytest.mark.parametrize(("seconds", "repeats"), [(4.0, 2), (1.0, 2), (0.5, 3), (0.2, 5)])
def test_every_run_of_a_long_block_counts(monkeypatch: pytest.MonkeyPatch, seconds: float, repeats: int) -> None:
    timing, runs = timed(monkeypatch, seconds)
    assert timing.repeats == runs == repeats
    assert timing.device_seconds == pytest.approx(seconds)


def test_a_short_block_counts_once_the_device_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    timing, runs = timed(monkeypatch, 0.01)
    assert runs - timing.repeats == 1 + int(HEAT_SECONDS / 0.01)
    assert timing.repeats >= 5


def test_without_training_there_is_one_flush_and_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cuda = make_timer(monkeypatch)
    passes = FakePasses(cuda, device=3e-3, host=3e-4, training=False)
    (sample,) = timer._run(passes, repeats=1, sleep_seconds=0.0)
    assert cuda.log == ["flush", "prepare_forward", "forward"]
    assert sample.backward == 0.0
    assert sample.forward == pytest.approx(3e-3, rel=0.1)


def test_between_the_two_the_device_runs_without_a_pause_and_the_host_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cuda = make_timer(monkeypatch)
    timing = timer.time(FakePasses(cuda, device=3e-3, host=2e-3, chained_host=9e-4))
    assert timing.device_seconds == pytest.approx(3e-3, rel=0.02)
    assert timing.host_seconds == pytest.approx(9e-4)
    assert len(cuda.slept) == 1, "one look at what a lead of the host changes"


def test_no_row_is_timed_where_the_host_could_not_limit_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cuda = make_timer(monkeypatch)
    passes = FakePasses(cuda, device=3e-3, host=1.7e-3, chained_host=9e-4)
    timing = timer.time(passes)
    assert passes.chains == []
    assert timing.host_seconds == pytest.approx(1.7e-3 / 1.5)
    assert timing.device_seconds == pytest.approx(3e-3, rel=0.02)
    alone = FakePasses(cuda, device=3e-3, host=1.7e-3)
    assert timer.time(alone).host_seconds == pytest.approx(1.7e-3), "nothing like it follows it in a model"


def test_a_launch_bound_block_is_timed_behind_a_sleep_and_its_host_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cuda = make_timer(monkeypatch)
    passes = FakePasses(cuda, device=4e-4, host=9e-4, chained_host=5e-4)
    timing = timer.time(passes)
    assert timing.device_seconds == pytest.approx(4e-4)
    assert timing.host_seconds == pytest.approx(5e-4)
    assert set(passes.chains) == {16}
    batch = max(1, min(8, int(MAX_QUEUED_LAUNCHES * FASTEST_LAUNCH_SECONDS / 9e-4)))
    assert batch == 2
    # A sleep outlasts what the host needs to issue a batch; the first of them is the look at a single run.
    assert cuda.slept[0] == pytest.approx(1.5 * 9e-4 + 1e-3)
    assert cuda.slept[1:] == pytest.approx([1.5 * batch * 9e-4 + 2e-4] * (len(cuda.slept) - 1))
    assert timing.repeats == batch * (len(cuda.slept) - 1)


def test_fewer_blocks_in_a_row_if_so_many_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cuda = make_timer(monkeypatch)
    few = FakePasses(cuda, device=4e-4, host=9e-4, chained_host=5e-4, chains_that_fit=4)
    assert timer.time(few).host_seconds == pytest.approx(5e-4)
    assert set(few.chains) == {4}
    none = FakePasses(cuda, device=4e-4, host=9e-4, chained_host=5e-4, chains_that_fit=1)
    assert timer.time(none).host_seconds == pytest.approx(9e-4), "the block by itself"
    alone = FakePasses(cuda, device=4e-4, host=9e-4)
    assert timer.time(alone).host_seconds == pytest.approx(9e-4)
    assert alone.chains == []


def test_a_row_is_never_slower_than_a_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cuda = make_timer(monkeypatch)
    assert timer.time(FakePasses(cuda, device=4e-4, host=9e-4, chained_host=2e-3)).host_seconds == pytest.approx(9e-4)


def test_a_block_that_waits_for_the_device_has_the_devices_time_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cuda = make_timer(monkeypatch)
    timing = timer.time(FakePasses(cuda, device=1e-3, host=5e-4, chained_host=1e-6, waits=True))
    assert timing.host_seconds == timing.device_seconds
    assert timing.device_seconds == pytest.approx(1.5e-3, rel=0.1), "host and device one after the other"


def test_the_way_into_the_engine_is_no_part_of_a_blocks_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cuda = make_timer(monkeypatch, engine_seconds=1e-4)
    assert timer._engine_seconds == pytest.approx(1e-4)
    (sample,) = timer._run(FakePasses(cuda, device=3e-4, host=9e-4), repeats=1, sleep_seconds=0.0)
    assert sample.host == pytest.approx(3e-4 + 6e-4 - 1e-4)
    chained = FakePasses(cuda, device=3e-4, host=9e-4, chained_host=5e-4)
    assert timer._time_chain(chained, 4) == pytest.approx((4 * 5e-4 - 1e-4) / 4)
    assert chained.chains == [4] * 6, "the first is not counted"
    (short,) = timer._run(FakePasses(cuda, device=3e-4, host=3e-5), repeats=1, sleep_seconds=0.0)
    assert short.host == pytest.approx(1e-5), "never less than nothing for the backward"


def test_warming_up_ends_when_two_runs_agree_or_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(seconds: list[float]) -> int:
        timer, cuda = make_timer(monkeypatch)
        left = list(seconds)

        def run(passes: Passes, *, repeats: int, sleep_seconds: float) -> list[PassSample]:
            cuda.host += left[0]
            return [PassSample(left.pop(0), 0.0, 0.0)] * repeats

        monkeypatch.setattr(timer, "_run", run)
        timer.warm_up(FakePasses(cuda, device=0.0, host=0.0))
        return len(seconds) - len(left)

    falling = [0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.005]
    assert runs(falling) == CudaTimer.MAX_WARM_UP_RUNS
    assert runs([0.02, 0.01, 0.0104, 0.01]) == 3, "within 5%"
    assert runs([0.02, 0.01, 0.0106, 0.0106]) == 4
    assert runs([0.5, 0.5]) == 1, "a long block is run once"
    assert runs([0.3, 0.2, 0.1]) == 2


def test_the_poll_is_called_while_the_device_works_and_forgotten_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, cuda = make_timer(monkeypatch)
    behind: list[bool] = []
    passes = FakePasses(cuda, device=1e-2, host=5e-4)
    timer.time(passes, lambda: behind.append(cuda.device > cuda.host))
    assert behind
    assert all(behind)
    seen = len(behind)
    timer.warm_up(passes)
    assert len(behind) == seen


def test_a_forward_that_waits_is_timed_with_a_lead_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward has a third of each: the host issues 2 ms, half of it after its wait, and the device works for 1 ms.

    Backward has a lead of its own, so that the device shows its own time, although the host is slower.
    """
    timer, cuda = make_timer(monkeypatch)
    found = timer.time_waiting(FakePasses(cuda, device=3e-3, host=6e-3, half_way=True))
    assert found.forward == pytest.approx(0.5e-3 + 1e-3 + 0.5e-3), (
        "the device stands still while the second half is issued"
    )
    assert found.forward_in_row == pytest.approx(2e-3 + 0.5e-3), "the host issues both halves, and waits for the first"
    assert found.backward == pytest.approx(2e-3)
    assert found.host_backward == pytest.approx(4e-3 / ALONE_OVER_ROW)


def test_the_host_of_a_backward_that_waits_does_not_wait_for_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward has two thirds of each: the host issues 4 ms, half of it after its wait for a millisecond of work."""
    timer, cuda = make_timer(monkeypatch)
    found = timer.time_waiting(FakePasses(cuda, device=3e-3, host=6e-3, half_way=True, again=True))
    assert found.backward == pytest.approx(1e-3 + 2e-3 + 1e-3), "the device stands still in backward, too"
    assert found.host_backward == pytest.approx((4e-3 + 1e-3) / ALONE_OVER_ROW)
