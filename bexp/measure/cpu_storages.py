"""Counts the bytes that tensors hold on the CPU, where no allocator counts them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operations create within its context until each is freed, in backward as well.

    Storages that exist before are not counted if their tensors are given as `ignore`. Buffers that live within one
    operation are not seen. The counts depend on shapes alone, so they repeat exactly.
    """

    def __init__(self, ignore: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in ignore:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = weakref.ref(storage, self._forget(id(storage), 0))

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
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one Python object for a storage for as long as the storage lives
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, self._forget(key, size))
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _forget(self, key: int, size: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            del self._known[key]
            self.allocated_bytes -= size

        return forget
