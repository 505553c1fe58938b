"""The candidate that needs least memory: its bytes, and the evidence that it does not fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bexp.explorer.cost.step import GIB
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.reported_runs import peak_factor


@dataclass(frozen=True, slots=True)
class SmallestCandidate:
    """The candidate that needs least memory, as its components compose its peak."""

    candidate: Candidate
    peak_bytes: int
    required_bytes: int
    is_measured: bool = True
    """Whether all of its components are measured."""
    ran_out_of_memory: str | None = None
    """The part that was tried and did not fit: its whole model, or a component. None if neither was."""
    reported_factor: float = 1.0
    """At least how many times the composed memory real runs of the model have needed; 1 without any."""

    def describe(self) -> str:
        """Return the bytes that the candidate needs, and the evidence that it does not fit."""
        tried = f", and {self.ran_out_of_memory} ran out of memory" if self.ran_out_of_memory else ""
        if self.reported_factor > 1.0:
            tried += f", and real runs needed at least {self.reported_factor:.2f}x the composed memory"
        peak = "a peak" if self.is_measured else "an expected peak"
        return (
            f"the smallest candidate ({self.candidate.describe()}) has {peak} of {self.peak_bytes / GIB:.2f} GiB and "
            f"needs {self.required_bytes / GIB:.2f} GiB with fragmentation, context and margin{tried}"
        )


def find_smallest(posterior: Posterior, whole_models: Iterable[Trial], *, memory_failed: bool) -> SmallestCandidate:
    """Return the candidate with the smallest peak; of several, one whose whole model ran out of memory.

    `memory_failed` says that trials of components failed, all of them because memory was short.
    """
    table, smallest = posterior.table, posterior.smallest_row
    ran_out = (t for t in whole_models if t.measurement.outcome is Outcome.OUT_OF_MEMORY)
    rows = [table.row[t.candidate] for t in ran_out if t.candidate in table.row]
    alike = [row for row in rows if posterior.memory.required_C[row] <= posterior.memory.required_C[smallest]]
    row, failed = (alike[0], "its whole model") if alike else (smallest, None)
    is_measured, memory = posterior.is_known(row), posterior.bytes(row)
    if failed is None and posterior.fits(row) and not (is_measured or posterior.is_open(row)) and memory_failed:
        failed = "a component of it"
    factor = peak_factor(posterior.knowledge.reported)
    return SmallestCandidate(
        table.candidates[row], memory.peak, memory.required, is_measured, failed, reported_factor=factor
    )
