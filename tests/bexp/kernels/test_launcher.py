"""Prepared launches, with a stand-in for what Triton compiles: which calls go below Triton's launch, and with what."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bexp.kernels import launcher
from bexp.kernels.launcher import Blocks, Launch, Launches, Pointer

STREAM = 7
HOOKS = ("launch_enter_hook", "launch_exit_hook")


class FakeKernel:
    """A compiled kernel that notes the calls that come through Triton."""

    pre_run_hooks: tuple[Any, ...] = ()
    device_caches: ClassVar[dict[int, Any]] = {}

    def __init__(self, scratch: int = 0) -> None:
        def kernel(x: Any, w_desc: Any, size: int, flag: bool = False) -> None: ...

        self.signature = inspect.signature(kernel)
        self.by_triton: list[dict[str, Any]] = []
        run = SimpleNamespace(launch_cooperative_grid=0, launch_pdl=0, profile_scratch_size=0)
        run.global_scratch_size = scratch
        self.compiled = SimpleNamespace(
            run=run, packed_metadata=(4, 1, 0), function=99, metadata=SimpleNamespace(tensordesc_meta=["swizzled"])
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**arguments: Any) -> Any:
            self.by_triton.append({"grid": grid, **arguments})
            return self.compiled

        return run


@pytest.fixture
def hooks() -> SimpleNamespace:
    return SimpleNamespace(**{name: SimpleNamespace(calls=[]) for name in HOOKS})


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch, hooks: SimpleNamespace) -> list[tuple[Any, ...]]:
    """The calls that reach the compiled launcher."""
    calls: list[tuple[Any, ...]] = []
    driver = SimpleNamespace(make_tensordesc_arg=lambda descriptor, metadata: [(metadata, descriptor), 4, 8])
    stand_ins = {
        "triton": SimpleNamespace(__version__="3.6.0", knobs=SimpleNamespace(runtime=hooks)),
        "triton.backends.nvidia.driver": driver,
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Blocks, "describe", lambda self, base: base.data_ptr())
    monkeypatch.setattr(launcher, "_compiled_launcher", lambda run: lambda *arguments: calls.append(arguments))
    return calls


def launches(*kernels: FakeKernel) -> Launches:
    given = {"x": Pointer("x", 32), "w_desc": Blocks(Pointer("w"), (4, 8), (2, 8)), "size": 4}
    return Launches(("x", "w"), [Launch(kernel, (3, 2), given, num_warps=4) for kernel in kernels])


def operands() -> tuple[Tensor, Tensor]:
    return torch.zeros(64), torch.zeros(4, 8)


def test_the_first_call_goes_through_triton_and_the_next_below_it(below: list[tuple[Any, ...]]) -> None:
    kernel = FakeKernel()
    launch = launches(kernel)
    (x, w), (other_x, other_w) = operands(), operands()
    launch(STREAM, x, w)
    (first,) = kernel.by_triton
    assert first["x"].data_ptr() == x.data_ptr() + 32
    assert (first["grid"], first["w_desc"], first["size"], first["num_warps"]) == ((3, 2), w.data_ptr(), 4, 4)
    assert below == []
    for stream in (STREAM, STREAM, 8):
        launch(stream, other_x, other_w)
    fixed = (99, 0, 0, None, None, (4, 1, 0), None, None, None)
    encoded = (("swizzled", other_w.data_ptr()), 4, 8, 8, 1)  # the map, the tensor's shape, and its strides
    arguments = (*fixed, other_x.data_ptr() + 32, *encoded, 4, False)
    assert below == [(3, 2, 1, stream, *arguments) for stream in (STREAM, STREAM, 8)]
    assert len(kernel.by_triton) == 1


def test_launches_keep_their_order_when_only_some_are_prepared(below: list[tuple[Any, ...]]) -> None:
    kernels = (FakeKernel(), FakeKernel(scratch=128), FakeKernel())
    launch = launches(*kernels)
    for _ in range(4):
        launch(STREAM, *operands())
    assert [len(kernel.by_triton) for kernel in kernels] == [1, 4, 1]
    assert len(below) == 2 * 3


def test_addresses_that_are_no_multiple_of_16_go_through_triton(below: list[tuple[Any, ...]]) -> None:
    """Triton compiles other code for them. The code for one must not run on the other, whichever came first."""
    kernel = FakeKernel()
    launch = launches(kernel)
    x, w = operands()
    off = torch.zeros(65)[1:]
    launch(STREAM, off, w)
    launch(STREAM, x, w)
    assert below == []
    launch(STREAM, x, w)
    assert len(below) == 1
    for _ in range(2):
        launch(STREAM, off, w)
        launch(STREAM, x, torch.zeros(33)[1:].view(4, 8))
    assert len(kernel.by_triton) == 6
    assert len(below) == 1


@pytest.mark.parametrize("name", HOOKS)
def test_hooked_launches_go_through_triton(name: str, below: list[tuple[Any, ...]], hooks: SimpleNamespace) -> None:
    kernel = FakeKernel()
    launch = launches(kernel)
    tensors = operands()
    for _ in range(3):
        launch(STREAM, *tensors)
    assert (len(kernel.by_triton), len(below)) == (1, 2)
    getattr(hooks, name).calls.append(print)
    launch(STREAM, *tensors)
    launch(STREAM, *operands())
    assert (len(kernel.by_triton), len(below)) == (3, 2)
    getattr(hooks, name).calls.clear()
    launch(STREAM, *tensors)
    assert (len(kernel.by_triton), len(below)) == (3, 3)


@pytest.mark.parametrize("unknown", ["version", "launcher", "scratch memory", "hooks of a kernel", "no block copies"])
def test_what_is_not_known_of_triton_goes_through_triton(
    unknown: str, below: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FakeKernel(scratch=128 if unknown == "scratch memory" else 0)
    if unknown == "version":
        monkeypatch.setattr(sys.modules["triton"], "__version__", "3.9.0")
    elif unknown == "launcher":
        del kernel.compiled.run.launch_pdl
    elif unknown == "hooks of a kernel":
        kernel.pre_run_hooks = (print,)
    elif unknown == "no block copies":
        kernel.compiled.metadata.tensordesc_meta = None
    launch = launches(kernel)
    for _ in range(3):
        launch(STREAM, *operands())
    assert (len(kernel.by_triton), len(below)) == (3, 0)


def test_an_address_is_encoded_once_and_what_is_kept_is_bounded(
    below: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    def describe(self: Blocks, base: Any) -> int:
        encoded.append(base.data_ptr())
        return encoded[-1]

    monkeypatch.setattr(Blocks, "describe", describe)
    monkeypatch.setattr(launcher, "MOST_ADDRESSES", 4)  # two descriptors and two sets of addresses
    monkeypatch.setattr(launcher, "_KEPT", deque())
    launch = launches(FakeKernel())
    x, a = operands()
    b, c = torch.zeros(4, 8), torch.zeros(4, 8)
    for w in (a, b, a, b, c, b, a):
        launch(STREAM, x, w)
    addresses = {"a": a.data_ptr(), "b": b.data_ptr(), "c": c.data_ptr()}
    # Triton encoded the first a. The oldest makes room: b for c, a for b, c for a.
    assert encoded == [addresses[name] for name in ("a", "b", "a", "c", "b", "a")]
    assert [call[14][1] for call in below] == [addresses[name] for name in ("b", "a", "b", "c", "b", "a")]
    assert len(launch._bound) == 2
    another = launches(FakeKernel())  # the room is the process's
    for w in (a, b, c):
        another(STREAM, x, w)
    assert (len(launch._bound), len(another._bound)) == (0, 2)
