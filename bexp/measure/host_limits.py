"""The host of a profiler: its cores, its memory, and the memory limit of a job."""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

MEMORY_SHARE = 0.6
"""The default limit of a job on the CPU, as a share of the memory that is available when the profiler starts."""
DATA_SLACK_BYTES = 64 << 20
"""Bytes that the interpreter itself may take on top of a job's limit."""

CGROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")


def processor_name() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """The physical cores that this process may run on, within its CPU quota; at least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), math.floor(_cpu_quota())))


def total_bytes() -> int:
    """The RAM of the host, or less if a control group limits it."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_groups())])


def available_bytes() -> int:
    """The RAM that can be used now without swapping."""
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _memory_groups())]))


def limit_data(limit_bytes: int) -> None:
    """Let this process's data grow by `limit_bytes` from now on; allocations beyond that fail as out of memory.

    The limit is RLIMIT_DATA, because torch does not even start its threads under RLIMIT_AS. On a platform that does
    not count data this does nothing.
    """
    data = _data_bytes()
    if data is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = data + limit_bytes + DATA_SLACK_BYTES
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def more_data(num_bytes: int) -> Iterator[None]:
    """Let this process's data grow by `num_bytes` more within the context, if it is limited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        raised = soft + num_bytes if hard == resource.RLIM_INFINITY else min(soft + num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (raised, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _siblings(cpu: int) -> str:
    try:
        return (TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _data_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)


def _group_folders(controller: str) -> list[Path]:
    """The control group of this process and all above it: version 2, or version 1's hierarchy of `controller`."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        number, names, path = line.split(":", 2)
        if number == "0" or controller in names.split(","):
            root = CGROUPS if number == "0" else CGROUPS / controller
            group = root / path.lstrip("/")
            folders += [folder for folder in (group, *group.parents) if folder == root or root in folder.parents]
    return folders


def _memory_groups() -> list[tuple[int, int]]:
    """(limit, used) bytes of each control group that has a limit; reclaimable page cache does not count as used."""
    groups = []
    for folder in _group_folders("memory"):
        for limit_name, used_name, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read_int(folder / limit_name), _read_int(folder / used_name)
            if limit is not None and used is not None:
                groups.append((limit, max(0, used - _read_statistic(folder / "memory.stat", cache))))
    return groups


def _cpu_quota() -> float:
    """CPUs' worth of time that the control groups allow."""
    quotas = [math.inf]
    for folder in _group_folders("cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError):
            old_quota, old_period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
            if old_quota and old_quota > 0 and old_period:
                quotas.append(old_quota / old_period)
    return max(1.0, min(*quotas, float(1 << 16)))


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _read_statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
