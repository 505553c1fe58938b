"""What a real training run of a recommendation reached, sent back by the trainer."""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field

from bexp.explorer.spec.base import Frozen

MAX_VERSIONS = 32

Rate = Annotated[float, Field(gt=0, le=1e15)]
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


class RunReport(Frozen):
    """The speed and the memory of a training run, of one device.

    `tokens_per_second` is the mean over `steps` optimizer steps, which took `seconds` together. `peak_bytes` is the
    highest max_memory_allocated, `peak_reserved_bytes` the highest max_memory_reserved; both are null on a device that
    does not count them. `versions` maps names of libraries to the versions that the run used.
    """

    tokens_per_second: Rate
    peak_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    steps: Annotated[int, Field(ge=1, le=1 << 40)]
    micro_batch_size: Annotated[int, Field(ge=1, le=1 << 20)]
    seconds: Annotated[float, Field(gt=0, le=1e10)]
    hardware: Name = Field(description="The name of the device, such as NVIDIA H100 80GB HBM3.")
    versions: Annotated[dict[Name, Name], Field(max_length=MAX_VERSIONS)] = Field(default_factory=dict)
    applied: bool | None = Field(
        None, description="Whether the recommended settings were applied beside the micro-batch size; null: unknown."
    )
    finished_at: AwareDatetime
