"""The live view of an exploration on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from textwrap import shorten
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bexp.explorer.answers.answer import memory_parts
from bexp.explorer.answers.lines import headline
from bexp.explorer.answers.text import clock_text
from bexp.explorer.model.amounts import RateUnit, bytes_text, rate_text
from bexp.explorer.records.event import Event, EventCode, render_message
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.request.request import ExplorationRequest

SMALLEST_SHARE = 0.1
INDENT = 13
FEWEST_ROWS, MAX_ROWS = 3, 12
OTHER_ROWS = 15
"""The rows of the view around the bars: a terminal cuts the rows below its last."""
PART_COLORS = {
    "parameters": "blue",
    "gradients": "cyan",
    "master weights": "green",
    "optimizer states": "yellow",
    "activations": "magenta",
    "transient": "red",
}


class LiveView:
    """The state of a running job, which Rich draws several times a second.

    At the end only the charts are left, because the answer follows below them.
    """

    def __init__(
        self,
        job_id: str,
        request: ExplorationRequest | None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._job_id = job_id
        self._clock = clock
        self._request = request
        self._started_at: datetime | None = None
        self._ended_at: datetime | None = None
        self._status = "queued"
        self._num_trials = 0
        self._best: Recommendation | None = None
        self._chart = RateChart()

    @property
    def best(self) -> Recommendation | None:
        """The best candidate so far."""
        return self._best

    def show(self, event: Event) -> None:
        """Update the state with an event."""
        match event.code:
            case EventCode.STARTED | EventCode.RESUMED:
                self._start(event.at)
            case EventCode.RECOMMENDATION if isinstance(event.data.get("recommendation"), dict):
                self._best = Recommendation.model_validate(event.data["recommendation"])
                self._chart.note_best(self._best)
                return
            case EventCode.VARIANT:  # another model: its figures cannot be compared with those of the last one
                self._best = None
                self._chart = RateChart()
            case EventCode.TRIAL | EventCode.INFEASIBLE:
                self._take_trial(event)
            case code if code.ends_job:
                self._ended_at = event.at
            case _:
                pass
        self._status = render_message(event)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        bar = Table.grid(expand=True)  # the bar does not end its own line
        bar.add_row(self._bar())
        parts: list[RenderableType] = [self._head(), bar]
        if self._ended_at is None:
            parts.append(Text(shorten(self._status, width, placeholder=" ..."), style="dim"))
            if self._best is not None:
                parts += [Text(), *self._recommendation(self._best)]
        if not self._chart.is_empty:
            final = self._ended_at is not None
            most = MAX_ROWS if final else min(MAX_ROWS, max(FEWEST_ROWS, console.height - OTHER_ROWS))
            parts += [Text(), *self._chart.draw(width, most, final=final)]
        if self._best is not None:
            parts += [Text(), *self._memory(self._best, width)]
        yield Group(*parts)

    def _start(self, at: datetime) -> None:
        """Start the clock; that of a job that had ended goes on where it stopped."""
        if self._started_at is None:
            self._started_at = at
        elif self._ended_at is not None:
            self._started_at += at - self._ended_at
        self._ended_at = None

    def _take_trial(self, event: Event) -> None:
        if event.code is EventCode.TRIAL:
            self._num_trials += 1
        candidate, rate = event.data.get("candidate"), event.data.get("tokens_per_second")
        size = _find_size(event.data)
        if size is not None and isinstance(rate, int | float):
            self._chart.note_rate(size, candidate, float(rate))
        elif size is not None and event.code is EventCode.INFEASIBLE:
            self._chart.note_failure(size, str(event.data.get("outcome", "infeasible")))

    def _elapsed(self) -> float:
        assert self._started_at is not None, "the callers have looked"
        return max(0.0, ((self._ended_at or self._clock()) - self._started_at).total_seconds())

    def _head(self) -> Text:
        name = self._request.explored.name if self._request is not None else "exploration"
        trials = f"{self._num_trials} trial{'' if self._num_trials == 1 else 's'}"
        head = Text.assemble((name, "bold"), f"  {self._job_id}  ", (trials, "dim"))
        if self._ended_at is not None and self._started_at is not None:
            head.append(f"  {clock_text(self._elapsed())}")
        elif self._started_at is not None and self._request is not None:
            head.append(f"  {clock_text(self._elapsed())} passed, {self._left(self._request)}")
        return head

    def _left(self, request: ExplorationRequest) -> str:
        """Return the remaining time as the confidence and the budget predict it, as text.

        The confidence is assumed to grow as fast as it has grown until now. The search ends at the target or with the
        budget, whichever comes first.
        """
        passed, budget = self._elapsed(), request.budget
        at_most = budget.max_seconds - passed
        if self._num_trials:
            at_most = min(at_most, passed / self._num_trials * (budget.max_trials - self._num_trials))
        confidence = self._best.confidence if self._best is not None else 0
        if at_most <= 0 or confidence >= budget.confidence_target:
            return "comparing and checking"
        if confidence:
            about = passed * (budget.confidence_target - confidence) / confidence
            if about < at_most:
                return f"about {clock_text(about)} left"
        return f"at most about {clock_text(at_most)} left"

    def _bar(self) -> ProgressBar:
        if self._ended_at is not None:
            return ProgressBar(total=1.0, completed=1.0)
        if self._request is None or self._started_at is None:
            return ProgressBar(total=1.0, pulse=True)
        budget = self._request.budget
        confidence = self._best.confidence if self._best is not None else 0
        shares = (
            self._elapsed() / budget.max_seconds,
            self._num_trials / budget.max_trials,
            confidence / budget.confidence_target,
        )
        return ProgressBar(total=1.0, completed=min(0.99, max(shares)))

    def _recommendation(self, best: Recommendation) -> list[RenderableType]:
        target = None if self._request is None else self._request.budget.confidence_target
        title = Text.assemble(("best so far  ", "bold"), (headline(best, target), "green"))
        return [title, Padding(Text(best.candidate.describe(), style="bold green"), (0, 0, 0, INDENT))]

    def _memory(self, best: Recommendation, width: int) -> list[RenderableType]:
        """Return the parts of the peak as a bar, which is as wide as the limit, or as the peak if that is small."""
        total, limit = best.memory.total, best.memory_limit_bytes
        whole = limit if total > limit * SMALLEST_SHARE else total
        cells = max(10, width - 4)
        bar, legend = Text(no_wrap=True), []
        for name, size in memory_parts(best.memory):
            bar.append("█" * round(size / whole * cells), style=PART_COLORS[name])
            legend.append(Text(f"{name} {bytes_text(size)}", style=PART_COLORS[name]))
        bar.append("░" * (cells - len(bar)), style="dim")
        title = f"memory at the peak, as composed: {bytes_text(total)} ({total / limit:.1%} of {bytes_text(limit)})"
        return [Text(title, style="bold"), bar, Columns(legend, padding=(0, 2))]


def _find_size(data: dict[str, Any]) -> int | None:
    candidate = data.get("candidate")
    size: int | None = candidate.get("micro_batch_size") if isinstance(candidate, dict) else None
    return size


FEWEST_CELLS, ROOM = 10, 30
"""The shortest scale, and the room for the rest of a row, in columns."""
EIGHTHS = " ▏▎▍▌▋▊▉"


class RateChart:
    """The newest figure of each candidate. A bar stands for the best candidate of a micro-batch size.

    The bars show differences: they begin below the smallest figure, and the title says where.
    """

    def __init__(self) -> None:
        self._rates: dict[int, dict[str, float]] = {}
        self._failures: dict[int, str] = {}
        self._best: Recommendation | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no candidate has a figure or a failure."""
        return not self._rates and not self._failures

    def note_rate(self, size: int, candidate: Any, rate: float) -> None:
        """Take the tokens/s of a candidate, in place of its earlier figure."""
        self._rates.setdefault(size, {})[json.dumps(candidate, sort_keys=True)] = rate

    def note_failure(self, size: int, outcome: str) -> None:
        """Take the outcome of a candidate that failed."""
        self._failures.setdefault(size, outcome)

    def note_best(self, best: Recommendation) -> None:
        """Take the recommended candidate, with its figure."""
        self._best = best
        candidate = best.candidate.model_dump(mode="json")
        self.note_rate(best.candidate.micro_batch_size, candidate, best.tokens_per_second)

    def draw(self, width: int, most: int, *, final: bool) -> list[RenderableType]:
        """Return the title and at most `most` bars in `width` columns; `final` says that nothing will change."""
        rates = {size: self._rate(size, of_size) for size, of_size in self._rates.items()}
        sizes = self._shown(rates, most)
        low = min((rates[size] for size in sizes if size in rates), default=0.0)
        top = max(rates.values(), default=0.0)
        start = axis_start(low, top)
        begin = f", bars begin at {start:,.0f}" if start else ""
        left_out = len(rates.keys() | self._failures.keys()) - len(sizes)
        more = f", {left_out} more" if left_out else ""
        unit = RateUnit.TOKENS if self._best is None else self._best.rate_unit
        title = Text(f"composed {unit}/s by micro_batch_size, as last measured{begin}{more}", style="bold")
        table = Table.grid(padding=(0, 1))
        for justify in ("right", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        cells = max(FEWEST_CELLS, width - ROOM)
        chosen = self._best.candidate.micro_batch_size if self._best is not None else None
        for size in sizes:
            if size not in rates:
                table.add_row(str(size), Text(self._failures[size].replace("_", " "), style="red"), "", "")
                continue
            share = (rates[size] - start) / (top - start) if top > start else 1.0
            style = "green" if size == chosen else "cyan"
            mark = ("◀ recommended" if final else "◀ best so far") if size == chosen else ""
            table.add_row(
                str(size), Text(_bar(share * cells), style=style), f"{rates[size]:,.0f}", Text(mark, style="green")
            )
        return [title, table, *self._whole_model()]

    def _whole_model(self) -> list[RenderableType]:
        """Return a line with the speed of the recommended candidate as a whole model, if it was run."""
        best = self._best
        if best is None or best.whole_model is None:
            return []
        size, rate = best.candidate.micro_batch_size, best.expected_tokens_per_second
        return [Text(f"micro_batch_size {size} ran as a whole model: {rate_text(rate)}", style="green")]

    def _rate(self, size: int, of_size: dict[str, float]) -> float:
        """Return the figure of a size: that of the recommended candidate if it has this size, else the best."""
        if self._best is not None and size == self._best.candidate.micro_batch_size:
            return self._best.tokens_per_second
        return max(of_size.values())

    def _shown(self, rates: dict[int, float], most: int) -> list[int]:
        """Return the sizes in ascending order; if there are too many, the fastest, and the first that failed."""
        failed = sorted(size for size in self._failures if size not in rates)
        fastest = sorted(rates, key=lambda size: -rates[size])
        room = most - min(len(failed), 1)
        return sorted([*fastest[:room], *failed[: most - min(len(fastest), room)]])


def axis_start(low: float, top: float) -> float:
    """Return the start of the bars from `low` to `top`: 0 if they differ enough, else a round number below them.

    The shortest bar then has at least a fifth of the length of the longest.
    """
    if low < top / 2 or low == top:
        return 0.0
    room = (top - low) / 4
    step = 10.0 ** math.floor(math.log10(max(room, top / 1000)))
    return math.floor((low - room) / step) * step


def _bar(cells: float) -> str:
    full, eighths = divmod(max(1, round(8 * cells)), 8)
    return "█" * full + EIGHTHS[eighths].strip()
