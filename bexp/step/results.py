"""The recommendation of `bexp.explore`, with the result of each size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from bexp.explorer.answers.text import row, wrap
from bexp.explorer.model.amounts import bytes_text, rate_text
from bexp.explorer.records.measurement import Outcome, SizeResult


@dataclass(frozen=True, repr=False)
class StepRecommendation:
    """The best size, and what is known of all that were tried. It prints as an answer in a few lines."""

    micro_batch_size: int | None
    """None if nothing fits, as the figures of the size are then."""
    grad_accum_steps: int | None
    """Micro-batches of a process in a whole step; None if the effective batch is not known."""
    sequences_per_second: float | None
    """Of a whole step, for each device."""
    confidence: int | None
    """The probability (0..99, rounded down) that no requested size is more than 1% faster; None if the search failed.

    It includes errors of measurement.
    """
    optimizer_seconds: float
    """Of one step of the optimizer."""
    results: tuple[SizeResult, ...]
    """A size has several if it was measured again to be surer."""
    notes: tuple[str, ...] = ()
    """Remarks on the answer for a person, a sentence each."""
    peak_bytes: int | None = None
    """The peak of allocated memory at this size; None on the CPU."""
    effective_batch_size: int | None = None
    """As it was asked for."""
    num_devices: int = 1
    """One for each process."""
    allocator: str = "default"
    """The setting of CUDA's allocator that was measured."""
    group_is_usable: bool = True
    """False if processes were left in the middle of an exchange: make the process group again before training."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, which `bexp.training_arguments` reads; the measured step is a person's own code."""
        return {
            **asdict(self),
            "candidate": {"micro_batch_size": self.micro_batch_size, "attention_backend": "own"},
            "batch_size": self.effective_batch_size,
            "measured_peak_bytes": self.peak_bytes,
        }

    def __repr__(self) -> str:
        return "\n".join(wrap(self._lines()))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    def _lines(self) -> Iterator[str]:
        if self.micro_batch_size is None:
            yield "No recommendation"
        else:
            yield f"Recommended micro_batch_size: {self.micro_batch_size}"
            if self.grad_accum_steps is not None:
                devices = f" on each of {self.num_devices} devices" if self.num_devices > 1 else ""
                steps = f"{self.grad_accum_steps} accumulation step{'' if self.grad_accum_steps == 1 else 's'}"
                yield row("batch", f"batch_size {self.effective_batch_size} in {steps}{devices}")
            yield row("speed", f"{_rate(self.sequences_per_second or 0.0)} per device")
            if self.peak_bytes is not None:
                yield row("memory", f"{bytes_text(self.peak_bytes)} at the peak")
            sure = "not known" if self.confidence is None else f"{self.confidence} out of 100"
            yield row("confidence", f"{sure} that none of the sizes is more than 1% faster")
        if self.results:
            yield row("without optimizer", ", ".join(self._tried()))
        for note in self.notes:
            yield row("note", note)

    def _tried(self) -> Iterator[str]:
        """Yield each size that was tried, with its speed or how it ended, the last time."""
        last = {result.micro_batch_size: result for result in self.results}
        for size, result in sorted(last.items()):
            yield f"{size}: {describe_result(result)}"


def describe_result(result: SizeResult) -> str:
    """Return the speed of one measurement of a size, forward and backward alone, or how it ended."""
    if result.outcome is not Outcome.OK:
        return result.outcome.replace("_", " ")
    return _rate(result.micro_batch_size / result.mean_seconds)


def _rate(sequences_per_second: float) -> str:
    return rate_text(sequences_per_second).replace("tokens", "sequences")
