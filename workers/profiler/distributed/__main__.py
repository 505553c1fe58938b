"""`python -m workers.profiler.distributed`: started by `workers.process.profiler`, never by hand."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

from explorer.spec.base import Frozen
from workers.process.protocol import RankLost, encode
from workers.profiler.lifeline import die_with_parent, end_group, read_orders

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

RANKS = "workers.profiler.distributed.rank"
MONITOR_SECONDS = 0.1
NOTICE_SECONDS = 10.0
"""How long a trial's coordinator has to take notice of a lost rank."""


def main() -> int:
    """Start a rank for each device and speak for them, until one of them is lost or the parent is gone."""
    parser = argparse.ArgumentParser(prog="python -m workers.profiler.distributed")
    parser.add_argument("--devices", required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()

    die_with_parent(arguments.parent)
    os.set_inheritable(arguments.socket, False)
    connection = socket.socket(fileno=arguments.socket)
    orders = read_orders(connection)

    def send(message: Frozen) -> None:
        connection.sendall(encode(message))

    # torch takes seconds to import: only now that this process cannot be left behind.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.elastic.utils.api import macros  # noqa: PLC0415 - it brings torch, or comes after it
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415 - it brings torch, or comes after it

    from workers.profiler.distributed.coordinator import Coordinator, GroupEndedError  # noqa: PLC0415
    from workers.profiler.distributed.message_queue import MessageQueue, host_store, join_store  # noqa: PLC0415

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says is said by the coordinator
    devices = arguments.devices.split(",")
    store, port = host_store()
    coordinator = Coordinator(MessageQueue(join_store(port)), devices, send)

    def serve() -> None:
        try:
            coordinator.serve(orders)
        except GroupEndedError:
            pass
        finally:
            end_group()

    thread = threading.Thread(target=serve, name="coordinator", daemon=True)
    thread.start()
    ranks = elastic_launch(launch_config(len(devices), port), sys.executable)
    try:
        ranks(
            *("-m", RANKS),
            *("--rank", macros.local_rank),
            *("--devices", arguments.devices),
            *("--port", str(port)),
            *("--parent", str(os.getpid())),
        )
    except ChildFailedError as error:
        messages = MessageQueue(join_store(port))
        for rank, failure in error.failures.items():
            messages.reply(rank, RankLost(rank=rank, device=devices[rank], status=failure.exitcode))
        if not coordinator.idle.is_set():
            thread.join(NOTICE_SECONDS)
    del store
    end_group()
    return 1


def launch_config(num_ranks: int, port: int) -> LaunchConfig:
    """One node that never starts a rank again: a trial that ran out of memory would be run twice without a word."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig  # noqa: PLC0415 - it brings torch, or comes after it

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        max_restarts=0,
        run_id="bexp",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"is_host": False, "timeout": 60},
        local_addr="127.0.0.1",
        monitor_interval=MONITOR_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )


if __name__ == "__main__":
    raise SystemExit(main())
