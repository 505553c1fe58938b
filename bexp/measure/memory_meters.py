"""Meters of the bytes that tensors hold on a device, and of their peak."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from bexp.measure.passes import MeteredPasses, join_gradients


class ByteMeter(Protocol):
    """A meter of bytes within its context. `reset_peak` begins a new peak at the present level."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def level(self) -> int:
        """Bytes allocated now."""

    def peak(self) -> int:
        """The most bytes that were allocated at one time since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin a new peak."""


class CudaMeter:
    """A reader of the caching allocator's counts, which costs the device nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def level(self) -> int:
        """`memory_allocated`."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """`max_memory_allocated`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """`reset_peak_memory_stats`."""
        torch.cuda.reset_peak_memory_stats(self._device)


class HostMeter:
    """A meter of the storages that operations create, without those that exist already.

    Everything runs eagerly within the context, because the meter cannot see the allocations of compiled code. Besides,
    torch never compiles code that once ran under a dispatch mode. So the meter does not see the savings of fusing.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        self._storages = LiveStorages(existing)
        self._eager = ExitStack()

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:  # nothing is compiled without it, and importing it takes seconds
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        self._storages.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._storages.__exit__(kind, error, traceback)
        self._eager.close()

    def level(self) -> int:
        """Bytes created and not freed."""
        return self._storages.allocated_bytes

    def peak(self) -> int:
        """Highest level."""
        return self._storages.peak_bytes

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self._storages.reset_peak()


def byte_meter(device: torch.device, existing: Iterable[torch.Tensor]) -> ByteMeter:
    """Return the meter of `device`, which does not count `existing` tensors."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter(existing)


class LiveStorages(TorchDispatchMode):
    """A count of the storages that operations create within its context until each is freed, in backward as well.

    Storages that exist before are not counted if their tensors are given as `ignore`. Sharding resizes storages in
    place, and each counts with its present size. A tensor that wraps others, such as a DTensor, counts as the tensors
    that it wraps. Buffers that live within one operation are not seen. The counts depend on shapes alone, so they
    repeat exactly.
    """

    def __init__(self, ignore: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        for tensor in ignore:
            self._know(tensor.untyped_storage())

    def __enter__(self) -> LiveStorages:
        """Begin to count. Resizing a storage is no operation, so torch's method is replaced within the context."""
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if id(storage) in self._sizes:
                self._count(id(storage), size)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]  # put back in __exit__
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Count no more operations; the release of what was counted still counts."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # untyped in torch
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # watched here

    def reset_peak(self) -> None:
        """Begin a new peak at the present level."""
        self.peak_bytes = self.allocated_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count what it leaves."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for tensor in _held(leaf):
                    storage = tensor.untyped_storage()
                    if id(storage) not in self._known:
                        self._know(storage)
                        self._count(id(storage), storage.nbytes())
        return result

    def _know(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # torch keeps one Python object for a storage for as long as the storage lives
        self._known[key] = weakref.ref(storage, self._forget(key))

    def _count(self, key: int, size: int) -> None:
        self.allocated_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _forget(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            del self._known[key]
            self.allocated_bytes -= self._sizes.pop(key, 0)

        return forget


def _held(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the memory of one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, torch.Tensor):  # a DTensor names its mesh, too
            yield from _held(inner)


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes over the level before the forward.

    `saved` includes the output, which is the next layer's input and is not counted there again. The gradients of the
    inputs are counted. Parameters, their gradients, the inputs and the incoming gradients are not, because they belong
    to others. In eval mode `saved` is the output alone and `backward_peak` is 0.
    """

    saved: int
    forward_peak: int
    backward_peak: int


def measure_memory(passes: MeteredPasses, device: torch.device) -> ActivationBytes:
    """Run one forward and backward under a meter, without recomputation of the whole module.

    On CUDA, the caller must have run the passes once before, so that the libraries' workspaces exist already.
    """
    gc.collect()
    passes.release()
    passes.prepare_forward()
    with passes.without_recomputation(), byte_meter(device, passes.existing_tensors()) as meter:
        meter.reset_peak()
        base = meter.level()
        outputs = passes.metered_forward()
        saved, forward_peak = meter.level() - base, meter.peak() - base
        if not passes.training:
            return ActivationBytes(saved, forward_peak, 0)
        meter.reset_peak()
        losses = [output for output in outputs if output.dim() == 0]
        states = [output for output in outputs if output.dim() > 0]
        incoming = sum(output.numel() * output.element_size() for output in states)
        if states:
            losses.append(join_gradients(states))
        del outputs, states
        torch.autograd.backward(losses)
        return ActivationBytes(saved, forward_peak, max(0, meter.peak() - base - incoming))
