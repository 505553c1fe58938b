"""The environment of a profiler process: settings that a measurement needs, unless the user has set them."""

from __future__ import annotations

from collections.abc import Mapping

CHILD_DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbering that the device locks use
    "OMP_WAIT_POLICY": "PASSIVE",  # a thread that spins at a barrier keeps the core from the thread it waits for
    "PYTHONFAULTHANDLER": "1",
    "BEXP_MEASURE_EXPERTS": "1",  # the expert back end `auto` measures shapes that its table lacks
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


def profiler_environment(given: Mapping[str, str], *, is_group: bool) -> dict[str, str]:
    """`given` with the defaults of a profiler process, or of the ranks of a group."""
    return CHILD_DEFAULTS | (GROUP_DEFAULTS if is_group else {}) | dict(given)
