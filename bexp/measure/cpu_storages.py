"""Counts the bytes that tensors hold on the CPU, where no allocator counts them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operations create within its context until each is freed, in backward as well.

    Storages that exist before are not counted if their tensors are given as `ignore`. Sharding makes storages larger
    and smaller where they are, and each counts with its present size. A tensor that wraps others, such as a DTensor,
    holds no memory of its own, and counts as what it wraps. Buffers that live within one operation are not seen. The
    counts depend on shapes alone, so they repeat exactly.
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
