"""What real runs of an earlier exploration reached, compared with what that exploration composed."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from bexp.explorer.spec.base import Frozen
from bexp.explorer.spec.candidate import Candidate


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
