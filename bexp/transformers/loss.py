"""The loss of a causal language model without all its logits in memory.

While the head trains, it returns lazy logits, which the loss takes apart: the product with the vocabulary moves into
the chunks of the loss. The model's own changes of the logits (scaling, capping) move along.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bexp.explorer.dimensions.loss import LOSS, LOSSES, Loss
from bexp.kernels.causal_loss import causal_cross_entropy
from bexp.transformers.kernels import import_liger
from bexp.transformers.settings import SettingsError
from bexp.transformers.undo import Changes

_LOGGER = logging.getLogger(__name__)


Entropy = Callable[..., Tensor]
"""The sum of the cross entropies, with the arguments of `causal_cross_entropy`."""


def set_loss(model: Any, loss: Loss, changes: Changes, *, chunk: int | None = None) -> None:
    """Compute the loss of a causal language model without all its logits, in one of the ways of `ENTROPIES`.

    Raises SettingsError if its class does not allow that, or a package is missing.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: PLC0415 - optional

    head = _trained(model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None)
    name = type(model).__name__
    if head is None or not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise SettingsError(f"the loss of {name} cannot be chunked: its head is no plain linear layer")
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise SettingsError(f"the loss of {name} cannot be chunked: it is not transformers' causal language model loss")
    entropy = ENTROPIES[loss](chunk)
    changes.set(head, "forward", functools.partial(_lazy_forward, head, head.forward))
    library = model.loss_function
    chunked = functools.partial(_chunked_loss, library, entropy)
    changes.set(model, "_loss_function", functools.update_wrapper(chunked, library))


def _trained(head: Any) -> Any:
    """The copy of a head that peft trains in its place (`modules_to_save`); the head itself if there is none."""
    copies, active = getattr(head, "modules_to_save", None), getattr(head, "active_adapters", None)
    return copies[active[0]] if isinstance(copies, nn.ModuleDict) and active and active[0] in copies else head


def _lazy_forward(head: nn.Linear, plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    if not (head.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return plain(hidden)
    if _is_sharded_alone(head):
        _warn_of_sharded_head()
        return plain(hidden)
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return LazyLogits(hidden, weight, bias)


def _of_plain_logits(fused: Callable[..., Tensor]) -> Entropy:
    """Give a function of (h_TD, weight_VD, targets_T, bias_V, ignore_index) the arguments of `causal_cross_entropy`."""

    def entropy(
        h_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        *,
        transform: Callable[[Tensor], Tensor] | None,
        ignore_index: int,
    ) -> Tensor:
        if transform is not None:
            raise SettingsError(
                "this loss takes logits as the head makes them, and the model changes them: name the loss chunked"
            )
        return fused(h_TD, weight_VD, targets_T, bias_V, ignore_index)

    return entropy


def _liger_entropy() -> Entropy:
    fused = import_liger("functional").liger_fused_linear_cross_entropy
    return _of_plain_logits(
        lambda h, weight, targets, bias, ignored: fused(h, weight, targets, bias, ignore_index=ignored, reduction="sum")
    )


def _torch_entropy(chunk: int | None) -> Entropy:
    if not hasattr(F, "linear_cross_entropy"):
        raise SettingsError(f"torch's linear_cross_entropy needs torch 2.13, and this is {torch.__version__}")
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method="auto" if chunk is None else None)
    return _of_plain_logits(
        lambda h, weight, targets, bias, ignored: F.linear_cross_entropy(
            h, weight, targets, linear_bias=bias, reduction="sum", ignore_index=ignored, options=options
        )
    )


ENTROPIES: Mapping[Loss, Callable[[int | None], Entropy]] = {
    "chunked": lambda chunk: functools.partial(causal_cross_entropy, chunk=chunk),
    "liger": lambda chunk: _liger_entropy(),
    "torch": _torch_entropy,
}
"""The maker of each loss's entropy, except the library's own; `chunk` is a number of tokens that a test asks for."""
if {*ENTROPIES, LOSS.plain} != set(LOSSES):
    raise TypeError(f"ENTROPIES makes {tuple(ENTROPIES)}: each of {tuple(LOSSES)} needs a maker, except {LOSS.plain!r}")


def _chunked_loss(
    library: Callable[..., Tensor],
    entropy: Callable[..., Tensor],
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    if not isinstance(logits, LazyLogits) or logits.shape[-1] != vocab_size:
        logits = logits.compute() if isinstance(logits, LazyLogits) else logits
        return library(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if shift_labels is None:
        assert labels is not None, "the loss is asked for with labels or with shifted ones"
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden, weight, bias = logits.parts
    targets = shift_labels.reshape(-1).to(hidden.device)
    total = entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        targets,
        transform=logits.transform,
        ignore_index=ignore_index,
    )
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    return total / torch.as_tensor(num_items_in_batch, device=total.device)


def _is_sharded_alone(head: nn.Module) -> bool:
    """Return whether fully_shard was called on the head itself, so that its weight is freed before the loss runs."""
    return any(base.__name__ == "FSDPModule" for base in type(head).__mro__)


@functools.cache
def _warn_of_sharded_head() -> None:
    _LOGGER.warning("the head is sharded on its own, so the loss is not chunked: shard it together with the model")


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
    computes the logits once, with gradients as usual. So a loss can compute them chunk by chunk, and all other code
    stays as it is.
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
        """Return all logits."""
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
        """Return whether an attribute can be read without computing the logits."""
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
