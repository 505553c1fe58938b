"""The environment of a profiler process: settings that a measurement needs, unless the user has them; no secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bexp.workers.settings import LOCAL_TARGET

CHILD_DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbering that the device locks use
    # A thread that spins at a barrier keeps the core from the thread that it waits for, and its time counts. A thread
    # that sleeps at once is late for a short operation. Some microseconds are enough where the cores are free.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "PYTHONFAULTHANDLER": "1",
}
CPU_DEFAULTS = {
    # glibc returns a large tensor's memory to the kernel, or not, by what the process freed before. Pages that come
    # back cost up to a third of a step, so one size would be faster after another size than by itself.
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
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Libraries fetch neither weights nor kernels nor code, whatever a request builds."""
SECRETS = ("BEXP_DATABASE_URL", "BEXP_API_TOKEN")
"""Variables for the worker alone, because a profiler runs code of a model's author."""
DATABASE_SECRETS = ("PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE")
"""What libpq reads where the URL has no password. A person's own code may read its texts from such a database."""


def profiler_environment(given: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
    """Return `given` without secrets, with the defaults of a process that measures `devices`."""
    more = (CPU_DEFAULTS if "cpu" in devices else {}) | (GROUP_DEFAULTS if len(devices) > 1 else {})
    is_own = bool(given.get(LOCAL_TARGET))
    more |= {} if is_own else OFFLINE
    secrets = SECRETS if is_own else (*SECRETS, *DATABASE_SECRETS)
    kept = {name: value for name, value in given.items() if name not in secrets}
    return CHILD_DEFAULTS | more | kept
