"""What the first passes at a width take longer than those that follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bexp.explorer.cost.text_batches import TextBatch
from bexp.workers.profiler.trials import component
from bexp.workers.profiler.trials.component import new_width_seconds

PLANNING_SECONDS = 0.03


class Planning:
    """Passes that take longer the first time at each width, and the very first time for another reason, too."""

    training = True

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.now = 0.0

    @contextmanager
    def at(self, batch: TextBatch) -> Iterator[Any]:
        self.width = batch.width
        yield self

    def synchronize(self) -> None: ...

    def prepare_forward(self) -> None: ...

    def forward(self) -> None:
        if not self.widths:
            self.now += 0.1
        if self.width not in self.widths:
            self.now += PLANNING_SECONDS
        self.now += 0.002
        self.widths.append(self.width)

    def prepare_backward(self) -> None: ...

    def backward(self) -> None: ...


def test_each_measurement_takes_widths_that_the_process_has_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Planning()
    monkeypatch.setattr(component, "time", SimpleNamespace(perf_counter=lambda: passes.now))
    monkeypatch.setattr(component, "_widths_run", set())
    usual = TextBatch(((701,), (333,)), 701)
    for _ in range(2):
        found = new_width_seconds(cast("Any", passes), passes.at, usual)
        assert found == pytest.approx(PLANNING_SECONDS)
    assert len(set(passes.widths)) == 4
    assert all(width <= 701 for width in passes.widths)
