"""`python -m workers.profiler.distributed.rank`: one rank of a group, a profiler of one device that reads from the messages."""

from __future__ import annotations

import argparse
import gc
import os

from explorer.spec.base import Frozen
from workers.process.protocol import Hello, Refused, RunTrial
from workers.profiler.lifeline import die_with_parent


def main() -> int:
    """Answer orders until the group is ended from outside.

    A trial that fails leaves the rank waiting like any other: what it may not do is to come back to the others, which
    wait for it in the middle of an operation. Whoever gave the order ends them all.
    """
    parser = argparse.ArgumentParser(prog="python -m workers.profiler.distributed.rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    rank, devices = arguments.rank, arguments.devices.split(",")

    die_with_parent(arguments.parent)
    import torch  # noqa: PLC0415 - takes seconds: only now that this process cannot be left behind
    from torch._C._distributed_c10d import PrefixStore  # noqa: PLC0415 - it brings torch, or comes after it

    from bexp.measure.device_monitor import DeviceMonitor  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.devices.gpu import open_gpu  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.profiler.distributed.message_queue import MessageQueue, join_store  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.profiler.distributed.process_groups import ProcessGroups  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.profiler.hardware import used_bytes  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.profiler.instruments import Instruments  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.profiler.session import Session  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.settings import read_settings  # noqa: PLC0415 - it brings torch, or comes after it

    messages = MessageQueue(join_store(arguments.port))

    def send(message: Frozen) -> None:
        messages.reply(rank, message)

    device = torch.device(devices[rank])
    used_before = used_bytes(device) if device.type == "cuda" else None
    try:
        instruments = Instruments(device, num_ranks=devices.count(devices[rank]))
        groups = ProcessGroups(PrefixStore("groups", join_store(arguments.port)), rank, len(devices), device)
    except (RuntimeError, AssertionError) as error:  # what torch raises without CUDA, or without this device
        send(Refused(reason=f"{device} cannot be used: {str(error).splitlines()[0]}"))
        return 1
    gpu = open_gpu(devices[rank], read_settings().environment)
    if gpu is not None:
        # Clocks and heat alone: connections to the other ranks take memory that looks like somebody else's.
        instruments.monitor = DeviceMonitor(gpu)
    gc.collect()
    gc.freeze()
    session = Session(instruments, used_before, send, groups.ranks)
    send(Hello(pid=os.getpid()))
    while True:
        order = messages.next_order(rank)
        if isinstance(order, RunTrial):
            groups.prepare(order.plan)
            if not groups.takes_part(order.plan):
                continue
        session.answer(order)


if __name__ == "__main__":
    raise SystemExit(main())
