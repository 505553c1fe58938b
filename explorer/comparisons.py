"""What is still to be measured when the search has ended: the recommended candidate in full, and what it beats."""

from __future__ import annotations

from explorer.acquisition import Suggestion, measuring_seconds
from explorer.answers import best_stock, largest_untiled
from explorer.belief import Belief
from explorer.hardware import DeviceReport

COMPARISON_SHARE = 0.1
"""Of the device's seconds so far, for one candidate that the answer is only compared with.

The largest micro-batch that fits is the dearest candidate of all, and the kernels of large sizes are near what smaller
ones lead to expect: beyond this cost its throughput is predicted, and the answer says so.
"""


def next_comparison(belief: Belief, report: DeviceReport, spent_seconds: float) -> Suggestion | None:
    """The next measurement for the answer; null when it has all it needs, or the rest costs too much.

    First what the search left out of the recommended candidate because it was predicted well enough; then the largest
    untiled micro-batch and the best with stock back ends. `spent_seconds` are the device's so far.
    """
    verdict = belief.recommend()
    if verdict is None:
        return None
    if not belief.is_known(verdict.row):
        return Suggestion(verdict.row, belief.table.missing(verdict.row, belief.surrogate.known_K))
    rows = belief.open_rows()
    for row in (largest_untiled(belief, among=rows), best_stock(belief, report, among=rows)):
        wanted = belief.wanted(row) if row is not None else ()
        if row is None or not wanted:
            continue
        columns = [belief.table.column[c] for c in wanted]
        cost = float(measuring_seconds(belief.surrogate.device_mean_K[columns]).sum())
        if cost <= COMPARISON_SHARE * spent_seconds:
            return Suggestion(row, wanted)
    return None
