"""What `bexp.explore` recommends, with the result of each size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bexp.explorer.records.measurement import SizeResult


@dataclass(frozen=True)
class StepRecommendation:
    """The best size, and what is known of all that were tried.

    `confidence` is the probability, rounded down to 0..99, that the throughput of the size is within 1% of the best of
    all requested sizes, measurement errors included. It is None if the search failed. A size that was
    measured again, because the search wanted to be surer, has several results. The other fields are None if nothing
    fits. `group_is_usable` is false if processes were left in the middle of an exchange: the process group must then be
    made again before training.
    """

    micro_batch_size: int | None
    grad_accum_steps: int | None
    sequences_per_second: float | None
    confidence: int | None
    optimizer_seconds: float
    results: tuple[SizeResult, ...]
    notes: tuple[str, ...] = ()
    peak_bytes: int | None = None
    effective_batch_size: int | None = None
    num_devices: int = 1
    allocator: str = "default"
    group_is_usable: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, which `bexp.training_arguments` reads; the measured step is a person's own code."""
        return {
            **asdict(self),
            "candidate": {"micro_batch_size": self.micro_batch_size, "attention_backend": "own"},
            "batch_size": self.effective_batch_size,
            "measured_peak_bytes": self.peak_bytes,
        }
