"""An exploration as a table with bars, in a notebook and as text. It is drawn from the events, so it can be live."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from bexp.explorer.model.amounts import bytes_text, rate_text
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.explorer.records.event import Event, EventCode
from bexp.explorer.records.recommendation import ratio_text

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
        self.best: Mapping[str, Any] | None = None
        self._rates: dict[int, dict[str, float]] = {}
        self._failures: dict[int, str] = {}

    def show(self, event: Event) -> None:
        """Take an event."""
        self.status = event.message
        self.has_ended = event.code.ends_job
        candidate = event.data.get("candidate")
        if event.code is EventCode.RECOMMENDATION and isinstance(event.data.get("recommendation"), Mapping):
            self.best = event.data["recommendation"]
            self._note(self.best["candidate"], self.best.get("tokens_per_second"))
        elif event.code is EventCode.VARIANT:  # another model, whose figures cannot be compared
            self.best, self._rates, self._failures = None, {}, {}
        elif event.code is EventCode.TRIAL:
            self.num_trials += 1
            self._note(candidate, event.data.get("tokens_per_second"))
        elif event.code is EventCode.INFEASIBLE and isinstance(candidate, Mapping):
            self._failures.setdefault(candidate["micro_batch_size"], str(event.data.get("outcome", "infeasible")))

    def conclude(self, recommendation: Mapping[str, Any]) -> None:
        """Take the answer's recommendation, which says more than its event: what divides the batch."""
        if self.best is not None and describe(self.best["candidate"]) == describe(recommendation["candidate"]):
            self.best = recommendation

    @property
    def rates(self) -> dict[int, float]:
        """Tokens per second of one device by micro-batch size, the best of each; of a model's measured blocks."""
        return {size: max(rates.values()) for size, rates in sorted(self._rates.items())}

    def __str__(self) -> str:
        lines = [f"{self.model} {self.exploration_id}: {self._headline()}"]
        lines += filter(None, [self._dividing()])
        lines += [f"{size:>6}  {rate:>12,.0f} tokens/s" for size, rate in self.rates.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [
            f"<p><b>{escape(self.model)}</b> {escape(self.exploration_id)}, {self.num_trials} trials<br>"
            f"<b>{escape(self._headline())}</b></p>"
        ]
        if self.best is not None:
            parts.append(f"<p><code>{escape(describe(self.best['candidate']))}</code></p>")
        if (dividing := self._dividing()) is not None:
            parts.append(f"<p><b>{escape(dividing)}</b></p>")
        if self._rates or self._failures:
            parts.append(self._table())
        if self.best is not None and isinstance(self.best.get("memory"), Mapping):
            parts.append(_memory(self.best["memory"], self.best["memory_limit_bytes"]))
        if not self.has_ended:
            parts.append(f"<p><small>{escape(self.status)}</small></p>")
        return "".join(parts)

    def _note(self, candidate: Any, rate: Any) -> None:
        if isinstance(candidate, Mapping) and isinstance(rate, int | float):
            self._rates.setdefault(candidate["micro_batch_size"], {})[describe(candidate)] = float(rate)

    def _headline(self) -> str:
        best = self.best
        if best is None:
            return self.status
        rate = rate_text((best.get("whole_model") or {}).get("tokens_per_second") or best["tokens_per_second"])
        gain = ratio_text(best["performance"], best["confidence"], best.get("run_noise"))
        size = best["candidate"]["micro_batch_size"]
        return (
            f"{'Recommended' if self.has_ended else 'Best so far'}: micro_batch_size {size}, {rate} per "
            f"device, {gain} base, confidence {best['confidence']} out of 100"
        )

    def _other(self) -> Mapping[str, Any] | None:
        """The candidate that divides the batch, where a batch is stated that the recommended one does not divide."""
        other = None if self.best is None else _alternative(self.best, "dividing")
        return None if self.best is None or not other or other["candidate"] == self.best["candidate"] else other

    def _dividing(self) -> str | None:
        """What trainers and exports take, where that is not the recommended candidate."""
        other = self._other()
        if other is None:
            return None
        return (
            f"For the batch: micro_batch_size {other['candidate']['micro_batch_size']} in {other['grad_accum_steps']} "
            f"micro-steps, {rate_text(other['tokens_per_second'])} per device, confidence {other['confidence']} out "
            "of 100; trainers and exports take this one"
        )

    def _table(self) -> str:
        rates, other = self.rates, self._other()
        top = max(rates.values(), default=1.0)
        marks = {} if other is None else {other["candidate"]["micro_batch_size"]: "for the batch"}
        if self.best is not None:
            marks[self.best["candidate"]["micro_batch_size"]] = "recommended"
        rows = []
        for size in sorted({*rates, *self._failures}):
            if size in rates:
                color = "#2e9e5b" if size in marks else "#4269d0"
                bar = f'<span style="{_BAR}{color};width:{round(240 * rates[size] / top)}px"></span>'
                cells = [str(size), bar, f"{rates[size]:,.0f}", marks.get(size, "")]
            else:
                cells = [str(size), "", "", escape(self._failures[size].replace("_", " "))]
            rows.append("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>")
        own = self.best is not None and self.best["candidate"].get("attention_backend") == OWN_ATTENTION
        names = ("micro_batch_size", "", "tokens/s" if own else "composed tokens/s", "")
        head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _alternative(best: Mapping[str, Any], role: str) -> Mapping[str, Any] | None:
    return next((each for each in best.get("alternatives") or () if each["role"] == role), None)


def describe(candidate: Mapping[str, Any]) -> str:
    """Return the choices of a candidate, without those that it leaves open."""
    return " ".join(f"{name}={value}" for name, value in candidate.items() if value is not None)


def _memory(memory: Mapping[str, int], limit: int) -> str:
    """Return the parts of the peak as a bar as wide as the limit, or as the peak if that is larger."""
    parts = {name: size for name, size in memory.items() if name in _COLORS and size}
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
