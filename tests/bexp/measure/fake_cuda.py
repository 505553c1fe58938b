"""A host and a device that run by a clock of their own, in place of `torch.cuda` and of the wall clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bexp.measure import cuda_timing
from bexp.measure.cuda_timing import CudaTimer

CYCLES_PER_SECOND = 1e9
CACHE_BYTES = 1024
FLUSH_SECONDS = 7e-5
WRITE_SECONDS = 3e-5
"""What a preparation takes on the device."""


class FakeCuda:
    """The device runs what it is given in order, each as soon as it is issued and the device is free."""

    def __init__(self) -> None:
        self.host = 0.0
        self.device = 0.0
        self.log: list[str] = []
        self.slept: list[float] = []

    def launch(self, seconds: float) -> None:
        """Issue work; takes the host no time."""
        self.device = max(self.device, self.host) + seconds

    def perf_counter(self) -> float:
        return self.host

    def synchronize(self, device: torch.device | None = None) -> None:
        assert isinstance(device, torch.device), "another device may be the current one"
        self.wait()

    def wait(self) -> None:
        """The host waits until the device has nothing left to do."""
        self.host = max(self.host, self.device)

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles / CYCLES_PER_SECOND)
        self.launch(cycles / CYCLES_PER_SECOND)

    def event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def zero_(self) -> None:
        """As the buffer that overwrites the cache."""
        self.log.append("flush")
        self.launch(FLUSH_SECONDS)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.at = -1.0

    def record(self) -> None:
        self.at = max(self._cuda.device, self._cuda.host)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert min(self.at, later.at) >= 0.0, "both were recorded"
        return (later.at - self.at) * 1e3


class FakePasses:
    """Passes that take the device and the host known times; forward a third of each, backward the rest."""

    def __init__(
        self,
        cuda: FakeCuda,
        *,
        device: float,
        host: float,
        training: bool = True,
        chained_host: float | None = None,
        chains_that_fit: int = 100,
        waits: bool = False,
        half_way: bool = False,
        again: bool = False,
    ) -> None:
        self.training = training
        self.is_chainable = chained_host is not None
        self.chains: list[int] = []
        self._cuda, self._device, self._host, self._waits = cuda, device, host, waits
        self._half_way = {"forward": half_way, "backward": half_way and again}
        # The host waits when it has issued half of a forward, and of a backward that runs the forward again.
        self._chained_host, self._most = chained_host or 0.0, chains_that_fit

    def prepare_forward(self) -> None:
        self._prepare("prepare_forward")

    def forward(self) -> None:
        self._run("forward", 1 / 3 if self.training else 1.0)

    def prepare_backward(self) -> None:
        self._prepare("prepare_backward")

    def backward(self) -> None:
        self._run("backward", 2 / 3)

    def run_chain(self, length: int) -> None:
        if length > self._most:
            raise torch.cuda.OutOfMemoryError
        self.chains.append(length)
        first = 50.0 if len(self.chains) == 1 else 1.0  # the first allocates
        self._cuda.host += first * length * self._chained_host
        self._cuda.launch(length * self._device)

    def _prepare(self, name: str) -> None:
        self._cuda.log.append(name)
        self._cuda.launch(WRITE_SECONDS)

    def _run(self, name: str, share: float) -> None:
        self._cuda.log.append(name)
        if self._waits:
            self._cuda.wait()
        if self._half_way[name]:
            self._cuda.host += share / 2 * self._host
            self._cuda.launch(share / 2 * self._device)
            self._cuda.wait()
            share /= 2
        self._cuda.host += share * self._host
        self._cuda.launch(share * self._device)


def make_timer(monkeypatch: pytest.MonkeyPatch, *, engine_seconds: float = 0.0) -> tuple[CudaTimer, FakeCuda]:
    """A timer of a fake device, whose backwards enter an engine that takes the host so long."""
    cuda = FakeCuda()
    monkeypatch.setattr(cuda_timing, "time", cuda)
    monkeypatch.setattr(torch.cuda, "Event", cuda.event)
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", cuda.sleep)
    properties = SimpleNamespace(L2_cache_size=CACHE_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with monkeypatch.context() as patch:
        entered = torch.autograd.backward

        def backward(*arguments: Any) -> None:
            cuda.host += engine_seconds
            entered(*arguments)

        patch.setattr(torch.autograd, "backward", backward)
        timer = CudaTimer(torch.device("cpu"))
    assert timer._flush.numel() == 2 * CACHE_BYTES
    timer._flush = cuda  # type: ignore[assignment]  # it is only ever overwritten
    cuda.slept.clear()
    return timer, cuda
