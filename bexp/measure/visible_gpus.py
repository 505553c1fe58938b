"""The GPUs that a process on this host would see, listed without torch."""

from __future__ import annotations

from collections.abc import Mapping

import pynvml


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the visible GPUs, in the order of CUDA's numbers."""
    uuids = _gpu_uuids()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return uuids
    chosen: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal() and int(name) < len(uuids):
            chosen.append(uuids[int(name)])
        elif name.startswith("MIG-"):
            chosen.append(name)
        elif name and any(uuid.startswith(name) for uuid in uuids):
            chosen.append(next(uuid for uuid in uuids if uuid.startswith(name)))
        else:
            break  # as CUDA does: the first invalid entry ends the list
    return chosen


def _gpu_uuids() -> list[str]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [
            pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
