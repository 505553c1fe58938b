"""Puts the measured figures into README.md, from the raw JSON under results/ and from nowhere else."""

from benchmarks.readme.sections import fill

__all__ = ["fill"]
