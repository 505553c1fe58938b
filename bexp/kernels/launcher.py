"""Launches of Triton kernels that cost the host little more than the driver's call.

Triton's own launch binds all arguments, derives what the kernel is specialised on, looks the kernel up by a string,
and encodes every tensor descriptor again. A `Launch` does that once for its shapes, and `Launches` keep the arguments
for each set of addresses. From then on they call the compiled launcher, without Triton's code around it.

A `Launch` belongs to one set of shapes, strides, number formats and one device: whoever keeps it must have all of
these in its key. Its numbers and compile-time constants never change. Of what Triton specialises a kernel on, the
addresses alone can differ from call to call, and only in whether they are multiples of 16. A call with other addresses
goes Triton's way, as do all calls in the interpreter, with a Triton that is not known here, and while a profiler has
hooked launches.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16
KEPT_LAUNCHES = 256
"""Shapes for which a function keeps its launches; the least recently used go first."""
MOST_ADDRESSES = 1 << 14
"""Addresses whose descriptors a process keeps, and sets of addresses whose arguments it keeps. The oldest go first."""
_KEPT: deque[tuple[dict[Any, Any], Any]] = deque()
"""Where each of them lies and its key, in the order in which they came."""
_KNOWN_TRITON = ("3.6.",)
K = TypeVar("K")
V = TypeVar("V")
_Bound: TypeAlias = tuple[Callable[..., None], int, int, int, tuple[Any, ...]]
"""A compiled launcher, the grid, and the arguments that follow the stream."""
_address_of = Tensor.data_ptr
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


@dataclass(frozen=True)
class Pointer:
    """An argument that points into one of the call's tensors, `offset` bytes behind its start.

    `dtype` says what lies there if it is not the tensor's own number format.
    """

    tensor: str
    offset: int = 0
    dtype: torch.dtype | None = None

    def view(self, tensors: Mapping[str, Tensor], shape: Sequence[int] | None = None) -> Tensor:
        """What the pointer points to, up to the tensor's end or, if given, of that contiguous shape."""
        tensor = tensors[self.tensor]
        if self.offset == 0 and self.dtype in {None, tensor.dtype} and shape is None:
            return tensor
        found = tensor.view(-1).view(torch.uint8)[self.offset :].view(self.dtype or tensor.dtype)
        return found if shape is None else found[: _product(shape)].view(tuple(shape))


@dataclass(frozen=True)
class Blocks:
    """An argument that describes a contiguous tensor of `shape` to the hardware, which copies blocks of it.

    `layout` is the layout of a block in shared memory, for kernels in Gluon.
    """

    pointer: Pointer
    shape: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None

    def describe(self, base: Any) -> Any:
        """Triton's descriptor. `base` has the address and the number format."""
        strides = [_product(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - optional

            return TensorDescriptor(base, list(self.shape), strides, list(self.block))
        from triton.experimental.gluon.nvidia.hopper import (  # noqa: PLC0415 - optional
            TensorDescriptor as GluonDescriptor,
        )

        return GluonDescriptor(base, list(self.shape), strides, list(self.block), self.layout)


class Launch:
    """One launch of a kernel for tensors of given shapes.

    `arguments` are the kernel's by name, with a `Pointer` or `Blocks` for each that depends on the tensors; `options`
    are Triton's, such as `num_warps`.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: Any) -> None:
        self._kernel = kernel
        self._grid = grid
        self._arguments = dict(arguments)
        self._options = options
        self._prepared: _Prepared | None = None
        self._can_prepare = _knows_triton(kernel)

    @property
    def is_prepared(self) -> bool:
        """Whether Triton has compiled the kernel, and its launcher is known."""
        return self._prepared is not None

    def bind(self, addresses: Mapping[str, int]) -> _Bound | None:
        """Everything that the driver needs for tensors at these addresses; None if only Triton can launch there."""
        return None if self._prepared is None else self._prepared.bind(addresses)

    def by_triton(self, tensors: Mapping[str, Tensor]) -> None:
        """Launch on the current stream as Triton does it, and prepare what later launches need."""
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}

        def located(pointer: Pointer) -> Any:
            tensor = tensors[pointer.tensor]
            if tensor.is_cuda and pointer.offset:
                return _Address(addresses[pointer.tensor] + pointer.offset, pointer.dtype or tensor.dtype)
            return pointer.view(tensors)

        def value(argument: Any) -> Any:
            if isinstance(argument, Pointer):
                return located(argument)
            return argument.describe(located(argument.pointer)) if isinstance(argument, Blocks) else argument

        given = {name: value(argument) for name, argument in self._arguments.items()}
        compiled = self._kernel[self._grid](**given, **self._options)
        if self._prepared is None and self._can_prepare and _all_aligned(self._arguments, addresses):
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            self._prepared = _prepare(compiled, self._kernel, self._grid, self._arguments, dtypes)
            self._can_prepare = self._prepared is not None


class Launches:
    """Launches that follow each other on the same tensors, which a call passes in the order of `names`.

    A call costs a look-up of the tensors' addresses, because the allocator of a training loop returns to the same
    addresses; an unknown set of addresses costs some microseconds more.
    """

    def __init__(self, names: tuple[str, ...], launches: Sequence[Launch]) -> None:
        self._names = names
        self._launches = tuple(launches)
        self._bound: dict[tuple[int, ...], list[_Bound]] = {}
        self._hooks: Any = None

    def __call__(self, stream: int, *tensors: Tensor) -> None:
        """Launch on `stream` of the current device, as `current_stream` returns it."""
        addresses = tuple(map(_address_of, tensors))
        bound = self._bound.get(addresses)
        hooks = self._hooks
        if bound is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            self._launch_unknown(stream, tensors, addresses)
            return
        for launcher, x, y, z, arguments in bound:
            launcher(x, y, z, stream, *arguments)

    def _launch_unknown(self, stream: int, tensors: tuple[Tensor, ...], addresses: tuple[int, ...]) -> None:
        named = dict(zip(self._names, tensors, strict=True))
        located = dict(zip(self._names, addresses, strict=True))
        hooked = self._hooks is not None and (self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls)
        found = []
        for launch in self._launches:
            bound = None if hooked else launch.bind(located)
            if bound is None:
                launch.by_triton(named)
            else:
                launcher, x, y, z, arguments = bound
                launcher(x, y, z, stream, *arguments)
                found.append(bound)
        if self._hooks is None and all(launch.is_prepared for launch in self._launches):
            from triton import knobs  # noqa: PLC0415 - optional

            self._hooks = knobs.runtime
        if self._hooks is not None and len(found) == len(self._launches):
            _keep(self._bound, addresses, found)


class _Prepared:
    """A compiled kernel's launcher with its arguments, of which only addresses are missing."""

    def __init__(
        self,
        launcher: Callable[..., None],
        sizes: tuple[int, int, int],
        arguments: list[Any],
        pointers: list[tuple[int, Pointer]],
        maps: list[tuple[int, Pointer, dict[int, Any], Callable[[int], Any]]],
    ) -> None:
        self._launcher = launcher
        self._sizes = sizes
        self._arguments = arguments
        self._pointers = pointers
        self._maps = maps

    def bind(self, addresses: Mapping[str, int]) -> _Bound | None:
        arguments = self._arguments.copy()
        for place, pointer in self._pointers:
            arguments[place] = address = addresses[pointer.tensor] + pointer.offset
            if address % ALIGNMENT_BYTES:
                return None
        for place, pointer, maps, encode in self._maps:
            address = addresses[pointer.tensor] + pointer.offset
            if address % ALIGNMENT_BYTES:
                return None
            encoded = maps.get(address)
            if encoded is None:
                encoded = encode(address)
                _keep(maps, address, encoded)
            arguments[place] = encoded
        return self._launcher, *self._sizes, tuple(arguments)


def _keep(kept: dict[K, V], key: K, value: V) -> None:
    """Add to what is kept; the oldest of the process goes if there is no room. Threads may do that at the same time."""
    kept[key] = value
    _KEPT.append((kept, key))
    if len(_KEPT) > MOST_ADDRESSES:
        with suppress(IndexError):  # another thread was faster
            oldest, its_key = _KEPT.popleft()
            oldest.pop(its_key, None)


def _prepare(
    compiled: Any, kernel: Any, grid: tuple[int, ...], given: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
) -> _Prepared | None:
    """Return the prepared launch of a kernel that Triton has compiled; None if this Triton works in another way."""
    try:
        from triton import knobs  # noqa: PLC0415 - optional
        from triton.backends.nvidia.driver import make_tensordesc_arg  # noqa: PLC0415 - optional

        run = compiled.run
        launcher = _compiled_launcher(run)
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        needs_scratch = run.global_scratch_size or run.profile_scratch_size
        packed, function = compiled.packed_metadata, compiled.function
        described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        if launcher is None or needs_scratch or kernel.pre_run_hooks:
            return None
        _ = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    except (ImportError, AttributeError, KeyError, TypeError):
        return None
    # Function, two flags, two scratch buffers, metadata of kernel and launch, two hooks; then the kernel's arguments.
    arguments: list[Any] = [function, *flags, None, None, packed, None, None, None]
    pointers: list[tuple[int, Pointer]] = []
    maps: list[tuple[int, Pointer, dict[int, Any], Callable[[int], Any]]] = []
    for name, parameter in kernel.signature.parameters.items():
        argument = given.get(name, parameter.default)
        if isinstance(argument, Pointer):
            pointers.append((len(arguments), argument))
            arguments.append(0)
        elif isinstance(argument, Blocks):
            metadata = next(described, None)
            if metadata is None:  # this device copies no blocks: Triton passes pointers in their place
                return None
            pointer = argument.pointer
            encode = _encoder(argument, pointer.dtype or dtypes[pointer.tensor], metadata, make_tensordesc_arg)
            maps.append((len(arguments), pointer, {}, encode))
            strides = [_product(argument.shape[axis + 1 :]) for axis in range(len(argument.shape))]
            arguments += [None, *argument.shape, *strides]
        else:
            arguments.append(argument)
    x, y, z = (*grid, 1, 1)[:3]
    return _Prepared(launcher, (x, y, z), arguments, pointers, maps)


def current_stream(device: int) -> int:
    """The current stream of a CUDA device; 0 for the CPU (-1), where kernels are interpreted."""
    return _raw_stream(device) if device >= 0 else 0


def is_current(device: int) -> bool:
    """Whether kernels are launched on `device`, an index as `Tensor.get_device` returns it; the CPU (-1) always is."""
    return device < 0 or device == _current_device()


class _Address:
    """What Triton takes for a tensor: an address in device memory, and the number format of what lies there."""

    __slots__ = ("_address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address


def _compiled_launcher(run: Any) -> Callable[..., None] | None:
    """What Triton compiled to parse a launch's arguments, below the function that expands descriptors."""
    launcher = run.launch
    if not isinstance(launcher, BuiltinFunctionType):
        launcher = inspect.getclosurevars(launcher).nonlocals["launcher"]
    return launcher if isinstance(launcher, BuiltinFunctionType) else None


def _encoder(
    blocks: Blocks, dtype: torch.dtype, metadata: Any, make_arguments: Callable[[Any, Any], list[Any]]
) -> Callable[[int], Any]:
    def encode(address: int) -> Any:
        return make_arguments(blocks.describe(_Address(address, dtype)), metadata)[0]

    return encode


def _knows_triton(kernel: Any) -> bool:
    import triton  # noqa: PLC0415 - optional

    return hasattr(kernel, "device_caches") and triton.__version__.startswith(_KNOWN_TRITON)


def _all_aligned(arguments: Mapping[str, Any], addresses: Mapping[str, int]) -> bool:
    pointers = [a.pointer if isinstance(a, Blocks) else a for a in arguments.values()]
    return all((addresses[p.tensor] + p.offset) % ALIGNMENT_BYTES == 0 for p in pointers if isinstance(p, Pointer))


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
