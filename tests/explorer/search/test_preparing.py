"""What it takes before a component can be timed."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import Measurement, Outcome, PhaseSeconds
from bexp.explorer.search.suggestion import PreparingSeconds
from tests.explorer.measurements import measured


def component(kind: str, size: int, backend: str | None) -> Component:
    part = "L" if kind == "layer" else None
    return Component.model_validate({"kind": kind, "micro_batch_size": size, "backend": backend, "part": part})


def measurement(*kinds: tuple[str, int, str | None], warm_up: float = 0.0, build: float = 0.0) -> Measurement:
    """A trial that took so long to build a model, or to start a command, and to warm it up."""
    return Measurement(
        candidate=Candidate(micro_batch_size=4, attention_backend="sdpa", num_query_groups=1),
        outcome=Outcome.OK,
        components=tuple(measured(component(*of)) for of in kinds),
        phases=PhaseSeconds(build=build, warm_up=warm_up, timed=1.0),
    )


def test_the_start_of_a_command_is_what_its_trials_take_to_build_it() -> None:
    found = PreparingSeconds("cuda", is_whole=True)
    assert found.each == 0.0, "the first trial is made at once"
    for number, build in enumerate((40.0, 20.0)):
        found.learn(number, measurement(("shell", 4, None), ("optimizer", 0, None), build=build))
    assert found.each == pytest.approx(30.0)
    prepared = np.array([True, True, False])
    assert found.of(prepared, np.array([True, False, True])).tolist() == pytest.approx([30.0, 30.0, 0.0])


def test_a_failed_start_says_nothing() -> None:
    found = PreparingSeconds("cpu", is_whole=True)
    found.learn(0, measurement(build=50.0))
    assert found.each == 0.0


def test_of_other_models_the_compiler_counts_and_takes_less_for_what_it_knows() -> None:
    found = PreparingSeconds("cuda")
    assert found.each == 10.0
    found.learn(0, measurement(("layer", 4, "sdpa"), warm_up=50.0))
    assert found.each == 10.0, "nothing was compiled"
    found.learn(1, measurement(("layer", 4, "sdpa+compiled"), warm_up=4.0))
    assert found.each == pytest.approx(7.0)
    seconds = found.of(np.array([True, True, False]), np.array([True, False, False]))
    assert seconds.tolist() == pytest.approx([2.8, 7.0, 0.0])
