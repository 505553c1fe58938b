"""The device of one rank, and the coordinator's commands that the rank answers with it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import PrefixStore

from bexp.explorer.model.base import Frozen
from bexp.workers.devices.discovery import open_gpu
from bexp.workers.instruments.device_instruments import freeze_imports
from bexp.workers.instruments.device_monitor import DeviceMonitor
from bexp.workers.process.protocol import Hello, Refused, RunTrial
from bexp.workers.profiler.device import DeviceRefusedError, open_instruments
from bexp.workers.profiler.distributed.message_queue import MessageQueue, join_store
from bexp.workers.profiler.distributed.process_groups import ProcessGroups
from bexp.workers.profiler.hardware import identify, used_bytes
from bexp.workers.profiler.session import Session
from bexp.workers.settings import read_settings


def serve_rank(rank: int, devices: Sequence[str], port: int) -> int:
    """Answer commands until the group is ended from outside; return an exit status if the device cannot be used.

    A rank goes on waiting for commands after a failed trial. The other ranks may wait for it in the middle of an
    operation that it cannot join again. The coordinator's parent then ends the whole group.
    """
    message_queue = MessageQueue(join_store(port))

    def send(message: Frozen) -> None:
        message_queue.reply(rank, message)

    device = torch.device(devices[rank])
    used_before = used_bytes(device) if device.type == "cuda" else None
    try:
        instruments = open_instruments(devices[rank], num_ranks=devices.count(devices[rank]))
        groups = _open_groups(rank, len(devices), device, port)
    except DeviceRefusedError as error:
        send(Refused(reason=str(error)))
        return 1
    gpu = open_gpu(devices[rank], read_settings().environment)
    if gpu is not None:
        # Only clocks and temperature, because connections to other ranks take memory that looks like another process's.
        instruments.monitor = DeviceMonitor(gpu)
    freeze_imports()
    session = Session(instruments, used_before, send, groups.rank_group)
    device_name, versions = identify(device)
    send(Hello(pid=os.getpid(), device_name=device_name, versions=versions))
    while True:
        command = message_queue.next_command(rank)
        if isinstance(command, RunTrial):
            groups.prepare(command.task)
            if not groups.takes_part(command.task):
                continue
        session.answer(command)


def _open_groups(rank: int, size: int, device: torch.device, port: int) -> ProcessGroups:
    try:
        return ProcessGroups(PrefixStore("groups", join_store(port)), rank, size, device)
    except RuntimeError as error:
        raise DeviceRefusedError(f"{device} cannot be used: {str(error).splitlines()[0]}") from error
