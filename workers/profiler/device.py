"""The device of this process, and the commands that it answers with it."""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import torch

from bexp.explorer.model.expert_kernels import NAMED_EXPERTS
from bexp.kernels.attention import attention_support
from bexp.kernels.experts.registry import expert_backends
from bexp.kernels.shapes import AttentionShape, ExpertsShape
from bexp.measure.gpu_processes import GpuProcessMonitor
from bexp.measure.heap import freeze_imports
from bexp.workers.devices.discovery import open_gpu
from bexp.workers.instruments.compilation import start_compiler
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.device_monitor import DeviceMonitor
from bexp.workers.instruments.failures import is_poisoned
from bexp.workers.instruments.kernel_builder import KernelBuilder
from bexp.workers.process.protocol import Command, Hello, Open, Refused
from bexp.workers.profiler.hardware import identify, used_bytes
from bexp.workers.profiler.parent import CommandQueue, Parent, end_group
from bexp.workers.profiler.session import Session
from bexp.workers.settings import read_settings
from bexp.workers.targets.choice import target_imports

_log = logging.getLogger(__name__)

ATTENTION = tuple(
    AttentionShape(num_heads=8, num_query_groups=8, head_size=size, dtype=torch.bfloat16, seq_length=1024)
    for size in (64, 128)
)
EXPERTS = ExpertsShape(hidden_size=1024, ffn_hidden_size=1024, num_experts=8, top_k=2, dtype=torch.bfloat16)
"""The shape of most models' experts. Other shapes need few other kernels for their checks."""


def prepare(commands: CommandQueue, instruments: Instruments | None) -> None:
    """Import modules that a job may need, then check back ends on the device if it is a GPU, until a command comes.

    The memory that the checks took is given back. If one of them left the device unusable, this process kills itself,
    so that the parent starts another one for the job. An ordinary exit status would end the job.
    """
    do_until_asked(commands, (*target_imports(), freeze_imports))
    if instruments is None or instruments.device.type != "cuda" or not commands.empty():
        return
    with suppress(Exception):  # others hold all of the memory, for instance; a job will see for itself
        do_until_asked(commands, kernel_checks(instruments.device))
    if is_poisoned(instruments.device):
        _log.error("the check of a back end left %s unusable", instruments.device)
        end_group()
    instruments.settle(release=True)


def do_until_asked(commands: CommandQueue, steps: Iterable[Callable[[], object]]) -> None:
    """Take the steps in their order, until a command waits."""
    for step in steps:
        if not commands.empty():
            return
        step()


def kernel_checks(device: torch.device) -> Iterator[Callable[[], object]]:
    """Yield the checks of back ends that need not be named, which build their kernels; then the compiler's start."""
    for shape in ATTENTION:
        yield partial(attention_support, shape, device)
    for backend in expert_backends():
        if backend.name not in NAMED_EXPERTS:
            yield partial(backend.unsupported_reason, EXPERTS, device)
    yield partial(start_compiler, device)


IDLE_SECONDS = 1.0
"""After this time without a command, a process prepares for a job."""
SETTLE_SECONDS, SETTLE_TICK_SECONDS = 2.0, 0.05
"""How long a new process waits for the memory that the process before it held, and how often it looks."""


class DeviceRefusedError(Exception):
    """torch cannot use the device; the message says why."""


def open_instruments(name: str, num_ranks: int = 1) -> Instruments:
    """Return the instruments of a device. On the CPU `num_ranks` processes share its cores.

    Raises:
        DeviceRefusedError: torch has no such device.
    """
    try:
        return Instruments(torch.device(name), num_ranks)
    except (RuntimeError, AssertionError) as error:  # torch raises these without CUDA, or without this device
        raise DeviceRefusedError(f"{name} cannot be used: {str(error).splitlines()[0]}") from error


def next_command(commands: CommandQueue, instruments: Instruments | None = None) -> Command:
    """Wait for a command between jobs. A process that waits for longer than a moment prepares for a job."""
    try:
        return commands.get(timeout=IDLE_SECONDS)
    except queue.Empty:
        prepare(commands, instruments)
        return commands.get()


def wait_for_open(commands: CommandQueue) -> None:
    """Wait for the command to take the device."""
    command = next_command(commands)
    assert isinstance(command, Open), f"'{command.type}' came before 'open'"


def serve_device(parent: Parent) -> int:
    """Answer commands until one leaves the device unusable; return the exit status."""
    (name,) = parent.devices
    device = torch.device(name)
    freeze_imports()
    wait_for_open(parent.commands)
    used_before = _settled_bytes(device) if device.type == "cuda" else None
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
    instruments.kernels = KernelBuilder(device)
    freeze_imports()
    session = Session(instruments, used_before, parent.send)
    device_name, versions = identify(device)
    parent.send(Hello(pid=os.getpid(), device_name=device_name, versions=versions))
    while session.answer(parent.commands.get() if session.has_job else next_command(parent.commands, instruments)):
        pass
    return 0


def _settled_bytes(device: torch.device) -> int | None:
    """The bytes in use on a device, once they no longer change: an earlier process may still free some."""
    deadline = time.monotonic() + SETTLE_SECONDS
    used = used_bytes(device)
    while time.monotonic() < deadline:
        time.sleep(SETTLE_TICK_SECONDS)
        earlier, used = used, used_bytes(device)
        if used == earlier:
            break
    return used
