"""Copies of the most popular experts on every rank (FasterMoE: He et al., PPoPP 2022).

Their owners broadcast the weights before they are needed, and the gradients are reduced to the owners afterwards. As
with `RowAllToAll`, both run beside what is computed between `start` and `finish`.
"""

from __future__ import annotations

from torch import Tensor

from bexp.kernels.expert_parallel.all_to_all import PendingCollective
from bexp.kernels.expert_parallel.peers import Peers


class ShadowBroadcast(PendingCollective):
    """The broadcast of the shadowed experts' matrices and the reduction of their gradients, of one forward pass."""

    def __init__(self, peers: Peers, num_local: int, shadowed_experts: tuple[int, ...]) -> None:
        super().__init__(peers)
        self._num_shadowed = len(shadowed_experts)
        self._own: list[tuple[int, int]] = []  # place among the shadowed experts, and place among this rank's own
        self._places: dict[int, slice] = {}  # places of each owner's experts, which are consecutive
        for place, expert in enumerate(shadowed_experts):
            owner, local = divmod(expert, num_local)
            first = self._places[owner].start if owner in self._places else place
            self._places[owner] = slice(first, place + 1)
            if owner == peers.rank:
                self._own.append((place, local))

    def start(self, *weights: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Begin to broadcast; return the weights (E / N, ...), for further use, and buffers (S, ...) for the copies.

        The gradients of what it returns must be new tensors, because they are changed in place.
        """
        buffers = self._start(*weights)
        return buffers[: len(weights)], buffers[len(weights) :]

    def launch(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Begin to broadcast, and return the weights and then the buffers."""
        return *tensors, *(self._broadcast(each) for each in tensors)

    def return_gradients(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Begin to sum the gradients of the copies at their owners."""
        return tuple(self._reduce(grad) for grad in grads)

    def take_gradients(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Add what was reduced to this rank to the gradients of its own experts, in place."""
        number = len(grads) // 2
        for grad, reduced in zip(grads[:number], grads[number:], strict=True):
            for place, local in self._own:
                grad[local].add_(reduced[place])
        return grads[:number]

    def _broadcast(self, weights: Tensor) -> Tensor:
        """Begin to broadcast from the owners, and return the buffer, which lies in memory as the weights do."""
        transposed = _is_transposed(weights)
        stored = weights.mT if transposed else weights
        buffer = stored.new_empty(self._num_shadowed, *stored.shape[1:])
        for place, local in self._own:
            buffer[place].copy_(stored[local])
        for owner, places in self._places.items():
            part = buffer[places]
            self._add(self._peers.broadcast(part, owner), part)
        return buffer.mT if transposed else buffer

    def _reduce(self, grad: Tensor) -> Tensor:
        """Begin to sum the gradients of the copies at the owners, in place if they lie without gaps."""
        transposed = _is_transposed(grad)
        stored = grad.mT if transposed else grad.contiguous()
        for owner, places in self._places.items():
            part = stored[places]
            self._add(self._peers.reduce(part, owner), part)
        return stored.mT if transposed else stored


def _is_transposed(weights: Tensor) -> bool:
    """Whether the matrices lie transposed in memory, without gaps."""
    return not weights.is_contiguous() and weights.mT.is_contiguous()
