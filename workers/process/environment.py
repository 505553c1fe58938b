"""The environment of a profiler process: settings that a measurement needs, unless the user has set them."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

FOLDER_VARIABLE = "BEXP_KERNEL_CACHE"
LIBRARY_FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "BEXP_EXPERT_TABLES": "experts",
}
"""The variable that tells a library its folder, and the name of that folder. Ours holds what `auto` has measured."""

_log = logging.getLogger(__name__)


def kernel_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell each library its folder; empty if no folder can be used.

    The folder is BEXP_KERNEL_CACHE, else `bexp/kernels` in XDG_CACHE_HOME or in ~/.cache, else one in the temporary
    directory. It is made if it is missing. A folder that nobody has named is used only if no other user can write to
    it, because what it holds is run.
    """
    named = environment.get(FOLDER_VARIABLE)
    if named and not _is_writable(Path(named)):
        _log.warning("%s=%s cannot be written; kernels are kept elsewhere", FOLDER_VARIABLE, named)
        named = None
    folder = Path(named).absolute() if named else next(filter(_is_private, _usual_folders(environment)), None)
    return {} if folder is None else {variable: str(folder / name) for variable, name in LIBRARY_FOLDERS.items()}


def _usual_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    cache, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    if cache.startswith("/"):
        yield Path(cache) / "bexp" / "kernels"
    elif home.startswith("/"):
        yield Path(home) / ".cache" / "bexp" / "kernels"
    yield Path(tempfile.gettempdir()) / f"bexp-kernels-{os.getuid()}"


def _is_writable(folder: Path) -> bool:
    """Whether this process can write to a folder, which is made if it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _is_private(folder: Path) -> bool:
    """Whether this user alone can write to a folder, which is made if it is missing."""
    if not _is_writable(folder):
        return False
    status = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & others


CHILD_DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbering that the device locks use
    # A thread that spins at a barrier keeps the core from the thread that it waits for, and its time counts. Some
    # microseconds are enough where nothing else wants the cores; one that sleeps at once is late for a short operation.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "PYTHONFAULTHANDLER": "1",
    "BEXP_MEASURE_EXPERTS": "1",  # the expert back end `auto` measures shapes that its table lacks
}
CPU_DEFAULTS = {
    # glibc returns a large tensor's memory to the kernel, or not, by what the process freed before. Pages that come back
    # cost up to a quarter of a step, so one size would be faster after another size than by itself.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
GROUP_DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",  # multicast through NVSwitch needs a fabric that not every host lets a process use
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_SOCKET_IFNAME": "lo",  # all ranks are on this host
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # an error ends its rank, and so the group, without waiting for peers
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # the group has its own store, on the loopback interface only
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a wait that ends without a message is normal here
}


def profiler_environment(given: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
    """`given` with the defaults of a process that measures `devices`; several have one rank each."""
    on_cpu = CPU_DEFAULTS if "cpu" in devices else {}
    return CHILD_DEFAULTS | on_cpu | (GROUP_DEFAULTS if len(devices) > 1 else {}) | dict(given)
