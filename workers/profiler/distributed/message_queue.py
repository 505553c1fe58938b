"""The store that the processes of a group talk through: it outlives any of them, and any process group."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from explorer.spec.base import Frozen
from workers.process.protocol import ORDERS, REPLIES, Order, Reply

_HOST = "127.0.0.1"
_PATIENCE = timedelta(seconds=60)
_REPLIES = "replies"


def host_store() -> tuple[TCPStore, int]:
    """A store that listens on the loopback interface alone, and its port."""
    listener = socket.create_server((_HOST, 0))
    port = int(listener.getsockname()[1])
    store = TCPStore(
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_PATIENCE,
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_store(port: int) -> TCPStore:
    """A connection of one's own: a connection that waits lets nobody else of its process through."""
    return TCPStore(_HOST, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)


class MessageQueue:
    """Queues of orders, one for each rank, and one queue of what the ranks reply. A reader needs a messages to itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def order(self, rank: int, order: Order) -> None:
        """To one rank."""
        self._store.queue_push(_orders(rank), order.model_dump_json())

    def next_order(self, rank: int) -> Order:
        """Waits as long as it takes: a rank ends with its group."""
        order = self._pop(_orders(rank))
        assert order is not None
        return ORDERS.validate_json(order)

    def reply(self, rank: int, message: Frozen) -> None:
        """From one rank, or about it."""
        self._store.queue_push(_REPLIES, f"{rank} {message.model_dump_json()}")

    def next_reply(self, seconds: float | None = None) -> tuple[int, Reply] | None:
        """The rank, and what it says; null if nothing comes within `seconds`, default as long as it takes."""
        said = self._pop(_REPLIES, seconds)
        if said is None:
            return None
        rank, _, text = said.partition(b" ")
        return int(rank), REPLIES.validate_json(text)

    def _pop(self, queue: str, seconds: float | None = None) -> bytes | None:
        self._store.set_timeout(_PATIENCE if seconds is None else timedelta(seconds=max(0.001, seconds)))
        while True:
            try:
                said: bytes = self._store.queue_pop(queue)
            except DistNetworkError:  # which is a DistStoreError for some versions
                raise
            except DistStoreError:
                if seconds is not None:
                    return None
            else:
                return said


def _orders(rank: int) -> str:
    return f"orders/{rank}"
