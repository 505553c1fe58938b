"""The device's peak rates, measured and not taken from data sheets."""

from __future__ import annotations

import itertools
import platform
import statistics
from collections.abc import Callable
from functools import partial

import pynvml
import torch

from bexp.explorer.model.hardware import HardwareSpec, SoftwareVersions
from bexp.explorer.model.model import DType
from bexp.measure import host_limits as host
from bexp.measure.timestamps import HostMark, synchronize
from bexp.targets.registry import version_of
from bexp.workers.instruments.device_instruments import clear_workspaces
from bexp.workers.instruments.kernel_shapes import torch_dtype

CUDA_MATMUL_SIZE = 8192
CUDA_COPY_BYTES = 1 << 30
CPU_MATMUL_SIZES = (256, 512, 1024, 2048)
CPU_MATMUL_SECONDS = 0.03
"""Products that are expected to take longer are left out."""
CPU_COPY_BYTES = 128 << 20
DRAWN_BYTES = 1 << 20
TINY_OPERATIONS = 200


def identify(device: torch.device) -> tuple[str, SoftwareVersions]:
    """Return the name of a device, and the versions that a measurement on it depends on."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name, _versions(device)
    return f"{host.processor_name()} ({torch.get_num_threads()} cores)", _versions(None)


def measure_hardware(device: torch.device, used_before: int | None) -> HardwareSpec:
    """Time large products of random matrices, a large copy, and the launch of tiny operations: 1 to 2 s.

    `used_before` is the device memory in bytes that was in use before this process had a context on the device.
    """
    return _measure_cuda(device, used_before) if device.type == "cuda" else _measure_cpu()


def _measure_cpu() -> HardwareSpec:
    cpu = torch.device("cpu")
    name, versions = identify(cpu)
    total = host.total_bytes()
    return HardwareSpec(
        device_kind="cpu",
        device_name=name,
        memory_bytes=total,
        memory_limit_bytes=max(1, min(total, int(host.MEMORY_SHARE * host.available_bytes()))),
        matmul_flops_per_second=_matmul_peaks(cpu, _cpu_matmul_peak),
        memory_bandwidth_bytes_per_second=_bandwidth(cpu, CPU_COPY_BYTES),
        launch_seconds=_launch_seconds(cpu),
        versions=versions,
    )


def _measure_cuda(device: torch.device, used_before: int | None) -> HardwareSpec:
    torch.cuda.set_device(device)
    name, versions = identify(device)
    matmul = _matmul_peaks(device, _cuda_matmul_peak)
    bandwidth = _bandwidth(device, CUDA_COPY_BYTES)
    launch = _launch_seconds(device)
    workspaces = _workspace_bytes(device)
    torch.cuda.empty_cache()
    total, limit, context = cuda_memory(device, used_before)
    return HardwareSpec(
        device_kind="cuda",
        device_name=name,
        memory_bytes=total,
        memory_limit_bytes=limit,
        context_bytes=context,
        workspace_bytes=workspaces,
        matmul_flops_per_second=matmul,
        memory_bandwidth_bytes_per_second=bandwidth,
        launch_seconds=launch,
        versions=versions,
    )


def cuda_memory(device: torch.device, used_before: int | None) -> tuple[int, int, int]:
    """Return the bytes of the device's memory, of its part that other processes leave, and of this process's context.

    NVML counts memory that the driver reserves as used (480 MiB of an H100), and CUDA leaves it out of the device's
    memory. NVML's figures therefore serve as a difference only: the memory that this process took since `used_before`.
    Without them all memory in use counts as this process's own.
    """
    free, total = torch.cuda.mem_get_info(device)
    in_use = total - free
    used_now = None if used_before is None else used_bytes(device)
    own = in_use if used_before is None or used_now is None else used_now - used_before
    limit = total - max(0, in_use - own)
    return total, max(1, limit), max(0, own - torch.cuda.memory_reserved(device))


def _matmul_peaks(device: torch.device, measure: Callable[[torch.device, torch.dtype], float]) -> dict[DType, float]:
    peaks = {}
    for dtype in DType:
        try:
            peaks[dtype] = measure(device, torch_dtype(dtype))
        except (RuntimeError, NotImplementedError):  # this device does not multiply numbers of this type
            continue
    return peaks


def _cuda_matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    n = CUDA_MATMUL_SIZE
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = _median_device_seconds(device, partial(torch.mm, a, b, out=out), warm_up=3, repeats=10)
    return 2 * n**3 / seconds


def _cpu_matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of the fastest of a few products, because other processes on the host slow some of them down."""
    peak = 0.0
    for n in CPU_MATMUL_SIZES:
        if peak and 2 * n**3 / peak > CPU_MATMUL_SECONDS:
            break
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        for _ in range(5):
            started = HostMark()
            torch.mm(a, b, out=out)
            peak = max(peak, 2 * n**3 / started.seconds_until(HostMark()))
    return peak


def _bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    # Random bits, because a GPU's clocks depend on them; drawing all of them takes a CPU longer than the copies.
    source = torch.randint(0, 256, (DRAWN_BYTES,), dtype=torch.uint8, device=device).repeat(size // DRAWN_BYTES)
    target = torch.empty_like(source)
    return 2 * size / _median_device_seconds(device, lambda: target.copy_(source), warm_up=2, repeats=5)


def _launch_seconds(device: torch.device) -> float:
    """Host seconds of one tiny eager operation. There are too few operations to fill the launch queue."""
    x = torch.zeros(16, device=device)
    seconds = []
    for _ in range(5):
        synchronize(device)
        started = HostMark()
        for _ in range(TINY_OPERATIONS):
            x.add_(1.0)
        seconds.append(started.seconds_until(HostMark()) / TINY_OPERATIONS)
    return statistics.median(seconds)


def _workspace_bytes(device: torch.device) -> int:
    """Return the bytes that cuBLAS keeps: a workspace for this thread, and one for autograd's, which runs backward."""
    clear_workspaces()
    before = torch.cuda.memory_allocated(device)
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()
    del x
    return max(0, torch.cuda.memory_allocated(device) - before)


def _median_device_seconds(device: torch.device, run: Callable[[], object], warm_up: int, repeats: int) -> float:
    for _ in range(warm_up):
        run()
    if device.type != "cuda":
        seconds = []
        for _ in range(repeats):
            started = HostMark()
            run()
            seconds.append(started.seconds_until(HostMark()))
        return statistics.median(seconds)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(float(a.elapsed_time(b)) / 1e3 for a, b in itertools.pairwise(events))


def used_bytes(device: torch.device) -> int | None:
    """Return the bytes of a CUDA device that all processes use; None if NVML cannot say. No context is made."""
    try:
        return int(torch.cuda.device_memory_used(device))
    except (RuntimeError, ModuleNotFoundError, pynvml.NVMLError):
        return None


def _versions(device: torch.device | None) -> SoftwareVersions:
    if device is None:
        return SoftwareVersions(python=platform.python_version(), torch=torch.__version__)
    cudnn = torch.backends.cudnn.version()
    return SoftwareVersions(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        driver=_driver_version(),
        triton=version_of("triton"),
    )


def _driver_version() -> str | None:
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
