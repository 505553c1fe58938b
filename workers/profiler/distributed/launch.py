"""The start of a group's ranks with torch's elastic launcher, and the report of a rank that ends."""

from __future__ import annotations

import logging
import os
import threading

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bexp.child_process import module_command
from bexp.workers.process.protocol import RankLost
from bexp.workers.profiler.device import wait_for_open
from bexp.workers.profiler.distributed.coordinator import Coordinator, GroupEndedError
from bexp.workers.profiler.distributed.message_queue import MessageQueue, host_store, join_store
from bexp.workers.profiler.parent import Parent, end_group

RANK_MODULE = "bexp.workers.profiler.distributed.rank"
MONITOR_SECONDS = 0.1
NOTICE_SECONDS = 10.0
"""How long the coordinator may take to report a lost rank to the parent."""


def serve_group(parent: Parent) -> int:
    """Run the ranks and their coordinator, and end this process and all ranks when one of them ends."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the coordinator reports it
    wait_for_open(parent.commands)
    store, port = host_store()
    coordinator = Coordinator(MessageQueue(join_store(port)), parent.devices, parent.send)

    def coordinate() -> None:
        try:
            coordinator.serve(parent.commands)
        except GroupEndedError:
            pass
        finally:
            end_group()

    thread = threading.Thread(target=coordinate, name="coordinator", daemon=True)
    thread.start()
    program, *arguments = module_command(
        RANK_MODULE,
        *("--rank", macros.local_rank),
        *("--devices", ",".join(parent.devices)),
        *("--port", str(port)),
        *("--parent", str(os.getpid())),
    )
    try:
        elastic_launch(launch_config(len(parent.devices), port), program)(*arguments)
    except ChildFailedError as error:
        message_queue = MessageQueue(join_store(port))
        for rank, failure in error.failures.items():
            message_queue.reply(rank, RankLost(rank=rank, device=parent.devices[rank], status=failure.exitcode))
        if not coordinator.idle.is_set():
            thread.join(NOTICE_SECONDS)
    del store
    end_group()
    return 1


def launch_config(num_ranks: int, port: int) -> LaunchConfig:
    """Return the launch of one node without restarts, which would silently repeat a trial that ran out of memory."""
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
