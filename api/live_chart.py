"""The bars of the live view: tokens/s by micro-batch size."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bexp.explorer.model.amounts import rate_text
from bexp.explorer.records.recommendation import Recommendation

FEWEST_CELLS, ROOM = 10, 30
"""The shortest scale in columns, and what the other columns of a row need."""
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
        """Whether nothing is known."""
        return not self._rates and not self._failures

    def note_rate(self, size: int, candidate: Any, rate: float) -> None:
        """Take the tokens/s of a candidate, in place of its earlier figure."""
        self._rates.setdefault(size, {})[json.dumps(candidate, sort_keys=True)] = rate

    def note_failure(self, size: int, outcome: str) -> None:
        """Take how a candidate failed."""
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
        title = Text(f"composed tokens/s by micro_batch_size, as last measured{begin}{more}", style="bold")
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
        """Return what the recommended candidate reached as a whole model, if it was run."""
        best = self._best
        if best is None or best.whole_model is None:
            return []
        size, rate = best.candidate.micro_batch_size, best.expected_tokens_per_second
        return [Text(f"micro_batch_size {size} ran as a whole model: {rate_text(rate)}", style="green")]

    def _rate(self, size: int, of_size: dict[str, float]) -> float:
        """Return the figure of a size: that of the recommended candidate where there is one, else the best."""
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
    """Return where bars from `low` to `top` begin: 0 if they differ enough there, else a round number below them.

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
