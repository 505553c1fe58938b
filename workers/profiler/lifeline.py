"""Ties the profiler's life to its parent's, and brings in the parent's orders."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading

from workers.process.protocol import ORDERS, Order

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; see prctl(2), PR_SET_PDEATHSIG."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was gone before the kernel was told
        end_group()


def end_group() -> None:
    """End this process and every child of it, compilers included. It leads a process group of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def read_orders(connection: socket.socket) -> queue.SimpleQueue[Order]:
    """Read orders in a thread of its own, so that the end of the parent is noticed in the middle of a trial too."""
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def read() -> None:
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    orders.put(ORDERS.validate_json(line))
        finally:
            end_group()

    threading.Thread(target=read, name="orders", daemon=True).start()
    return orders
