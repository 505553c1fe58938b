"""The hardware that a model runs on: measured peaks, and the kernels that can be used there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from bexp.explorer.model.base import Frozen
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import ModelParts

Positive = Annotated[float, Field(gt=0)]


NAME_IT = "a request has to name it"
"""The reason of a value that was not tried."""
WITH_ADAPTERS = "with adapters on experts"
"""The beginning of the reason that leaves out kernels which serve the same experts without adapters."""


class BackendSupport(Frozen):
    """Whether a kernel back end can serve a model on a device."""

    name: str
    usable: bool
    reason: str | None = Field(None, description="Why the back end cannot be used.")
    stock: bool = Field(True, description="Whether torch itself has the back end.")
    only_when_named: bool = Field(False, description="Whether it is explored only if the request names it.")
    context_parallel: bool = Field(False, description="Whether attention serves sequences that several devices share.")
    context_parallel_reason: str | None = Field(None, description="Why attention does not serve them.")


class SoftwareVersions(Frozen):
    """Versions that a measurement depends on; None if the device has no such software."""

    python: str
    torch: str
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    triton: str | None = None


class HardwareSpec(Frozen):
    """One device, or several alike, as measured by the worker that owns them.

    The peaks of matrix products and of the memory's bandwidth are measured, not figures of a data sheet.
    """

    device_kind: Literal["cpu", "cuda"]
    device_name: str
    num_devices: Annotated[int, Field(ge=1)] = 1
    memory_bytes: Annotated[int, Field(gt=0)] = Field(description="The memory of one device.")
    memory_limit_bytes: Annotated[int, Field(gt=0)] = Field(description="The memory that a job may use by default.")
    context_bytes: Annotated[int, Field(ge=0)] = Field(
        0, description="Device memory that the runtime holds outside the allocator."
    )
    workspace_bytes: Annotated[int, Field(ge=0)] = Field(
        0, description="Memory that cuBLAS takes from the allocator for the threads of forward and backward, and keeps."
    )
    matmul_flops_per_second: dict[DType, Positive]
    memory_bandwidth_bytes_per_second: Positive = Field(description="Of reads and writes together.")
    launch_seconds: Positive = Field(description="The host's time for one eager operation.")
    versions: SoftwareVersions

    @property
    def most_memory_bytes(self) -> int:
        """The most memory of one device that a request may ask for: all of a CPU's, and the default of a GPU."""
        return self.memory_bytes if self.device_kind == "cpu" else self.memory_limit_bytes

    def matmul_peak(self, dtype: DType) -> float:
        """Return the floating-point operations per second of matrix products in a number format, as far as measured.

        A format that was not measured counts as the fastest one.
        """
        return self.matmul_flops_per_second.get(dtype) or max(self.matmul_flops_per_second.values())

    @property
    def fingerprint(self) -> str:
        """A hash of all that results depend on but the measured peaks; a resumed job needs the same."""
        parts = (self.device_kind, self.device_name, str(self.memory_bytes), self.versions.model_dump_json())
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Return one line for a person: `2 x NVIDIA H200, 139.8 GiB, torch 2.11.0+cu130, CUDA 13.0, cuDNN 9.19`."""
        named = (("torch", self.versions.torch), ("CUDA", self.versions.cuda), ("cuDNN", self.versions.cudnn))
        versions = ", ".join(f"{name} {version}" for name, version in named if version is not None)
        number = f"{self.num_devices} x " if self.num_devices > 1 else ""
        return f"{number}{self.device_name}, {self.memory_bytes / 2**30:.1f} GiB, {versions}"


class DeviceSupport(Frozen):
    """A device, and what of it a model can use.

    `default_attention` is the back end that torch's scaled_dot_product_attention picks by itself. `default_experts` is
    the expert back end of the base candidate: grouped_mm, or the loop if grouped_mm is unavailable.
    """

    hardware: HardwareSpec
    attention_backends: tuple[BackendSupport, ...]
    expert_backends: tuple[BackendSupport, ...] = ()
    choices: Mapping[str, tuple[BackendSupport, ...]] = Field(
        {}, description="The values that this model can have here, by dimension, where the request leaves a choice."
    )
    default_attention: str
    default_experts: str | None = None
    parts: ModelParts | None = Field(
        None, description="The parts of a model whose own code is measured; null for the reference layers."
    )

    def is_stock(self, attention: str, experts: str | None) -> bool:
        """Return whether torch itself has both back ends."""
        stock = {b.name for b in (*self.attention_backends, *self.expert_backends) if b.stock}
        return attention in stock and (experts is None or experts in stock)
