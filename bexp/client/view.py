"""An exploration as a table with bars, in a notebook and as text. It is drawn from the events, so it can be live."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from bexp.client.explorations import Exploration
from bexp.explorer.answers.lines import headline
from bexp.explorer.answers.rows import AnswerText, Importance, Row
from bexp.explorer.answers.text import row
from bexp.explorer.cost.step import MemoryParts
from bexp.explorer.model.amounts import RateUnit, bytes_text
from bexp.explorer.records.event import Event, EventCode
from bexp.explorer.records.recommendation import Recommendation, Role

_CELL = "text-align:left;padding:2px 8px"
_BAR = "display:inline-block;height:0.8em;background:"
_COLORS = {
    "parameters": "#4269d0",
    "gradients": "#3ca3b5",
    "master_weights": "#5aa469",
    "optimizer_states": "#c9a227",
    "activations": "#a463c2",
    "transient": "#d0605e",
}


class ExplorationView:
    """What is known of an exploration. In a notebook it shows itself; `str` returns it as text."""

    def __init__(self, exploration_id: str, model: str) -> None:
        self.exploration_id = exploration_id
        self.model = model
        self.num_trials = 0
        self.status = "queued"
        self.has_ended = False
        self.best: Recommendation | None = None
        self.text: AnswerText | None = None
        self._rates: dict[int, dict[str, float]] = {}
        self._failures: dict[int, str] = {}

    def show(self, event: Event) -> None:
        """Take an event."""
        self.status = event.message
        self.has_ended = event.code.ends_job
        candidate = event.data.get("candidate")
        if event.code is EventCode.RECOMMENDATION and isinstance(event.data.get("recommendation"), Mapping):
            self.best = Recommendation.model_validate(event.data["recommendation"])
            self._note(event.data["recommendation"]["candidate"], self.best.tokens_per_second)
        elif event.code is EventCode.VARIANT:  # another model, whose figures cannot be compared
            self.best, self._rates, self._failures = None, {}, {}
        elif event.code is EventCode.TRIAL:
            self.num_trials += 1
            self._note(candidate, event.data.get("tokens_per_second"))
        elif event.code is EventCode.INFEASIBLE and isinstance(candidate, Mapping):
            self._failures.setdefault(candidate["micro_batch_size"], str(event.data.get("outcome", "infeasible")))

    def conclude(self, exploration: Exploration) -> None:
        """Take what is said of an answer, and what its event leaves out of the recommendation."""
        best = exploration.recommendation
        if self.best is not None and best is not None and self.best.candidate == best.candidate:
            self.best, self.text = best, exploration.text

    @property
    def rates(self) -> dict[int, float]:
        """Tokens per second of one device by micro-batch size, the best of each; of a model's measured blocks."""
        return {size: max(rates.values()) for size, rates in sorted(self._rates.items())}

    @property
    def _unit(self) -> str:
        return f"{RateUnit.TOKENS if self.best is None else self.best.rate_unit}/s"

    def __str__(self) -> str:
        lines = [f"{self.model} {self.exploration_id}: {self._headline()}"]
        lines += [row(each.label, each.text).replace("\t", "") for each in self._main_rows()]
        lines += [f"{size:>6}  {rate:>12,.0f} {self._unit}" for size, rate in self.rates.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [
            f"<p><b>{escape(self.model)}</b> {escape(self.exploration_id)}, {self.num_trials} trials<br>"
            f"<b>{escape(self._headline())}</b></p>"
        ]
        if self.best is not None:
            parts.append(f"<p><code>{escape(self.best.candidate.describe())}</code></p>")
        if rows := self._main_rows():
            cells = (f"<tr>{_cell(each.label)}{_cell(each.text)}</tr>" for each in rows)
            parts.append(f"<table>{''.join(cells)}</table>")
        if self._rates or self._failures:
            parts.append(self._table())
        if self.best is not None:
            parts.append(_memory(self.best.memory, self.best.memory_limit_bytes))
        if not self.has_ended:
            parts.append(f"<p><small>{escape(self.status)}</small></p>")
        return "".join(parts)

    def _note(self, candidate: Any, rate: Any) -> None:
        if isinstance(candidate, Mapping) and isinstance(rate, int | float):
            self._rates.setdefault(candidate["micro_batch_size"], {})[describe(candidate)] = float(rate)

    def _headline(self) -> str:
        if self.best is None:
            return self.status
        said = "Recommended" if self.has_ended else "Best so far"
        return f"{said}: micro_batch_size {self.best.candidate.micro_batch_size}, {headline(self.best)}"

    def _main_rows(self) -> list[Row]:
        rows = () if self.text is None else self.text.rows
        return [each for each in rows if each.importance is Importance.MAIN]

    def _table(self) -> str:
        rates, best, marks = self.rates, self.best, dict[int, str]()
        top = max(rates.values(), default=1.0)
        if best is not None:
            marks[best.for_batch.candidate.micro_batch_size] = Role.DIVIDING.label
            marks[best.candidate.micro_batch_size] = "recommended"
        rows = []
        for size in sorted({*rates, *self._failures}):
            if size in rates:
                color = "#2e9e5b" if size in marks else "#4269d0"
                bar = f'<span style="{_BAR}{color};width:{round(240 * rates[size] / top)}px"></span>'
                cells = [str(size), bar, f"{rates[size]:,.0f}", marks.get(size, "")]
            else:
                cells = [str(size), "", "", escape(self._failures[size].replace("_", " "))]
            rows.append("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>")
        own = best is not None and best.candidate.is_whole
        names = ("micro_batch_size", "", self._unit if own else f"composed {self._unit}", "")
        head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def describe(candidate: Mapping[str, Any]) -> str:
    """Return the choices of a candidate, without those that it leaves open."""
    return " ".join(f"{name}={value}" for name, value in candidate.items() if value is not None)


def _cell(text: str) -> str:
    return f'<td style="{_CELL}">{escape(text)}</td>'


def _memory(memory: MemoryParts, limit: int) -> str:
    """Return the parts of the peak as a bar as wide as the limit, or as the peak if that is larger."""
    parts = {name: size for name, size in memory.model_dump().items() if size}
    total = sum(parts.values())
    bars = "".join(
        f'<span style="{_BAR}{_COLORS[name]};width:{round(400 * size / max(limit, total))}px" title="{name}"></span>'
        for name, size in parts.items()
    )
    listed = ", ".join(f"{name.replace('_', ' ')} {bytes_text(size)}" for name, size in parts.items())
    return (
        f"<p>Memory at the peak, as composed: {bytes_text(total)} of {bytes_text(limit)}<br>"
        f'<span style="display:inline-block;width:400px;border:1px solid #888">{bars}</span><br>'
        f"<small>{escape(listed)}</small></p>"
    )
