"""A real run, compared with the answer that it used."""

from __future__ import annotations

from bexp.explorer.model.amounts import bytes_text, rate_text
from bexp.explorer.records.recommendation import Recommendation, Role
from bexp.explorer.records.run_report import RunReport


def render_run_report(report: RunReport, best: Recommendation) -> str:
    """Return one line about a real run, compared with `best` if it used one of its two micro-batch sizes."""
    line = (
        f"a run on {report.hardware} reached {rate_text(report.tokens_per_second)} per device with micro_batch_size "
        f"{report.micro_batch_size} in {report.steps:,} steps"
    )
    if report.peak_bytes is not None:
        line += f", peak {bytes_text(report.peak_bytes)}"
    promised = _promised(best, report.micro_batch_size)
    if promised is None:
        return line
    speed = report.tokens_per_second / promised[0]
    peak = ""
    if report.peak_bytes is not None and promised[1]:
        peak = f", {report.peak_bytes / promised[1]:.2f}x the promised peak"
    return f"{line}: {speed:.2f}x the promised speed{peak}"


def _promised(best: Recommendation, micro_batch_size: int) -> tuple[float, int] | None:
    """Return the tokens/s and the peak bytes of the figure with this micro-batch size; None if neither has it."""
    if micro_batch_size == best.candidate.micro_batch_size:
        return best.expected_tokens_per_second, best.expected_peak_bytes
    other = best.alternative(Role.DIVIDING)
    if other is not None and micro_batch_size == other.candidate.micro_batch_size:
        return other.tokens_per_second, other.expected_peak_bytes
    return None
