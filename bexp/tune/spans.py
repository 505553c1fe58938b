"""The pace of a run from one span of seconds to the next, which a host may change.

A span's pace is how many times as long it took as all steps in the mean, for the work in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

SPAN_SECONDS, FEWEST_SPANS = 1.0, 3
"""With enough spans of this length, their paces tell how far one part of a run differs from another.

Micro-steps in a row are alike, so their own standard error is too small.
"""
STALLED = 2.0
"""In a span that takes so many times as long as the median one, the host stood still. The mean leaves such spans out.
"""


def span_paces(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Return how many times as long each span of SPAN_SECONDS took as all steps, for the work in it.

    Each step has its seconds and its work: what a fit gives to its length, or its positions.
    """
    spans, seconds, work = list[float](), 0.0, 0.0
    for own_seconds, own_work in steps:
        seconds, work = seconds + own_seconds, work + own_work
        if seconds >= SPAN_SECONDS:
            spans.append(seconds / work)
            seconds = work = 0.0
    total_seconds, total_work = (sum(each) for each in zip(*steps, strict=True))
    return [span * total_work / total_seconds for span in spans]


def pace_without_stalls(paces: Sequence[float]) -> float:
    """Return the pace without the spans in which the host stood still; 1 if it never did. All spans are as long."""
    kept = [pace for pace in paces if pace <= STALLED * statistics.median(paces)]
    return 1.0 if len(kept) == len(paces) else statistics.harmonic_mean(kept)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values."""
    return statistics.stdev(values) / math.sqrt(len(values))
