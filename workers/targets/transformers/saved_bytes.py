"""What a layer keeps for its backward pass, counted."""

from __future__ import annotations

import torch
from torch import Tensor

from bexp.workers.targets.transformers.layers import LayerPart


def bytes_saved_by(part: LayerPart) -> int:
    """Bytes of the distinct storages that one forward of `part` keeps for autograd; its parameters do not count."""
    parameters = {tensor.untyped_storage().data_ptr() for tensor in part.module.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # a freed storage's address may come again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = min(storage.nbytes(), tensor.numel() * tensor.element_size())
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        part.forward_all()
    return sum(storages.values())
