"""A profiler process that does what a file tells it to: `python -m tests.chaos.faulty_profiler`.

BEXP_CHAOS_FAULT names the file: the place where the fault strikes, its kind, how many trials are reported before, how
often the place is passed after these, and how often it strikes then. The file is gone when it has struck for the last
time.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "BEXP_CHAOS_FAULT"
SHARED_VARIABLE = "BEXP_CHAOS_SHARED"
"""If it is set, the process does not look for others on its device, because there are some on purpose."""

LEAKED_BYTES = 1 << 30
GPU_CYCLES, HOST_SECONDS = 1 << 42, 1e6
"""Longer than any trial may take."""

CALM_SECONDS = 1.0
"""What a disturbed trial's successor waits for the device, in place of 5 s, because it waits in vain beside a process
that stays."""

_leaked: list[object] = []


def strike(place: str, device: str = "cpu") -> None:
    """Do what the file says if it names this place."""
    path = Path(os.environ[VARIABLE])
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    if told["trials"] > 0:
        if place == "reply":
            path.write_text(json.dumps({**told, "trials": told["trials"] - 1}))
        return
    if told["place"] != place:
        return
    if told["passes"] > 0:
        path.write_text(json.dumps({**told, "passes": told["passes"] - 1}))
        return
    if told["times"] > 1:
        path.write_text(json.dumps({**told, "times": told["times"] - 1}))
    else:
        path.unlink()
    FAULTS[told["kind"]](device)


def kill(_: str) -> None:
    """End this process as the kernel or a person would."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def exhaust(device: str) -> None:
    """Allocate until the device or the limit has no more."""
    import torch

    held = []
    step = (1 << 30) if device.startswith("cuda") else (1 << 50)
    while True:
        held.append(torch.empty(step, dtype=torch.uint8, device=device))


def access_illegally(device: str) -> None:
    """Touch memory that is not there: beyond an allocation on a GPU, at the address null on a host."""
    if not device.startswith("cuda"):
        import ctypes

        ctypes.string_at(0)
        return
    import torch

    class Beyond:
        """A view that claims 256 TiB from an allocation on."""

        def __init__(self, start: int) -> None:
            interface = {"shape": (1 << 46,), "typestr": "<f4", "data": (start, False), "version": 3}
            self.__cuda_array_interface__ = interface

    few = torch.zeros(16, device=device)
    torch.as_tensor(Beyond(few.data_ptr()), device=device)[-1024:].fill_(1.0)
    torch.cuda.synchronize(device)


def hang(device: str) -> None:
    """Keep the device, or the host, busy for ever."""
    if not device.startswith("cuda"):
        time.sleep(HOST_SECONDS)
    import torch

    torch.cuda._sleep(GPU_CYCLES)
    torch.cuda.synchronize(device)


def leak(device: str) -> None:
    """Allocate what stays after the trial."""
    import torch

    _leaked.append(torch.ones(LEAKED_BYTES, dtype=torch.uint8, device=device))


def lose(device: str) -> None:
    """Fail as a GPU that has fallen off the bus: each query of NVML and each wait for the device."""
    import pynvml
    import torch

    def fail(*_: object, **__: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def fail_in_cuda(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    for name in dir(pynvml):
        if name.startswith("nvmlDevice"):
            setattr(pynvml, name, fail)
    torch.cuda.synchronize = fail_in_cuda
    fail_in_cuda(device)


FAULTS = {
    "kill": kill,
    "out_of_memory": exhaust,
    "illegal_access": access_illegally,
    "hang": hang,
    "leak": leak,
    "lost_device": lose,
}


def install() -> None:
    """Let a fault strike where a profiler process opens its device, begins a job and measures."""
    from bexp.workers.instruments import device_instruments as instruments
    from bexp.workers.instruments import phases
    from bexp.workers.profiler import device as opening
    from bexp.workers.profiler import session

    def before(owner: Any, name: str, place: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            strike(place, str(_device_of(arguments)))
            return original(*arguments, **options)

        setattr(owner, name, wrapped)

    if os.environ.get(SHARED_VARIABLE):
        alone: Any = opening
        alone.open_gpu = lambda *_: None
    before(opening, "open_instruments", "open")
    before(session.Session, "_begin", "begin")
    before(session, "measure_component", "component")
    before(instruments.Instruments, "settle", "settle")
    original_phase = phases.PhaseClock.phase

    def phase(self: Any, name: Any) -> Any:
        strike(name)
        return original_phase(self, name)

    phases.PhaseClock.phase = phase  # type: ignore[method-assign]  # a stand-in
    patched: Any = session
    patched.CALM_SECONDS = CALM_SECONDS
    finished = patched.TrialFinished

    def reply(**options: Any) -> Any:
        strike("reply")
        return finished(**options)

    patched.TrialFinished = reply


def _device_of(arguments: tuple[Any, ...]) -> object:
    with suppress(IndexError):
        return getattr(arguments[0], "device", "cpu")
    return "cpu"


def main() -> int:
    """Serve as `python -m bexp.workers.profiler` does."""
    strike("start")
    from bexp.workers.profiler.parent import connect_to_parent

    parent = connect_to_parent("tests.chaos.faulty_profiler")
    install()
    from bexp.workers.profiler.device import serve_device

    return serve_device(parent)


if __name__ == "__main__":
    raise SystemExit(main())
