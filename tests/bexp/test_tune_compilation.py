"""The seconds of torch.compile in a trial of a training command."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import callback

from bexp.tune import compilation
from bexp.tune.clock import Clock
from bexp.tune.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until a test moves it."""
    time = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: time[0])
    monkeypatch.setattr(compilation, "_new", [])
    return time


def compiler(now: list[float]) -> Any:
    """Something that compiles for so many seconds, as torch says it to who listens."""
    begin: list[Any] = []
    end: list[Any] = []
    handler = SimpleNamespace(register_start_callback=begin.append, register_end_callback=end.append)
    compilation.patch(SimpleNamespace(callback_handler=handler))  # type: ignore[arg-type]  # a stand-in

    def compile_for(seconds: float) -> None:
        begin[0](None)
        now[0] += seconds
        end[0](None)

    return compile_for


def run(now: list[float], compiles: list[list[float]], widths: list[int]) -> dict[str, Any]:
    """The figures of micro-steps of 0.5 s, in each of which some code is compiled."""
    compile_for, clock = compiler(now), Clock(CPU, Ranks(), 1)
    clock.begin_micro_step()
    for place, width in enumerate(widths):
        for seconds in compiles[place] if place < len(compiles) else ():
            compile_for(seconds)
        now[0] += 0.5
        clock.end_micro_step(None, width)
        if place % 2:
            clock.end_step()
    clock.end_early()
    return clock.figures()


@pytest.mark.parametrize(
    ("compiles", "widths", "seen", "shapes"),
    [
        ([[30.0, 10.0]], [64] * 12, [40.0], 1),
        ([[30.0], [], [], [8.0]], [64, 64, 48, 32] * 3, [30.0, 8.0], 3),
        ([], [64] * 12, [], 1),
        ([[], [], [], [], [], [5.0]], [64] * 12, [5.0], 1),
    ],
)
def test_compilations_are_counted_apart_from_the_steps_in_which_they_happen(
    now: list[float], compiles: list[list[float]], widths: list[int], seen: list[float], shapes: int
) -> None:
    figures = run(now, compiles, widths)
    assert figures["compile_seconds"] == pytest.approx(seen)
    assert figures["num_shapes"] == shapes
    assert figures["micro_step_seconds"] == pytest.approx(0.5)


def test_what_was_compiled_before_the_first_noted_step_belongs_to_it(now: list[float]) -> None:
    compiler(now)(7.0)
    assert compilation.new_seconds() == 7.0
    assert compilation.new_seconds() == 0.0, "each counts once"


@pytest.fixture
def followed() -> Iterator[None]:
    """Compilations of torch are followed, and there were none before."""
    torch._dynamo.reset()
    compilation._has_compiled.clear()
    handler = callback.callback_handler
    before = len(handler.start_callbacks), len(handler.end_callbacks)
    compilation.patch(callback)
    yield
    compilation.new_seconds()
    del handler.start_callbacks[before[0] :], handler.end_callbacks[before[1] :]


@pytest.mark.usefixtures("followed")
def test_torch_says_when_it_compiles() -> None:
    """The names of torch's module are those that the patch needs."""
    with callback.callback_handler.install_callbacks(callback.CallbackTrigger.DYNAMO, "0/0"):
        pass
    assert compilation._new


@pytest.mark.filterwarnings("ignore:.*script_method")  # torch's own code, which is imported late
@pytest.mark.usefixtures("followed")
@pytest.mark.parametrize(("anew", "are_dynamic"), [(True, [False] * 4), (False, [False, True])])
def test_each_size_is_compiled_for_itself(anew: bool, are_dynamic: list[bool]) -> None:
    found: list[bool] = []

    def compile_noted(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        given = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        found.append(any(isinstance(each, torch.SymInt) for each in given))
        return graph.forward

    run = torch.compile(lambda x: x.sin(), backend=compile_noted)
    seconds = []
    for size in (2, 8, 16, 32):
        run(torch.ones(size, 3))
        seconds.append(compilation.new_seconds())
        if anew:
            compilation.compile_anew()
    assert found == are_dynamic
    assert all(seconds[: len(found)]), "each compilation is timed"


class Parts(nn.Module):
    """A model with a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class CompiledForward(Parts):
    """A model whose class compiles what it computes."""

    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]  # torch has no types for it


def test_each_way_to_compile_a_model_is_seen() -> None:
    assert not compilation.is_compiled(Parts())
    assert compilation.is_compiled(CompiledForward())
    assert not compilation.is_compiled(torch.optim.SGD(Parts().parameters()))
    assert compilation.is_compiled(torch.compile(Parts(), backend="eager"))
    by_itself, by_forward, by_layer = Parts(), Parts(), Parts()
    by_itself.compile(backend="eager")
    by_forward.forward = torch.compile(by_forward.forward, backend="eager")
    by_layer.layer = torch.compile(by_layer.layer, backend="eager")  # type: ignore[assignment]  # as people do
    assert all(map(compilation.is_compiled, (by_itself, by_forward, by_layer)))
