"""A ring whose ranks are threads of one process, so that one device can play them all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from torch import Tensor

from bexp.kernels.context_parallel.ring import Passage, Ring
from tests.waits import PATIENCE_SECONDS

T = TypeVar("T")
Boxes = list[dict[int, "SimpleQueue[Tensor]"]]


class ThreadRing(Ring):
    """A rank that puts what it sends into its successor's box."""

    def __init__(self, rank: int, boxes: Boxes) -> None:
        self.rank, self.size, self._boxes = rank, len(boxes), boxes

    def pass_on(self, sent: Tensor, received: Tensor, *, tag: int = 0) -> Passage:
        """As a ring of processes does; what is sent is what the buffer holds now."""
        assert sent.is_contiguous()
        assert received.is_contiguous()
        self._boxes[(self.rank + 1) % self.size][tag].put(sent.clone())
        return ThreadPassage(self._boxes[self.rank][tag], received)


class ThreadPassage(Passage):
    """Fills the buffer when it is waited for; until then it holds nothing that could be read."""

    def __init__(self, box: SimpleQueue[Tensor], received: Tensor) -> None:
        received.fill_(float("nan"))
        self.box, self.received = box, received

    def wait(self) -> None:
        """Until the predecessor has sent."""
        self.received.copy_(self.box.get(timeout=PATIENCE_SECONDS))


def run_ranks(num_ranks: int, function: Callable[[Ring], T]) -> list[T]:
    """What `function` returns on each rank."""
    boxes: Boxes = [{tag: SimpleQueue() for tag in range(2)} for _ in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(
            pool.map(function, [ThreadRing(rank, boxes) for rank in range(num_ranks)], timeout=PATIENCE_SECONDS)
        )
