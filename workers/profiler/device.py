"""Opens the device of this process, and answers commands with it."""

from __future__ import annotations

import gc
import os
from functools import partial

import torch

from bexp.measure.device_monitor import DeviceMonitor
from bexp.measure.gpu_processes import GpuProcessMonitor
from workers.devices.gpu import open_gpu
from workers.process.protocol import Hello, Refused
from workers.profiler.hardware import used_bytes
from workers.profiler.instruments import Instruments
from workers.profiler.parent import Parent
from workers.profiler.session import Session
from workers.settings import read_settings


class DeviceRefusedError(Exception):
    """torch cannot use the device; the message says why."""


def open_instruments(name: str, num_ranks: int = 1) -> Instruments:
    """The instruments of a device. On the CPU `num_ranks` processes share its cores.

    Raises:
        DeviceRefusedError: torch has no such device.
    """
    try:
        return Instruments(torch.device(name), num_ranks)
    except (RuntimeError, AssertionError) as error:  # torch raises these without CUDA, or without this device
        raise DeviceRefusedError(f"{name} cannot be used: {str(error).splitlines()[0]}") from error


def freeze_imports() -> None:
    """Exempt the hundreds of thousands of objects of torch's import from the collections between timings."""
    gc.collect()
    gc.freeze()


def serve_device(parent: Parent) -> int:
    """Answer commands until one leaves the device unusable; returns the exit status."""
    (name,) = parent.devices
    device = torch.device(name)
    used_before = used_bytes(device) if device.type == "cuda" else None
    gpu = open_gpu(name, read_settings().environment)
    processes_before = gpu.processes() if gpu is not None else None
    try:
        instruments = open_instruments(name)
    except DeviceRefusedError as error:
        parent.send(Refused(reason=str(error)))
        return 1
    if gpu is not None:
        reserved = partial(torch.cuda.memory_reserved, device)
        instruments.monitor = DeviceMonitor(gpu, GpuProcessMonitor(gpu, reserved, used_before, processes_before))
    freeze_imports()
    session = Session(instruments, used_before, parent.send)
    parent.send(Hello(pid=os.getpid()))
    while session.answer(parent.commands.get()):
        pass
    return 0
