"""The devices of this host, listed without torch, and their NVML handles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pynvml

from bexp.measure.nvml import Gpu, visible_gpus


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return `cpu`, and a `cuda:i` for each GPU that CUDA_VISIBLE_DEVICES leaves visible."""
    return ("cpu", *(f"cuda:{i}" for i in range(len(visible_gpus(environment)))))


def why_no_gpu(environment: Mapping[str, str]) -> str | None:
    """Return why no CUDA device is visible; None if one is."""
    if visible_gpus(environment):
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML does not answer ({error}): is NVIDIA's driver installed?"
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return f"NVML does not count the devices ({error})"
    finally:
        pynvml.nvmlShutdown()
    if count == 0:
        return "the driver finds no GPU"
    return f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES')!r} hides the {count} GPUs of this host"


def device_key(device: str, environment: Mapping[str, str]) -> str:
    """Identify a device on this host, independent of its number in a process: `cpu`, or the UUID of a GPU.

    CUDA numbers the visible GPUs. These numbers are NVML's under CUDA_DEVICE_ORDER=PCI_BUS_ID, which profiler processes
    have by default.

    Raises:
        ValueError: `device` is neither `cpu` nor a visible `cuda:i`.
    """
    if device == "cpu":
        return "cpu"
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ValueError(f"unknown device {device!r}: use cpu or cuda:0, cuda:1, ...")
    gpus = visible_gpus(environment)
    if int(index or 0) >= len(gpus):
        raise ValueError(
            f"device {device!r} does not exist: {len(gpus)} CUDA devices are visible (`bexp doctor` shows what can be "
            "used)"
        )
    return gpus[int(index or 0)]


def open_gpu(device: str, environment: Mapping[str, str]) -> Gpu | None:
    """The GPU that this process calls `device`; None for the CPU, and if NVML does not find the device."""
    try:
        key = device_key(device, environment)
    except ValueError:
        return None
    return None if key == "cpu" else Gpu.open(key)


def read_gpus(uuids: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Read each GPU, given by name and UUID, as `WorkerInfo.gpus` has it; None if NVML says nothing of any."""
    read = []
    for name, uuid in uuids.items():
        gpu = Gpu.open(uuid)
        found = (
            {} if gpu is None else {"busy_share": gpu.busy_share(), "temperature_celsius": gpu.temperature_celsius()}
        )
        read.append({"device": name} | {key: value for key, value in found.items() if value is not None})
    return read if any(len(one) > 1 for one in read) else None


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of devices that are acceptable: `2`, or `1,2,4`.

    Raises:
        ValueError: `text` has another form.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"'{text}' must be a number of devices, or several numbers joined by commas")
    return tuple(map(int, parts))


def default_devices(
    visible: Sequence[str], *, group: bool = False, counts: Sequence[int] | None = None
) -> tuple[str, ...]:
    """Return the first GPU, or all GPUs for a group, or the CPU if the host has no GPU.

    With `counts`, return as many GPUs as the largest of these numbers that the host has.

    Raises:
        ValueError: there are fewer than the smallest of `counts`.
    """
    gpus = [device for device in visible if device != "cpu"] or ["cpu"]
    if counts is None:
        return tuple(gpus) if group else (gpus[0],)
    enough = [count for count in counts if count <= len(gpus)]
    if not enough:
        raise ValueError(f"{min(counts)} devices are needed, and there is {', '.join(gpus)} here")
    return tuple(gpus[: max(enough)])
