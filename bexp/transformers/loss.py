"""The loss of a causal language model without all its logits in memory.

The head returns lazy logits while it trains, and the loss takes them apart: the product with the vocabulary moves into
the chunks of the loss. What the model does to the logits in between (scaling, capping) moves along.
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
from bexp.transformers.lazy_logits import LazyLogits
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


def _liger_entropy(
    h_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    fused: Callable[..., Tensor],
    transform: Callable[[Tensor], Tensor] | None,
    ignore_index: int,
) -> Tensor:
    """liger's function with the arguments of `causal_cross_entropy`."""
    if transform is not None:
        raise SettingsError("liger's loss takes logits as the head makes them; this model changes them")
    return fused(h_TD, weight_VD, targets_T, bias_V, ignore_index=ignore_index, reduction="sum")


ENTROPIES: Mapping[Loss, Callable[[int | None], Entropy]] = {
    "chunked": lambda chunk: functools.partial(causal_cross_entropy, chunk=chunk),
    "liger": lambda chunk: functools.partial(
        _liger_entropy, fused=import_liger("functional").liger_fused_linear_cross_entropy
    ),
}
"""What makes the entropy of each loss but the library's own; `chunk` is the number of tokens that a test asks for."""
if {*ENTROPIES, LOSS.plain} != set(LOSSES):
    raise TypeError(f"the losses are {tuple(LOSSES)}, and a model can be set up with {tuple(ENTROPIES)}")


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
    """Whether fully_shard was called on the head itself, so that its whole weight is freed before the loss runs."""
    return any(base.__name__ == "FSDPModule" for base in type(head).__mro__)


@functools.cache
def _warn_of_sharded_head() -> None:
    _LOGGER.warning("the head is sharded on its own, so the loss is not chunked: shard it together with the model")
