"""Selective recomputation: forward discards some results after their last use, and backward recomputes them.

Every tensor that an operation saves for backward passes through `torch.autograd.graph.saved_tensors_hooks`. If a
result was marked as recomputable, the hook saves a recipe instead: the function, and the tensors or recipes that it
starts from. Megatron-Core's output-discarding recomputation has the same effect; this one is built on autograd's hooks.

torch's selective checkpointing (`create_selective_checkpoint_contexts`) does not serve here. It asks a policy in Python
at every dispatched operator in both passes, which costs the host several times what the hooks cost. It sees no operator
inside an autograd Function, such as a Triton kernel. And it does not notice that a kept projection has been rotated in
place since, and rotates it twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Results = TypeVar("Results", Tensor, tuple[Tensor, ...])


@contextmanager
def selective_recompute(*, products: bool) -> Iterator[None]:
    """Within the context, results of `recomputable` are not kept for backward. Matrix products are, unless `products`.

    A result that was changed in place after it was marked is kept after all. If a tensor that a recipe starts from is
    changed in place, backward raises an error, as autograd does for its saved tensors. Gradients come from the same
    kernels on the same numbers. Backward can run again if the graph is retained, but there are no second derivatives.
    """
    announced = _Announced(products)
    token = _ANNOUNCED.set(announced)
    try:
        with saved_tensors_hooks(announced.pack, _unpack):
            yield
    finally:
        _ANNOUNCED.reset(token)


def recomputable(function: Callable[..., Results], *inputs: Tensor, product: bool = False) -> Results:
    """Return `function(*inputs)`, which backward may recompute. `product` marks matrix products and their results.

    The function must not depend on anything that changes between forward and backward, and its operations must not save
    their own results for backward. Outside `selective_recompute` this is a plain call.
    """
    results = function(*inputs)
    announce(results, function, *inputs, product=product)
    return results


def announce(
    results: Tensor | tuple[Tensor, ...],
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    *inputs: Tensor,
    product: bool = False,
) -> None:
    """Mark results that exist already as recomputable: `function(*inputs)` without gradients must equal them.

    If several results share a storage, the first of them stands for it.
    """
    if torch.compiler.is_compiling():  # the compiler itself chooses what to keep
        return
    announced = _ANNOUNCED.get()
    if announced is not None and (announced.products or not product):
        announced.add(results if isinstance(results, tuple) else (results,), function, inputs)


class _Recipe:
    """How to recompute results. They are held from the first request until every saved tensor has been fetched."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: tuple[_Packed, ...]) -> None:
        self._function = function
        self._inputs = inputs
        self._versions = tuple(packed._version if isinstance(packed, Tensor) else 0 for packed in inputs)
        self._num_saved = 0
        self._num_left = 0
        self._results: tuple[Tensor, ...] | None = None

    def count(self) -> None:
        """Count one more saved tensor that is a result of this recipe."""
        self._num_saved += 1
        self._num_left += 1

    def results(self) -> tuple[Tensor, ...]:
        """Return all results, computed unless they are held."""
        if self._results is not None:
            return self._results
        for packed, version in zip(self._inputs, self._versions, strict=True):
            if isinstance(packed, Tensor) and packed._version != version:
                raise RuntimeError("a tensor needed to recompute in backward has been modified by an inplace operation")
        with torch.no_grad():
            found = self._function(*(_view(packed) for packed in self._inputs))
        results = found if isinstance(found, tuple) else (found,)
        if self._num_left:
            self._results = results
        return results

    def fetch(self) -> None:
        """Count a saved tensor that has been fetched; free the results after the last one."""
        self._num_left -= 1
        if self._num_left == 0:
            self._results, self._num_left = None, self._num_saved


@dataclass(frozen=True, slots=True)
class _Discarded:
    """A view of a recipe's result."""

    recipe: _Recipe
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


_Packed = Tensor | _Discarded


class _Announced:
    """The recipes by storage. A recipe is valid only while its storage lives, because an address may be reused."""

    def __init__(self, products: bool) -> None:
        self.products = products
        self._found: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.dtype, int, _Recipe, int]] = {}

    def add(
        self,
        results: tuple[Tensor, ...],
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
    ) -> None:
        """Remember how to recompute `results`."""
        recipe = _Recipe(function, tuple(self._packed(x) for x in inputs))
        fresh = set()
        for i, result in enumerate(results):
            storage = result.untyped_storage()
            key = id(storage)  # torch keeps one Python object for a storage for as long as the storage lives
            if key not in fresh:
                self._found[key] = (weakref.ref(storage), result.dtype, result._version, recipe, i)
                fresh.add(key)

    def pack(self, tensor: Tensor) -> _Packed:
        """The hook: return a recipe in place of a marked tensor."""
        packed = self._packed(tensor)
        if isinstance(packed, _Discarded):
            packed.recipe.count()
        return packed

    def _packed(self, tensor: Tensor) -> _Packed:
        storage = tensor.untyped_storage()
        found = self._found.get(id(storage))
        if found is None:
            return tensor
        reference, dtype, version, recipe, index = found
        if reference() is not storage or tensor.dtype is not dtype or tensor._version != version:
            return tensor
        return _Discarded(recipe, index, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _view(packed: _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    result = packed.recipe.results()[packed.index]
    return result.as_strided(packed.size, packed.stride, packed.offset)


def _unpack(packed: _Packed) -> Tensor:
    tensor = _view(packed)
    if isinstance(packed, _Discarded):
        packed.recipe.fetch()
    return tensor


_ANNOUNCED: ContextVar[_Announced | None] = ContextVar("announced", default=None)
