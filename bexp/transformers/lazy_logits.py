"""Logits that are computed only when their values are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_POINTWISE = frozenset(
    {
        torch.tanh,
        torch.mul,
        torch.div,
        torch.true_divide,
        torch.Tensor.tanh,
        torch.Tensor.mul,
        torch.Tensor.div,
        torch.Tensor.true_divide,
        torch.Tensor.__mul__,
        torch.Tensor.__rmul__,
        torch.Tensor.__truediv__,
        torch.Tensor.float,
        torch.Tensor.to,
    }
)
"""The operations that models apply to logits before the loss: scaling, capping, a change of dtype."""
_METADATA = frozenset(
    {"size", "dim", "numel", "ndimension", "is_floating_point", "is_complex", "__hash__", "__len__", "element_size"}
)


class LazyLogits(Tensor):
    """The logits (..., V) of a head, held as the hidden states (..., D) and the weight (V, D) that they follow from.

    Multiplying by a number, tanh and changes of dtype are recorded, and their result is lazy, too. Any other use
    computes the logits once, with gradients as usual. A loss can therefore compute them chunk by chunk, and no other
    code has to know.
    """

    _hidden: Tensor
    _weight: Tensor
    _bias: Tensor | None
    _steps: tuple[Callable[[Tensor], Tensor], ...]
    _computed: Tensor | None

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        steps: tuple[Callable[[Tensor], Tensor], ...] = (),
        dtype: torch.dtype | None = None,
    ) -> LazyLogits:
        """Logits of `hidden` after `steps`, in `dtype`, or that of the hidden states."""
        self: LazyLogits = Tensor._make_wrapper_subclass(
            cls, (*hidden.shape[:-1], weight.shape[0]), dtype=dtype or hidden.dtype, device=hidden.device
        )
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._steps, self._computed = steps, None
        return self

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The hidden states (..., D), the weight (V, D) and the bias (V,)."""
        return self._hidden, self._weight, self._bias

    @property
    def transform(self) -> Callable[[Tensor], Tensor] | None:
        """The elementwise function that is applied to the products; None if there is none."""
        steps = self._steps
        if not steps:
            return None

        def run(logits: Tensor) -> Tensor:
            for step in steps:
                logits = step(logits)
            return logits

        return run

    def compute(self) -> Tensor:
        """All logits."""
        if self._computed is None:
            logits = F.linear(self._hidden, self._weight, self._bias)
            transform = self.transform
            self._computed = logits if transform is None else transform(logits)
        return self._computed

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's names the contents to print
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a pointwise step, answer questions about the shape, and compute the logits for anything else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _METADATA or (name in {"__get__", "__set__"} and args[0]._answers(func)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lazy = args[0] if args and isinstance(args[0], cls) else None
        if lazy is not None and func in _POINTWISE and _only_numbers(args[1:], kwargs):
            return lazy._then(func, args[1:], kwargs)
        if lazy is not None and func is torch.Tensor.contiguous:
            return lazy
        computed = torch.utils._pytree.tree_map_only(cls, cls.compute, (args, kwargs))
        return func(*computed[0], **computed[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no type worth keeping
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the logits for operations that bypass `__torch_function__`."""
        computed = torch.utils._pytree.tree_map_only(cls, cls.compute, (args, kwargs or {}))
        return func(*computed[0], **computed[1])

    def _answers(self, func: Any) -> bool:
        """Whether an attribute can be read without computing the logits."""
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        return owner in {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta"}

    def _then(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits:
        def step(logits: Tensor) -> Tensor:
            result: Tensor = func(logits, *args, **kwargs)
            return result

        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            dtype = step(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return LazyLogits(self._hidden, self._weight, self._bias, (*self._steps, step), dtype)


def _only_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(isinstance(value, int | float | torch.dtype) for value in (*args, *kwargs.values()))
