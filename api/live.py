"""The live view of an exploration on a terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api.answer import memory_parts
from api.text import bytes_text
from explorer.records.event import Event, EventCode
from explorer.records.recommendation import Recommendation
from explorer.spec.request import ExplorationRequest

MAX_CHART_ROWS = 12
SMALLEST_SHARE = 0.1
PART_COLORS = {
    "parameters": "blue",
    "gradients": "cyan",
    "master weights": "green",
    "optimizer states": "yellow",
    "activations": "magenta",
    "transient": "red",
}


class LiveView:
    """The state of a running job. Rich asks for a drawing of it several times a second."""

    def __init__(self, job_id: str, request: ExplorationRequest | None) -> None:
        self._job_id = job_id
        self._request = request
        self._started_at: datetime | None = None
        self._ended_at: datetime | None = None
        self._status = "queued"
        self._num_trials = 0
        self._best: Recommendation | None = None
        self._rates: dict[int, float] = {}
        self._failures: dict[int, str] = {}

    def show(self, event: Event) -> None:
        """Update the state with an event."""
        self._status = event.message
        match event.code:
            case EventCode.STARTED | EventCode.RESUMED:
                self._started_at = self._started_at or event.at
            case EventCode.RECOMMENDATION if isinstance(event.data.get("recommendation"), dict):
                self._best = Recommendation.model_validate(event.data["recommendation"])
                self._note_rate(self._best.candidate.micro_batch_size, self._best.tokens_per_second)
            case EventCode.VARIANT:  # another model: its figures cannot be compared with those of the last one
                self._best = None
                self._rates.clear()
                self._failures.clear()
            case EventCode.TRIAL | EventCode.INFEASIBLE:
                self._take_trial(event)
            case code if code.ends_job:
                self._ended_at = event.at
            case _:
                pass

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar = Table.grid(expand=True)  # the bar does not end its own line
        bar.add_row(self._bar())
        status = Text(self._status, style="dim", no_wrap=True, overflow="ellipsis")
        parts: list[RenderableType] = [self._head(), bar, status]
        if self._best is not None:
            parts += [Text(), *self._recommendation(self._best)]
        if self._rates or self._failures:
            parts += [Text(), Text("tokens/s by micro_batch_size", style="bold"), self._chart(options.max_width)]
        if self._best is not None:
            parts += [Text(), *self._memory(self._best, options.max_width)]
        yield Group(*parts)

    def _take_trial(self, event: Event) -> None:
        if event.code is EventCode.TRIAL:
            self._num_trials += 1
        size = _find_size(event.data)
        rate = event.data.get("tokens_per_second")
        if size is not None and isinstance(rate, int | float):
            self._note_rate(size, float(rate))
        elif size is not None and event.code is EventCode.INFEASIBLE:
            self._failures.setdefault(size, str(event.data.get("outcome", "infeasible")))

    def _note_rate(self, size: int, rate: float) -> None:
        self._rates[size] = max(rate, self._rates.get(size, 0.0))

    def _elapsed(self) -> float:
        if self._started_at is None:
            return 0.0
        return max(0.0, ((self._ended_at or datetime.now(UTC)) - self._started_at).total_seconds())

    def _head(self) -> Text:
        name = self._request.model_name if self._request is not None else "exploration"
        trials = f"{self._num_trials} trial{'' if self._num_trials == 1 else 's'}"
        head = Text.assemble((name, "bold"), f"  {self._job_id}  ", (trials, "dim"), no_wrap=True)
        if self._ended_at is None and self._started_at is not None and self._request is not None:
            left = max(0.0, self._request.budget.max_seconds - self._elapsed())
            head.append(f"  {_clock(self._elapsed())} passed, ")
            head.append(f"up to about {_clock(left)} left to explore" if left > 0 else "comparing and checking")
        return head

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
        return [
            Text.assemble(
                ("best so far  ", "bold"),
                (f"micro_batch_size {best.candidate.micro_batch_size}", "bold green"),
                f"  {best.expected_tokens_per_second:,.0f} tokens/s  {best.performance:.2f}x base",
                f"  confidence {best.confidence}",
            ),
            Text(f"             {best.candidate.describe()}", style="dim", no_wrap=True),
        ]

    def _chart(self, width: int) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(justify="right")
        table.add_column()
        table.add_column(justify="right")
        sizes = sorted(self._rates.keys() | self._failures.keys())[:MAX_CHART_ROWS]
        top = max(self._rates.values(), default=1.0)
        chosen = self._best.candidate.micro_batch_size if self._best is not None else None
        for size in sizes:
            rate = self._rates.get(size)
            if rate is None:
                table.add_row(str(size), Text(self._failures[size].replace("_", " "), style="red"), "")
                continue
            length = max(1, round(rate / top * max(10, width - 24)))
            style = "green" if size == chosen else "cyan"
            table.add_row(str(size), Text("━" * length, style=style), f"{rate:,.0f}")
        return table

    def _memory(self, best: Recommendation, width: int) -> list[RenderableType]:
        """Return the parts of the peak as a bar as wide as the limit, or as the peak if the peak is small."""
        total, limit = best.memory.total, best.memory_limit_bytes
        whole = limit if total > limit * SMALLEST_SHARE else total
        cells = max(10, width - 4)
        bar, legend = Text(no_wrap=True), []
        for name, size in memory_parts(best.memory):
            bar.append("█" * round(size / whole * cells), style=PART_COLORS[name])
            legend.append(Text(f"{name} {bytes_text(size)}", style=PART_COLORS[name]))
        bar.append("░" * max(0, cells - len(bar)), style="dim")
        title = f"memory at the peak: {bytes_text(total)} ({total / limit:.1%} of {bytes_text(limit)})"
        return [Text(title, style="bold"), bar, Columns(legend, padding=(0, 2))]


def _find_size(data: dict[str, Any]) -> int | None:
    candidate = data.get("candidate")
    size = candidate.get("micro_batch_size") if isinstance(candidate, dict) else data.get("micro_batch_size")
    return size if isinstance(size, int) else None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
