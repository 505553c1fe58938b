"""Messages between the processes of a group, in a store that outlives each process and each process group."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from bexp.explorer.model.base import Frozen
from bexp.workers.process.protocol import COMMANDS, REPLIES, Command, Reply

_HOST = "127.0.0.1"
_PATIENCE = timedelta(seconds=60)
_REPLIES = "replies"


def host_store() -> tuple[TCPStore, int]:
    """Return a store that listens only on the loopback interface, and its port."""
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
    """Return a new connection to the store. While a connection waits for a message, no other thread can use it."""
    return TCPStore(_HOST, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)


class MessageQueue:
    """A queue of commands for each rank, and one queue of the ranks' replies. Each reader needs its own object."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def command(self, rank: int, command: Command) -> None:
        """Send a command to one rank."""
        self._store.queue_push(_command_key(rank), command.model_dump_json())

    def next_command(self, rank: int) -> Command:
        """Return the next command to this rank. There is no time limit, because a rank ends with its group."""
        command = self._pop(_command_key(rank))
        assert command is not None
        return COMMANDS.validate_json(command)

    def reply(self, rank: int, message: Frozen) -> None:
        """Send a reply of a rank, or a message about it."""
        self._store.queue_push(_REPLIES, f"{rank} {message.model_dump_json()}")

    def next_reply(self, seconds: float | None = None) -> tuple[int, Reply] | None:
        """Return the next reply and its rank; None if none comes within `seconds` (None: there is no limit)."""
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
            except DistNetworkError:  # in some versions a DistStoreError
                raise
            except DistStoreError:
                if seconds is not None:
                    return None
            else:
                return said


def _command_key(rank: int) -> str:
    return f"commands/{rank}"
