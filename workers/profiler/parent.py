"""The worker that started this process, its commands, and the replies to it. This process ends with the worker."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from bexp.child_process import end_with_parent
from bexp.explorer.model.base import Frozen
from bexp.workers.process.protocol import COMMANDS, Command, encode

MOST_LOCKS = 253
"""The most descriptors that the kernel sends with a message."""

CommandQueue = queue.SimpleQueue[Command]


@dataclass(frozen=True, slots=True)
class Parent:
    """The parent's orders to this process: `devices` to own, `commands` to answer, and `send` for the answers."""

    devices: tuple[str, ...]
    commands: CommandQueue
    send: Callable[[Frozen], None]


def connect_to_parent(program: str) -> Parent:
    """Read the command line of a profiler process, and tie the life of this process to its parent's.

    Call this before torch is imported, because the import takes seconds, in which the parent may end.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--devices", required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    os.set_inheritable(arguments.socket, False)
    connection = socket.socket(fileno=arguments.socket)
    return Parent(
        devices=tuple(arguments.devices.split(",")),
        commands=_read_commands(connection),
        send=lambda message: connection.sendall(encode(message)),
    )


def die_with_parent(parent_pid: int) -> None:
    """End this process with the thread that started it."""
    if not end_with_parent(parent_pid):  # the parent ended before the request reached the kernel
        end_group()


def end_group() -> None:
    """End this process and all its children, compilers included. This process leads a process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _read_commands(connection: socket.socket) -> CommandQueue:
    """Read commands in a separate thread, which notices the parent's end also during a trial.

    The locks that come with a command stay open, so that nobody has the devices before this process has ended.
    """
    commands: CommandQueue = queue.SimpleQueue()

    def read() -> None:
        received = b""
        try:
            while True:
                data, locks, *_ = socket.recv_fds(connection, 1 << 16, MOST_LOCKS)
                if not data:
                    break
                for lock in locks:
                    os.set_inheritable(lock, False)
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    commands.put(COMMANDS.validate_json(line))
        finally:
            end_group()

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands
