"""Tables of the expert back end `auto` that tests write, and a timer whose seconds they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bexp.kernels.experts.auto.choice import ByLoad, Seconds, Times
from bexp.kernels.experts.auto.measuring import GemmShape
from bexp.kernels.experts.auto.products import STOCK

CPU = torch.device("cpu")
OTHER = "other"
GEMM = GemmShape(4, 32, 16, torch.bfloat16)


def seconds(
    uniform: Mapping[str, float],
    zipf: Mapping[str, float],
    error: float = 0.0,
    device: Mapping[str, float] | None = None,
) -> ByLoad:
    """Times by load; those on the device are those by the clock unless they are given."""
    loads = {"uniform": uniform, "zipf": zipf}
    return {
        load: {name: Times(Seconds(value, error), Seconds((device or times)[name])) for name, value in times.items()}
        for load, times in loads.items()
    }


FASTER = seconds({STOCK: 2.0, OTHER: 1.0}, {STOCK: 2.0, OTHER: 1.0})
SLOWER = seconds({STOCK: 1.0, OTHER: 2.0}, {STOCK: 1.0, OTHER: 2.0})


class FakeTimer:
    """Runs everything once; the seconds are given by name, 1 if they are not."""

    def __init__(self, by_name: Mapping[str, tuple[float, float]]) -> None:
        self.by_name = by_name
        self.names: list[tuple[str, ...]] = []

    def __call__(
        self, runs: Mapping[str, Callable[[], object]], device: torch.device, budget: object, /
    ) -> dict[str, Times]:
        self.names.append(tuple(runs))
        for run in runs.values():
            run()
        found = {name: self.by_name.get(name, (1.0, 1.0)) for name in runs}
        return {name: Times(Seconds(clock), Seconds(device_time)) for name, (clock, device_time) in found.items()}


def never(*_: Any, **__: Any) -> Any:
    """Stand in for what must not be called."""
    raise AssertionError("nothing is measured here")
