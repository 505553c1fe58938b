"""The seconds that compilation takes before a run is as fast as promised, and the steps after which it pays back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, Floats, Ints
from bexp.explorer.model.amounts import rate_text, seconds_text
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.surrogate.observations import ComponentObservations

if TYPE_CHECKING:
    from bexp.explorer.search.posterior import Posterior

MOST_NAMED = 4
"""Further compilations are not named one by one."""


class Compilation:
    """The compilation of the candidates of a table.

    For a model that is measured whole, it is what trials have seen: the most of any size with the same settings. One
    process measures several sizes, and compiles most for the first. For any other model, each compiled component takes
    the mean of those that were compiled.
    """

    def __init__(self, table: Composition, runs: Mapping[Component, ComponentObservations], each: float) -> None:
        compiled_K = np.array([each if component.is_compiled else 0.0 for component in table.components])
        if table.candidates[0].is_whole:
            seen: dict[object, float] = {}
            for component, observed in runs.items():
                most = max(sum(run.compile_seconds) for run in observed.runs)
                seen[component.backend] = max(most, seen.get(component.backend, 0.0))
            compiled_K = np.array([seen.get(c.backend, 0.0) if c.micro_batch_size else 0.0 for c in table.components])
        self.seconds_C: Floats = np.where(table.used_CP, compiled_K[table.columns_CP], 0.0).sum(axis=1)
        """Of each candidate; 0 for one that does not compile, or of which nothing is known."""
        self.run_tokens: int | None = None
        """The tokens of the person's own run on each device; None if they are not known."""
        model = table.model
        if isinstance(model, ModelParts) and model.num_steps is not None and model.batch_size is not None:
            self.run_tokens = model.num_steps * model.batch_size * model.seq_length

    def over_run(self, tokens_per_second: Floats, rows: Ints) -> Floats:
        """Return tokens/s over the whole run, compilation included, shape (..., A), from those of its steps."""
        if self.run_tokens is None:
            return tokens_per_second
        return np.asarray(tokens_per_second / (1.0 + tokens_per_second * self.seconds_C[rows] / self.run_tokens))


def describe_compilation(posterior: Posterior, row: int) -> Iterator[str]:
    """Yield the compilation of the recommended candidate, or of a faster one that does not pay back, if any."""
    known, seconds_C = posterior.known_rows(), posterior.compilation.seconds_C
    mean_C = posterior.mean_tokens_per_second()
    if seconds_C[row] > 0.0:
        plain = known[seconds_C[known] == 0.0]
        text = f"{seconds_text(seconds_C[row])} before full speed{_seen(posterior, row)}"
        if not plain.size:
            yield f"{text}; nothing was measured that does not compile"
        else:
            yield f"{text}; {_pays_back(posterior, row, int(plain[np.argmax(mean_C[plain])]))}"
        return
    compiled = known[(seconds_C[known] > 0.0) & (mean_C[known] > mean_C[row])]
    if not compiled.size or posterior.compilation.run_tokens is None:
        return
    faster = int(compiled[np.argmax(mean_C[compiled])])
    rate = rate_text(mean_C[faster], posterior.table.model.rate_unit)
    text = f"{posterior.table.candidates[faster].describe()} reaches {rate}"
    text += f" after {seconds_text(seconds_C[faster])} of compilation{_seen(posterior, faster)}"
    yield f"{text}; {_pays_back(posterior, faster, row)}"


def _seen(posterior: Posterior, row: int) -> str:
    """Return how often a training command compiled, and for how many shapes; empty if it did so once."""
    columns = posterior.table.columns_CP[row][posterior.table.used_CP[row]]
    backends = {posterior.table.components[column].backend for column in columns}
    runs = [
        run
        for component, observed in posterior.knowledge.log.runs.items()
        if component.backend in backends
        for run in observed.runs
    ]
    most = max(runs, key=lambda run: sum(run.compile_seconds), default=None)
    if most is None or len(most.compile_seconds) < 2:
        return ""
    first, *others = map(seconds_text, most.compile_seconds)
    shapes = "" if most.num_shapes is None else f"; a trial saw {most.num_shapes}"
    return f" ({first} at first, then {', '.join(others[:MOST_NAMED])} for other shapes{shapes})"


def _pays_back(posterior: Posterior, row: int, plain: int) -> str:
    """Return the optimizer steps after which a candidate's compilation has paid, compared with one that has none."""
    against = posterior.table.candidates[plain].describe()
    saved = posterior.corrected_seconds(plain).step - posterior.corrected_seconds(row).step
    if saved <= 0.0:
        return f"it never pays back against {against}"
    number = posterior.compilation.seconds_C[row] / saved
    of = "" if posterior.is_whole else f" of {posterior.request.effective_batch_size} sequences"
    text = f"it pays back after {np.ceil(number):,.0f} optimizer steps{of} against {against}"
    steps = posterior.table.model.num_steps if isinstance(posterior.table.model, ModelParts) else None
    return text if steps is None else f"{text}, and the run has {steps:,}"
