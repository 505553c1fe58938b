"""Reports of real training runs of a recommendation: as a trainer sends them back, and as a later search uses them."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AwareDatetime, Field

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.base import Frozen

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
        None,
        description="Whether all recommended settings were applied, and not only the micro-batch size; null: unknown.",
    )
    finished_at: AwareDatetime


class ReportedRun(Frozen):
    """The real runs of a candidate that one exploration named, which were made on the same device with the same model.

    `speed_ratio` is the median tokens/s that they reached over the composed tokens/s. `peak_ratio` is the highest
    max_memory_allocated over the composed peak; null if no run counted memory.
    """

    exploration_id: str
    candidate: Candidate
    num_reports: Annotated[int, Field(ge=1)]
    speed_ratio: Annotated[float, Field(gt=0)]
    peak_ratio: Annotated[float, Field(gt=0)] | None = None

    @property
    def log_error(self) -> float:
        """The logarithm of reached over composed tokens/s: the error of the composition."""
        return math.log(self.speed_ratio)
