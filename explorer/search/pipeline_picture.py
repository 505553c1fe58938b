"""A pipeline as text: what each rank does at the beginning of a step."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from bexp.explorer.cost_model.pipeline import PipelineRun, TimedPass
from bexp.explorer.cost_model.pipeline_order import Pass
from bexp.explorer.records.plan import PipelinePicture

WIDTH = 64
"""Characters of a line."""
MOST_LINES = 16
"""Ranks that are drawn; of more, every second, every third and so on is."""
WAITS = "."


def draw_pipeline(run: PipelineRun) -> PipelinePicture:
    """Draw a run from its beginning until the first rank has run as many backward passes as there are ranks.

    A character is what the rank does in the middle of its share of the time: `F`, `B` and `W` are the passes of a
    micro-batch, in small letters for every second micro-batch, and `.` is waiting.
    """
    by_rank: defaultdict[int, list[TimedPass]] = defaultdict(list)
    for each in run.passes:
        by_rank[each.rank].append(each)
    ranks = sorted(by_rank)
    first = [each.end for each in by_rank[ranks[0]] if each.action.kind is Pass.BACKWARD]
    seconds = min(run.seconds, sorted(first)[min(len(ranks), len(first)) - 1])
    drawn = ranks[:: -(-len(ranks) // MOST_LINES)]
    lines = tuple(_line(by_rank[rank], seconds) for rank in drawn)
    return PipelinePicture(seconds=seconds, ranks=tuple(drawn), lines=lines)


def _line(passes: list[TimedPass], seconds: float) -> str:
    begins = [each.begin for each in passes]
    return "".join(_character(passes, begins, seconds * (i + 0.5) / WIDTH) for i in range(WIDTH))


def _character(passes: list[TimedPass], begins: list[float], moment: float) -> str:
    index = bisect_right(begins, moment) - 1
    if index < 0 or passes[index].end <= moment:
        return WAITS
    kind, _, micro_batch = passes[index].action
    return kind.value.lower() if micro_batch % 2 else kind.value
