"""Saved activations of layers in the host's memory until backward (Rhu et al., 2016, arXiv:1602.08124)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks


def pinned_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in pinned memory, whose allocator rounds up to a power of two."""
    return 1 << max(0, tensor.numel() * tensor.element_size() - 1).bit_length()


class OnHost:
    """The forward of a layer whose saved tensors lie in pinned memory of the host until backward needs them.

    torch's `save_on_cpu` copies them, except weights, which stay on the device in any case. `host_bytes` is the memory
    that the last forward took on the host.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._forward = layer.forward
        self._host = save_on_cpu(pin_memory=True)
        self._weights: frozenset[int] = frozenset()
        self.host_bytes = 0
        functools.update_wrapper(self, self._forward, updated=())  # the library reads the names of the arguments

    def __getstate__(self) -> dict[str, Any]:
        """Return all but torch's functions, which a copy or a stored model makes anew."""
        return {name: value for name, value in vars(self).items() if name != "_host"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` has returned."""
        vars(self).update(state, _host=save_on_cpu(pin_memory=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; without gradients this is a plain call."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        self.host_bytes = 0
        self._weights = frozenset(p.untyped_storage().data_ptr() for p in self._layer.parameters())
        with saved_tensors_hooks(self._pack, self._host.unpack_hook):
            return self._forward(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in self._weights:
            return tensor.device, tensor.detach()
        self.host_bytes += pinned_bytes(tensor)
        return self._host.pack_hook(tensor)
