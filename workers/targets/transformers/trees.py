"""Tensors inside nested arguments and outputs: finding, copying, and replacing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to each tensor of `tree`. Tuples, lists and mappings are rebuilt, other objects stay."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(one, function) for one in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(one, function) for one in tree)
    if type(tree) is dict:
        return {name: map_tensors(one, function) for name, one in tree.items()}
    return tree


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor of `tree`, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for one in tree:
            yield from tensors_of(one)
    elif isinstance(tree, Mapping):
        for one in tree.values():
            yield from tensors_of(one)


def copied(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a copy with values of its own; an expanded axis stays expanded, and `requires_grad` is kept."""
    narrow = tensor.detach()
    shape = narrow.shape
    for axis, stride in enumerate(narrow.stride()):
        if stride == 0 and shape[axis] > 1:
            narrow = narrow.narrow(axis, 0, 1)
    moved = narrow.clone() if device is None or device == narrow.device else narrow.to(device, copy=True)
    return moved.expand(shape).requires_grad_(tensor.requires_grad)


def signature(tree: Any) -> Any:
    """Return structure, shapes and dtypes of tensors, which the arguments of layers of one kind share."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), str(tree.dtype))
    if isinstance(tree, (tuple, list)):
        return tuple(signature(one) for one in tree)
    if isinstance(tree, Mapping):
        return tuple((str(name), signature(one)) for name, one in sorted(tree.items(), key=lambda item: str(item[0])))
    return type(tree).__name__
