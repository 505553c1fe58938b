"""`python -m workers.profiler`: started by `workers.process.profiler`, never by hand."""

from __future__ import annotations

import argparse
import gc
import os
import socket
from functools import partial

from explorer.spec.base import Frozen
from workers.process.protocol import Hello, Refused, encode
from workers.profiler.lifeline import die_with_parent, read_orders


def main() -> int:
    """Own the device until the parent is gone, or until this process is no longer fit to."""
    parser = argparse.ArgumentParser(prog="python -m workers.profiler")
    parser.add_argument("--device", required=True)
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
    import torch  # noqa: PLC0415 - it brings torch, or comes after it

    from bexp.measure.device_monitor import DeviceMonitor  # noqa: PLC0415 - it brings torch, or comes after it
    from bexp.measure.gpu_processes import GpuProcessMonitor  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.devices.gpu import open_gpu  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.profiler.hardware import used_bytes  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.profiler.instruments import Instruments  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.profiler.session import Session  # noqa: PLC0415 - it brings torch, or comes after it
    from workers.settings import read_settings  # noqa: PLC0415 - it brings torch, or comes after it

    device = torch.device(arguments.device)
    used_before = used_bytes(device) if device.type == "cuda" else None
    gpu = open_gpu(arguments.device, read_settings().environment)
    processes_before = gpu.processes() if gpu is not None else None
    try:
        instruments = Instruments(device)
    except (RuntimeError, AssertionError) as error:  # what torch raises without CUDA, or without this device
        send(Refused(reason=f"{arguments.device} cannot be used: {str(error).splitlines()[0]}"))
        return 1
    if gpu is not None:
        reserved = partial(torch.cuda.memory_reserved, device)
        instruments.monitor = DeviceMonitor(gpu, GpuProcessMonitor(gpu, reserved, used_before, processes_before))
    gc.collect()
    gc.freeze()  # the hundreds of thousands of objects that torch brings need no second look between timings
    session = Session(instruments, used_before, send)
    send(Hello(pid=os.getpid()))
    while session.answer(orders.get()):
        pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
