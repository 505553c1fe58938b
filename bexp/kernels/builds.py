"""Builds expert kernels into Triton's cache, side by side, before a device needs them.

`python -m bexp.kernels.builds` reads an `Order` from its standard input. It uses no device: the order says what the
kernels are built for. So it disturbs no device that is timed, and its processes can be forks. It reads private parts of
launches and plans, because public ones would be a change of code that was measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from bexp.child_process import end_with_parent
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.launcher import ALIGNMENT_BYTES, Blocks, Launch, Pointer
from bexp.kernels.shapes import ExpertsShape

if TYPE_CHECKING:
    from bexp.kernels.activations import Activation


@dataclass(frozen=True)
class Experts:
    """Experts to build for, at each number of tokens.

    `transposed` says that their matrices are the transposes of contiguous tensors.
    """

    shape: ExpertsShape
    num_tokens: tuple[int, ...]
    transposed: bool


@dataclass(frozen=True)
class Order:
    """What to build, for a device of this capability with so many multiprocessors, in so many processes."""

    experts: tuple[Experts, ...]
    capability: tuple[int, int]
    multiprocessors: int
    processes: int

    def encode(self) -> str:
        """Return the order as JSON."""
        return json.dumps(asdict(self), default=dtype_name)

    @classmethod
    def decode(cls, text: str) -> Order:
        """Return what `encode` was called on."""
        found = json.loads(text)
        experts = []
        for one in found.pop("experts"):
            shape = one["shape"] | {"dtype": getattr(torch, one["shape"]["dtype"])}
            experts.append(Experts(ExpertsShape(**shape), tuple(one["num_tokens"]), one["transposed"]))
        return cls(tuple(experts), tuple(found.pop("capability")), **found)


class _Device:
    """What Triton asks its driver for before it compiles."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - optional

        return GPUTarget("cuda", 10 * self._capability[0] + self._capability[1], 32)


def pretend(order: Order) -> None:
    """Let Triton and our choice of tiles take the order's device for that of this process, which opens none."""
    from triton.runtime import driver  # noqa: PLC0415 - optional

    driver.set_active(_Device(order.capability))
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda device=None: order.capability
    cuda.get_device_properties = lambda device=None: _Properties(order.multiprocessors)


@dataclass(frozen=True)
class _Properties:
    multi_processor_count: int


@dataclass(frozen=True)
class Build:
    """A launch whose kernel can be compiled before there are tensors: `dtypes` are their formats by name."""

    launch: Launch
    dtypes: Mapping[str, torch.dtype]

    @property
    def variant(self) -> Any:
        """What the kernel is compiled for: constants, formats, and what Triton assumes of numbers."""
        launch = self.launch
        parameters = tuple(map(self._assumed, launch._kernel.params))
        return launch._kernel, parameters, tuple(sorted(launch._options.items()))

    def run(self) -> Any:
        """Return what Triton compiles. Nothing is launched."""
        launch = self.launch
        given = {name: self._value(argument) for name, argument in launch._arguments.items()}
        return launch._kernel.run(**given, grid=launch._grid, warmup=True, **launch._options)

    def _assumed(self, parameter: Any) -> Any:
        argument = self.launch._arguments.get(parameter.name, parameter.default)
        if isinstance(argument, Pointer):
            return self._dtype(argument)
        if isinstance(argument, Blocks):
            return len(argument.shape), argument.block, repr(argument.layout), self._dtype(argument.pointer)
        if parameter.is_constexpr or not isinstance(argument, int):
            return repr(argument)
        return parameter.do_not_specialize or (argument == 1, argument % ALIGNMENT_BYTES == 0)

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, Pointer):
            return _Aligned(self._dtype(argument))
        return argument.describe(_Aligned(self._dtype(argument.pointer))) if isinstance(argument, Blocks) else argument

    def _dtype(self, pointer: Pointer) -> torch.dtype:
        return pointer.dtype or self.dtypes[pointer.tensor]


@dataclass(frozen=True)
class _Aligned:
    """What Triton takes for a tensor: its number format, and an address that is a multiple of all that it asks for."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def builds_of(order: Order) -> list[Build]:
    """Return one build of each kernel that the back ends' checks and the order's experts need."""
    found: dict[Any, Build] = {}
    for build in _all_builds(order):
        found.setdefault(build.variant, build)
    return list(found.values())


PROBED = ExpertsShape(hidden_size=64, ffn_hidden_size=32, num_experts=4, top_k=1, dtype=torch.bfloat16)
"""The experts that `ExpertBackend.check` runs. A wrong one delays the first check by what it builds itself."""
PROBED_TOKENS = (16, 32, 512)


def _all_builds(order: Order) -> Iterator[Build]:
    for experts in order.experts:
        probed = Experts(replace(PROBED, dtype=experts.shape.dtype), PROBED_TOKENS, transposed=False)
        for one in (experts, probed):
            for num_tokens in one.num_tokens:
                yield from fused_builds(one.shape, num_tokens, transposed=one.transposed)
                yield from grouped_builds(one.shape, num_tokens, transposed=one.transposed)


def fused_builds(shape: ExpertsShape, num_tokens: int, *, transposed: bool) -> Iterator[Build]:
    """Yield the launches of the fused back end, forward and backward with all gradients."""
    from bexp.kernels.experts.fused.plan import fused_plan  # noqa: PLC0415 - needs Triton

    w_in = (shape.num_experts, shape.hidden_size, shape.ffn_hidden_size * (2 if shape.gated else 1))
    activation = cast("Activation", shape.activation)
    names = ("x", "w_in", "w_out", "pre", "work", "out", "grad", "hidden", "grad_w_in", "grad_w_out", "grad_x")
    numbers = {"routes": torch.int64} | dict.fromkeys(("permutation", "counts", "scan", "counter"), torch.int32)
    for weights in dict.fromkeys((shape.dtype, torch.float32)):  # a router's class decides
        formats = (shape.dtype, weights, torch.int64, shape.dtype)
        routes, size = (num_tokens, shape.top_k), shape.ffn_hidden_size
        plan = fused_plan(routes, w_in, size, activation, formats, transposed, transposed, True, None, 0)
        dtypes = numbers | dict.fromkeys(names, shape.dtype) | dict.fromkeys(("weights", "grad_weights"), weights)
        forward, backward = plan._forward, plan._backward
        assert backward is not None, "the plan keeps what backward needs"
        sort = () if forward.sort is None else (forward.sort._count, forward.sort._place)
        for launches in (*sort, forward.launches, *backward.launches((True, True, True, True))):
            for launch in () if launches is None else launches._launches:
                yield Build(launch, dtypes)


def grouped_builds(shape: ExpertsShape, num_tokens: int, *, transposed: bool) -> Iterator[Build]:
    """Yield the launches of the back end `hopper_grouped`: both products and their gradients."""
    from bexp.kernels.experts.hopper_grouped.gemm import rows_launch, weights_launch  # noqa: PLC0415 - needs Triton

    dtype, num_experts, num_rows = shape.dtype, shape.num_experts, num_tokens * shape.top_k
    dtypes = dict.fromkeys(("x", "w", "out", "grad"), dtype) | dict.fromkeys(("ends", "counter"), torch.int32)
    x, w, out, grad, ends = (Pointer(name) for name in ("x", "w", "out", "grad", "ends"))
    gates = 2 if shape.gated else 1
    for k, n in ((shape.hidden_size, gates * shape.ffn_hidden_size), (shape.ffn_hidden_size, shape.hidden_size)):
        yield Build(rows_launch(x, w, out, ends, num_rows, num_experts, k, n, transposed, dtype, 0), dtypes)
        yield Build(rows_launch(x, w, out, ends, num_rows, num_experts, n, k, not transposed, dtype, 0), dtypes)
        sizes = (n, k) if transposed else (k, n)
        yield Build(weights_launch(x, grad, out, ends, num_rows, num_experts, *sizes, dtype, 0)[0], dtypes)


def run(build: Build) -> bool:
    """Compile a kernel, and the C code that launches it where the driver's library is there; return whether it is."""
    try:
        compiled = build.run()
    except Exception:  # noqa: BLE001 - who needs it builds it again, and sees why it cannot be had
        return False
    with suppress(Exception):  # a host without a driver
        from triton.backends.nvidia.driver import CudaLauncher  # noqa: PLC0415 - optional

        CudaLauncher(compiled.src, compiled.metadata)
    return True


def load_driver() -> None:
    """Compile the C code by which Triton calls the driver."""
    with suppress(Exception):  # a host without a driver
        from triton.backends.nvidia.driver import CudaUtils  # noqa: PLC0415 - optional

        CudaUtils()


def main() -> int:
    """Build what the order on standard input asks for; return 1 if something could not be built."""
    import triton.experimental.gluon  # noqa: F401, PLC0415 - while the order is made

    end_with_parent(os.getppid())
    order = Order.decode(sys.stdin.readline())
    pretend(order)
    builds = builds_of(order)

    context = multiprocessing.get_context("fork")
    claimed, failed, owner = context.Value("i", 0), context.Value("i", 0), os.getpid()

    def claim() -> int:
        with claimed.get_lock():
            claimed.value += 1
            return int(claimed.value) - 1

    def work() -> None:
        if end_with_parent(owner):
            while (number := claim()) < len(builds):
                if not run(builds[number]):
                    failed.value = 1

    processes = [context.Process(target=work) for _ in range(min(order.processes, len(builds)))]
    for process in processes:
        process.start()
    load_driver()
    for process in processes:
        process.join()
    return int(failed.value or any(process.exitcode for process in processes))


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())
