"""The devices of this host, listed without torch, and their NVML handles."""

from __future__ import annotations

from collections.abc import Mapping

import pynvml

from bexp.measure.nvml import Gpu
from bexp.measure.visible_gpus import visible_gpus


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
